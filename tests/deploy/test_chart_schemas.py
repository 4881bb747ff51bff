"""The chart in the eyes of helm, of Kubernetes' schemas and those of custom resources, and of the server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.flags import parse_serve
from tests.deploy.chart import VALUE_SETS, Rendered, helm, template
from tests.deploy.deploy_tools import CHART, DEPLOY, TOOLS, tool

KUBERNETES = ("1.29", "1.33", "1.37")
DEFAULTS = Path(os.devnull)
SETS = pytest.mark.parametrize("values", [DEFAULTS, *VALUE_SETS], ids=lambda path: path.stem)


def native(resource: dict[str, Any]) -> bool:
    """Whether Kubernetes itself knows the kind."""
    group = resource["apiVersion"].rpartition("/")[0]
    return "." not in group or group == "networking.k8s.io"


def assert_valid(rendered: Rendered, folder: Path) -> None:
    own = [resource for resource in rendered.resources if native(resource)]
    file = folder / "resources.yaml"
    file.write_text(yaml.safe_dump_all(own))
    for version in KUBERNETES:
        done = subprocess.run(
            [tool("kubernetes-validate"), "--strict", "-k", version, str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"Kubernetes {version}: {done.stdout}{done.stderr}"
        assert "WARN" not in done.stdout + done.stderr
    custom = [r for r in rendered.resources if not native(r) and r["kind"] != "InferencePool"]
    assert custom_faults(custom) == []


def custom_faults(resources: list[dict[str, Any]]) -> list[str]:
    if not resources:
        return []
    command = [tool("node"), str(DEPLOY / "tools" / "custom_resources.mjs")]
    done = subprocess.run(command, input=json.dumps(resources), capture_output=True, text=True, check=True, cwd=TOOLS)
    faults: list[str] = json.loads(done.stdout)
    return faults


@SETS
def test_every_resource_fits_its_schema(values: Path, tmp_path: Path) -> None:
    assert_valid(template(values), tmp_path)


def test_the_validators_do_refuse(tmp_path: Path) -> None:
    rendered = template(VALUE_SETS[0])
    rendered.pod["enableServiceLink"] = False
    with pytest.raises(AssertionError, match="enableServiceLink"):
        assert_valid(rendered, tmp_path)
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {"name": "x"}, "spec": {}}
    assert "selector" in custom_faults([monitor])[0]


@SETS
def test_helm_lints_it(values: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout and "ERROR" not in done.stdout


@SETS
def test_the_server_takes_the_settings(values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)
    rendered = template(values)
    file = tmp_path / "config.yaml"
    file.write_text(rendered.of("ConfigMap")["data"]["config.yaml"])
    variables = {entry["name"]: entry.get("value", "from-a-secret") for entry in rendered.container["env"]}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = parse_serve(
        [str(file) if part.endswith(".yaml") else part for part in rendered.container["args"]]
    ).settings
    given = yaml.safe_load(values.read_text()) or {}
    assert settings.port == 8000
    assert settings.host == given.get("host", "0.0.0.0")
    assert settings.model == given.get("model")
    for name, value in given.get("settings", {}).items():
        if name != "kv_cache_memory":
            assert getattr(settings, name) == value
    for name, value in given.get("speculative", {}).items():
        if name != "num_speculative_tokens_per_batch_size":
            assert settings.speculative is not None and getattr(settings.speculative, name) == value


def test_an_inference_pool_has_what_version_1_of_it_wants() -> None:
    rendered = template(CHART / "ci" / "inference-pool-values.yaml")
    pool = rendered.of("InferencePool")
    labels = rendered.of("Deployment")["spec"]["template"]["metadata"]["labels"]
    selector = pool["spec"].pop("selector")
    assert list(selector) == ["matchLabels"] and selector["matchLabels"].items() <= labels.items()
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"] == {
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"},
    }
    (backend,) = rendered.of("HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert labels["llm-d.ai/engine-type"] == labels["inference.networking.k8s.io/engine-type"] == "vllm"


def test_a_package_has_rules_and_dashboards_in_it(tmp_path: Path) -> None:
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("outrider-*.tgz")
    sets = ("monitoring.prometheusRule.enabled=true", "monitoring.dashboards.enabled=true")
    shown = helm("template", "here", str(package), *(part for one in sets for part in ("--set", one)))
    assert shown.returncode == 0, shown.stderr
    rendered = Rendered([resource for resource in yaml.safe_load_all(shown.stdout) if resource])
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    assert rendered.of("PrometheusRule")["spec"] == rules
    for file in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        board = rendered.of("ConfigMap", f"here-outrider-{file.stem}")
        assert json.loads(board["data"][f"outrider-{file.name}"]) == json.loads(file.read_text())
        assert len(json.dumps(board)) < 2**20, "more than a ConfigMap holds"

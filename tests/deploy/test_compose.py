"""The compose files: their schema, and that what they mount and name is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import Settings
from tests.deploy.deploy_tools import DEPLOY, ROOT, TOOLS, tool

FILES = sorted(DEPLOY.glob("compose*.yaml"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_fits_the_schema_of_compose(path: Path, tmp_path: Path) -> None:
    schema = ROOT / ".tools" / "compose_spec.json"
    if not schema.exists() and not os.environ.get("DEPLOY_REQUIRED"):
        pytest.skip("`make .tools/compose_spec.json` fetches the schema (Debian)")
    document = yaml.safe_load(path.read_text())
    document.pop("name", None)  # younger than the schema that Debian has
    instance = tmp_path / "compose.json"
    instance.write_text(json.dumps(document))
    command = [str(TOOLS / "bin" / "python"), "-W", "ignore", "-m", "jsonschema", "-i", str(instance), str(schema)]
    tool("helm")  # comes with them
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_mounted_exists() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", volume).partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume


def test_the_server_is_locked_down_reachable_and_has_time_to_drain() -> None:
    server = SERVICES["outrider"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and server["tmpfs"] == ["/tmp"]
    assert int(server["stop_grace_period"].removesuffix("s")) >= Settings().drain_timeout + 5
    variables = {name for name in server["environment"] if name.startswith("OUTRIDER_")}
    assert {name.removeprefix("OUTRIDER_").lower() for name in variables} <= set(Settings.model_fields)
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service["ports"])


def test_prometheus_and_grafana_find_each_other_and_the_server() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["outrider:8000"] and "outrider" in SERVICES
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090" and "prometheus" in SERVICES
    boards = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "outrider.yaml").read_text())
    (folder,) = [provider["options"]["path"] for provider in boards["providers"]]
    assert any(volume.split(":")[1] == folder for volume in SERVICES["grafana"]["volumes"])


def test_images_are_pinned() -> None:
    for path in FILES:
        for service in yaml.safe_load(path.read_text())["services"].values():
            assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), service["image"]

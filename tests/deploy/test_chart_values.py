"""What values do to the resources, and which values are refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import FULLNAME, VALUE_SETS, helm, refusal, template
from tests.deploy.deploy_tools import CHART


def values_of(name: str) -> Path:
    (path,) = [path for path in VALUE_SETS if path.stem == f"{name}-values"]
    return path


@pytest.mark.parametrize(
    ("sets", "grace"),
    [
        ((), 5 + 30 + 10),
        (("settings.drain_timeout=0",), 5 + 0 + 10),
        (("settings.drain_timeout=600", "drain.preStopSeconds=20"), 20 + 600 + 10),
        (("settings.drain_timeout=1.2", "drain.marginSeconds=60"), 5 + 2 + 60),
    ],
)
def test_the_grace_period_holds_prestop_and_drain(sets: tuple[str, ...], grace: int) -> None:
    rendered = template(sets=sets)
    assert rendered.pod["terminationGracePeriodSeconds"] == grace
    assert rendered.container["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"


def test_the_default_pod_is_locked_down_and_can_write_where_it_must() -> None:
    rendered = template()
    pod, container = rendered.pod, rendered.container
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    user = {key: pod["securityContext"][key] for key in ("runAsNonRoot", "runAsUser", "runAsGroup")}
    assert user == {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 0}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    writable = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert set(writable) == {"/cache", "/tmp", "/dev/shm"}
    assert all("emptyDir" in volume for volume in writable.values())
    assert writable["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert container["startupProbe"]["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1800
    assert "nvidia.com/gpu" not in container["resources"]["limits"] and container["image"].endswith("-cpu")


def test_a_gpu_a_volume_of_models_and_no_hub() -> None:
    rendered = template(values_of("gpu-draft"))
    container, pod = rendered.container, rendered.pod
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1 and container["image"].endswith("-cuda")
    assert pod["terminationGracePeriodSeconds"] == 5 + 121 + 10
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    (models,) = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
    assert models == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert rendered.of("Deployment")["spec"]["strategy"] == {"type": "Recreate"}, "one pod may mount the cache"
    assert rendered.of("NetworkPolicy")["spec"]["egress"] == []
    assert rendered.config["speculative"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 4], [9, 128, 0]]


def test_numbers_keep_their_digits() -> None:
    text = template(values_of("cpu-ngram")).of("ConfigMap")["data"]["config.yaml"]
    assert '"max_num_batched_tokens": 1000000' in text


def test_keys_token_and_certificate_come_from_secrets_alone() -> None:
    rendered = template(values_of("hub-keys-tls"))
    assert json.loads(rendered.of("Secret")["stringData"]["api-keys"]) == ["first-key", "second,key"]
    others = [r for r in rendered.resources if r["kind"] != "Secret"]
    assert "first-key" not in yaml.safe_dump_all(others)
    sources = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in rendered.container["env"] if "valueFrom" in e}
    assert sources == {
        "OUTRIDER_API_KEY": {"name": FULLNAME, "key": "api-keys"},
        "HF_TOKEN": {"name": "hub", "key": "token"},
    }
    assert rendered.config["ssl_certfile"] == "/tls/tls.crt"
    assert rendered.container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert rendered.of("PodMonitor")["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    egress = rendered.of("NetworkPolicy")["spec"]["egress"]
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 443}


@pytest.mark.parametrize("name", ["keda-shared-cache", "hpa"])
def test_an_autoscaler_alone_sets_the_replicas(name: str) -> None:
    rendered = template(values_of(name))
    assert "replicas" not in rendered.of("Deployment")["spec"]
    scaler = rendered.of("ScaledObject" if name.startswith("keda") else "HorizontalPodAutoscaler")
    assert "outrider_requests_waiting" in json.dumps(scaler["spec"])


def test_a_change_of_settings_starts_new_pods() -> None:
    def checksum(*sets: str) -> str:
        annotations: dict[str, str] = template(sets=sets).of("Deployment")["spec"]["template"]["metadata"][
            "annotations"
        ]
        return annotations["checksum/config"]

    assert checksum() == checksum() != checksum("settings.max_num_seqs=7") != checksum("speculative.method=ngram")


def test_services_and_monitors_select_the_servers_and_not_the_test_pod() -> None:
    rendered = template(values_of("cpu-ngram"))
    labels = rendered.of("Deployment")["spec"]["template"]["metadata"]["labels"]
    tester = rendered.of("Pod", f"{FULLNAME}-answers")
    assert tester["metadata"]["annotations"]["helm.sh/hook"] == "test"
    compile(tester["spec"]["containers"][0]["args"][0], "answers.py", "exec")
    for selector in (
        rendered.of("Service")["spec"]["selector"],
        rendered.of("Deployment")["spec"]["selector"]["matchLabels"],
        rendered.of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        assert not selector.items() <= tester["metadata"]["labels"].items()
    monitor = rendered.of("ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= rendered.of("Service")["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert rendered.of("Service")["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "outrider"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"speculativ": {}}, "additional properties 'speculativ' not allowed"),
        ({"speculative": {"methd": "ngram"}}, "'methd' not allowed"),
        ({"speculative": {"method": "ngrams"}}, "'/speculative/method'"),
        ({"speculative": {"num_speculative_tokens": 99}}, "got 99, want 16"),
        ({"speculative": '{"method": "ngram"}'}, "got string, want object"),
        ({"settings": {"max_num_seq": 4}}, "'max_num_seq' not allowed"),
        ({"settings": {"tensor_parallel_size": 8}}, "got 8, want 1"),
        ({"settings": {"api_key": ["x"]}}, "'api_key' not allowed"),
        ({"settings": {"attention_backend": "flash"}}, "'/settings/attention_backend'"),
        ({"gpu": {"count": 2}}, "got 2, want 1"),
        ({"resources": {"limits": {"memory": "8 GB"}}}, "'/resources/limits/memory'"),
        ({"image": {"digest": "latest"}}, "'/image/digest'"),
        ({"drain": {"marginSeconds": 0}}, "got 0, want 5"),
        ({"model": "/models/x"}, "modelVolume is empty"),
        ({"speculative": {"model": "/models/x"}}, "speculative.model /models/x lies below /models"),
        ({"replicaCount": 2, "cache": {"persistence": {"enabled": True}}}, "ReadWriteMany"),
        ({"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}}, "keep one"),
        ({"autoscaling": {"minReplicas": 9}}, "minReplicas 9 is above autoscaling.maxReplicas 4"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}, "keep one"),
        ({"apiKeys": {"existingSecret": "a", "values": ["b"]}}, "keep one"),
        ({"inferencePool": {"enabled": True}}, "name the Service of your endpoint picker"),
        ({"settings": {"device": "cuda"}}, "set gpu.count to 1"),
        ({"settings": {"device": "cpu"}, "gpu": {"count": 1}}, "the GPU would lie idle"),
        (
            {
                "settings": {"metrics_names": "outrider"},
                "inferencePool": {"enabled": True, "endpointPicker": {"name": "x"}},
            },
            "reads vllm: metrics",
        ),
        (
            {"settings": {"metrics_names": "vllm"}, "monitoring": {"prometheusRule": {"enabled": True}}},
            "read outrider_ metrics",
        ),
    ],
    ids=lambda bad: json.dumps(bad)[:60] if isinstance(bad, dict) else "",
)
def test_bad_values_are_refused_in_clear_words(bad: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(bad))
    assert words in refusal(file)


def test_the_notes_say_how_to_call_it() -> None:
    sets = ("apiKeys.existingSecret=keys", "speculative.method=ngram")
    shown = helm(
        "install", "here", str(CHART), "--dry-run=client", *(part for one in sets for part in ("--set", one))
    ).stdout
    notes = shown[shown.index("NOTES:") :]
    assert "get secret keys" in notes and '"Authorization: Bearer $KEY"' in notes
    assert "45 s: 5 s before SIGTERM, 30 s for open requests, 10 s to spare" in notes
    assert '{"method":"ngram"}' in notes

"""Write the chart's values.schema.json: deploy/helm/schema.yaml, with the server's own settings put in.

The settings' names, types and bounds come from `server.config`, so the chart refuses what the server would refuse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from server.config import Settings, flag_of
from server.setting_values import ATTENTION_NAMES, MOE_NAMES
from server.spec.settings import SpeculativeSettings

HERE = Path(__file__).parent
WRITTEN = HERE / "outrider" / "values.schema.json"

CHART_DECIDES = {
    "model": "the value `model`",
    "speculative": "the value `speculative`",
    "api_key": "the value `apiKeys`",
    "host": "the value `host`",
    "port": "always 8000",
    "ssl_certfile": "the value `tls`",
    "ssl_keyfile": "the value `tls`",
    "ssl_ca_certs": "probes have no certificate to show",
}
"""Settings that are no keys of `settings`, and where they come from instead."""

SPELT: dict[str, dict[str, Any]] = {
    "attention_backend": {"enum": ["auto", *ATTENTION_NAMES]},
    "moe_backend": {"enum": ["auto", *MOE_NAMES]},
    "kv_cache_memory": {"type": ["string", "integer"], "pattern": "^[0-9.]+ ?([KMGTkmgt]i?)?[Bb]?$"},
    "tensor_parallel_size": {"type": "integer", "minimum": 1, "maximum": 1},
    "num_speculative_tokens_per_batch_size": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 3, "maxItems": 3},
    },
}
"""What a value looks like in YAML, where the type in the settings says less."""


def chart_schema() -> dict[str, Any]:
    """The whole schema, as draft 7 of JSON Schema."""
    schema: dict[str, Any] = yaml.safe_load((HERE / "schema.yaml").read_text())
    settings = _plain(Settings.model_json_schema(), CHART_DECIDES)
    for name, field in settings["properties"].items():
        field["description"] = flag_of(name).help
    schema["properties"] |= {"settings": settings, "speculative": _plain(SpeculativeSettings.model_json_schema(), {})}
    return _closed(schema)


def _plain(model: dict[str, Any], left_out: dict[str, str]) -> dict[str, Any]:
    """A model's schema without titles, defaults and null, which YAML's absence stands for."""
    fields = {}
    for name, field in model["properties"].items():
        if name in left_out:
            continue
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
        kind = SPELT.get(name) or kinds[0]
        fields[name] = {key: value for key, value in kind.items() if key not in ("title", "default")}
        if fields[name].get("type") == "number":
            fields[name] |= {"type": ["number", "string"], "pattern": r"^[0-9]+(\.[0-9]+)?$"}  # `--set x=0.5` is a text
    return {"type": "object", "properties": fields}


def _closed(schema: Any) -> Any:
    """The same, where every mapping with named keys takes no others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed = {"type": "object", **closed, "additionalProperties": False}
    return closed


def text() -> str:
    """What values.schema.json holds."""
    return json.dumps(chart_schema(), indent=1) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(text())
    sys.stdout.write(f"wrote {WRITTEN}\n")

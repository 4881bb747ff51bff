"""The rules and dashboards under deploy/, and the expressions in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
RULE_TESTS = DEPLOY / "prometheus" / "rules_test.yaml"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class Expression:
    """One expression and where it stands."""

    where: str
    text: str

    def __str__(self) -> str:
        return self.where


def rules() -> list[dict[str, Any]]:
    """All of them, in order."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    """Those that show something."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def panel_expressions(rate_interval: str, selected: str = ".*") -> list[Expression]:
    """Of all panels, with Grafana's variables replaced; `selected` stands for what is chosen in each of them."""
    found = []
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", rate_interval)
                text = re.sub(r"\$\{?(model|instance)\}?", selected, text)
                found.append(Expression(f"{dashboard.stem}: {panel['title']} {target['refId']}", text))
    return found


def rule_expressions() -> list[Expression]:
    """Of all rules."""
    return [Expression(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]

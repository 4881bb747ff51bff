"""Every expression of the rules and dashboards parses, and asks for series, labels and buckets that /metrics has."""

from __future__ import annotations

import json
from pathlib import Path

import promql_parser
import pytest
import yaml

from server.metrics import names
from tests.observe_files import (
    DASHBOARDS,
    DEPLOY,
    RULE_TESTS,
    Expression,
    panel_expressions,
    panels,
    rule_expressions,
    rules,
)

EXPRESSIONS = rule_expressions() + panel_expressions("1m")
FROM_THE_TARGET = {"model_name"}
FROM_PROMETHEUS = {"job", "instance", "namespace"}
ALERT_NAMES = sorted({rule["alert"] for rule in rules() if "alert" in rule})
RECORDS = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def known() -> dict[str, tuple[set[str], set[str]]]:
    """By series: its own labels, and its buckets."""
    found: dict[str, tuple[set[str], set[str]]] = {"up": (set(), set()), "ALERTS": ({"alertname", "alertstate"}, set())}
    for metric in vars(names).values():
        if isinstance(metric, names.Metric):
            labels = set(metric.labels)
            if metric.kind == "histogram":
                bounds = {repr(float(bound)) for bound in metric.buckets}
                found[f"{metric.name}_bucket"] = labels | {"le"}, bounds
                found[f"{metric.name}_sum"] = found[f"{metric.name}_count"] = labels, set()
            else:
                found[metric.name] = labels, set()
    for record in RECORDS:
        found[record] = {"position", "phase"}, set()
    return found


KNOWN = known()


def selectors(text: str) -> list[promql_parser.VectorSelector]:
    """The vector selectors within an expression."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(text), visit)
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_it_parses_and_asks_for_what_there_is(expression: Expression) -> None:
    found = selectors(expression.text)
    assert found
    for selector in found:
        assert selector.name in KNOWN, f"{selector.name} is no series of /metrics and no record"
        labels, buckets = KNOWN[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels | FROM_THE_TARGET | FROM_PROMETHEUS, f"{selector.name} has no {matcher.name}"
            if matcher.name == "le":
                assert matcher.value in buckets, f"{selector.name} has no bucket {matcher.value}, but {sorted(buckets)}"


def test_no_expression_is_left_out() -> None:
    assert len(EXPRESSIONS) > 90
    written = sum(path.read_text().count('"expr":') for path in DASHBOARDS)
    annotations = sum(len(json.loads(path.read_text())["annotations"]["list"]) for path in DASHBOARDS)
    assert len(panel_expressions("1m")) == written - annotations


def test_a_misspelt_series_is_noticed() -> None:
    wrong = Expression("wrong", "rate(outrider_generated_tokens_total[5m])")
    with pytest.raises(AssertionError, match="no series"):
        test_it_parses_and_asks_for_what_there_is(wrong)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(dashboard: Path) -> None:
    content = json.loads(dashboard.read_text())
    ids = [panel["id"] for panel in content["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in content["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"] and panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"] for variable in content["templating"]["list"]}
    assert variables == {"datasource", "model", "instance"}


def test_the_dashboards_show_every_series_that_counts() -> None:
    shown = {selector.name for e in EXPRESSIONS for selector in selectors(e.text)}
    left_out = {
        metric.name
        for metric in vars(names).values()
        if isinstance(metric, names.Metric) and metric.name.startswith("outrider_")
        if not shown & {metric.name, f"{metric.name}_bucket", f"{metric.name}_sum"}
    }
    assert left_out <= {"outrider_request_longest_choice_tokens"}  # it is there for its vllm: name


def test_every_rule_is_tried_out() -> None:
    cases = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    verdicts: dict[str, set[bool]] = {name: set() for name in ALERT_NAMES}
    asked = ""
    for case in cases:
        for alert in case.get("alert_rule_test", []):
            verdicts[alert["alertname"]].add(bool(alert["exp_alerts"]))
        asked += " ".join(one["expr"] for one in case.get("promql_expr_test", []) if one["exp_samples"]) + " "
    assert {name: seen for name, seen in verdicts.items() if seen != {True, False}} == {}
    assert [record for record in RECORDS if record not in asked] == []


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_the_runbook_knows_the_alert(name: str) -> None:
    headings = [line for line in (DEPLOY / "RUNBOOK.md").read_text().splitlines() if line.startswith("#")]
    assert f"### {name}" in headings
    for rule in rules():
        if rule.get("alert") == name:
            assert rule["annotations"]["runbook"] == f"deploy/RUNBOOK.md#{name.lower()}"
            assert rule["labels"]["severity"] in ("warning", "critical")

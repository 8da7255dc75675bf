"""Alerts, runbooks and the dashboard refer to each other and to existing metrics."""

import json
import re
from typing import Any

import yaml

from tests.observability.metricdocs import ROOT, documented, label_values

FILES = ROOT / "helm" / "cardwise" / "files"
RUNBOOKS = ROOT / "docs" / "runbooks.md"
_METRIC = re.compile(r"(?<!:)\bcardwise_[a-z0-9_]+")
_RECORDED = re.compile(r"\b[a-z]+:cardwise_[a-z0-9_]+:[a-z]+")
_SERIES = re.compile(r"_(?:bucket|count|sum)$")
_SELECTOR = re.compile(r"(cardwise_[a-z0-9_]+)\{([^}]*)\}")
_MATCHER = re.compile(r"(\w+)=~?\"([^\"$]+)\"")


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts" / "cardwise.yaml").read_text())["groups"]
    all_rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in all_rules}) == len(all_rules), "an alert is there twice"
    return {rule["alert"]: rule for rule in all_rules}


def recording_rules() -> dict[str, str]:
    """Expressions by the name of the recorded metric."""
    groups = yaml.safe_load((FILES / "rules" / "cardwise.yaml").read_text())["groups"]
    return {rule["record"]: str(rule["expr"]) for group in groups for rule in group["rules"]}


def sections() -> dict[str, str]:
    """Text of the runbooks by heading."""
    parts = re.split(r"^## (.+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def targets() -> list[str]:
    panels = json.loads((FILES / "dashboards" / "cardwise.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def known() -> dict[str, str]:
    return {name: row.kind for rows in documented().values() for name, row in rows.items()}


def unknown(expression: str) -> set[str]:
    """Names in the expression that no part serves."""
    kinds, unknown_names = known(), set()
    for name in _METRIC.findall(expression):
        base = _SERIES.sub("", name)
        if name not in kinds and kinds.get(base) != "histogram":
            unknown_names.add(name)
    return unknown_names


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    assert sorted(sections()) == sorted(rules())


def test_alerts_point_at_their_own_section() -> None:
    for name, rule in rules().items():
        # Anchors as GitHub derives them from headings.
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_links_within_the_runbooks_have_targets() -> None:
    anchors = {name.lower() for name in sections()}
    assert set(re.findall(r"\]\(#([^)]+)\)", RUNBOOKS.read_text())) <= anchors
    for target in re.findall(r"\]\((?!#)([^)#]+)[^)]*\)", RUNBOOKS.read_text()):
        assert (RUNBOOKS.parent / target).exists(), target


def test_alerts_and_panels_query_existing_metrics() -> None:
    expressions = [*(rule["expr"] for rule in rules().values()), *targets(), *recording_rules().values()]
    assert len(expressions) > 60
    assert {expression: unknown(expression) for expression in expressions if unknown(expression)} == {}


def test_alerts_and_panels_query_recorded_metrics_that_exist() -> None:
    expressions = [*(rule["expr"] for rule in rules().values()), *targets()]
    queried = {name for expression in expressions for name in _RECORDED.findall(expression)}
    assert queried
    assert queried <= recording_rules().keys()


def test_unknown_metrics_are_detected() -> None:
    assert unknown("rate(cardwise_nobody_total[5m])") == {"cardwise_nobody_total"}
    assert unknown("cardwise_grants_bucket") == {"cardwise_grants_bucket"}, "it is no histogram"


def test_every_metric_is_on_the_dashboard() -> None:
    # A metric that is not displayed is not maintained.
    shown = {
        _SERIES.sub("", name) if name not in known() else name
        for target in targets()
        for name in _METRIC.findall(target)
    }
    assert known().keys() - shown - {"cardwise_workload_learned"} == set()


def test_label_values_in_queries_are_documented_ones() -> None:
    """A value that no part writes matches nothing: the alert would never fire."""
    documented_rows = {name: row for rows in documented().values() for name, row in rows.items()}
    checked = 0
    for expression in [*(rule["expr"] for rule in rules().values()), *targets()]:
        for series, matchers in _SELECTOR.findall(expression):
            row = documented_rows[_SERIES.sub("", series)]
            for label, content in _MATCHER.findall(matchers):
                assert label in row.labels, (series, label)
                if (listed_values := label_values(row, label)) is not None:
                    assert set(content.split("|")) <= listed_values, (series, label)
                    checked += 1
    assert checked > 5, "the queries were not read"

"""Each query of the dashboards and of the rules finds what it names in a real scrape of a service and its engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest
import yaml

from tests.deploy.chart import find_scaling_query
from tests.deploy.monitored import monitor, query
from tests.deploy.tools import ROOT

DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
SELECTOR = re.compile(r"\breasoner[_:][\w:]+(?:\{[^}]*\})?")
VARIABLES = {"$namespace": ".*", "$__rate_interval": "1m"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with monitor(tmp_path_factory.mktemp("monitored")) as client:
        yield client


@pytest.mark.timeout(400)
def test_every_query_of_the_dashboards_has_a_series(prometheus: httpx.Client) -> None:
    empty = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                assert "$" not in expression
                if not query(prometheus, expression):
                    empty.append((path.name, panel["title"], expression))
    assert empty == []


@pytest.mark.timeout(400)
def test_every_label_in_a_legend_is_one_of_its_series(prometheus: httpx.Client) -> None:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
                labels = {label.strip() for group in grouped for label in group.split(",")}
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


@pytest.mark.timeout(400)
def test_every_selector_of_the_rules_has_a_series(prometheus: httpx.Client) -> None:
    expressions = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    selectors = {selector for expression in expressions for selector in SELECTOR.findall(expression)}
    assert len(selectors) > 15
    assert [selector for selector in sorted(selectors) if not query(prometheus, selector)] == []


@pytest.mark.timeout(400)
def test_prometheus_evaluates_every_rule_and_reports_the_engine_that_is_away(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    assert len(rules) == sum(len(group["rules"]) for group in RULES["groups"])
    state = {name: rule.get("state") for name, rule in rules.items()}
    assert (state["ReasonerEngineAway"], state["ReasonerNoEngine"], state["ReasonerDown"]) == (
        "pending",
        "inactive",
        "inactive",
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pool", ["interactive", "batch"])
def test_the_query_that_scales_a_pool_needs_no_slots_when_all_jobs_have_ended(
    prometheus: httpx.Client, pool: str
) -> None:
    (series,) = query(prometheus, find_scaling_query(pool))
    assert series["value"][1] == "0"

"""The form for a new job, and the prompt for an API key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from engine.protocol.types import ModelInfo, ProbeInfo
from tests.e2e.dashboard.service import (
    WAIT,
    Engine,
    Service,
    expect_text,
    open_page,
)
from tests.scripted import ScriptedEngine
from workers.config.settings import load_settings


def test_a_refused_job_marks_the_wrong_field(browser: Browser, service: Service) -> None:
    with open_page(browser, service.url) as page:
        page.click("#new")
        page.fill("#problem", "?")
        page.fill("#budget [name=tokens]", "0")
        page.click("#form [type=submit]")
        expect(page.locator("#form .refused")).to_contain_text("budget.tokens", timeout=WAIT)
        expect(page.locator("#budget [name=tokens]")).to_have_attribute("aria-invalid", "true", timeout=WAIT)
        assert service.get("/v1/jobs")["data"] == []


def test_the_form_offers_no_strategy_that_the_service_would_refuse(browser: Browser, url: str, tmp_path: Path) -> None:
    settings = load_settings(redis_url=url, data_dir=tmp_path, prm="none")
    with Service(settings) as service, open_page(browser, service.url) as page:
        page.keyboard.press("n")
        expect(page.locator("#strategies")).to_have_value("self_consistency", timeout=WAIT)
        offered = page.locator("#strategies option").evaluate_all("options => options.map((option) => option.value)")
        assert {"greedy", "auto"} < set(offered)
        assert not {"beam", "best_of_n", "weighted_vote"} & set(offered)
        page.fill("#problem", "3 + 4?")
        page.click("#form [type=submit]")
        expect_text(page.locator("#state"), "queued")


def test_the_form_offers_the_strategies_of_the_chosen_model_and_names_its_verifier(
    browser: Browser, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = ProbeInfo("1f", (2,), 65)

    async def models(_: Engine) -> list[ModelInfo]:
        policy, prm = await ScriptedEngine().models()
        return [policy, prm, replace(policy, id="other", probe=probe), replace(policy, id="probed", probe=probe)]

    monkeypatch.setattr(Engine, "models", models)
    settings = load_settings(redis_url=url, data_dir=tmp_path, models={"probed": {"verifier": {"kind": "probe"}}})
    with Service(settings) as service, open_page(browser, service.url) as page:
        verifier, strategies = page.locator("#verifier"), page.locator("#strategies")
        page.keyboard.press("n")
        expect_text(verifier, "Verifier: prm")
        expect(strategies).to_have_value("beam", timeout=WAIT)
        page.select_option("#models", "other")
        expect_text(verifier, "Verifier: none named; the model has a probe, which its settings may name")
        expect(strategies).to_have_value("self_consistency", timeout=WAIT)
        assert strategies.locator("option[value=best_of_n]").count() == 0
        page.select_option("#models", "probed")
        expect_text(verifier, "Verifier: probe")
        expect(strategies).to_have_value("self_consistency", timeout=WAIT)
        page.select_option("#strategies", "best_of_n")
        page.fill("#problem", "3 + 4?")
        page.click("#form [type=submit]")
        expect_text(page.locator("#state"), "queued")


def test_the_page_asks_for_a_key_and_keeps_it_in_session_storage(browser: Browser, url: str, tmp_path: Path) -> None:
    secret = "a-key-of-this-very-test"
    with (
        Service(load_settings(redis_url=url, data_dir=tmp_path, api_keys=[secret])) as service,
        open_page(browser, service.url) as page,
    ):
        page.fill("#key", "not-the-key-of-this-test")
        page.click("#keys [type=submit]")
        expect(page.locator("#keys .refused")).to_contain_text("not one of", timeout=WAIT)
        page.fill("#key", secret)
        page.click("#keys [type=submit]")
        expect(page.locator("#nojobs")).to_be_visible(timeout=WAIT)
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [[secret], []]
        page.click("#first")
        page.fill("#problem", "3 + 4?")
        page.click("#form [type=submit]")
        expect_text(page.locator("#state"), "queued")
        page.click("#forget")
        expect(page.locator("#keys")).to_be_visible(timeout=WAIT)


def test_verifier_tools_answer_constraint_and_webhook_of_the_form_are_in_the_job(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    names = {"careful": {"model": "policy", "strategy": {"name": "best_of_n", "n": 3}, "description": "three tries"}}
    settings = load_settings(redis_url=url, data_dir=tmp_path, names=names)
    with Service(settings) as service, open_page(browser, service.url) as page:
        page.click("#new")
        page.fill("#problem", "3 + 4?")
        page.select_option("#models", "careful")
        expect_text(page.locator("#about"), "three tries")
        page.select_option("#models", "policy")
        page.select_option("#verifiers", "numeric")
        page.select_option("#strategies", "best_of_n")
        page.fill("#verifier-fields [name=expected]", "7")
        for summary in ("Answer", "Tools", "More"):
            page.locator("#form summary", has_text=summary).click()
        page.select_option("#answer-fields [name=compare]", "text")
        page.fill("#pattern", "is (.*)$")
        page.check("#python")
        page.fill("#python-fields [name=calls]", "3")
        page.fill("#functions", '{"name": "lookup", "parameters": {"type": "object"}}')
        page.fill("#more [name=metadata]", "course=numbers\nrun=7")
        page.fill("#more [name=webhook]", "http://insecure.example/")
        page.click("#form [type=submit]")
        expect(page.locator("#form form > .refused")).to_contain_text("webhook", timeout=WAIT)
        expect(page.locator("#more [name=webhook]")).to_have_attribute("aria-invalid", "true", timeout=WAIT)
        page.fill("#more [name=webhook]", "")
        page.fill("#functions", "not json")
        page.click("#form [type=submit]")
        expect(page.locator("#functions")).to_have_attribute("aria-invalid", "true", timeout=WAIT)
        page.fill("#functions", '{"name": "lookup", "parameters": {"type": "object"}}')
        with page.expect_request(lambda request: request.method == "POST") as sent:
            page.click("#form [type=submit]")
        spec = sent.value.post_data_json
        assert (spec["model"], spec["strategy"]["name"], spec["metadata"]) == (
            "policy",
            "best_of_n",
            {"course": "numbers", "run": "7"},
        )
        assert spec["verifier"] == {"kind": "numeric", "expected": 7}
        assert spec["answer"] == {"compare": "text", "extract": {"regex": "is (.*)$"}}
        assert spec["tools"] == [
            {"type": "python", "calls": 3},
            {"type": "function", "name": "lookup", "parameters": {"type": "object"}},
        ]
        expect(page.locator("#form form > .refused")).to_contain_text("tool_format", timeout=WAIT)
        page.fill("#functions", "")
        page.uncheck("#python")
        page.click("#form [type=submit]")
        expect_text(page.locator("#state"), "queued")
        job = service.get(f"/v1/jobs/{page.url.partition('#')[2]}")["spec"]
        assert (job["verifier"]["kind"], job["metadata"]["run"], job["answer"]["compare"]) == ("numeric", "7", "text")


@pytest.mark.parametrize(
    ("kind", "text", "constraint"),
    [
        ("json_schema", '{"type": "integer"}', {"type": "integer"}),
        ("json_object", None, True),
        ("regex", "[0-9]+", "[0-9]+"),
        ("choice", "yes\nno", ["yes", "no"]),
    ],
)
def test_a_constraint_of_the_form_is_sent_as_the_service_reads_it(
    browser: Browser, service: Service, kind: str, text: str | None, constraint: object
) -> None:
    with open_page(browser, service.url) as page:
        page.click("#new")
        page.fill("#problem", "3 + 4?")
        page.locator("#form summary", has_text="Constraint").click()
        page.select_option("#constraint", kind)
        expect(page.locator("#constraint-text")).to_be_visible(visible=text is not None, timeout=WAIT)
        if text is not None:
            page.fill("#constraint-text", text)
        with page.expect_request(lambda request: request.method == "POST") as sent:
            page.click("#form [type=submit]")
        assert sent.value.post_data_json["constraint"] == {kind: constraint}

"""The page, driven by a real browser: jobs, the growing tree, its replay, and text that stays text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
import uvicorn
from playwright.sync_api import Browser, Page, expect

from api.app.app import create_app
from benchmarks.browser import CHROMIUM, chromium
from engine.protocol.types import InvalidRequest
from reasoner.run import run_job
from tests.planned import Planned, PlannedEngine
from tests.workers.fixtures import broker, url
from workers.config.settings import Settings, load_settings
from workers.execution.execute import execute
from workers.store.jobs import JobStore

__all__ = ["broker", "url"]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no 'chromium' on PATH")

WAIT = 40_000.0
"""Milliseconds until something on the page counts as missing: nobody waits for this long where nothing is wrong."""
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
PLAN = {
    (0,): Planned("3 + 4 = 7\n\n", 0.3),
    (1,): Planned(f"{EVIL}\n\n", 0.8),
    (2,): Planned("2 * 5 = 10\n\n", 0.6),
    (3,): Planned("who knows\n\n", 0.1),
    (1, 0): Planned("so \\boxed{7}", 0.9),
    (2, 0): Planned("so \\boxed{10}", 0.4),
}
"""A beam of width 2 keeps 1 and 2, and chooses 1.0."""
JOB = {"problem": "3 + 4?", "strategy": {"name": "beam", "n": 4, "expansions": 2}, "budget": {"tokens": 500}, "seed": 1}


class Engine(PlannedEngine):
    """Its branch 1.0 waits for ``gate``; an abort opens it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        super().__init__(PLAN, {(1, 0): self.gate})

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.gate.set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class Service:
    """The application on a port, and a worker that runs a job when it is told to, both in one thread's event loop."""

    def __init__(self, settings: Settings) -> None:
        self.engine = Engine()
        app = create_app(settings, self.engine)
        self._server = _Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Service:
        self._thread.start()
        assert self._server.ready.wait(60)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def work(self, job_id: str) -> Future[None]:
        """Does for a job what a worker does when its message arrives."""

        async def run() -> None:
            store = JobStore(str(self._settings.redis_url))
            try:
                await execute(
                    job_id,
                    store=store,
                    engine=self.engine,
                    run=run_job,
                    draining=asyncio.Event(),
                    lease=0.6,
                    max_attempts=3,
                )
            finally:
                await store.close()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.gate.set)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def submit(self, **more: Any) -> str:
        return str(httpx.post(f"{self.url}/v1/jobs", json=JOB | more, timeout=30).raise_for_status().json()["id"])

    def events(self, job_id: str) -> list[dict[str, Any]]:
        lines = httpx.get(f"{self.url}/v1/jobs/{job_id}/events", timeout=30).text.splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("data:")]


def tokens_of(events: Sequence[dict[str, Any]]) -> int:
    """What these events added to the bill."""
    return round(
        sum(event["spend"].get("generated", 0) + event["spend"].get("verifier_computed", 0) for event in events)
    )


@pytest.fixture(autouse=True)
def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def service(url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(load_settings(redis_url=url, data_dir=tmp_path)) as service:
        yield service


@contextlib.contextmanager
def opened(
    browser: Browser,
    address: str,
    *,
    width: int = 1440,
    height: int = 900,
    dark: bool = False,
    title: str = "Reasoner",
) -> Iterator[Page]:
    """The page in a window; fails if it complained, broke its content security policy, or asked anybody else."""
    complaints: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None)
    here = "/".join(address.split("/")[:3])
    elsewhere: list[str] = []
    page.on("request", lambda sent: None if sent.url.startswith((here, "data:")) else elsewhere.append(sent.url))
    page.goto(address)
    yield page
    assert (complaints, elsewhere) == ([], [])
    assert page.title() == title
    context.close()


def nodes(page: Page, kind: str = "") -> Any:
    """Branches that are drawn now."""
    return page.locator(f"#canvas .node{kind}:visible")


def shows(locator: Any, text: str | re.Pattern[str]) -> None:
    expect(locator).to_have_text(text, timeout=WAIT)


def counts(locator: Any, count: int) -> None:
    expect(locator).to_have_count(count, timeout=WAIT)


def test_a_job_is_submitted_watched_while_its_tree_grows_and_replayed(browser: Browser, service: Service) -> None:
    with opened(browser, service.url) as page:
        page.keyboard.press("n")
        page.fill("#problem", "3 + 4?")
        page.select_option("#strategies", "beam")
        page.fill("#parameters [name=n]", "4")
        page.fill("#parameters [name=expansions]", "2")
        page.fill("#budget [name=tokens]", "500")
        page.click("#form [type=submit]")
        shows(page.locator("#state"), "queued")
        job_id = page.url.partition("#")[2]
        spec = service.get(f"/v1/jobs/{job_id}")["spec"]
        assert (spec["problem"], spec["budget"]["tokens"]) == ("3 + 4?", 500)
        assert {name: spec["strategy"][name] for name in ("name", "n", "expansions")} == JOB["strategy"]

        running = service.work(job_id)
        shows(page.locator("#state"), "running")
        expect(page.locator("[data-node='2.0']")).to_be_visible(timeout=WAIT)
        counts(nodes(page, ".pruned"), 2)
        expect(page.locator("[data-node='1'].frontier")).to_be_visible(timeout=WAIT)
        shows(page.locator("#votes .said"), "10")
        shows(page.locator("#step .value b"), "0.80")
        expect(page.locator("#step .mine p")).to_have_text(EVIL, timeout=WAIT)
        counts(page.locator("img[src=x]"), 0)

        service.open_gate()
        running.result(60)
        shows(page.locator("#state"), "completed")
        shows(page.locator("#answer .answer"), "7")
        assert [mark.get_attribute("data-node") for mark in nodes(page, ".best").all()] == ["1", "1.0"]
        counts(nodes(page, ".frontier"), 0)
        job = service.get(f"/v1/jobs/{job_id}")
        tokens = job["usage"]["generated"] + job["usage"]["verifier_computed"]
        shows(page.locator("[data-resource=tokens] b"), str(tokens))

        events = service.events(job_id)
        assert [event["seq"] for event in events] == list(range(1, job["last_seq"] + 1))
        assert tokens_of(events) == tokens
        page.keyboard.press("Home")
        counts(nodes(page), 0)
        for seq in (5, 9, 7, len(events)):
            page.locator("#seek").fill(str(seq))
            so_far = events[:seq]
            counts(nodes(page), len({event["data"]["node"] for event in so_far if event["type"] == "node"}))
            shows(page.locator("[data-resource=tokens] b"), str(tokens_of(so_far)))
        page.locator("#seek").evaluate("slider => slider.blur()")
        page.keyboard.press("Home")
        page.keyboard.press("Space")
        expect(page.locator("#play")).to_have_attribute("aria-pressed", "true", timeout=WAIT)
        shows(page.locator("#event b"), f"{len(events)} / {len(events)}")
        expect(page.locator("#play")).to_have_attribute("aria-pressed", "false", timeout=WAIT)
        counts(nodes(page), len(service.get(f"/v1/jobs/{job_id}/tree")["nodes"]))


def test_the_keyboard_walks_the_tree_and_the_jobs(browser: Browser, service: Service) -> None:
    ids = [service.submit(problem=f"{number}?") for number in range(2)]
    service.open_gate()
    for job_id in ids:
        service.work(job_id).result(60)
    with opened(browser, service.url) as page:
        shows(page.locator("#question"), "1?")
        for key, question in (("j", "0?"), ("k", "1?")):
            page.keyboard.press(key)
            shows(page.locator("#question"), question)
        shows(page.locator("#event b"), re.compile("^([0-9]+) / \\1$"))
        for key, selected in (
            ("b", "1.0"),
            ("ArrowLeft", "1"),
            ("ArrowUp", "0"),
            ("ArrowDown", "1"),
            ("ArrowDown", "2"),
            ("ArrowRight", "2.0"),
            ("ArrowUp", "1.0"),
        ):
            page.keyboard.press(key)
            expect(page.locator(".node.selected")).to_have_attribute("data-node", selected, timeout=WAIT)
        assert page.url.endswith(f"#{ids[1]}/1.0")
        page.keyboard.press("?")
        expect(page.locator("#shortcuts")).to_be_visible(timeout=WAIT)


def test_cancelling_asks_first_and_ends_the_job(browser: Browser, service: Service) -> None:
    job_id = service.submit()
    running = service.work(job_id)
    with opened(browser, f"{service.url}/#{job_id}") as page:
        expect(page.locator("[data-node='2.0']")).to_be_visible(timeout=WAIT)
        page.keyboard.press("c")
        page.click("#sure-dialog .close")
        assert service.get(f"/v1/jobs/{job_id}")["status"] == "in_progress"
        page.click("#cancel")
        page.click("#sure-dialog [type=submit]")
        running.result(60)
        shows(page.locator("#state"), "cancelled")
        assert service.get(f"/v1/jobs/{job_id}")["status"] == "cancelled"
        page.click("#delete")
        page.click("#sure-dialog [type=submit]")
        counts(page.locator("#list button"), 0)
        assert service.get("/v1/jobs")["data"] == []


def test_a_link_to_a_job_that_is_gone_says_so_and_shows_no_other_job(browser: Browser, service: Service) -> None:
    kept, gone = service.submit(), f"job_{'0' * 32}"
    with opened(browser, f"{service.url}/#{gone}") as page:
        expect(page.locator("#welcome")).to_contain_text(f"There is no job {gone}", timeout=WAIT)
        counts(page.locator("#list button"), 1)
        expect(page.locator("#search")).to_be_hidden(timeout=WAIT)
        page.click("#list button")
        shows(page.locator("#state"), "queued")
        assert page.url.endswith(kept)
        page.goto(f"{service.url}/#{gone}")
        expect(page.locator("#search")).to_be_hidden(timeout=WAIT)
        expect(page.locator("#welcome")).to_contain_text(f"There is no job {gone}", timeout=WAIT)


def test_a_job_that_is_opened_is_in_sight_in_the_list(browser: Browser, service: Service) -> None:
    for _ in range(20):
        service.submit()
    with opened(browser, service.url) as page:
        counts(page.locator("#list button"), 20)
        page.locator("#list button").last.scroll_into_view_if_needed()
        page.keyboard.press("n")
        page.fill("#problem", "3 + 4?")
        page.click("#form [type=submit]")
        counts(page.locator("#list button"), 21)
        expect(page.locator("#list [aria-current=true]")).to_be_in_viewport(timeout=WAIT)


def test_a_refused_job_is_told_where_it_is_wrong(browser: Browser, service: Service) -> None:
    with opened(browser, service.url) as page:
        page.click("#new")
        page.fill("#problem", "?")
        page.fill("#budget [name=tokens]", "0")
        page.click("#form [type=submit]")
        expect(page.locator("#form .refused")).to_contain_text("budget.tokens", timeout=WAIT)
        expect(page.locator("#budget [name=tokens]")).to_have_attribute("aria-invalid", "true", timeout=WAIT)
        assert service.get("/v1/jobs")["data"] == []


def sticking_out(page: Page) -> Any:
    """What reaches beyond the right edge of the window."""
    return page.evaluate(
        "[...document.querySelectorAll('body *')].map(e => [e, e.getBoundingClientRect()])"
        ".filter(([e, box]) => box.right > innerWidth + 0.5 && !e.closest('svg')).map(([e]) => e.outerHTML)"
    )


def test_on_a_phone_each_view_has_the_screen_in_light_and_in_dark(browser: Browser, service: Service) -> None:
    job_id = service.submit(problem="word " * 20 + "unbreakable" * 8)
    service.open_gate()
    service.work(job_id).result(60)
    grounds = []
    for dark in (False, True):
        with opened(browser, service.url, width=375, height=720, dark=dark) as page:
            page.locator("#list button").click()
            shows(page.locator("#answer .answer"), "7")
            for view, shown in (("step", "#step .solution"), ("jobs", "#list"), ("search", "#canvas")):
                page.click(f".tabs [data-to={view}]")
                expect(page.locator(shown)).to_be_visible(timeout=WAIT)
                assert page.evaluate("document.documentElement.scrollWidth") == 375
                assert sticking_out(page) == [], view
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_ground = ([int(part) for part in re.findall(r"\d+", ground)[:3]] for ground in grounds)
    assert min(light) > 230
    assert max(dark_ground) < 40


def test_the_form_offers_no_strategy_that_the_service_would_refuse(browser: Browser, url: str, tmp_path: Path) -> None:
    settings = load_settings(redis_url=url, data_dir=tmp_path, prm="none")
    with Service(settings) as service, opened(browser, service.url) as page:
        page.keyboard.press("n")
        expect(page.locator("#strategies")).to_have_value("self_consistency", timeout=WAIT)
        offered = page.locator("#strategies option").evaluate_all("options => options.map((option) => option.value)")
        assert {"greedy", "auto"} < set(offered)
        assert not {"beam", "best_of_n", "weighted_vote"} & set(offered)
        page.fill("#problem", "3 + 4?")
        page.click("#form [type=submit]")
        shows(page.locator("#state"), "queued")


def test_a_strategy_of_many_parameters_does_not_widen_a_phones_page(browser: Browser, service: Service) -> None:
    job_id = service.submit(strategy={"name": "mcts", "n": 256})
    with opened(browser, f"{service.url}/#{job_id}", width=375, height=720) as page:
        expect(page.locator("#strategy")).to_contain_text("max steps", timeout=WAIT)
        assert sticking_out(page) == []


@pytest.mark.parametrize("width", [375, 1440])
def test_a_job_that_failed_before_its_first_branch_says_why_and_promises_none(
    browser: Browser, service: Service, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    why = "the problem has 2802 tokens, and the context of model 'policy' holds 512: shorten it so that room is left"

    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest(why)

    monkeypatch.setattr(service.engine, "generate", refuse)
    job_id = service.submit()
    service.work(job_id).result(60)
    with opened(browser, f"{service.url}/#{job_id}", width=width, height=720) as page:
        shows(page.locator("#answer .facts"), why)
        assert page.evaluate("(box => box.scrollHeight - box.clientHeight)(document.querySelector('#answer'))") == 0
        shows(page.locator("#empty"), "The job ended before its first branch.")
        shows(page.locator("#step .hint"), "There is no branch to show.")


def test_seconds_are_rounded_before_they_become_minutes(browser: Browser, service: Service) -> None:
    with opened(browser, service.url) as page:
        told = page.evaluate(
            "times => import('/dashboard/words.js').then(({ seconds }) => times.map(seconds))",
            [0.04, 9.94, 99.4, 99.6, 119.4, 179.7, 5999.4],
        )
    assert told == ["0.0 s", "9.9 s", "99 s", "1 min 40 s", "1 min 59 s", "3 min 0 s", "99 min 59 s"]


def test_where_a_key_is_asked_for_the_page_asks_and_keeps_it_in_its_tab(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    secret = "a-key-of-this-very-test"
    with (
        Service(load_settings(redis_url=url, data_dir=tmp_path, api_keys=[secret])) as service,
        opened(browser, service.url) as page,
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
        shows(page.locator("#state"), "queued")
        page.click("#forget")
        expect(page.locator("#keys")).to_be_visible(timeout=WAIT)


def test_the_documentation_tries_every_call_without_asking_anybody_else(browser: Browser, service: Service) -> None:
    with opened(browser, f"{service.url}/docs", title="Reasoner: the HTTP interface", dark=True) as page:
        operations = [call for item in service.get("/openapi.json")["paths"].values() for call in item]
        counts(page.locator(".opblock"), len(operations))
        job = page.locator(".opblock-post", has=page.get_by_text("Submit a job", exact=True))
        job.locator(".opblock-summary-control").click()
        job.locator("textarea").fill(json.dumps(JOB))
        job.locator("button.execute").click()
        expect(job.locator(".live-responses-table .response .response-col_status")).to_have_text(
            re.compile("202"), timeout=WAIT
        )
        assert len(service.get("/v1/jobs")["data"]) == 1
        page.locator("button.authorize").first.click()
        expect(page.locator(".dialog-ux input")).to_be_visible(timeout=WAIT)


@pytest.mark.parametrize("dark", [False, True])
def test_equal_steps_of_a_score_look_equal_and_lightness_alone_tells_them_apart(
    browser: Browser, service: Service, dark: bool
) -> None:
    """In OKLab (Ottosson 2020), and as the two common kinds of colour blindness see it (Machado et al. 2009)."""
    with opened(browser, service.url, dark=dark) as page:
        painted = page.evaluate(
            "[...document.querySelectorAll('#ramp i')].map(e => getComputedStyle(e).backgroundColor)"
        )
    colours = [[float(part) for part in re.findall(r"-?[\d.]+(?:e-?\d+)?", colour)[:3]] for colour in painted]
    lab = [
        np.array([light, chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))])
        for light, chroma, hue in colours
    ]
    steps = [float(np.linalg.norm(after - before)) for before, after in pairwise(lab)]
    assert max(steps) < 1.15 * min(steps)
    linear = [linear_rgb(colour) for colour in lab]
    assert all(-0.005 < float(part) < 1.005 for colour in linear for part in colour), "a screen cannot show it"
    for sight in (np.eye(3), PROTANOPIA, DEUTERANOPIA):
        luminance = [float(np.array([0.2126, 0.7152, 0.0722]) @ (sight @ colour)) for colour in linear]
        towards = 1 if dark else -1
        perceived = [value ** (1 / 3) * towards for value in luminance]
        gaps = np.diff(perceived)
        assert (gaps > 0.01).all(), gaps
        assert perceived[-1] - perceived[0] > 0.4


PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)


def linear_rgb(lab: Any) -> Any:
    cubes = np.array(
        [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.291485548]]
    )
    matrix = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.707614701],
        ]
    )
    return matrix @ (cubes @ lab) ** 3

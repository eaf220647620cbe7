"""Appearance of the dashboard: phones, dark mode, durations and the colours of scores."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import (
    WAIT,
    Service,
    expect_text,
    open_page,
    overflowing_elements,
)


def test_on_a_phone_each_view_fills_the_screen_in_light_and_dark_mode(browser: Browser, service: Service) -> None:
    job_id = service.submit(problem="word " * 20 + "unbreakable" * 8)
    service.open_gate()
    service.work(job_id).result(60)
    grounds = []
    for dark in (False, True):
        with open_page(browser, service.url, width=375, height=720, dark=dark) as page:
            page.locator("#list button").click()
            expect_text(page.locator("#answer .answer"), "7")
            for view, shown in (("step", "#step .solution"), ("jobs", "#list"), ("search", "#canvas")):
                page.click(f".tabs [data-to={view}]")
                expect(page.locator(shown)).to_be_visible(timeout=WAIT)
                assert page.evaluate("document.documentElement.scrollWidth") == 375
                assert overflowing_elements(page) == [], view
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_ground = ([int(part) for part in re.findall(r"\d+", ground)[:3]] for ground in grounds)
    assert min(light) > 230
    assert max(dark_ground) < 40


def test_many_strategy_parameters_do_not_widen_the_page_on_a_phone(browser: Browser, service: Service) -> None:
    job_id = service.submit(strategy={"name": "mcts", "n": 256})
    with open_page(browser, f"{service.url}/#{job_id}", width=375, height=720) as page:
        expect(page.locator("#strategy")).to_contain_text("max steps", timeout=WAIT)
        assert overflowing_elements(page) == []


def test_seconds_are_rounded_before_they_become_minutes(browser: Browser, service: Service) -> None:
    with open_page(browser, service.url) as page:
        told = page.evaluate(
            "times => import('/dashboard/words.js').then(({ seconds }) => times.map(seconds))",
            [0.04, 9.94, 99.4, 99.6, 119.4, 179.7, 5999.4],
        )
    assert told == ["0.0 s", "9.9 s", "99 s", "1 min 40 s", "1 min 59 s", "3 min 0 s", "99 min 59 s"]


@pytest.mark.parametrize("dark", [False, True])
def test_score_colours_have_equal_perceptual_steps_and_differ_in_lightness_alone(
    browser: Browser, service: Service, dark: bool
) -> None:
    """Compared in OKLab (Ottosson 2020), also as seen with the two common kinds of colour blindness (Machado et al.
    2009).
    """
    with open_page(browser, service.url, dark=dark) as page:
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

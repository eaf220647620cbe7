"""A service with a scripted engine, and a real browser. Tests are skipped without Chromium."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from playwright.sync_api import Browser

from benchmarks.browser import CHROMIUM, chromium
from tests.e2e.dashboard.service import Service
from tests.workers.fixtures import broker, url
from workers.config.settings import load_settings

__all__ = ["broker", "url"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no 'chromium' on PATH")
    with chromium() as browser:
        yield browser


@pytest.fixture
def service(url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(load_settings(redis_url=url, data_dir=tmp_path)) as service:
        yield service

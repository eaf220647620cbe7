"""The configured engines, and a verifier on an engine of its own."""

from __future__ import annotations

from typing import get_args

import pytest

from api.roles.supervisor import engine_command
from engine.remote.failover import choose_by_rendezvous
from engine.remote.health import Health
from engine.remote.replicas import ReplicatedEngine
from engine.remote.router import KnownProperties, RoutedEngine
from engine.remote.urls import hide_login
from prm.formats.registry import FORMATS, FormatName
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from workers.config.model_settings import DEFAULT_ENGINE_URL
from workers.config.settings import load_settings
from workers.config.types import ConfigError
from workers.engines.connect import connect


async def test_without_its_own_address_the_verifier_runs_on_the_engines() -> None:
    health = Health()
    engine = connect(load_settings(), health=health)
    assert isinstance(engine, ReplicatedEngine)
    assert [known.name for known in health.snapshot()] == [DEFAULT_ENGINE_URL]
    await engine.close()
    command = engine_command(load_settings(), [])
    assert [part.partition("=")[0] for part in command if "=" in part and "bundled" in part] == ["policy", "prm"]


async def test_a_verifier_with_its_own_address_is_requested_there_and_not_loaded_here() -> None:
    settings = load_settings(prm_url="http://127.0.0.1:9, http://127.0.0.1:10", prm="Qwen/Qwen2.5-Math-PRM-7B")
    health = Health()
    engine = connect(settings, health=health)
    assert isinstance(engine, RoutedEngine)
    assert list(engine._overrides) == ["Qwen/Qwen2.5-Math-PRM-7B"]
    assert [known.name for known in health.snapshot()] == [DEFAULT_ENGINE_URL, *settings.prm_url]
    await engine.close()
    command = engine_command(settings, [])
    assert [part.partition("=")[0] for part in command if "=" in part and "bundled" in part] == ["policy"]


async def test_engines_are_a_list_and_are_shown_without_their_passwords() -> None:
    urls = "http://me:secret@a:1/v1,unix:///b.sock , https://[::1]:2"
    health = Health()
    engine = connect(load_settings(engine_url=urls), health=health)
    assert [known.name for known in health.snapshot()] == ["http://a:1/v1", "unix:///b.sock", "https://[::1]:2"]
    assert hide_login("http://a:secret@@b:1") == "http://b:1"
    await engine.close()


@pytest.mark.parametrize("dies_after", [0, 1, 2, 3, 5, 8, 13, 21, 34, 1000])
async def test_a_search_whose_engine_dies_at_any_call_gives_the_undisturbed_result(dies_after: int) -> None:
    spec = build_spec(
        {
            "problem": "1 + 1?",
            "strategy": {"name": "beam", "n": 12, "max_steps": 6},
            "budget": {"tokens": 100_000},
            "seed": 5,
            "deterministic": True,
        }
    )
    undisturbed = ScriptedEngine()
    expected = await run_job(spec, undisturbed, MemoryJournal())
    journal = MemoryJournal()
    home, other = ScriptedEngine(die_after=dies_after), ScriptedEngine(order=1)
    names = ("http://a", "http://b")
    engine = ReplicatedEngine(
        {name: home if name == choose_by_rendezvous(names, journal.job_id) else other for name in names}
    )
    outcome = await run_job(spec, engine, journal)
    await engine.close()
    assert outcome.result == expected.result
    assert outcome.usage.generated == expected.usage.generated  # tokens lost with the engine are not billed
    assert bool(other._answers) == (dies_after < undisturbed._answers)
    assert other.pin_keys == set()


def test_every_prm_format_can_be_named_and_is_reported_with_the_model() -> None:
    assert set(get_args(FormatName)) == set(FORMATS)
    engine = connect(load_settings(prm_format="rlhflow", prm="policy"))
    assert isinstance(engine, RoutedEngine)
    assert engine._known == {"policy": KnownProperties({"reasoner_prm_format": "rlhflow"})}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"prm_url": "file:///etc/passwd"}, "--prm_url|--prm-url.*must start with one of http://, https://, unix://"),
        ({"engine_url": "http://a,b"}, "--url.*must start with one of http://, https://, unix://"),
        ({"engine_url": ["http://a", "http://a"]}, "--url.*names a server twice"),
        ({"prm_format": "oracle"}, "'token_classification', 'qwen_math'"),
    ],
)
def test_an_invalid_verifier_is_refused_with_the_name_of_its_setting(setting: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(**setting)

"""Which engines the configuration names, and that a verifier elsewhere is not started here."""

from __future__ import annotations

from typing import get_args

import pytest

from api.supervisor import engine_command
from engine.client import HttpEngine
from engine.routed import RoutedEngine
from prm.formats import FORMATS, FormatName
from workers.engines import connect
from workers.settings import ConfigError, load_settings


async def test_without_an_address_of_its_own_the_verifier_is_the_engines() -> None:
    engine = connect(load_settings())
    assert isinstance(engine, HttpEngine)
    await engine.close()
    command = engine_command(load_settings(), [])
    assert [part.partition("=")[0] for part in command if "=" in part and "bundled" in part] == ["policy", "prm"]


async def test_a_verifier_with_an_address_of_its_own_is_asked_there_and_not_loaded_here() -> None:
    settings = load_settings(prm_url="http://127.0.0.1:9", prm="Qwen/Qwen2.5-Math-PRM-7B")
    engine = connect(settings)
    assert isinstance(engine, RoutedEngine)
    assert isinstance(engine._of("Qwen/Qwen2.5-Math-PRM-7B"), HttpEngine)
    assert engine._of("Qwen/Qwen2.5-Math-PRM-7B") is not engine._of("policy")
    await engine.close()
    command = engine_command(settings, [])
    assert [part.partition("=")[0] for part in command if "=" in part and "bundled" in part] == ["policy"]


def test_every_format_may_be_named_and_comes_with_the_model() -> None:
    assert set(get_args(FormatName)) == set(FORMATS)
    engine = connect(load_settings(prm_format="rlhflow", prm="policy"))
    assert isinstance(engine, RoutedEngine)
    assert engine._notes == {"policy": {"reasoner_prm": "rlhflow"}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"prm_url": "file:///etc/passwd"}, "--prm_url|--prm-url.*must start with one of http://, https://, unix://"),
        ({"prm_format": "oracle"}, "'token_classification', 'qwen_math'"),
    ],
)
def test_what_cannot_be_a_verifier_is_refused_by_the_name_of_its_setting(setting: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(**setting)

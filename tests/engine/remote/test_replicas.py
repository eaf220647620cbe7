"""Replicated engines: routing, health and changed checkpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from scipy.stats import chisquare

from engine.protocol.types import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelInfo,
    SomeModelsAway,
    TokenizeRequest,
    list_answering,
)
from engine.remote.failover import choose_by_rendezvous
from engine.remote.replicas import ReplicatedEngine
from tests.engine.remote.fleet import BRANCHES, NAMES, Fleet, completions, request, scoring


def test_every_engine_is_first_choice_for_its_share_of_keys() -> None:
    keys = [f"job_{number}" for number in range(20_000)]
    counts = Counter(choose_by_rendezvous(NAMES, key) for key in keys)
    assert chisquare([counts[name] for name in NAMES]).pvalue > 0.001


def test_removing_an_engine_moves_only_its_own_keys_and_list_order_does_not_matter() -> None:
    keys = [f"job_{number}" for number in range(2_000)]
    before = {key: choose_by_rendezvous(NAMES, key) for key in keys}
    assert {key: choose_by_rendezvous(reversed(NAMES), key) for key in keys} == before
    after = {key: choose_by_rendezvous(NAMES[1:], key) for key in keys}
    assert [key for key in keys if before[key] != after[key]] == [key for key in keys if before[key] == NAMES[0]]
    assert len({after[key] for key in keys if before[key] == NAMES[0]}) == len(NAMES) - 1


async def test_all_requests_of_a_job_go_to_one_engine_and_jobs_are_spread(fleet: Fleet) -> None:
    for number in range(40):
        pin_key = f"job{number}"
        for turn in range(3):
            await completions(fleet.client, request(pin_key, request_id=f"{pin_key}-{turn}"))
        await fleet.client.score(scoring(pin_key))
        here, elsewhere = fleet.order(pin_key)
        assert pin_key in here.pin_keys
        assert pin_key not in elsewhere.pin_keys
    assert all(len(engine.pin_keys) >= 8 for engine in fleet.engines.values())  # of 40: p < 1e-4 to be wrong, and fixed


async def test_a_lease_is_released_only_on_the_engines_that_saw_it(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    await completions(fleet.client, request())
    await fleet.client.release("job", (7, 8, 9, 1))
    await fleet.client.release("job")
    await fleet.client.release("job")
    assert (here.released, here.pin_keys, elsewhere.asked["release"]) == (["job", "job"], set(), 0)


async def test_a_request_goes_to_an_engine_that_serves_its_model(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.serves = [replace(elsewhere.serves[0], id="large")]
    assert sorted(info.id for info in await fleet.client.models()) == ["large", "policy", "prm"]
    await completions(fleet.client, request())
    await fleet.client.score(scoring())
    await completions(fleet.client, replace(request(), model="large"))
    assert (here.asked["generate"], elsewhere.asked["generate"], elsewhere.asked["score"]) == (1, 1, 1)


async def test_a_model_whose_only_engine_is_away_is_away_and_not_gone(fleet: Fleet) -> None:
    """It is named as one that was served, and the others are listed; also before it has ever been seen."""
    here, elsewhere = fleet.order()
    here.serves = [replace(elsewhere.serves[0], id="large")]
    await fleet.client.models()
    here.dead = True
    fleet.clock.now += 60
    with pytest.raises(SomeModelsAway, match="dead") as known:
        await fleet.client.models()
    assert ([info.id for info in known.value.known], known.value.away) == (["policy", "prm"], here.serves)
    unseen = ReplicatedEngine(fleet.engines)
    with pytest.raises(SomeModelsAway, match="dead") as unknown:
        await unseen.models()
    assert ([info.id for info in unknown.value.known], unknown.value.away) == (["policy", "prm"], [])
    await unseen.close()
    here.serves, here.dead = elsewhere.serves, False
    fleet.clock.now += 60
    assert [info.id for info in await fleet.client.models()] == ["policy", "prm"]
    here.dead = True
    fleet.clock.now += 60
    assert [info.id for info in await fleet.client.models()] == ["policy", "prm"]  # the other one has all of them


async def test_what_engines_that_are_all_away_had_is_known(fleet: Fleet) -> None:
    models = await fleet.client.models()
    for engine in fleet.engines.values():
        engine.dead = True
    fleet.clock.now += 60
    with pytest.raises(SomeModelsAway, match="dead; dead") as caught:
        await fleet.client.models()
    assert (caught.value.known, caught.value.away) == ([], models)


async def test_a_refused_request_is_not_retried_on_another_engine(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.refuses = InvalidRequest("never", "prompt")
    with pytest.raises(InvalidRequest, match="never"):
        await completions(fleet.client, request())
    assert elsewhere.asked["generate"] == 0
    assert fleet.states() == ["up", "up"]


async def test_a_different_checkpoint_under_the_same_name_is_not_used_for_failover(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    meant, other = fleet.engines.values()
    other.serves = [replace(info, fingerprint="another") for info in other.serves]
    assert await fleet.client.models() == meant.serves
    for number in range(8):
        await completions(fleet.client, request(f"job{number}"))
    assert (meant.asked["generate"], other.asked["generate"]) == (8, 0)
    assert "serves another 'policy'" in caplog.text
    meant.dead = True
    with pytest.raises(EngineUnavailable, match="dead"):
        await completions(fleet.client, request())
    assert other.asked["generate"] == 0


async def test_an_engine_that_is_away_gets_no_requests_and_its_jobs_return_afterwards(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    assert (fleet.states(), elsewhere.asked["generate"]) == (["away", "up"], 1)
    failed = here.asked.copy()
    await completions(fleet.client, request())
    await fleet.client.score(scoring())
    assert here.asked == failed
    here.dead = False
    fleet.clock.now += 60
    await fleet.client.models()
    assert fleet.states() == ["up", "up"]
    await completions(fleet.client, request())
    assert here.asked["generate"] == failed["generate"] + 1


async def test_an_engine_that_is_away_is_probed_in_the_background(fleet: Fleet) -> None:
    here, _ = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    here.dead = False
    fleet.clock.now += 60
    await fleet.health.until(lambda: fleet.states() == ["up", "up"])


async def test_clients_of_one_process_share_health_state(fleet: Fleet) -> None:
    here, _ = fleet.order()
    here.dead = True
    await completions(fleet.client, request())
    failed = here.asked.copy()
    second = ReplicatedEngine(fleet.engines, fleet.health)
    await list_answering(second)
    await completions(second, request())
    await second.close()
    assert here.asked == failed


async def test_when_all_engines_are_away_the_error_lists_each_and_a_recovered_one_is_used_at_once(fleet: Fleet) -> None:
    for engine in fleet.engines.values():
        engine.dead = True
    with pytest.raises(EngineUnavailable, match="dead; dead"):
        await fleet.client.models()
    with pytest.raises(EngineUnavailable):
        await completions(fleet.client, request())
    _, elsewhere = fleet.order()
    elsewhere.dead = False
    assert len(await completions(fleet.client, request())) == len(BRANCHES)  # the clock has not advanced


async def test_misconfigured_engines_are_an_error_and_not_unavailable(fleet: Fleet) -> None:
    async def misconfigured() -> list[ModelInfo]:
        raise EngineError("name the folder of its tokenizer")

    for engine in fleet.engines.values():
        engine.models = misconfigured  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="folder") as caught:
        await fleet.client.models()
    assert not isinstance(caught.value, EngineUnavailable)


async def test_closing_ends_every_task_and_closes_every_engine(fleet: Fleet) -> None:
    here, elsewhere = fleet.order()
    here.hangs = True
    await elsewhere.tokenize(TokenizeRequest("policy", "x"))
    listing = asyncio.ensure_future(fleet.client.models())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    listing.cancel()
    await fleet.client.close()
    await asyncio.wait({listing})
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert here.closed
    assert elsewhere.closed

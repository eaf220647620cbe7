"""A name stands for models and for a search: a request wins where it leaves a field open, and it may fix fields."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.protocol.types import EngineUnavailable, ModelInfo, SomeModelsAway
from reasoner.admission.effort import DEFAULT_EFFORTS
from reasoner.admission.names import Name, NameFault, find_model, find_name
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.budget.spec import Budget
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from tests.seeds import shift
from workers.config.engine_profiles import EngineProfile
from workers.config.settings import Settings

HEAVY: dict[str, Any] = {
    "model": "policy",
    "strategy": {"name": "weighted_vote", "n": 16},
    "budget": {"tokens": 9000, "seconds": 60},
    "sampling": {"temperature": 0.6},
}


class Serving:
    async def models(self) -> list[ModelInfo]:
        prm = {"format": "token_classification", "separator": "\n\n", "positive_label": 1}
        writing = [ModelInfo(name, "generate", 256, 100, 1000) for name in ("policy", "other", "odd:high")]
        return [*writing, ModelInfo("prm", "classify", 256, 100, 1000, {"reasoner_prm": prm})]


async def resolve(names: dict[str, dict[str, Any]], model: str, **fields: Any) -> JobSpec:
    settings = Settings(names={word: Name.model_validate(name) for word, name in names.items()})
    request = JobRequest.model_validate({"problem": "1 + 1?", "model": model} | fields)
    return await resolve_job(request, settings, Serving())


async def refuse(names: dict[str, dict[str, Any]], model: str, **fields: Any) -> JobRefused:
    with pytest.raises(JobRefused) as caught:
        await resolve(names, model, **fields)
    return caught.value


async def test_a_name_gives_the_fields_that_the_request_leaves_open() -> None:
    job = await resolve({"heavy": HEAVY}, "heavy")
    assert (job.name, job.model, job.strategy.params["n"]) == ("heavy", "policy", 16)
    assert (job.budget, job.sampling.temperature) == (Budget(tokens=9000, seconds=60), 0.6)
    assert JobSpec.model_validate(job.model_dump()) == job


async def test_what_the_request_says_wins_field_by_field() -> None:
    fields = {"strategy": {"name": "greedy"}, "budget": {"tokens": 12_000}, "sampling": {"top_p": 0.5}}
    job = await resolve({"heavy": HEAVY}, "heavy", **fields)
    assert job.strategy.name == "greedy"
    assert job.budget == Budget(tokens=12_000, seconds=60)
    assert (job.sampling.temperature, job.sampling.top_p) == (0.6, 0.5)


async def test_an_effort_of_the_request_replaces_the_names_limits_and_the_strategy_of_its_effort() -> None:
    names = {"heavy": HEAVY, "slow": {"model": "policy", "effort": "high"}}
    job = await resolve(names, "heavy", budget={"effort": "low"})
    assert (job.budget.tokens, job.budget.seconds, job.strategy.params["n"]) == (5000, None, 16)
    job = await resolve(names, "slow", budget={"effort": "low"})
    assert (job.budget.tokens, job.strategy.params["n"]) == (5000, 4)
    job = await resolve(names, "slow")
    assert (job.budget, job.strategy.params["n"]) == (Budget(tokens=80_000), 64)


@pytest.mark.parametrize("effort", sorted(DEFAULT_EFFORTS))
async def test_a_model_with_an_effort_behind_it_is_a_name(effort: str) -> None:
    job = await resolve({}, f"policy:{effort}")
    assert (job.name, job.model, job.budget) == (f"policy:{effort}", "policy", DEFAULT_EFFORTS[effort].budget)


async def test_a_served_model_whose_name_ends_as_an_effort_is_that_model() -> None:
    job = await resolve({}, "odd:high")
    assert (job.name, job.model) == (None, "odd:high")


async def test_an_alias_of_such_a_model_is_an_alias_wherever_a_model_is_named() -> None:
    """Its own name is no effort either where it stands among several models, or as a verifier's or a judge's."""
    names = {"mine": {"model": "odd:high"}, "heavy": HEAVY}
    assert (await resolve(names, "mine")).budget == (await resolve({}, "policy")).budget
    judged = await resolve(names, "policy", verifier={"kind": "judge", "model": "mine"})
    assert getattr(judged.verifier, "model", None) == "odd:high"
    models = [{"model": "mine"}, {"model": "policy"}]
    strategy = {"name": "synthesize", "judge": "report", "judged_by": "mine", "written_by": "policy"}
    request = JobRequest.model_validate({"problem": "?", "models": models, "strategy": strategy})
    settings = Settings(names={word: Name.model_validate(name) for word, name in names.items()})
    panel = await resolve_job(request, settings, Serving())
    assert (panel.policy_names, panel.strategy.params["judged_by"]) == (["odd:high", "policy"], "odd:high")


async def test_the_judge_and_the_writer_of_a_panel_may_be_aliases() -> None:
    names: dict[str, dict[str, Any]] = {"mine": {"model": "policy"}, "judge": {"model": "other"}, "heavy": HEAVY}
    strategy = {"name": "synthesize", "judge": "report", "judged_by": "judge", "written_by": "mine"}
    panel = {"models": [{"model": "mine"}, {"model": "judge"}], "strategy": strategy}
    job = await resolve(names | {"panel": panel}, "panel")
    assert (job.strategy.params["judged_by"], job.strategy.params["written_by"]) == ("other", "policy")
    wrong = panel | {"strategy": strategy | {"written_by": "heavy"}}
    refusal = await refuse(names | {"panel": wrong}, "panel", strategy=wrong["strategy"])
    assert "'heavy' stands for a search, not for a model alone" in str(refusal)


async def test_a_model_that_is_away_is_waited_for_and_the_others_are_checked_as_ever() -> None:
    """Also one whose name ends as an effort: it was listed before its server went away."""

    class PartlyAway:
        async def models(self) -> list[ModelInfo]:
            here, *_, away, _ = await Serving().models()
            raise SomeModelsAway("http://b is down", [here], [away])

    job = await resolve_job(JobRequest(problem="?", model="odd:high"), Settings(prm="none"), PartlyAway())
    assert (job.model, job.name) == ("odd:high", None)
    probed = {"problem": "?", "model": "policy", "verifier": {"kind": "probe"}}
    with pytest.raises(JobRefused) as whole:
        await resolve_job(JobRequest.model_validate(probed), Settings(prm="none"), Serving())
    with pytest.raises(JobRefused) as partly:
        await resolve_job(JobRequest.model_validate(probed), Settings(prm="none"), PartlyAway())
    assert str(whole.value) == str(partly.value)


async def test_a_name_may_stand_for_another_one_and_change_its_fields() -> None:
    names = {"heavy": HEAVY, "gpt-4o": {"model": "heavy", "budget": {"tokens": 100}}}
    job = await resolve(names, "gpt-4o")
    assert (job.name, job.model, job.budget, job.strategy.name) == (
        *("gpt-4o", "policy", Budget(tokens=100, seconds=60), "weighted_vote"),
    )
    job = await resolve(names, "gpt-4o:low")
    assert (job.budget, job.strategy.params["n"]) == (Budget(tokens=5000), 16)


async def test_an_alias_is_taken_wherever_a_model_is_named() -> None:
    names = {"mine": {"model": "policy"}, "judge": {"model": "other"}, "heavy": HEAVY}
    models = [{"model": "mine"}, {"model": "other"}]
    job = await resolve(names, "mine", verifier={"kind": "judge", "model": "judge"})
    assert getattr(job.verifier, "model", None) == "other"
    request = {"problem": "?", "models": models, "strategy": {"name": "self_consistency", "n": 4}}
    settings = Settings(names={"mine": Name(model="policy")})
    mixed = await resolve_job(JobRequest.model_validate(request), settings, Serving())
    assert (mixed.model, mixed.policy_names) == ("policy", ["policy", "other"])
    refusal = await refuse(names, "mine", verifier={"kind": "judge", "model": "heavy"})
    assert (refusal.code, refusal.field) == ("unknown-model", "model")
    assert "stands for a search, not for a model alone" in str(refusal)


async def test_fields_that_a_name_fixes_are_refused_by_their_own_name() -> None:
    fixed = HEAVY | {"fixed": ["strategy", "sampling", "system"], "system": "Be brief."}
    for field, fields in {
        "strategy": {"strategy": {"name": "greedy"}},
        "sampling.temperature": {"sampling": {"temperature": 1.5}},
        "system": {"system": "Be long."},
    }.items():
        refusal = await refuse({"heavy": fixed}, "heavy", **fields)
        assert (refusal.code, refusal.field) == ("invalid-request", field)
        assert "the name 'heavy' fixes it: leave it out" in str(refusal)
    messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "?"}]
    assert (await refuse({"heavy": fixed}, "heavy", problem=None, messages=messages)).field == "messages"
    same = await resolve(
        {"heavy": fixed}, "heavy", sampling={"temperature": 0.6, "top_p": 0.9}, strategy=HEAVY["strategy"]
    )
    assert (same.sampling.top_p, same.system) == (0.9, "Be brief.")


@pytest.mark.parametrize("seed", range(5))
async def test_of_a_fixed_budget_and_any_of_a_request_the_lower_limits_hold(seed: int) -> None:
    rng = random.Random(shift(seed))
    limits = {"tokens": rng.randint(100, 90_000), "seconds": float(rng.randint(1, 100))}
    names = {"heavy": HEAVY | {"budget": limits, "fixed": ["budget"]}}
    tokens, seconds = rng.randint(1, 200_000), float(rng.randint(1, 200))
    job = await resolve(names, "heavy", budget={"tokens": tokens, "seconds": seconds})
    assert job.budget == Budget(tokens=min(tokens, limits["tokens"]), seconds=min(seconds, limits["seconds"]))
    effort = rng.choice(sorted(DEFAULT_EFFORTS))
    job = await resolve(names, "heavy", budget={"effort": effort})
    tokens = min(DEFAULT_EFFORTS[effort].tokens or 0, limits["tokens"])
    assert (job.budget.tokens, job.budget.seconds) == (tokens, limits["seconds"])
    unknown = await refuse(names, "heavy", budget={"effort": "extreme"})
    assert "there is no effort 'extreme'" in str(unknown)


async def test_a_name_of_several_models_samples_from_all_of_them() -> None:
    names = {"panel": {"models": [{"model": "policy"}, {"model": "other", "weight": 2}], "strategy": "weighted_vote"}}
    job = await resolve(names, "panel")
    assert (job.model, job.policy_names) == ("policy", ["policy", "other"])
    ranked = await resolve(names, "panel", candidates=["2", "3"])
    assert (ranked.models, ranked.strategy.name) == (None, "select")


async def test_a_fixed_budget_and_a_fixed_strategy_hold_for_names_and_efforts_around_them() -> None:
    capped = {"model": "policy", "effort": "low", "fixed": ["budget", "strategy"]}
    for word, fields in (("capped:max", {}), ("alias", {}), ("capped", {"budget": {"effort": "max"}})):
        names = {"capped": capped, "alias": {"model": "capped", "budget": {"tokens": 999_999}}}
        job = await resolve(names, word, **fields)
        assert (job.budget.tokens, job.strategy.params["n"]) == (5_000, 4)
    ranked = await resolve({"capped": capped}, "capped", candidates=["2", "3"], strategy={"name": "select"})
    assert ranked.strategy.name == "select"


async def test_aliases_among_several_models_have_the_settings_of_their_models_and_are_named_once() -> None:
    names = {"mine": {"model": "policy"}, "both": {"models": [{"model": "mine"}, {"model": "other"}]}}
    plain = await resolve({}, "policy", strategy={"name": "weighted_vote"})
    job = await resolve(names, "both", strategy={"name": "weighted_vote"})
    assert (job.policy_names, job.verifier) == (["policy", "other"], plain.verifier)
    assert (await resolve(names, "both", candidates=["2", "3"])).model == "policy"
    twice = {"mine": {"model": "policy"}, "both": {"models": [{"model": "mine"}, {"model": "policy"}]}}
    assert "'policy' is named twice among the models" in str(await refuse(twice, "both"))
    locked = {"mine": {"model": "policy", "system": "Hi", "fixed": ["system"]}}
    refusal = await refuse(locked, "mine", verifier={"kind": "judge", "model": "mine"})
    assert "stands for a search" in str(refusal)


async def test_a_model_of_a_server_that_ends_as_an_effort_is_that_model_while_the_server_is_away() -> None:
    class Away:
        async def models(self) -> list[ModelInfo]:
            raise EngineUnavailable("no engine answers")

    ollama = EngineProfile.model_validate({"url": "http://127.0.0.1:1", "models": ["phi3:medium"]})
    job = await resolve_job(JobRequest(problem="?", model="phi3:medium"), Settings(engines={"o": ollama}), Away())
    assert (job.model, job.name) == ("phi3:medium", None)


async def test_a_model_that_is_gone_is_refused_with_the_name_that_stands_for_it() -> None:
    for names, word in (({"old": {"model": "gone"}}, "old"), ({}, "gone:low")):
        refusal = await refuse(names, word)
        assert (refusal.code, refusal.field) == ("unknown-model", "model")
        assert f"the name '{word}' stands for gone" in str(refusal)
        assert "served are" in str(refusal)


async def test_names_that_stand_for_themselves_are_refused_with_the_circle() -> None:
    names = {"a": {"model": "b"}, "b": {"model": "c"}, "c": {"model": "b"}, "self": {"model": "self"}}
    assert "'a' stands for itself (a -> b -> c -> b)" in str(await refuse(names, "a"))
    assert "'self' stands for itself (self -> self)" in str(await refuse(names, "self"))


def test_a_name_needs_something_to_stand_for() -> None:
    for fields in ({}, {"model": "policy", "models": [{"model": "a"}, {"model": "b"}]}):
        with pytest.raises(ValueError, match="give either 'model', what the name stands for, or 'models'"):
            Name.model_validate(fields)


def test_an_effort_beside_other_limits_of_the_same_name_is_a_fault() -> None:
    settings = Settings(
        names={"odd": Name.model_validate({"model": "policy", "effort": "low", "budget": {"tokens": 7}})}
    )
    with pytest.raises(NameFault, match="effort 'low' sets the limits"):
        find_name("odd", settings, ())
    assert find_model("policy", settings, ()) == "policy"

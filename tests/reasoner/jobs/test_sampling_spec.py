"""The sampling parameters of a job, as the engine takes them."""

from __future__ import annotations

from engine.protocol.types import SamplingParams
from reasoner.jobs.sampling_spec import Sampling


def test_the_engine_knows_every_parameter_that_is_its_own() -> None:
    every = dict.fromkeys(Sampling.model_fields, 1) | {"top_p": 0.5, "min_p": 0.5}
    known = Sampling.model_validate(every).of_engine
    assert SamplingParams(**known).kv_budget == 1
    assert set(every) - set(known) == {"max_tokens", "thinking_tokens"}
    assert Sampling().of_engine == {}

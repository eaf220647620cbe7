"""The client on answers that a real vLLM 0.32 gave to the same requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.remote.recordings import Replayer
from tests.engine.remote.vllm_cases import Case, connect, our_engine, parameters, recording
from tests.listening import listening


@pytest.mark.parametrize(("server", "case"), parameters())
async def test_the_client_understands_the_answers_of_vllm(server: str, case: Case, tmp_path: Path) -> None:
    ours = our_engine(server)
    with listening(Replayer(recording(case)).app, tmp_path / "s") as url:
        vllm = connect(url, server)
        await case(vllm, ours)
        await vllm.close()
    await ours.close()

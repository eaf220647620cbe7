"""Engine without a model, for tests of everything above the engine.

Its tokens are a hash of (seed, branch, position), like the real engine's noise, so a branch has the same text however
it is cut into requests. It answers out of order, and tracks the budget: the tokens requested so far and the most that
it could still be made to generate.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b

from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    ProbeInfo,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
    TokenLogprob,
)
from prm.scorers.verdict_formats import NOTE
from tests.seeds import shift

EOS, SEPARATOR, ANSWER, THOUGHT, OPENING = 0, 1, 2, 3, 4
TEXTS = {EOS: "", SEPARATOR: "\n\n", ANSWER: "\\boxed{%d}", THOUGHT: "</think>", OPENING: "<think>"}
CONTEXT = 256
SHORT_PROMPTS = {
    "template": "{{ question }} {{ solution }}",
    "verdict": "Verdict:",
    "labels": ["Y", "N"],
    "pairwise": {"template": "{{ question }} {{ first }} {{ second }}", "labels": ["A", "B"]},
}
"""Prompts of verdicts that fit into this context."""
_VERDICT = tuple(50 + ord(char) % 50 for char in "Verdict:")


class ScriptedEngine:
    """Engine without a model.

    ``order`` seeds the order in which branches arrive; after ``die_after`` answers it is unreachable. With ``guesses``
    it reports three draft tokens for each token, and accepts every other one. From position ``loops`` on, every other
    branch and the greedy ones repeat the same twelve tokens, one of them the separator. The fraction ``held`` of every
    prompt is in its cache. With ``probes`` the policy has a probe. ``thinks``: its prompts open a thought, which it
    closes some time.
    """

    def __init__(
        self,
        *,
        order: int = 0,
        die_after: int | None = None,
        warm: bool = True,
        guesses: bool = False,
        context: int = CONTEXT,
        loops: int | None = None,
        thinks: bool = False,
        held: float = 0,
        probes: bool = False,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.verdict_requests: list[GenerateRequest] = []
        """Requests of a verifier that writes, whose prompts are on the bill, too."""
        self.generated: list[tuple[tuple[int, ...], int, int]] = []
        """(prompt, branch key, position) of every generated token; none may appear twice in a job."""
        self.outstanding = 0
        self.total = 0
        self.most = 0
        """Largest value so far of spent plus still allowed tokens."""
        self._order = random.Random(shift(order))
        self._die_after = die_after
        self._answers = 0
        self._warm = warm
        self._guesses = guesses
        self._context = context
        self._loops = loops
        self._thinks = thinks
        self._held = held
        self._probe = ProbeInfo("scripted", (1,), 11) if probes else None
        self._seen: set[tuple[object, ...]] = set()
        self._aborted: set[str] = set()
        self.pin_keys: set[str | None] = set()
        """Leases named by requests and not yet released."""
        self.salts: set[tuple[str, str | None]] = set()
        """Requested models, with the cache salts of the requests."""
        self.pruned: list[tuple[str, tuple[int, ...]]] = []

    async def models(self) -> list[ModelInfo]:
        prm = {"format": "token_classification", "separator": "\n\n", "positive_label": 1}
        return [
            ModelInfo("policy", "generate", self._context, 100, 1000, {NOTE: SHORT_PROMPTS}, probe=self._probe),
            ModelInfo("prm", "classify", CONTEXT, 100, 1000, {"reasoner_prm": prm}),
        ]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        text = request.text
        if text == TEXTS[SEPARATOR]:
            return (SEPARATOR,)
        plain = text if isinstance(text, str) else "".join(message["content"] for message in text)
        if self._thinks and not isinstance(text, str):
            plain += TEXTS[OPENING]
        pieces = re.split("(</?think>)", plain) if self._thinks else [plain]
        tags = {TEXTS[THOUGHT]: (THOUGHT,), TEXTS[OPENING]: (OPENING,)} if self._thinks else {}
        return tuple(token for piece in pieces for token in tags.get(piece, [50 + ord(char) % 50 for char in piece]))

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        (self.verdict_requests if is_verdict(request) else self.requests).append(request)
        self.pin_keys.add(request.pin_key)
        self.salts.add((request.model, request.cache_salt))
        self._promise(sum(branch.max_tokens + _billed_prompt(request, branch) for branch in request.branches))
        order = list(range(len(request.branches)))
        self._order.shuffle(order)
        for index in order:
            for _ in range(self._order.randrange(4)):
                await asyncio.sleep(0)
            self._count_answer()
            yield self._complete(request, index)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        self.pin_keys.add(request.pin_key)
        self.salts.add((request.model, request.cache_salt))
        if request.max_compute is not None:
            self._promise(request.max_compute * len(request.items))
        await asyncio.sleep(0)
        self._count_answer()
        results = []
        for index, item in enumerate(request.items):
            lengths = [len(part) if isinstance(part, tuple) else max(1, len(part) // 4) for part in item.parts]
            known = 0
            while self._warm and known < item.read[0] and item.parts[: known + 1] in self._seen:
                known += 1
            computed, cached = sum(lengths[known:]), sum(lengths[:known])
            refused = request.max_compute is not None and computed > request.max_compute
            if request.max_compute is not None:
                self.outstanding -= request.max_compute
            if not refused:
                self.total += computed
                self._seen.update(item.parts[:end] for end in range(1, len(item.parts) + 1))
            values: list[tuple[float, ...]]
            values = [(0.0, 4.0 * _unit("score", item.parts[: read + 1]) - 2.0) for read in item.read]
            if request.normalized:
                values = [grade_logprobs(item.parts, request.token_ids)]
            if request.probe:
                [part] = item.parts
                values = [(probe_score(part),)]  # type: ignore[arg-type]
            results.append(ScoreResult(index, None if refused else tuple(values), computed, cached))
        return results

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def release(self, pin_key: str, tokens: Sequence[int] | None = None) -> None:
        if tokens is None:
            self.pin_keys.discard(pin_key)
        else:
            self.pruned.append((pin_key, tuple(tokens)))

    async def clear_cache(self) -> None:
        self._seen.clear()

    async def close(self) -> None:
        return None

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        """Return the token at a position."""
        return _token(branch, position, temperature)

    def _promise(self, tokens: int) -> None:
        self.outstanding += tokens
        self.most = max(self.most, self.total + self.outstanding)

    def _count_answer(self) -> None:
        if self._die_after is not None and self._answers >= self._die_after:
            raise EngineUnavailable("the engine is gone")
        self._answers += 1

    def _complete(self, request: GenerateRequest, index: int) -> Completion:
        branch = request.branches[index]
        ids: list[int] = []
        text = ""
        reason: FinishReason = "length"
        stop: int | str | None = None
        room = self._context - len(request.prompt) - len(branch.generated)
        start = len(request.prompt)
        earlier = "".join(_text(token, at) for at, token in enumerate(branch.generated, start))
        for position in range(min(branch.max_tokens, room)):
            if request.request_id in self._aborted:
                reason = "cancelled"
                break
            at = len(request.prompt) + len(branch.generated) + position
            token = self.token(branch, at, request.sampling.temperature)
            if self._loops is not None and at >= self._loops and (branch.key % 2 or not request.sampling.temperature):
                token = 10 + at % 12 if at % 12 else SEPARATOR
            if self._thinks and 24 <= token < 32:
                token = THOUGHT
            if not is_verdict(request):
                self.generated.append((request.prompt, branch.key, at))
            ids.append(token)
            text += _text(token, at)
            if token == EOS:
                reason, stop = "stop", EOS
                break
            if token in request.sampling.stop_token_ids:
                reason, stop = "stop", token
                break
            stop = next((string for string in request.sampling.stop if (earlier + text).endswith(string)), None)
            if stop is not None:
                reason = "stop"
                break
        else:
            reason = "context" if room <= branch.max_tokens else "length"
        prompt = len(request.prompt) + len(branch.generated)
        held = int(self._held * (prompt - 1))
        self.outstanding -= branch.max_tokens + _billed_prompt(request, branch)
        self.total += len(ids) + (prompt - held if is_verdict(request) else 0)
        drafted, accepted = (3 * len(ids), len(ids) // 2) if self._guesses and request.draft else (0, 0)
        return Completion(
            index,
            tuple(ids),
            text,
            reason,
            stop,
            -float(len(ids)),
            prompt,
            held,
            logprobs=self._logprobs(request, branch, ids),
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            probe=probe_score(request.prompt + branch.generated + tuple(ids[:-1])) if request.probe and ids else None,
        )

    def _logprobs(self, request: GenerateRequest, branch: Branch, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        count = request.sampling.logprobs
        if count is None:
            return None
        if request.sampling.ignore_eos:  # a verdict's label is read
            return (TokenLogprob(ids[0], -9.0, label_logprobs(request.prompt + branch.generated)),)
        start = len(request.prompt) + len(branch.generated)
        sure = [confidence(branch, start + at) for at in range(len(ids))]
        tops = [tuple((rank, -rank * value) for rank in range(count)) for value in sure]
        return tuple(TokenLogprob(token, -1.0, top) for token, top in zip(ids, tops, strict=True))


def is_verdict(request: GenerateRequest) -> bool:
    """Return True for a critique, and for what is read or written behind it."""
    return request.sampling.ignore_eos or "Verdict:" in request.sampling.stop or is_written_verdict(request)


def is_written_verdict(request: GenerateRequest) -> bool:
    """Return True for what is written behind a critique where no label is likely."""
    [*_, last] = request.branches
    return not request.sampling.ignore_eos and last.generated[-len(_VERDICT) :] == _VERDICT


def _billed_prompt(request: GenerateRequest, branch: Branch) -> int:
    """Return the tokens that a branch reads at a verifier's cost."""
    return len(request.prompt) + len(branch.generated) if is_verdict(request) else 0


def label_logprobs(tokens: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Return the log-probabilities of the labels A, B, Y and N behind these tokens."""
    share = 0.1 + 0.8 * _unit("label", tokens)
    return tuple(
        (50 + ord(label) % 50, math.log(0.4 * part)) for label, part in zip("ABYN", (share, 1 - share) * 2, strict=True)
    )


def grade_logprobs(parts: tuple[object, ...], token_ids: Sequence[object]) -> tuple[float, ...]:
    """Return the log-probabilities of grades behind these parts, which together have nine tenths."""
    weights = [_unit("grade", parts, token) for token in token_ids]
    return tuple(math.log(0.9 * weight / math.fsum(weights)) for weight in weights)


def probe_score(tokens: tuple[int, ...]) -> float:
    """Return the probe's score of the state of the last of these tokens."""
    return _unit("probe", tokens)


def confidence(branch: Branch, position: int) -> float:
    """Return a confidence from 0 to 4; the larger, the less likely are the other top tokens."""
    return 4.0 * _unit("confidence", branch.seed, branch.key, position)


def _unit(*parts: object) -> float:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "big") / 2**56


def _text(token: int, position: int) -> str:
    return TEXTS.get(token, f"w{token} ") if token != ANSWER else TEXTS[ANSWER] % (position % 3)


def _token(branch: Branch, position: int, temperature: float) -> int:
    draw = _unit(branch.seed, branch.key, position) if temperature else _unit("greedy", position)
    if draw < 0.04:
        return EOS
    if draw < 0.16:
        return SEPARATOR
    if draw < 0.24:
        return ANSWER
    return 3 + int(draw * 90)

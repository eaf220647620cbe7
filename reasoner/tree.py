"""The search tree. A node holds the tokens that one branch added to its parent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

from engine.protocol.refusal import Refusal
from engine.protocol.request_checks import ContentFiltered, PromptTooLong
from engine.protocol.thoughts import split_thought
from engine.protocol.types import EngineError, InvalidRequest, Tokens

Reason = Literal[
    "step",
    "said",
    "answer",
    "stop",
    "length",
    "context",
    "repetition",
    "tool",
    "budget",
    "timeout",
    "cancelled",
    "pruned",
    "refused",
]
"""Reason for which a branch ended.

``step``: at a step separator, so it can be expanded. ``said``: after text that the search injected, so it can be
continued. ``answer``: the answer is stated. ``stop``: the model ended it. ``length``: limit of one solution, set by the
job or the strategy. ``context``: the model's context is full. ``repetition``: the text ends in a loop. ``tool``: a
call reached a limit. ``budget``, ``timeout``: a limit of the budget. ``cancelled``: aborted during generation.
``pruned``: discarded by the search. ``refused``: the server refused to generate it.
"""

ThoughtState = Literal["undecided", "open", "closed"]
"""State of a conversation's thought (``reasoner.thoughts``) at the end of a node."""
PartKind = Literal["thought", "answer"]
Reads = Literal["answer", "thought", "all"]
"""Parts of a solution that a verifier reads."""
Origin = Literal["generated", "injected", "tool"]
"""Writer of a text: the model, the search, or a tool, whose output it is."""

LEAST_LOGPROB = -9999.0
"""OpenAI's value for a token that is hardly possible; JSON has no infinity."""

AnswerLevel = Literal["strict", "flexible"]
"""Level at which an answer was extracted.

``strict``: the solution states it as its answer. ``flexible``: it is the last number or choice letter.
"""


_ENDED: frozenset[Reason] = frozenset(
    {"answer", "stop", "length", "context", "repetition", "tool", "budget", "timeout"}
)
"""Reasons of branches that came to an end of their own, or to a limit."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a node's text, by its length in characters and in tokens; a node's parts cover all of its text."""

    kind: PartKind
    origin: Origin
    num_chars: int
    num_tokens: int


def find_turn(parts: Sequence[Part]) -> int:
    """Return the index of the first part of the model's current turn.

    A tool's output that ends a turn is followed by the tokens that begin the next one, which have no text. Other
    outputs stand within the turn.
    """
    breaks = [
        before.origin == "tool" and after.origin == "injected" and not after.num_chars
        for before, after in pairwise(parts)
    ]
    return max((index + 2 for index, is_break in enumerate(breaks) if is_break), default=0)


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree. ``prefix``, all tokens from the prompt through this node, is the key of its cached KV."""

    path: tuple[int, ...]
    parent: Node | None
    prefix: Tokens
    text: str = ""
    tokens: int = 0
    """Number of tokens of this node alone."""
    logprob: float = 0.0
    """Log-probability of its tokens under the sampling distribution; 0 for greedy sampling."""
    reason: Reason | None = None
    answer: str | None = None
    answer_level: AnswerLevel | None = None
    """Level at which ``answer`` was extracted; ``None`` without an answer."""
    vote_key: str | None = None
    """Text that is the same for candidates with equal calls of functions; ``None`` where answers are compared."""
    calls: tuple[tuple[str, str], ...] = ()
    """Calls of the client's functions with which it ends: the name and the JSON text of the arguments of each."""
    content: str | None = None
    """The text of the answer without thought and calls, of a job with functions."""
    scores: tuple[float, ...] = ()
    """The verifier's scores of all steps from the root through this node, in order; empty until scored, and always
    for verifiers of whole solutions."""
    score: float | None = None
    """The verifier's score of the solution up to here; ``None`` until scored."""
    confidence: tuple[float, ...] = ()
    """Confidence of each token (``reasoner.confidence.token_confidence``), if requested."""
    probe: float | None = None
    """Score of the policy's probe at its end, if the engine read it while decoding."""
    starts_conversation: bool = False
    """True if the node begins a new conversation, so that solutions below start after it."""
    is_solution: bool = True
    """False if its conversation is about solutions instead of being one, so that it states no answer."""
    ended_with_eos: bool = False
    """True if the last token is an end-of-sequence token, which injected text replaces."""
    trimmed_chars: int = 0
    """Number of characters that this node removes from the end of its ancestors' text."""
    policy: int = 0
    """Index of the policy that writes what follows it, and, unless the search injected it, wrote it."""
    is_copy: bool = False
    """True if the node copies an existing branch, since greedy sampling gives the same tokens."""
    parts: tuple[Part, ...] = ()
    """Parts of its text, if the model's thoughts are known; otherwise all of it is answer."""
    refusal: Refusal | None = None
    """The server's words, of a branch that it refused."""
    thought: ThoughtState | None = None
    """State of the conversation's thought at its end; ``None`` if the model's thoughts are not known."""
    children: list[Node] = field(default_factory=list)
    num_children_requested: int = 0
    """Number of children requested so far, which is the next child's index."""

    @property
    def id(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def open(self) -> bool:
        """True if the branch can be continued."""
        return self.reason in (None, "step", "said")

    @property
    def has_ended(self) -> bool:
        """True if the model ended the branch, or a limit of one solution did and nothing follows."""
        cut = self.reason in ("length", "context", "repetition", "tool") and not self.children
        return self.reason in ("answer", "stop") or cut

    def lineage(self) -> list[Node]:
        """Return the nodes of this node's conversation, from the first to this one."""
        nodes = []
        node: Node = self
        while node.parent is not None and not node.starts_conversation:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def completion_ids(self) -> Tokens:
        """Tokens after the prompt of its conversation."""
        lineage = self.lineage()
        beginning = lineage[0].parent if lineage else self
        return self.prefix[len(beginning.prefix) if beginning is not None else 0 :]

    @property
    def solution(self) -> str:
        text = ""
        for node in self.lineage():
            text = text[: len(text) - node.trimmed_chars] + node.text
        return text

    @property
    def answer_text(self) -> str:
        """The solution without its thought; empty as long as the thought is not closed."""
        return "".join(text for part, text in self._split_solution() if part.kind == "answer")

    @property
    def reply_text(self) -> str:
        """The text of the model's last turn without its thought."""
        pieces = self._split_solution()
        turn = pieces[find_turn([part for part, _ in pieces]) :]
        return "".join(text for part, text in turn if part.kind == "answer")

    @property
    def thought_text(self) -> str:
        return "".join(text for part, text in self._split_solution() if part.kind == "thought")

    @property
    def own_answer_text(self) -> str:
        """The text in which the solution may state its answer: without its thought and the output of tools, and only
        of the model's last turn."""
        pieces = self._split_solution()
        turn = pieces[find_turn([part for part, _ in pieces]) :]
        own = ((part, text) for part, text in turn if part.origin != "tool")
        return "".join(text for part, text in own if self.thought is None or part.kind == "answer")

    @property
    def turn_parts(self) -> tuple[Part, ...]:
        """Parts of the model's current turn at its end."""
        parts = [part for node in self.lineage() for part in node.parts]
        return tuple(parts[find_turn(parts) :])

    @property
    def texts_between_outputs(self) -> list[str]:
        """The texts that outputs of tools follow, and the text after the last output. Of each text it is what belongs
        to the thought alone, or to the answer alone, at its end."""
        texts: list[str] = []
        last: list[tuple[Part, str]] = []
        for part, text in self._split_solution():
            if part.origin == "tool":
                texts.append("".join(text for _, text in last))
                last = []
            elif text:
                last = [*(last if last and last[-1][0].kind == part.kind else []), (part, text)]
        return [*texts, "".join(text for _, text in last)]

    @property
    def output_tokens(self) -> int:
        """Number of this node's own tokens that are output of tools, which nobody generated."""
        return sum(part.num_tokens for part in self.parts if part.origin == "tool")

    @property
    def num_calls(self) -> int:
        """Number of its conversation's calls of tools through this node."""
        return sum(part.origin == "tool" for node in self.lineage() for part in node.parts)

    def read_text(self, reads: Reads) -> str:
        """Return the parts of the solution that a verifier reads.

        Where the model's thoughts are not known, its text is searched for one.
        """
        if reads == "all":
            return self.solution
        if self.thought is None:
            thought, answer = split_thought(self.solution)
            return answer if reads == "answer" else thought
        return self.answer_text if reads == "answer" else self.thought_text

    def count_tokens(self, reads: Reads) -> int:
        """Return the number of this node's own tokens in these parts."""
        if not self.parts or reads == "all":
            return self.tokens
        return sum(part.num_tokens for part in self.parts if part.kind == reads)

    @property
    def thought_tokens(self) -> int:
        """Number of generated tokens of its conversation's thought through this node."""
        return sum(node.own_thought_tokens for node in self.lineage())

    @property
    def own_thought_tokens(self) -> int:
        """Number of this node's own tokens that are generated thought."""
        generated = (part for part in self.parts if part.origin == "generated")
        return sum(part.num_tokens for part in generated if part.kind == "thought")

    def _split_solution(self) -> list[tuple[Part, str]]:
        """Return the solution's parts with their texts, without what later nodes remove."""
        pieces: list[tuple[Part, str]] = []
        for node in self.lineage():
            trimmed = node.trimmed_chars
            while trimmed and pieces:
                part, text = pieces.pop()
                if len(text) > trimmed:
                    pieces.append((part, text[: len(text) - trimmed]))
                trimmed = max(0, trimmed - len(text))
            start = 0
            for part in node.parts or (Part("answer", "generated", len(node.text), node.tokens),):
                pieces.append((part, node.text[start : start + part.num_chars]))
                start += part.num_chars
        return pieces

    @property
    def depth_tokens(self) -> int:
        """Number of generated tokens of its conversation through this node."""
        return sum(node.tokens for node in self.lineage())

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens of its conversation through this node."""
        return sum(node.logprob for node in self.lineage()) / max(1, self.depth_tokens)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all descendants, parents first, in order of creation."""
        yield self
        for child in self.children:
            yield from child.walk()


def unseen(siblings: Iterable[Node]) -> float:
    """Return the probability that another sample differs from all of these siblings."""
    return max(0.0, 1.0 - sum({node.text: math.exp(node.logprob) for node in siblings}.values()))


def read_parts(data: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of a node's journal data; none for models whose thoughts are not known."""
    return tuple(Part(*part) for part in data.get("parts", ()))


def describe_refusal(refusal: Refusal | None) -> dict[str, Any]:
    """Return the journal data of a branch that the server refused."""
    return {} if refusal is None else {"refusal": asdict(refusal)}


def find_refusal(root: Node) -> EngineError | None:
    """Return the server's first refusal, if it has left no branch that came to its end otherwise."""
    nodes = [node for node in root.walk() if node.parent is not None]
    refusals = [node.refusal for node in nodes if node.refusal is not None]
    if not refusals or any(node.reason in _ENDED or _is_filtered_text(node) for node in nodes):
        return None
    first = refusals[0]
    match first.kind:
        case "too_long":
            return PromptTooLong(first.message, first.field)
        case "invalid":
            return InvalidRequest(first.message, first.field)
        case "filtered":
            return ContentFiltered(first.message)
        case "failed" | "away":
            return EngineError(first.message)


def describe_refusals(root: Node) -> str | None:
    """Return a sentence with the server's first refusal; ``None`` if it has refused nothing."""
    refused = [node.refusal for node in root.walk() if node.refusal is not None]
    refusals = [refusal.message for refusal in refused if refusal.kind != "away"]
    if len(refusals) == 1:
        return f"1 branch was refused: {refusals[0]}"
    return f"{len(refusals)} branches were refused; the first: {refusals[0]}" if refusals else None


def _is_filtered_text(node: Node) -> bool:
    """Return True for the beginning of a solution whose rest the server withholds."""
    return node.refusal is not None and node.refusal.kind == "filtered" and bool(node.solution.strip())


def read_answer_level(data: Mapping[str, Any]) -> AnswerLevel | None:
    """Return the level of the answer in a node's journal data; earlier versions wrote strict answers alone."""
    level: AnswerLevel | None = data.get("answer_level")
    return "strict" if level is None and data["answer"] is not None else level


def add_end(node: Node, data: Mapping[str, Any]) -> None:
    """Add the end of a branch from the journal data of its last part."""
    node.reason, node.answer, node.answer_level = data["reason"], data["answer"], read_answer_level(data)
    node.vote_key, node.content = data.get("vote"), data.get("words")
    node.calls = tuple((name, arguments) for name, arguments in data.get("calls", ()))
    node.refusal = Refusal(**data["refusal"]) if "refusal" in data else None


def find_most_promising(root: Node) -> Node | None:
    """Return the leaf with the best text among the branches that are not pruned.

    The highest score comes first. Of equal or unscored ones it is a finished solution with the highest mean
    log-probability of its tokens, or else the longest branch.
    """
    live = [node for node in root.walk() if node.parent is not None and node.reason != "pruned" and node.is_solution]
    leaves = [
        node for node in live if all(child.reason == "pruned" or not child.is_solution for child in node.children)
    ]

    def promise(node: Node) -> tuple[float, bool, float, int]:
        is_finished = node.reason in ("answer", "stop") and bool(node.solution.strip())
        mean = node.mean_logprob if is_finished else 0.0
        return (-1.0 if node.score is None else node.score, is_finished, mean, node.depth_tokens)

    return max(sorted(leaves, key=lambda node: node.path), key=promise, default=None)


def find_best_leaf(ends: Sequence[Node]) -> Node | None:
    """Return the leaf with the highest score; of equal or unscored ones the one with the most tokens."""
    return max(
        sorted(ends, key=lambda node: node.path),
        key=lambda node: (-1.0 if node.score is None else node.score, node.depth_tokens),
        default=None,
    )


def make_branch_key(path: tuple[int, ...]) -> int:
    """Return the noise key of a node: 63 bits of its path's hash, so that no two branches of a job share noise."""
    return int.from_bytes(blake2b(".".join(map(str, path)).encode(), digest_size=8).digest(), "big") >> 1

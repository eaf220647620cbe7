"""The columns of training data. TRL's, verl's and prime-rl's readers take them by these names."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ChatMessage(TypedDict):
    """A message for a chat template."""

    role: str
    content: str
    reasoning_content: NotRequired[str | None]
    """The thought of an answer, without its delimiters, of a model whose thoughts are known."""


class JobRow(TypedDict):
    """Columns of all rows: the job, and its end in seconds since 1970."""

    job: str
    finished_at: float


class SftRow(JobRow):
    """The chosen solution as a conversation (TRL: language modeling, conversational)."""

    messages: list[ChatMessage]


class PreferenceRow(JobRow):
    """Two solutions of one job (TRL: preference, conversational, explicit prompt)."""

    prompt: list[ChatMessage]
    chosen: list[ChatMessage]
    rejected: list[ChatMessage]
    score_chosen: float
    score_rejected: float


class UnpairedRow(JobRow):
    """One solution, and whether it is right (TRL: unpaired preference, conversational)."""

    prompt: list[ChatMessage]
    completion: list[ChatMessage]
    label: bool


class PrmRow(JobRow):
    """The steps of one solution (TRL: stepwise supervision)."""

    prompt: str
    completions: list[str]
    labels: list[bool]


class TreeNode(TypedDict):
    """A branch with its own tokens; all tokens before them are those of its parent."""

    id: str
    parent: str
    text: str
    token_ids: list[int] | None
    """Null: its server names no tokens, or it was not generated and the job does not record tokens."""
    logprobs: list[float | None] | None
    """By the model's own distribution; null: the job does not record them, or the token was not generated."""
    mask: list[bool]
    """True for generated tokens."""
    prompt_ids: list[int] | None
    """All tokens through a node that was not generated, which may replace the end of its parent's."""
    starts_conversation: bool
    is_solution: bool
    score: float | None
    step_scores: list[float]
    answer: str | None
    reason: str | None
    model: str | None


class TreeComparison(TypedDict):
    """A comparison of two branches: the probability that the first is better."""

    nodes: list[str]
    score: float | None


class TreeRow(JobRow):
    """The search tree of a job."""

    status: str
    model: str | None
    strategy: str
    messages: list[ChatMessage]
    prompt_ids: list[int] | None
    nodes: list[TreeNode]
    comparisons: list[TreeComparison]
    best: str | None
    answer: str | None
    confidence: float | None


class RolloutRow(JobRow):
    """A path from a prompt to a leaf, with verl's names. Rows of one job are one group."""

    node: str
    """The leaf."""
    path: list[str]
    """The nodes of the response, from the first to the leaf: each is the parent of the next one."""
    path_ends: list[int]
    """For each of them the number of tokens of the response through it."""
    model: str | None
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 for generated tokens, 0 for injected ones, the output of tools, and copies of another branch."""
    response_logprobs: list[float]
    """By the model's own distribution; 0 where the mask is."""
    shared_tokens: int
    """Number of tokens at the response's beginning that an earlier row of the job has, too."""
    reward_score: float | None
    finish_reason: str | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float


Row = SftRow | PreferenceRow | UnpairedRow | PrmRow | TreeRow | RolloutRow

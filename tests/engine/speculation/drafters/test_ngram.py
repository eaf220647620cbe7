"""The n-gram drafter: equality with a scan of all texts, isolation of namespaces, bounded memory and time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from engine.protocol.types import Branch
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence, Request
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters import ngram
from engine.speculation.drafters.ngram import NgramDrafter
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.ngrams import NgramTable
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.speculation.drafters.ngram_requests import (
    CACHE,
    LIFE,
    NO_STATES,
    SIZES,
    WIDTH,
    advances,
    branches_of,
    chain,
    finish,
    only,
    request,
    step,
    write,
)
from tests.engine.ties import assert_same_tokens
from tests.seeds import keep, shift


@dataclass
class Texts:
    """The texts of one namespace, with a slow exact lookup."""

    followed: list[tuple[tuple[int, ...], int, object]] = field(default_factory=list)
    """Each token with all tokens before it and the search that generated it, in the order of reading."""
    read_before: set[tuple[int, ...]] = field(default_factory=set)

    def read(self, tokens: list[int], start: int, prefix: int, search: object) -> None:
        for end in range(start + 1, len(tokens) + 1):
            if end > prefix or tuple(tokens[:end]) not in self.read_before:
                self.followed.append((tuple(tokens[: end - 1]), tokens[end - 1], search))
            self.read_before.add(tuple(tokens[:end]))

    def match(self, before: tuple[int, ...]) -> tuple[int, list[tuple[int, object]]]:
        """Return the size of the longest match, and all tokens that followed it with their searches, oldest first."""
        for size in SIZES:
            suffix = before[-size:]
            found = [(token, who) for text, token, who in self.followed if len(text) >= size and text[-size:] == suffix]
            if len(suffix) == size and found:
                return size, found
        return 0, []


class Followers:
    """Counts of the tokens that followed an n-gram, as the drafter keeps them."""

    def __init__(self, size: int, found: list[tuple[int, object]], search: object) -> None:
        assert len(found) < LIFE
        kept: list[tuple[int, int, object]] = []
        """Tokens, counts, and the searches that generated them last; the latest last."""
        for token, who in found:
            known = [one for one in kept if one[0] == token]
            if not known and len(kept) == WIDTH:
                kept.remove(min(kept, key=lambda one: one[1]))
            kept = [one for one in kept if one[0] != token] + [(token, 1 + (known[0][1] if known else 0), who)]
        self.counts = {token: count for token, count, _ in kept}
        self.total = sum(self.counts.values())
        self.best = max(reversed(kept), key=lambda one: one[1])[0]
        own = [token for token, _, who in reversed(kept) if who == search]
        knows = (0 if not own else 1 if self.best in own else 2) if own else 0
        self.kind = (size, min(bits(len(found)), 8), bits(len(kept)), knows)
        self.own = own[0] if knows == 2 else None
        self.own_kind = (size, min(bits(self.counts[self.own]), 4)) if self.own is not None else None


def bits(count: int) -> int:
    return len(f"{count:b}")


@dataclass
class Scan:
    """Reference drafter that scans all texts for every draft."""

    texts: dict[object, Texts] = field(default_factory=dict)
    judged: list[tuple[object, bool]] = field(default_factory=list)
    done: dict[GenerateSequence, int] = field(default_factory=dict)
    foreseen: dict[GenerateSequence, Followers] = field(default_factory=dict)
    """Known followers of each branch's last tokens when it was drafted."""

    def of(self, sequence: GenerateSequence) -> Texts:
        return self.texts.setdefault(sequence.request.namespace, Texts())

    def search(self, sequence: GenerateSequence) -> object:
        return sequence.request.pin_key or sequence.request

    def read(self, sequences: list[GenerateSequence]) -> None:
        for sequence in sequences:
            followers, done = self.foreseen.pop(sequence, None), self.done.get(sequence, 0)
            if followers is not None and done < len(sequence.tokens):
                token = sequence.tokens[done]
                self.judged.append((followers.kind, token in followers.counts))
                if followers.own_kind is not None:
                    self.judged.append((followers.own_kind, token == followers.own))
        for sequence in sequences:
            done, search = self.done.get(sequence, 0), self.search(sequence)
            self.of(sequence).read(sequence.tokens, done, sequence.num_prefix_tokens, search)
            self.done[sequence] = len(sequence.tokens)

    def foresee(self, sequence: GenerateSequence) -> None:
        size, found = self.of(sequence).match(tuple(sequence.tokens))
        if found:
            self.foreseen[sequence] = Followers(size, found, self.search(sequence))

    def rate(self, kind: object) -> float:
        seen = [was for other, was in self.judged if other == kind]
        return (1 + sum(seen)) / (2 + len(seen))

    def next(self, sequence: GenerateSequence, before: tuple[int, ...]) -> dict[int, float]:
        """Return the acceptance probabilities of the tokens that may come next."""
        size, found = self.of(sequence).match(before)
        if not found:
            return {}
        followers = Followers(size, found, self.search(sequence))
        rate = self.rate(followers.kind)
        chances = {token: rate * count / followers.total for token, count in followers.counts.items()}
        if followers.own is not None:
            chances[followers.own] = max(chances[followers.own], self.rate(followers.own_kind))
        return chances

    def check(self, wish: DraftRequest, draft: Draft, least: float) -> None:
        before = tuple(wish.sequence.tokens)
        paths = [tuple(draft.path(index)) for index in range(len(draft))]
        chances = dict(zip(paths, draft.probs, strict=True))
        assert len(chances) == len(draft)
        self.foresee(wish.sequence)
        if wish.nodes == wish.depth:
            assert draft.is_chain
            for index, path in enumerate(paths):
                possible = self.next(wish.sequence, before + path[:-1])
                assert draft.probs[index] == pytest.approx(possible[path[-1]]) == pytest.approx(max(possible.values()))
            more = self.next(wish.sequence, before + (paths[-1] if paths else ()))
            whole = math.prod(draft.probs)
            assert whole >= least or not paths
            assert len(draft) == wish.depth or whole * max(more.values(), default=0) < (least or 1e-9)
            return
        possible: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}
        for path, (_, whole) in (queue := list(possible.items())):
            for token, chance in self.next(wish.sequence, before + path).items() if len(path) < wish.depth else ():
                if whole * chance >= least:
                    queue.append(((*path, token), (chance, whole * chance)))
        possible = dict(queue[1:])
        assert chances == pytest.approx({path: possible[path][0] for path in chances})
        best = sorted((possible[path][1] for path in possible), reverse=True)[: wish.nodes]
        assert sorted((possible[path][1] for path in chances), reverse=True) == pytest.approx(best)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rng=st.randoms(use_true_random=False), alphabet=st.integers(2, 8))
def test_drafts_equal_those_of_a_scan_of_the_namespaces_texts(rng: random.Random, alphabet: int) -> None:
    drafter, scan = NgramDrafter(), Scan()
    drafter.reset(CACHE)
    running: list[Request] = []
    texts: list[list[int]] = [[0]]
    unread: list[GenerateSequence] = []
    asked: list[GenerateSequence] = []
    for _ in range(rng.randint(3, 20)):
        if rng.random() < 0.4 and sum(len(in_flight.sequences) for in_flight in running) < 8:
            old = rng.choice(texts)
            prompt = old[: rng.randint(1, len(old))] + rng.choices(range(alphabet), k=rng.choice((0, 0, 1, 5)))
            pin_key, namespace = rng.choice((None, "a", "a", "b")), rng.choice((None, None, "n"))
            running.append(request(prompt, rng.randint(1, 4), pin_key, namespace))
        sequences = branches_of(running)
        rng.shuffle(sequences)
        guessed = sequences[: rng.randint(0, len(sequences))]
        wishes = [
            DraftRequest(one, depth, depth + rng.choice((0, 0, 3, 9)))
            for one in guessed
            for depth in [rng.randint(1, 3)]
        ]
        if wishes:
            least = rng.choice((0.0, 0.0, 0.0507, 0.2983))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ngram, "_LEAST", least)
                drafts = drafter.propose(wishes)
            scan.read([*guessed, *(one for one in asked if one not in guessed and one not in unread), *unread])
            unread.clear()
            asked = guessed
            for wish, draft in zip(wishes, drafts, strict=True):
                scan.check(wish, draft, least)
        for sequence in sequences:
            sequence.tokens += rng.choices(range(alphabet), k=rng.randint(1, 3))
            sequence.num_computed = len(sequence.tokens) - 1
        for sequence in [sequence for sequence in sequences if rng.random() < 0.2]:
            finish(drafter, sequence)
            texts.append(sequence.tokens)
            unread.append(sequence)
        running = [in_flight for in_flight in running if in_flight.sequences]


def test_a_branch_is_drafted_from_its_siblings_text() -> None:
    drafter = NgramDrafter()
    first, second = branches_of([request([1, 2, 3], 2)])
    for token in (10, 11, 12, 13, 14):
        step(drafter, {first: [token]})
    assert chain(drafter, second) == [10, 11, 12, 13]
    step(drafter, {second: [11, 12]})
    assert chain(drafter, second) == [13, 14]


def test_a_sibling_that_starts_late_is_drafted_from_finished_siblings() -> None:
    drafter = NgramDrafter()
    first, second = branches_of([request([1, 2, 3], 2)])
    step(drafter, {first: [10, 11, 12]})
    finish(drafter, first)
    assert chain(drafter, second) == [10, 11, 12]


def test_a_request_is_drafted_from_earlier_requests_with_its_pin_key() -> None:
    drafter = NgramDrafter()
    write(drafter, request([1, 2, 3], 2, "search"), [10, 11, 12, 13])
    assert chain(drafter, only(request([1, 2, 3, 10, 11], pin_key="search"))) == [12, 13]


def test_a_search_is_drafted_from_earlier_searches_of_its_namespace() -> None:
    drafter = NgramDrafter()
    write(drafter, request([1, 2, 3], 2, "search", "tenant"), [10, 11, 12, 13])
    for pin_key in ("other", None):
        assert chain(drafter, only(request([9, 2, 3, 10], pin_key=pin_key, namespace="tenant"))) == [11, 12, 13]


@pytest.mark.parametrize("pin_key", ["search", "other", None])
@pytest.mark.parametrize("namespace", ["other", None])
def test_no_draft_comes_from_another_namespace(pin_key: str | None, namespace: str | None) -> None:
    drafter = NgramDrafter()
    write(drafter, request([1, 2, 3], 2, "search", "tenant"), [10, 11, 12, 13])
    write(drafter, request([1, 2, 3], 2, None, "tenant"), [20, 21, 22])
    (draft,) = drafter.propose([DraftRequest(only(request([1, 2, 3], pin_key=pin_key, namespace=namespace)), 4, 8)])
    assert draft == EMPTY_DRAFT


def test_the_searchs_own_text_is_preferred_if_it_is_accepted_more_often() -> None:
    """Each search generates a name of its own after words that all of them generate."""
    drafter = NgramDrafter()
    for number in range(20):
        write(drafter, request([1, 2, 3], 1, f"search {number}"), [7, 8, 100 + number, 7, 8, 100 + number, 5] * 2)
    # Five names are kept, and each was accepted more often than any of the four others.
    write(drafter, request([1, 2, 3], 1, "search"), [7, 8, 103])
    assert chain(drafter, only(request([9, 7, 8], pin_key="search")), 1) == [103]
    (draft,) = drafter.propose([DraftRequest(only(request([9, 7, 8], pin_key="search")), 1, 5)])
    assert draft.tokens[0] == 103
    assert draft.probs[0] > 0.6
    assert set(draft.tokens[1:]) < set(range(100, 120))


def test_drafts_are_ranked_by_match_length_then_frequency_then_recency() -> None:
    def guessed(prompt: list[int]) -> list[int]:
        return chain(NgramDrafter(), only(request(prompt)), 1)

    assert guessed([5, 1, 7, 6, 1, 8, 6, 1, 8, 5, 1]) == [7]
    assert guessed([1, 7, 1, 8, 1, 8, 1, 7, 1, 8, 1, 9, 1]) == [8]
    assert guessed([1, 7, 1, 8, 1]) == [8]
    assert guessed([1, 8, 1, 7, 1]) == [7]


def test_a_shared_prompt_counts_once_and_each_sample_counts() -> None:
    drafter = NgramDrafter()
    first, second, third = branches_of([request([9, 1, 4, 9, 1], 3)])
    step(drafter, {first: [5, 6], second: [5, 6], third: [9, 1]})
    (draft,) = drafter.propose([DraftRequest(third, 1, 3)])
    assert draft.tokens[0] == 5
    assert set(draft.tokens) == {5, 4, 9}
    assert draft.probs[0] == pytest.approx(2 * draft.probs[1]) == pytest.approx(2 * draft.probs[2])


def test_unread_texts_are_read_at_the_next_draft_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those finished branches are read that ended last."""
    monkeypatch.setattr(ngram, "_BACKLOG", 450)
    drafter = NgramDrafter()
    *siblings, last = branches_of([request([1, 2], 6, "search")])
    for number, sequence in enumerate(siblings):
        sequence.tokens += [3, *range(100 * number + 100, 100 * number + 200)]
        sequence.num_computed = len(sequence.tokens)
    drafter.observe_step(advances([*siblings, last]), NO_STATES)
    for sequence in siblings:
        finish(drafter, sequence)
    last.tokens += [3]
    (draft,) = drafter.propose([DraftRequest(last, 1, 9)])
    assert set(draft.tokens) == {200, 300, 400, 500}


def test_reset_removes_all_texts() -> None:
    drafter = NgramDrafter()
    write(drafter, request([1, 2, 3], pin_key="search"), [10, 11])
    running = request([1, 2, 3], pin_key="search")
    step(drafter, {only(running): [10]})
    drafter.reset(CACHE)
    assert drafter.propose([DraftRequest(only(request([1, 2, 3], pin_key="search")), 4, 4)]) == [EMPTY_DRAFT]
    finish(drafter, only(running))


def test_a_branch_continues_after_its_lease_is_released() -> None:
    drafter = NgramDrafter()
    write(drafter, request([1, 2, 3], pin_key="search"), [10, 11, 12])
    in_flight = request([1, 2, 3], pin_key="search")
    step(drafter, {only(in_flight): [10]})
    in_flight.pin_key = None
    assert chain(drafter, only(in_flight)) == [11, 12]
    finish(drafter, only(in_flight))


def test_an_unknown_branch_can_be_released() -> None:
    NgramDrafter().release(only(request([1])))


# Estimated probabilities.


class Source:
    """A random second-order Markov source of twelve tokens, sampled as the engine samples: by the branch's noise."""

    def __init__(self, noise: random.Random) -> None:
        shape = 12, 12, 12
        self.logits = np.log([noise.expovariate(1) ** 3 for _ in range(math.prod(shape))]).reshape(shape)

    def draw(self, sequence: GenerateSequence, tokens: list[int]) -> int:
        keys = np.array([[sequence.seed], [sequence.key], [len(tokens)]])
        noise = gumbel_noise(noise_streams(*keys, SAMPLE)[:, None], np.arange(12))[0]
        return int((self.logits[tokens[-2], tokens[-1]] + noise).argmax())


def begin_siblings(noise: random.Random, temperature: float) -> list[GenerateSequence]:
    """Return twelve siblings with a prompt and noise of their own."""
    sequences = branches_of([request(noise.choices(range(12), k=20), 12, temperature=temperature)])
    for sequence in sequences:
        sequence.seed = noise.getrandbits(40)
    return sequences


@pytest.mark.parametrize(("temperature", "excess"), [(0.0, 0.1), (1.0, 0.25)], ids=["noise unknown", "noise known"])
def test_estimated_probabilities_match_acceptance_rates(temperature: float, excess: float) -> None:
    """Twelve siblings at a time sample from a Markov source. For each decile of the estimates, and each depth, the
    hypotheses that the acceptance rate is less than the estimate by more than 0.1, or more by ``excess``, are rejected
    at p < 0.001: where the drafter knows the noise, its estimates are low, since its shares are better than most."""
    noise = random.Random(keep(4, "a statistical claim"))
    source, drafter = Source(noise), NgramDrafter()
    seen: dict[object, list[tuple[float, bool]]] = {}
    for _ in range(12):
        sequences = begin_siblings(noise, temperature)
        for _ in range(60):
            drafts = step(drafter, {one: [source.draw(one, one.tokens)] for one in sequences}, (4, 10))
            for sequence, draft in zip(sequences, drafts, strict=True):
                # Samples as a step does: until a sample equals no draft token.
                tokens, node = list(sequence.tokens), -1
                while True:
                    children = {draft.tokens[i]: i for i, parent in enumerate(draft.parents) if parent == node}
                    for token, child in children.items():
                        chance, met = draft.probs[child], token == tokens[-1]
                        seen.setdefault(int(10 * chance), []).append((chance, met))
                        seen.setdefault(f"depth {draft.depths[child]}", []).append((chance, met))
                    if tokens[-1] not in children:
                        break
                    node = children[tokens[-1]]
                    tokens.append(source.draw(sequence, tokens))
        for sequence in sequences:
            finish(drafter, sequence)
    tested = {name: pairs for name, pairs in seen.items() if len(pairs) > 500}
    assert len(tested) >= 8
    for name, pairs in tested.items():
        promised, met = sum(chance for chance, _ in pairs) / len(pairs), sum(was for _, was in pairs)
        assert promised < 0.1 or binom.sf(met - 1, len(pairs), promised - 0.1) < 1e-3, (name, promised, met)
        assert binom.cdf(met, len(pairs), min(1.0, promised + excess)) < 1e-3, (name, promised, met)


def test_known_noise_raises_the_acceptance_rate() -> None:
    """The first draft token is accepted more often if the drafter knows the noise of the samples: a sign test over the
    tokens of which only one of two drafters is right rejects the opposite at p < 0.001."""
    noise = random.Random(keep(6, "a statistical claim"))
    source, blind, knowing = Source(noise), NgramDrafter(NgramTable(noise=0.0)), NgramDrafter()
    wins = [0, 0]
    for _ in range(12):
        sequences = begin_siblings(noise, 1.0)
        for _ in range(60):
            requests = [DraftRequest(sequence, 1, 1) for sequence in sequences]
            drafts = zip(blind.propose(requests), knowing.propose(requests), strict=True)
            for sequence, (without, with_noise) in zip(sequences, drafts, strict=True):
                sequence.tokens.append(source.draw(sequence, sequence.tokens))
                accepted = [draft.tokens == (sequence.tokens[-1],) for draft in (without, with_noise)]
                if accepted[0] != accepted[1]:
                    wins[accepted.index(True)] += 1
    assert binom.sf(wins[1] - 1, sum(wins), 0.5) < 1e-3, wins


def test_results_are_unchanged_and_a_repeated_search_is_drafted(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    drafter = NgramDrafter()
    plain, guessing = Harness(folder), Harness(folder)
    guessing.core.start_speculation(drafter, FixedController(4, 8))
    noise = random.Random(shift(2))
    for temperature in (0.0, 1.0):
        prompt = noise.choices(range(3, 300), k=40)
        asked = generate(
            prompt,
            [Branch(seed=1, key=key, max_tokens=40) for key in range(4)],
            temperature=temperature,
            pin_key=f"at {temperature}",
            ignore_eos=True,
        )
        wanted = [one.token_ids for one in plain.complete(asked)]
        accepted = 0
        for _ in range(2):
            before = guessing.core.speculation_stats.accepted
            assert_same_tokens(folder, [asked], [one.token_ids for one in guessing.complete(asked)], wanted)
            accepted = guessing.core.speculation_stats.accepted - before
        # The second time all texts are known; at best there is a step for every five tokens.
        assert accepted > 0.7 * sum(map(len, wanted))


# Costs.

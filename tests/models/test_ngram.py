"""The n-gram baseline against dictionaries filled from the formula."""
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from trueup.models.training.ngram import FALLBACK_DISCOUNTS, KneserNey, discounts, fit

V = 11  # not a power of two, so that packed ids leave gaps


def zipf_stream(length: int, seed: int) -> np.ndarray:
    """Text-like: few tokens are frequent, and a token depends on the one before it."""
    rng = np.random.default_rng(seed)
    steps = np.minimum(rng.zipf(1.7, length), V) - 1
    return (np.cumsum(steps) // 3 * 5 + steps) % V


class Dictionaries:
    """Interpolated modified Kneser-Ney, one n-gram at a time."""

    def __init__(self, stream: list[int], order: int) -> None:
        self.order = order
        self.counts: dict[int, Counter] = {}
        for n in range(1, order + 1):
            grams = [tuple(stream[i : i + n]) for i in range(len(stream) - n + 1)]
            if n == order:
                self.counts[n] = Counter(grams)
            else:
                before = defaultdict(set)
                for i in range(1, len(grams)):
                    before[grams[i]].add(stream[i - 1])
                self.counts[n] = Counter({gram: len(tokens) for gram, tokens in before.items()})
        self.off = {n: self.discounts(c) for n, c in self.counts.items()}

    @staticmethod
    def discounts(counts: Counter) -> dict[int, float]:
        n = Counter(counts.values())
        found = dict(enumerate(FALLBACK_DISCOUNTS, 1))
        if n[1] and n[2] and n[3] and n[4]:
            y = n[1] / (n[1] + 2 * n[2])
            candidates = {c: c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)}
            if all(0 < d < c for c, d in candidates.items()):
                found = candidates
        return found

    def probability(self, context: tuple[int, ...], token: int) -> float:
        context = context[-(self.order - 1) :] if self.order > 1 else ()
        n = len(context) + 1
        lower = self.probability(context[1:], token) if context else 1 / V
        follow = {g[-1]: c for g, c in self.counts[n].items() if g[:-1] == context}
        if not follow:
            return lower
        total, taken = sum(follow.values()), sum(self.off[n][min(c, 3)] for c in follow.values())
        count = follow.get(token, 0)
        kept = count - self.off[n][min(count, 3)] if count else 0
        return (kept + taken * lower) / total


def contexts(stream: np.ndarray, seed: int) -> list[list[int]]:
    """Empty, seen and random ones, from too short to too long."""
    rng = np.random.default_rng(seed)
    seen = [stream[i : i + n].tolist() for n in range(1, 7) for i in rng.integers(0, len(stream) - n, 8)]
    return [[], *seen, *([rng.integers(0, V, n).tolist() for n in range(1, 7) for _ in range(8)])]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [8, 60, 900])
def test_agrees_with_dictionaries(order, length):
    stream = zipf_stream(length, seed=length)
    model, naive = fit(stream, order, V), Dictionaries(stream.tolist(), order)
    for context in contexts(stream, seed=order):
        expected = [naive.probability(tuple(context), token) for token in range(V)]
        np.testing.assert_allclose(model.distribution(context), expected, rtol=1e-12)
        assert model.distribution(context).sum() == pytest.approx(1, abs=1e-12)


def test_long_streams_estimate_their_discounts_and_short_ones_fall_back():
    """So that the comparison above covers both."""
    long, short = (Dictionaries(zipf_stream(length, seed=length).tolist(), 3).off for length in (900, 8))
    assert all(tuple(long[n].values()) != FALLBACK_DISCOUNTS for n in (2, 3))
    assert all(tuple(short[n].values()) == FALLBACK_DISCOUNTS for n in (1, 2, 3))


def test_discounts_by_hand():
    """Six n-grams seen once, three twice, two three times, one four times: Y = 6 / 12."""
    counts = np.repeat([1, 2, 3, 4, 9], [6, 3, 2, 1, 5])
    assert discounts(counts) == pytest.approx((1 - 2 * 0.5 * 3 / 6, 2 - 3 * 0.5 * 2 / 3, 3 - 4 * 0.5 * 1 / 2))
    assert discounts(np.array([1, 2, 3])) == FALLBACK_DISCOUNTS  # none seen four times
    assert discounts(np.repeat([1, 2, 3, 4], [2, 2, 2, 9])) == FALLBACK_DISCOUNTS  # the third would be negative


@pytest.mark.parametrize("order", [1, 3, 5])
def test_loss_is_the_mean_of_what_distribution_says(order):
    model, held_out = fit(zipf_stream(500, 1), order, V), zipf_stream(40, 2)
    nats = [-math.log(model.distribution(held_out[:i])[token]) for i, token in enumerate(held_out)]
    assert model.loss(held_out) == pytest.approx(np.mean(nats), rel=1e-12)
    assert model.loss(held_out[:2]) == pytest.approx(np.mean(nats[:2]), rel=1e-12)  # shorter than the order


def test_sums_to_one_at_the_size_it_is_used_at():
    """V = 2048 and order 5: 55 of 63 bits."""
    stream = np.random.default_rng(3).zipf(1.3, 20_000) % 2048
    model = fit(stream.astype(np.int32))
    assert (model.order, model.vocab_size) == (5, 2048)
    for context in ([], [2047], stream[:4], stream[-9:], [2047] * 4, [0, 0, 1, 2]):
        p = model.distribution(context)
        assert p.shape == (2048,) and p.min() > 0 and p.sum() == pytest.approx(1, abs=1e-12)


def test_a_longer_memory_helps_on_repeated_text():
    """Ten phrases of nine tokens in random order: the phrase is told by its beginning."""
    rng = np.random.default_rng(4)
    phrases = rng.integers(0, V, (10, 9))
    text = phrases[rng.integers(0, 10, 400)].ravel()
    held_out = phrases[rng.integers(0, 10, 50)].ravel()
    losses = [fit(text, order, V).loss(held_out) for order in range(1, 5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > 2 and losses[3] < 0.6


def test_unseen_tokens_keep_a_probability():
    model = fit(np.array([1, 2] * 20), 3, V)
    assert 0 < model.distribution([1])[7] < model.distribution([1])[2]
    assert model.loss(np.array([7, 8, 9])) < math.log(V) + 5


@pytest.mark.parametrize(("call", "message"), [
    (lambda: fit(np.array([0, V]), 1, V), "ids go from 0 to 11; expected 0 to 10"),
    (lambda: fit(np.array([-1, 3]), 1, V), "from -1 to 3"),
    (lambda: fit(np.array([1, 2]), 3, V), "got 2 token ids; expected at least 3"),
    (lambda: fit(np.array([1.0, 2.0]), 1, V), "float64"),
    (lambda: fit(np.zeros((2, 2), dtype=int), 1, V), "one row"),
    (lambda: fit(np.zeros(9, dtype=int), 6, 2048), "expected 1 to 5"),
    (lambda: fit(np.zeros(9, dtype=int), 0, 2048), "expected 1 to 5"),
    (lambda: small().loss(np.array([], dtype=int)), "at least 1"),
    (lambda: small().distribution([V]), "from 11 to 11"),
])
def test_bad_input_is_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def small() -> KneserNey:
    return fit(np.arange(V), 2, V)

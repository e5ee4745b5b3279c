"""An n-gram model as the bar that a trained network must clear: interpolated modified Kneser-Ney.

    P_n(w | context) = (c - D(c)) / total  +  backoff(context) * P_{n-1}(w | context without its first token)

c counts the n-gram at the highest order; below, it counts after how many different tokens the shorter
n-gram was seen.  D(c) is one of three discounts an order (for c = 1, 2, and 3 or more), and what
they take off is the backoff.  Under the unigrams lies the uniform distribution, so every token has a
probability and each distribution sums to one.

Source: Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1999).
"""
from typing import NamedTuple

import numpy as np

# Where the counts of counts say nothing (a tiny corpus), as in KenLM's --discount_fallback.
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


class Table(NamedTuple):
    """All n-grams of one length and the contexts they begin with, each packed into an int64 and sorted."""

    ngrams: np.ndarray  # [n-grams]
    share: np.ndarray  # [n-grams] discounted count over the total of its context
    contexts: np.ndarray  # [contexts]
    backoff: np.ndarray  # [contexts] what the discounts leave to the shorter n-grams


class KneserNey:
    """A fitted model; made by :func:`fit`."""

    def __init__(self, tables: list[Table], bits: int, vocab_size: int) -> None:
        self.tables, self.bits, self.vocab_size = tables, bits, vocab_size

    @property
    def order(self) -> int:
        """Length of the longest n-grams: one more than the tokens of context it looks at."""
        return len(self.tables)

    def loss(self, stream: np.ndarray) -> float:
        """Mean nats a token over a stream of ids [tokens], each predicted from up to order - 1 tokens before it.

        Raises:
            ValueError: an empty stream, or ids outside the vocabulary.
        """
        stream = _ids(stream, self.vocab_size, at_least=1)  # [T]
        p = np.full(len(stream), 1 / self.vocab_size)  # [T]
        # The first tokens have less context than the longest n-grams want, and stay with the shorter ones.
        for n in range(1, min(self.order, len(stream)) + 1):
            p[n - 1 :] = self._refine(n, _windows(stream, n, self.bits), p[n - 1 :])  # [T - n + 1]
        return float(-np.log(p).mean())

    def distribution(self, context: list[int] | np.ndarray) -> np.ndarray:
        """Probabilities of the next token [V]; looks at the last order - 1 tokens of the context.

        Raises:
            ValueError: ids outside the vocabulary.
        """
        context = _ids(np.asarray(context, dtype=np.int64), self.vocab_size, at_least=0)
        p = np.full(self.vocab_size, 1 / self.vocab_size)  # [V]
        for n in range(1, min(self.order - 1, len(context)) + 2):
            packed = 0
            for token in context[len(context) - n + 1 :]:
                packed = packed << self.bits | int(token)
            p = self._refine(n, (packed << self.bits) + np.arange(self.vocab_size), p)  # [V]
        return p

    def _refine(self, n: int, ngrams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """P_n of packed n-grams from P_{n-1}; where the context was never seen, P_{n-1} itself."""
        table = self.tables[n - 1]
        share = _look_up(ngrams, table.ngrams, table.share, missing=0.0)
        backoff = _look_up(ngrams >> self.bits, table.contexts, table.backoff, missing=1.0)
        return share + backoff * lower


def fit(stream: np.ndarray, order: int = 5, vocab_size: int = 2048) -> KneserNey:
    """Count the n-grams of a stream of ids [tokens] and smooth the counts.

    Ten million tokens at order 5 take seconds, and less than 1 GB.

    Raises:
        ValueError: ids outside the vocabulary, a stream shorter than ``order``, or n-grams that do not fit into
            63 bits.
    """
    bits = max(1, (vocab_size - 1).bit_length())
    if not 1 <= order <= 63 // bits:
        raise ValueError(f"order {order} is not possible; expected 1 to {63 // bits}, because an n-gram of {bits}-bit "
                         f"ids (vocabulary {vocab_size}) is packed into 63 bits")
    stream = _ids(stream, vocab_size, at_least=order)
    return KneserNey([_smooth(*_count(stream, n, order, bits), bits) for n in range(1, order + 1)], bits, vocab_size)


def discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """What to take off counts of 1, 2, and 3 or more, from how many n-grams were counted once to four times."""
    one, two, three, four = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].tolist()
    if not (one and two and three and four):
        return FALLBACK_DISCOUNTS
    y = one / (one + 2 * two)
    found = (1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three)
    # A discount must leave something of the count, and something for the shorter n-grams.
    return found if all(0 < d < c for c, d in enumerate(found, 1)) else FALLBACK_DISCOUNTS


def _count(stream: np.ndarray, n: int, order: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct n-grams, sorted, and their counts: how often, or below the highest order after how many tokens."""
    if n == order:
        return _tally(_windows(stream, n, bits))
    longer, _ = _tally(_windows(stream, n + 1, bits))
    return _tally(longer & ((1 << bits * n) - 1))


def _tally(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys, sorted, and how often each occurs; reorders ``keys``.

    np.unique hashes since NumPy 2.3, which is many times slower where most keys differ.
    """
    keys.sort()
    starts = _run_starts(keys)  # [distinct]
    return keys[starts], np.diff(starts, append=len(keys))


def _run_starts(ordered: np.ndarray) -> np.ndarray:
    """Where each run of equal, non-negative numbers begins."""
    return np.flatnonzero(np.diff(ordered, prepend=-1))


def _smooth(ngrams: np.ndarray, counts: np.ndarray, bits: int) -> Table:
    """Discount sorted n-grams and normalise them by context."""
    off = np.array((0.0, *discounts(counts)))[np.minimum(counts, 3)]  # [n-grams]
    context = ngrams >> bits  # [n-grams] sorted too, so that each context is one run
    starts = _run_starts(context)  # [contexts]
    total = np.add.reduceat(counts, starts)  # [contexts]
    backoff = np.add.reduceat(off, starts) / total  # [contexts]
    share = (counts - off) / np.repeat(total, np.diff(starts, append=len(ngrams)))  # [n-grams]
    return Table(ngrams, share, context[starts], backoff)


def _ids(stream: np.ndarray, vocab_size: int, at_least: int) -> np.ndarray:
    if stream.ndim != 1 or stream.dtype.kind not in "iu":
        raise ValueError(f"token ids are {stream.dtype} {list(stream.shape)}; expected one row of integers")
    if len(stream) < at_least:
        raise ValueError(f"got {len(stream)} token ids; expected at least {at_least}")
    if len(stream) and not 0 <= stream.min() <= stream.max() < vocab_size:
        raise ValueError(f"token ids go from {stream.min()} to {stream.max()}; expected 0 to {vocab_size - 1}")
    return stream.astype(np.int64)


def _windows(stream: np.ndarray, n: int, bits: int) -> np.ndarray:
    """Each n consecutive tokens in one number, the first in the highest bits; int64 [tokens - n + 1]."""
    count = len(stream) - n + 1
    packed = stream[:count].copy()
    for i in range(1, n):
        packed <<= bits
        packed |= stream[i : i + count]
    return packed


def _look_up(wanted: np.ndarray, keys: np.ndarray, values: np.ndarray, missing: float) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], missing)

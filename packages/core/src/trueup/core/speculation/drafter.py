"""What the engine tells a drafter, and what it wants to hear: the protocol of every drafter."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from trueup.core.cache import Pools
from trueup.core.layout import Layout, Mode
from trueup.core.pages import PagePool
from trueup.core.sampling import Sampler


@dataclass(frozen=True)
class Turn:
    """A request whose next tokens are to be proposed.

    Args:
        request: its id.
        tokens: prompt and generated ids; the last one is pending: its cache row is written by the verification.
        pages: its page ids, which reach far enough for all drafts.
        most: how many drafts still fit before max_tokens.
        sampler: draws drafts, and says from what distribution.
    """

    request: int
    tokens: Sequence[int]
    pages: tuple[int, ...]
    most: int
    sampler: Sampler


@dataclass(frozen=True)
class Draft:
    """Proposed ids, and the distributions they were drawn from: q [k, V]."""

    tokens: tuple[int, ...]
    q: Float[Tensor, "k V"]


@dataclass(frozen=True)
class Fed:
    """Rows of a request that the target has just run: what a drafter learns from.

    Row i stands at position ``start`` + i; the drafter pairs the target's features of that row with the token at the
    position after it (SB-18).  Rows of rejected drafts come along, so that the shape does not depend on what was kept;
    they follow the kept ones, and none of those sees them.

    Args:
        request: its id.
        mode: DRAFT_EXTEND after a verification, PREFILL for a prompt chunk.
        start: position of the first row.
        next_tokens: one a row: the drafts kept, the token behind them, 0 for rejected rows; or the prompt, shifted.
        features: [rows, F], see :attr:`Drafter.taps`.
        kept: how many rows stay; the last of them is where drafting goes on.
        pages: the request's page ids.
    """

    request: int
    mode: Mode
    start: int
    next_tokens: Sequence[int]
    features: Float[Tensor, "rows F"]
    kept: int
    pages: tuple[int, ...]


class Drafter(Protocol):
    """Proposes tokens.  What it remembers of a request is its own affair, by request id and unpadded."""

    taps: tuple[int, ...] | None
    """The target's features it wants: the residual streams entering these layers, side by side; () is the hidden rows
    after the final norm, None is nothing."""

    layouts: list[Layout]
    """The forwards that it planned in this round, in order; the engine empties it."""

    def bind(self, target: Pools, pages: PagePool, buckets: Sequence[int]) -> None:
        """Called once by the engine: its cache, the page ids of both, and the request counts to pad to."""
        ...

    def propose(self, turns: Sequence[Turn]) -> dict[int, Draft]:
        """Drafts by request; a request may be left out."""
        ...

    def learn(self, fed: Sequence[Fed]) -> None:
        """Take in what the target has decided since; the next proposal continues from the last row of each request."""
        ...

    def forget(self, request: int) -> None:
        """The request is gone; unknown ids are ignored."""
        ...


def certain(tokens: Sequence[int], vocab_size: int) -> Draft:
    """A draft that was not drawn: q is 1 at each token."""
    q = torch.zeros(len(tokens), vocab_size)  # [k, V]
    q[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)] = 1.0
    return Draft(tuple(tokens), q)

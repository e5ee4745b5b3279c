"""A part of a forward whose requests do the same: B requests, T token rows, padded to Bp and Tp.  Integers only."""
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

DUMMY_PAGE = 0  # never allocated: padded requests read and write here, and nobody else reads it


class Mode(Enum):
    """What a segment's requests are doing.  The order is the order of rows in a batch."""

    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"
    EXTEND = "extend"  # a prompt chunk behind a cached prefix
    PREFILL = "prefill"  # a prompt from its first token
    IDLE = "idle"  # no real request


class Form(Enum):
    """EXPANDED: per-head keys and values, ordinary attention.  ABSORBED: one latent head, read from the cache."""

    EXPANDED = "expanded"
    ABSORBED = "absorbed"


class Policy(Enum):
    """What becomes of padded token rows.

    COVER: dummy requests own them, so the operators see every row and each output is defined.
    TRIM: attention gets real rows only, and zero rows are put back behind it.
    """

    COVER = "cover"
    TRIM = "trim"


@dataclass(frozen=True)
class Segment:
    """Requests of one mode, padded.  Request columns have Bp entries, token columns Tp.

    ``requests`` holds the ids, None for a dummy.  ``kv_lens`` counts the rows written in this forward,
    ``prefix_lens`` those before it.
    """

    mode: Mode
    form: Form
    policy: Policy
    first_row: int
    requests: tuple[int | None, ...]  # [Bp]
    q_lens: tuple[int, ...]  # [Bp]
    kv_lens: tuple[int, ...]  # [Bp]
    pages: tuple[tuple[int, ...], ...]  # [Bp, max_pages]
    positions: tuple[int, ...]  # [Tp]
    slots: tuple[int, ...]  # [Tp]

    @cached_property
    def real_requests(self) -> int:
        return sum(request is not None for request in self.requests)

    @property
    def padded_requests(self) -> int:
        return len(self.requests)

    @cached_property
    def real_tokens(self) -> int:
        return sum(self.q_lens[: self.real_requests])

    @property
    def padded_tokens(self) -> int:
        return len(self.slots)

    @cached_property
    def operator_tokens(self) -> int:
        """Token rows that attention sees: all of them under COVER, the real ones under TRIM."""
        return sum(self.q_lens)

    @cached_property
    def width(self) -> int:
        return max(self.q_lens)

    @cached_property
    def prefix_lens(self) -> tuple[int, ...]:
        return tuple(kv - q for q, kv in zip(self.q_lens, self.kv_lens, strict=True))

    @cached_property
    def q_cum(self) -> tuple[int, ...]:
        """Inclusive prefix sums of q_lens: no leading zero, the last is operator_tokens."""
        return tuple(accumulate(self.q_lens))

    @cached_property
    def prefix_cum(self) -> tuple[int, ...]:
        return tuple(accumulate(self.prefix_lens))

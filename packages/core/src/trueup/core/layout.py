"""What one forward computes: real and padded sizes, decided once, before anything is derived from them.

A Layout is what :func:`trueup.core.planning.plan` returns.  It is immutable and knows every length list in every
mode; the constructor checks what an operator would otherwise find out on the device.  Integers only, no torch.

Axis letters: B requests, T token rows, P page size; Bp and Tp are the padded counts.
"""
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


@dataclass(frozen=True, eq=False)
class Layout:
    """Segments in row order.  Compared by identity: two equal batches are still two batches."""

    segments: tuple[Segment, ...]
    page_size: int

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def real_requests(self) -> int:
        return sum(s.real_requests for s in self.segments)

    @cached_property
    def padded_requests(self) -> int:
        return sum(s.padded_requests for s in self.segments)

    @cached_property
    def real_tokens(self) -> int:
        return sum(s.real_tokens for s in self.segments)

    @cached_property
    def padded_tokens(self) -> int:
        return sum(s.padded_tokens for s in self.segments)

    @cached_property
    def requests(self) -> tuple[int, ...]:
        """Real request ids in row order."""
        return tuple(r for s in self.segments for r in s.requests if r is not None)

    @cached_property
    def token_rows(self) -> dict[int, range]:
        """The token rows of each real request."""
        rows = {}
        for s in self.segments:
            for request, q, end in zip(s.requests, s.q_lens, s.q_cum, strict=True):
                if request is not None:
                    rows[request] = range(s.first_row + end - q, s.first_row + end)
        return rows

    @cached_property
    def last_rows(self) -> tuple[int, ...]:
        """The last token row of each real request: where its next token is predicted."""
        return tuple(self.token_rows[request][-1] for request in self.requests)

    @cached_property
    def scored_rows(self) -> dict[int, range]:
        """The rows whose logits a round needs: all of a request that decodes, the last of one in its prompt."""
        prompts = {r for s in self.segments if s.form is Form.EXPANDED for r in s.requests}
        return {r: rows[-1:] if r in prompts else rows for r, rows in self.token_rows.items()}

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return tuple(p for s in self.segments for p in s.positions)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        return tuple(slot for s in self.segments for slot in s.slots)


def _check(layout: Layout) -> None:
    """The invariants that make a wrong batch impossible to express."""
    size, first_row = layout.page_size, 0
    owner: dict[int, int | None] = {}  # which request writes to a page
    for s in layout.segments:
        Bp, max_pages = s.padded_requests, len(s.pages[0])
        assert s.first_row == first_row, "segments are contiguous in the token rows"
        assert Bp == len(s.q_lens) == len(s.kv_lens) == len(s.pages) >= 1, "one entry a request in every column"
        assert s.padded_tokens == len(s.positions) and s.operator_tokens <= s.padded_tokens
        assert s.policy is Policy.TRIM or s.operator_tokens == s.padded_tokens, "COVER leaves no row without a request"
        assert all(1 <= q <= kv <= max_pages * size for q, kv in zip(s.q_lens, s.kv_lens, strict=True))
        assert all(len(row) == max_pages for row in s.pages)
        row_request = [i for i, q in enumerate(s.q_lens) for _ in range(q)]
        for row, slot in enumerate(s.slots):
            page = slot // size
            if row >= s.operator_tokens or s.requests[row_request[row]] is None:
                assert page == DUMMY_PAGE, "a padded row writes to the dummy page only"
                continue
            i = row_request[row]
            assert page != DUMMY_PAGE and page == s.pages[i][s.positions[row] // size]
            if owner.setdefault(page, s.requests[i]) != s.requests[i]:
                raise ValueError(f"page {page} would be written by requests {owner[page]} and {s.requests[i]}: "
                                 "a page has one writer")
        first_row += s.padded_tokens
    ids = layout.requests
    if len(set(ids)) != len(ids):
        raise ValueError(f"a request appears twice in one forward: {sorted(ids)}")

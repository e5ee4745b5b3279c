"""What one forward computes: real and padded sizes, decided once, before anything is derived from them.

A Layout is what :func:`trueup.core.planning.plan` returns.  It is immutable, knows every length list in every mode, and
checks itself for what an operator would otherwise find out on the device.  Integers only, no torch.
"""
from dataclasses import dataclass
from functools import cached_property

from trueup.core.invariants import check
from trueup.core.segment import DUMMY_PAGE, Form, Mode, Policy, Segment

__all__ = ["DUMMY_PAGE", "Form", "Layout", "Mode", "Policy", "Segment"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Segments in row order.  Compared by identity: two equal batches are still two batches."""

    segments: tuple[Segment, ...]
    page_size: int

    def __post_init__(self) -> None:
        check(self.segments, self.page_size)

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

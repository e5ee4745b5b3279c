"""The invariants that make a wrong batch impossible to express.  Integers only, no torch."""
from collections.abc import Sequence

from trueup.core.segment import DUMMY_PAGE, Policy, Segment


def check(segments: Sequence[Segment], page_size: int) -> None:
    """Raise where ``segments`` are no batch.

    Raises:
        ValueError: a page with two writers, or a request twice; the rest is :func:`plan`'s own affair.
    """
    first_row = 0
    owner: dict[int, int | None] = {}  # which request writes to a page
    for s in segments:
        Bp, max_pages = s.padded_requests, len(s.pages[0])
        assert s.first_row == first_row, "segments are contiguous in the token rows"
        assert Bp == len(s.q_lens) == len(s.kv_lens) == len(s.pages) >= 1, "one entry a request in every column"
        assert s.padded_tokens == len(s.positions) and s.operator_tokens <= s.padded_tokens
        assert s.policy is Policy.TRIM or s.operator_tokens == s.padded_tokens, "COVER leaves no row without a request"
        assert all(1 <= q <= kv <= max_pages * page_size for q, kv in zip(s.q_lens, s.kv_lens, strict=True))
        assert all(len(row) == max_pages for row in s.pages)
        row_request = [i for i, q in enumerate(s.q_lens) for _ in range(q)]
        for row, slot in enumerate(s.slots):
            page = slot // page_size
            if row >= s.operator_tokens or s.requests[row_request[row]] is None:
                assert page == DUMMY_PAGE, "a padded row writes to the dummy page only"
                continue
            i = row_request[row]
            assert page != DUMMY_PAGE and page == s.pages[i][s.positions[row] // page_size]
            if owner.setdefault(page, s.requests[i]) != s.requests[i]:
                raise ValueError(f"page {page} would be written by requests {owner[page]} and {s.requests[i]}: "
                                 "a page has one writer")
        first_row += s.padded_tokens
    ids = [request for s in segments for request in s.requests if request is not None]
    if len(set(ids)) != len(ids):
        raise ValueError(f"a request appears twice in one forward: {sorted(ids)}")

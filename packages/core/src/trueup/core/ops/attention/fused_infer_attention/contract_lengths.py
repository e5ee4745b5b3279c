"""The rules of the two lists of lengths (see lengths.py)."""
from collections.abc import Sequence
from functools import lru_cache

from trueup.core.ops.attention.fused_infer_attention.lengths import between, for_each
from trueup.core.ops.attention.fused_infer_attention.points import SHORT_SUM
from trueup.core.ops.contract import RELATION, SIZE, Check

TILING = "cann-ops-transformer: op_host/fused_infer_attention_score_tiling_check_feature.cpp"


def most(lengths: Sequence[int]) -> int:
    """The largest; quickly where all are alike, as they are in decoding."""
    if not lengths:
        return 0
    return lengths[0] if lengths.count(lengths[0]) == len(lengths) else max(lengths)


def _alike(ends: Sequence[int]) -> list[int] | None:
    """Lengths from end offsets that are evenly spaced, as they are in decoding: twice as fast as subtracting."""
    width, requests = ends[0], len(ends)
    if width > 0 and ends[-1] == width * requests and tuple(ends) == _steps(width, requests):
        return [width] * requests
    return None


@lru_cache(256)
def _steps(width: int, requests: int) -> tuple[int, ...]:
    return tuple(range(width, width * requests + 1, width))


def check_cumulative(check: Check, argument: str, ends: Sequence[int] | None, of: str, rows: int, page: str
                     ) -> list[int]:
    """The length of each request, from end offsets in a tensor of ``rows`` rows."""
    if not ends:
        check.fail(RELATION, argument, ends, f"the end offset of each request in {of}, of one request at least", page)
        return []
    lengths = _alike(ends)
    if lengths is None:
        lengths = between(ends)
        if min(lengths) < 0:
            check.fail(RELATION, argument, list(ends), "cumulative: never negative, never decreasing", page)
    last = ends[-1]
    if last > rows:
        check.fail(RELATION, argument, f"{last} in its last element, for {rows} rows of {of}",
                   f"{of}T({rows}) must equal the last element of {argument}({last}): {of} lacks {last - rows} of the "
                   "planned rows", TILING, "SB-03")
    if last < rows:
        check.fail(RELATION, argument, f"{last} in its last element, for {rows} rows of {of}",
                   f"{of}T({rows}) must equal the last element of {argument}({last}): cover the other {rows - last} "
                   f"rows by a request of their own, or cut {of} to {last} rows", TILING, "SB-03", SHORT_SUM)
    if len(ends) > 4096:
        check.fail(SIZE, argument, f"{len(ends)} requests", "at most 4096", page)
    return lengths


def check_count(check: Check, argument: str, lengths: Sequence[int] | None, requests: int, of: str, page: str
                ) -> Sequence[int]:
    """As many lengths as the query's list has requests."""
    if lengths is None or len(lengths) != requests:
        check.fail(RELATION, argument, None if lengths is None else f"{len(lengths)} lengths",
                   f"{requests} lengths, one for each of {of}", page, "SB-04")
    return lengths or ()


def check_per_request(check: Check, argument: str, lengths: Sequence[int] | None, B: int, rows: int, page: str
                      ) -> list[int]:
    """The length of each request, from a list of lengths, or from none: all ``rows`` that there are."""
    if lengths is None:
        return [rows] * B
    if len(lengths) != B and len(lengths) != 1 and (len(lengths) < B or not lengths):
        check.fail(RELATION, argument, f"{len(lengths)} lengths", f"1, or one for each of {B} requests", page, "SB-04")
    lengths = for_each(lengths, B, rows)
    if lengths and (min(lengths) < 0 or max(lengths) > rows):
        check.fail(RELATION, argument, lengths, f"lengths of each request (not cumulative) from 0 to {rows}", page)
    return lengths

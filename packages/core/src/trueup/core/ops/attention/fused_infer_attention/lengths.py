"""How many query rows and keys each request has, and where they stand.

Packed tensors (T in the layout) take *end offsets*, cumulative, and so do their keys unless those are paged.
Everything else takes a length for each request, or one for all, or more than there are requests, which is cut.
"""
from collections.abc import Sequence
from operator import sub

from trueup.core.ops.attention.fused_infer_attention.arguments import Call
from trueup.core.ops.attention.fused_infer_attention.layouts import Layout

Spans = list[tuple[int, int]]  # (first row, rows) of each request


def between(ends: Sequence[int]) -> list[int]:
    """Lengths from end offsets."""
    return list(map(sub, ends, (0, *ends)))


def for_each(lengths: Sequence[int] | None, requests: int, rows: int) -> list[int]:
    """A length for each request; None says that all ``rows`` of each count."""
    if lengths is None:
        return [rows] * requests
    if len(lengths) == requests:
        return lengths if isinstance(lengths, list) else list(lengths)
    return [lengths[0]] * requests if len(lengths) == 1 else list(lengths[:requests])


def query_lengths(call: Call, layout: Layout) -> list[int]:
    """Query rows of each request.  Where the query has one row each, a device does not look at the list."""
    if layout.packed:
        return between(call.actual_seq_qlen or ())
    rows, requests = layout.rows(call.query), layout.requests(call.query)
    return [1] * requests if rows == 1 else for_each(call.actual_seq_qlen, requests, rows)


def key_lengths(call: Call, layout: Layout, requests: int) -> list[int]:
    """Keys of each request."""
    given = call.actual_seq_kvlen
    if call.block_table is not None:
        return for_each(given or (), requests, 0)
    return between(given or ()) if layout.packed else for_each(given, requests, layout.rows(call.key))


def spans(lengths: list[int], stride: int | None) -> Spans:
    """Where rows stand that lie ``stride`` apart in a batched tensor, or one after the other (None)."""
    if stride is not None:
        return [(b * stride, length) for b, length in enumerate(lengths)]
    found, start = [], 0
    for length in lengths:
        found.append((start, length))
        start += length
    return found

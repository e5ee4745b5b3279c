"""The requests of a call to a sparse-attention operator: which query rows and which keys belong together.

An indexer chooses keys for each query row, and sparse attention attends to them; both also exist in a quantised form.
All four lay out their tensors in the same ways:

=======  ========================  ===========================================================
layout   tensor                    lengths: int32, one for each request, on the device
=======  ========================  ===========================================================
BSND     query [B, q, N, D]        query rows of each request; None: all q
BSND     key [B, S, 1, D]          keys of each request; None: all S
TND      query [T, N, D]           cumulative; there are as many requests as elements
TND      key [S, 1, D]             cumulative
PA_BSND  key [pages, P, 1, D]      keys of each request; ``block_table`` [B, columns] names pages
=======  ========================  ===========================================================

Keys are BSND or TND as the queries are, or PA_BSND with either.  Below, query rows and keys are counted through the
flattened tensors, [T, N, D] and [keys, D].
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, assumed, describe, open_point
from trueup.core.ops.registry import poison

PAGES = "op-plugin: docs/.../torch_npu-npu_sparse_flash_attention.md, torch_npu-npu_lightning_indexer.md"
TILING = "ops-transformer: attention/sparse_flash_attention/op_host, attention/lightning_indexer/op_host"
QUERY_LAYOUTS = ("BSND", "TND")
KEY_LAYOUTS = ("BSND", "TND", "PA_BSND")
ALL_TOKENS = 2**63 - 1  # of pre_tokens and next_tokens: no window
FEW = 64  # entries of a block table: so many are looked at one by one sooner than with tensor operations

PAST_THE_END = open_point(
    "rows-past-the-end", "Are rows behind the last cumulative length zeroed, and index rows filled with -1?",
    "the call passes; these rows count as unwritten")

Span = tuple[int, int]  # first row, number of rows


class Requests(NamedTuple):
    """Where the query rows and keys of each request stand, and whether its rows see only keys up to their own place.

    Where keys lie in pages, each request counts its keys from 0.
    """

    q: list[Span]
    kv: list[Span]
    causal: bool

    def thresholds(self, rows: int) -> list[int]:
        """How many of its request's keys each of ``rows`` query rows may see; below 1: none, or it has no request."""
        found = [0] * rows
        for (start, count), (_, keys) in zip(self.q, self.kv, strict=True):
            if count == 1:
                found[start] = keys
            elif self.causal:
                found[start:start + count] = range(keys - count + 1, keys + 1)
            else:
                found[start:start + count] = [keys] * count
        return found


def requests_of(query: Tensor, key: Tensor, q_lengths: Tensor | None, kv_lengths: Tensor | None, layout_query: str,
                layout_kv: str, sparse_mode: int) -> Requests:
    """The requests of a call that its contract let pass."""
    q, kv = (None if lengths is None else lengths.tolist() for lengths in (q_lengths, kv_lengths))
    return _requests(query, key, q, kv, layout_query, layout_kv, sparse_mode)


def _requests(query: Tensor, key: Tensor, q: list[int] | None, kv: list[int] | None, layout_query: str, layout_kv: str,
              sparse_mode: int) -> Requests:
    return Requests(_spans(q, layout_query, query), _spans(kv, layout_kv, key), sparse_mode == 3)


def _spans(lengths: list[int] | None, layout: str, tensor: Tensor) -> list[Span]:
    B, S = tensor.shape[:2]
    values = [S] * B if lengths is None else lengths
    if layout == "PA_BSND":
        return [(0, keys) for keys in values]
    if layout == "BSND":
        return [(b * S, rows) for b, rows in enumerate(values)]
    return [(start, end - start) for start, end in zip([0, *values], values, strict=False)]


def check_requests(check: Check, query: Tensor, key: Tensor, q_lengths: Tensor | None, kv_lengths: Tensor | None,
                   block_table: Tensor | None, layout_query: str, layout_kv: str, sparse_mode: int, pre_tokens: int,
                   next_tokens: int, side: str) -> Callable[[], Requests]:
    """Layouts, lengths and pages agree; returns what says what they mean, which takes longer than to check them.

    ``side``: 'kv' or 'key', as the operator calls it in the names of its arguments.
    """
    if layout_query not in QUERY_LAYOUTS:
        check.fail(RELATION, "layout_query", repr(layout_query), "'BSND' or 'TND'", PAGES)
    if layout_kv not in KEY_LAYOUTS:
        check.fail(RELATION, f"layout_{side}", repr(layout_kv), "'BSND', 'TND' or 'PA_BSND'", PAGES)
    if layout_kv not in (layout_query, "PA_BSND"):
        check.fail(RELATION, f"layout_{side}", repr(layout_kv), f"{layout_query!r}, as layout_query, or 'PA_BSND'",
                   PAGES)
    if query.dim() != len(layout_query):
        check.fail(RELATION, "query", describe(query), f"the {len(layout_query)} axes of layout {layout_query}", PAGES)
    if key.dim() != (3 if layout_kv == "TND" else 4) or key.shape[-2] != 1:
        check.fail(RELATION, "key", describe(key), "(B, S, 1, D) in layout BSND, (S, 1, D) in TND, (pages, P, 1, D) in "
                   "PA_BSND: all heads share one key head", PAGES)
    if layout_kv == "BSND" and len(key) != len(query):
        check.fail(RELATION, "key", f"{len(key)} requests, {describe(key)}", f"{len(query)} requests, as query", PAGES,
                   "SB-01")
    if sparse_mode not in (0, 3):
        check.fail(RELATION, "sparse_mode", sparse_mode, "0 (a row sees all keys) or 3 (right-aligned causal)", PAGES)
    for name, tokens in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        if tokens != ALL_TOKENS:
            check.fail(RELATION, name, tokens, "2^63 - 1, its default: there is no window", PAGES)
    for name, tensor in (("query", query), ("key", key)):
        if not tensor.numel():
            check.fail(SIZE, name, describe(tensor), "no empty axis", PAGES)
        if not tensor.is_contiguous():
            check.fail(SIZE, name, f"not contiguous: {describe(tensor)} with strides {tensor.stride()}",
                       "a contiguous tensor: call .contiguous()", PAGES)

    q = _check_query_lengths(check, query, q_lengths, layout_query)
    B = query.shape[0] if q is None else len(q)
    kv = _check_key_lengths(check, key, kv_lengths, block_table, layout_kv, B, side)
    requests = partial(_requests, query, key, q, kv, layout_query, layout_kv, sparse_mode)
    if block_table is not None:
        _check_pages(check, key, block_table, requests)
    return requests


def _check_query_lengths(check: Check, query: Tensor, q_lengths: Tensor | None, layout_query: str
                         ) -> list[int] | None:
    """Returns the lengths."""
    if layout_query == "BSND":
        if q_lengths is None:
            return None
        B, q = query.shape[:2]
        _check_count(check, "actual_seq_lengths_query", q_lengths, B)
        _check_int32(check, "actual_seq_lengths_query", q_lengths)
        values = q_lengths.tolist()
        _check_each(check, "actual_seq_lengths_query", values, q)
        return values
    if q_lengths is None or q_lengths.dim() != 1 or not q_lengths.numel():
        check.fail(RELATION, "actual_seq_lengths_query", None if q_lengths is None else describe(q_lengths),
                   "the end offset of each request in query, of one request at least, where layout_query is 'TND'",
                   PAGES)
        return []
    _check_int32(check, "actual_seq_lengths_query", q_lengths)
    values = q_lengths.tolist()
    _check_cumulative(check, "actual_seq_lengths_query", values, query.shape[0])
    return values


def _check_key_lengths(check: Check, key: Tensor, kv_lengths: Tensor | None, block_table: Tensor | None,
                       layout_kv: str, B: int, side: str) -> list[int] | None:
    """Returns the lengths."""
    if layout_kv != "PA_BSND" and block_table is not None:
        check.fail(RELATION, "block_table", describe(block_table), f"None, unless layout_{side} is 'PA_BSND'", TILING)
    if kv_lengths is None:
        if layout_kv != "BSND":
            check.fail(RELATION, f"actual_seq_lengths_{side}", None, f"a length for each of {B} requests, where "
                       f"layout_{side} is 'TND' or 'PA_BSND'", PAGES)
        return None
    _check_count(check, f"actual_seq_lengths_{side}", kv_lengths, B)
    _check_int32(check, f"actual_seq_lengths_{side}", kv_lengths)
    values = kv_lengths.tolist()
    if layout_kv == "PA_BSND":
        _check_block_table(check, key, values, block_table, B, side)
    elif layout_kv == "TND":
        _check_cumulative(check, f"actual_seq_lengths_{side}", values, len(key))
    else:
        _check_each(check, f"actual_seq_lengths_{side}", values, key.shape[1])
    return values


def _check_count(check: Check, argument: str, lengths: Tensor, B: int) -> None:
    if lengths.shape != (B,):
        check.fail(RELATION, argument, f"{lengths.numel()} lengths, {describe(lengths)}",
                   f"{B} lengths, one for each request of query: take all lengths, and the rows of the block table, "
                   "from one plan, made after the padding", TILING, "SB-01")


def _check_int32(check: Check, argument: str, lengths: Tensor) -> None:
    if lengths.dtype != torch.int32:
        check.fail(DTYPE, argument, describe(lengths), "int32", PAGES)


def _check_each(check: Check, argument: str, values: list[int], most: int) -> None:
    if values and (min(values) < 0 or max(values) > most):
        check.fail(RELATION, argument, values, f"a length of each request (not cumulative) from 0 to {most}", PAGES)


def _check_cumulative(check: Check, argument: str, ends: list[int], rows: int) -> None:
    if ends[0] < 0 or ends != sorted(ends):
        check.fail(RELATION, argument, ends, "cumulative: never negative, never decreasing", PAGES)
    if ends[-1] > rows:
        check.fail(RELATION, argument, f"{ends[-1]} in its last element", f"at most {rows}, the rows of its tensor: "
                   "lengths and tensor are of different batches", PAGES, "SB-01")


def _check_block_table(check: Check, key: Tensor, kv_lengths: list[int], block_table: Tensor | None, B: int,
                       side: str) -> None:
    P = key.shape[1]
    if block_table is None:
        check.fail(RELATION, "block_table", None, f"the pages of each request, where layout_{side} is 'PA_BSND'",
                   PAGES)
        return
    if block_table.dim() != 2 or block_table.shape[0] != B:
        rows = len(block_table) if block_table.dim() else 0
        check.fail(RELATION, "block_table", f"{rows} rows, {describe(block_table)}", f"{B} rows, one for each request: "
                   "make it from the same plan as the lengths", TILING, "SB-01")
    if block_table.dtype != torch.int32:
        check.fail(DTYPE, "block_table", describe(block_table), "int32", PAGES)
    if not block_table.is_contiguous():
        check.fail(SIZE, "block_table", f"not contiguous: {describe(block_table)}", "a contiguous tensor", PAGES)
    if P % 16 or P > 1024:
        check.fail(SIZE, "key", describe(key, "pages, P, 1, D"), "P a multiple of 16, at most 1024", PAGES)
    _check_each(check, f"actual_seq_lengths_{side}", kv_lengths, block_table.shape[1] * P)


def _check_pages(check: Check, key: Tensor, block_table: Tensor, lengths: Callable[[], Requests]) -> None:
    """Every page that a request's keys lie in exists; what stands behind them in the table is never read."""
    pages, P = key.shape[0], key.shape[1]
    if block_table.numel() > FEW:
        low, high = block_table.aminmax()
        if low.item() >= 0 and high.item() < pages:
            return
    requests = lengths()
    for b, ids in enumerate(block_table.tolist()):
        read = ids[:-(-requests.kv[b][1] // P)] if requests.q[b][1] else []
        if read and (min(read) < 0 or max(read) >= pages):
            column = next(c for c, page in enumerate(read) if not 0 <= page < pages)
            check.fail(RELATION, f"block_table[{b}, {column}]", ids[column], f"0 to {pages - 1}: request {b} reads "
                       "this page, and a device would read foreign memory", PAGES)


# For kernels: requests in groups, and what a group reads.


class Block(NamedTuple):
    """The same number of query rows of each of G requests."""

    rows: Tensor  # [G, W], in the flattened query
    thresholds: Tensor  # [G, W], how many keys each row may see
    most: int  # the largest threshold


def groups(requests: Requests, width: int, heads: int, budget: int) -> Iterator[list[int]]:
    """Requests that have rows and keys, in order, where all of a group have the same number of rows.

    A group ends where a copy of its keys, padded and ``width`` wide, and scores of ``heads`` heads would pass
    ``budget`` elements.
    """
    group: list[int] = []
    W = S = 0
    for b, ((_, rows), (_, keys)) in enumerate(zip(requests.q, requests.kv, strict=True)):
        if rows == 0 or keys == 0:
            continue
        if group and (rows != W or (len(group) + 1) * max(S, keys) * (width + W * heads) > budget):
            yield group
            group, S = [], 0
        group.append(b)
        W, S = rows, max(S, keys)
    if group:
        yield group


def blocks(requests: Requests, group: list[int], size: int, device: torch.device) -> Iterator[Block]:
    """The query rows of a group, at most ``size`` of each request at a time; without blocks that see no key."""
    starts = torch.tensor([requests.q[b][0] for b in group], device=device)  # [G]
    keys = torch.tensor([requests.kv[b][1] for b in group], device=device)  # [G]
    W, longest = requests.q[group[0]][1], max(requests.kv[b][1] for b in group)
    for first in range(0, W, size):
        places = torch.arange(first, min(first + size, W), device=device)  # [w]
        thresholds = keys[:, None].expand(-1, len(places))  # [G, w]
        most = longest
        if requests.causal:
            thresholds = thresholds - W + places + 1  # [G, w]
            most = longest - W + min(first + size, W)
        if most > 0:
            yield Block(starts[:, None] + places, thresholds, most)


def key_rows(requests: Requests, group: list[int], positions: Tensor, key: Tensor, block_table: Tensor | None
             ) -> Tensor:
    """Where keys stand in the flattened key tensor: [G, S] from their places [G, S] in the requests of a group.

    Row numbers are int64, so that no offset into a large pool is computed in 32 bits (SB-25 in the bug gallery).
    """
    device = positions.device
    if block_table is None:
        return positions + torch.tensor([requests.kv[b][0] for b in group], device=device)[:, None]  # [G, S]
    P = key.shape[1]
    table = block_table[torch.tensor(group, device=device)].long()  # [G, columns]
    return table.gather(1, positions // P) * P + positions % P  # [G, S]


def all_places(requests: Requests, group: list[int], device: torch.device) -> Tensor:
    """Every place of the longest request of a group, [G, S]; a shorter one repeats its last key behind its end."""
    keys = torch.tensor([requests.kv[b][1] for b in group], device=device)  # [G]
    return torch.minimum(torch.arange(int(keys.max()), device=device), keys[:, None] - 1)  # [G, S]


def poison_past_the_end(out: Tensor, requests: Requests, layout_query: str) -> None:
    """What a device leaves unwritten in the rows of ``out``, [T, ...]: those behind the last request."""
    if layout_query == "TND" and not assumed(PAST_THE_END):
        end = sum(requests.q[-1])
        out[end:] = poison((1,), out.dtype, out.device)  # [T - end, ...]

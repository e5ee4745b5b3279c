"""What ``npu_fused_infer_attention_score_v2`` demands of the forms that trueup calls.

Built: packed queries (TND) over packed keys, with or without separate rope parts; packed queries over paged keys
(TND, TND_NTD), which is absorbed MLA; and batched queries and keys (BSND).  Every other form is refused as not
built.  Each form has its function below, named after its keys: packed, paged, batched.

A device enforces part of this, documents a part, and leaves the rest to its caller: nobody checks block ids or the
content of a mask, and a wrong one gives a wrong answer, or foreign memory, without an error.

One thing is only warned about: a ``softmax_scale`` of 1.0.  It is the default, so mostly it was forgotten, but it is
legal where the queries come scaled already.
"""
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.causal_mask import check_causal_mask
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, active_profile, describe
from trueup.core.ops.registry import float_dtypes, refuse_unbuilt

DOC = "torch_npu docs: npu_fused_infer_attention_score_v2"
TILING = "cann-ops-transformer: op_host/fused_infer_attention_score_tiling_check_feature.cpp"

AXES = {"TND": 3, "TND_NTD": 3, "BSND": 4}
UNBUILT_LAYOUTS = ("BSH", "BNSD", "NTD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD",
                   "BNSD_NBSD", "NSD")
UNBUILT_MODES = (1, 2, 4, 9)
MLA_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
PACKED_WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192))  # of query and key, and of value
NEUTRAL = {"query_quant_mode": 0, "key_quant_mode": 0, "value_quant_mode": 0, "inner_precise": 0}


class Call(NamedTuple):
    """The arguments that the rules of one form read."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    qlen: Sequence[int] | None
    kvlen: Sequence[int] | None
    G: int  # key heads
    layout: str


def fused_infer_attention_contract(
    check: Check, query: Tensor, key: Tensor, value: Tensor, *,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None, num_query_heads: int = 1, num_key_value_heads: int = 0,
    softmax_scale: float = 1.0, pre_tokens: int = 2147483647, next_tokens: int = 2147483647,
    input_layout: str = "BSH", sparse_mode: int = 0, block_size: int = 0, return_softmax_lse: bool = False,
    **rest: Any,
) -> None:
    """Refuse a call that a device would refuse, read wrongly or answer wrongly.

    ``pre_tokens`` and ``next_tokens`` may hold anything: neither mode 0 without a mask nor mode 3 looks at them.

    Raises:
        ContractError: says the rule, its source, and what to change.
    """
    refuse_unbuilt(check, rest, NEUTRAL)
    axes = AXES.get(input_layout)
    if axes is None:
        known = "is not built yet" if input_layout in UNBUILT_LAYOUTS else "does not exist"
        check.fail(RELATION, "input_layout", f"{input_layout!r}, which {known}", "'TND', 'TND_NTD' or 'BSND'", DOC)
    if query.dim() != axes:
        check.fail(RELATION, "query", describe(query), f"{axes} axes in layout {input_layout}", DOC)
    G = num_key_value_heads or num_query_heads
    call = Call(query, key, value, query_rope, key_rope, actual_seq_qlen, actual_seq_kvlen, G, input_layout)
    _check_memory(check, call)
    _check_heads(check, query, num_query_heads, G)
    _check_rope(check, call)
    _check_mode(check, sparse_mode, atten_mask)
    if softmax_scale == 1.0 and active_profile() != "paper":
        warnings.warn(f"{check.operator}: softmax_scale is 1.0, its default, so scores are not divided by sqrt(D)",
                      stacklevel=3)
    if block_table is not None:
        q_lens, kv_lens = _check_paged(check, call, block_table, block_size, return_softmax_lse)
    elif input_layout == "BSND":
        q_lens, kv_lens = _check_batched(check, call)
    else:
        q_lens, kv_lens = _check_packed(check, call)
    if sparse_mode == 3:
        for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            if q_len > kv_len > 0:
                check.fail(RELATION, "actual_seq_kvlen", f"{kv_len} keys for the {q_len} query rows of request {b}",
                           f"at least {q_len}: in sparse_mode 3 the last row sees all keys, so the first "
                           f"{q_len - kv_len} rows would see none", DOC)


def _check_packed(check: Check, call: Call) -> tuple[Sequence[int], Sequence[int]]:
    """TND, keys packed like the queries; returns both lengths of each request."""
    query, key, value, G = call.query, call.key, call.value, call.G
    T, N, D = query.shape
    if call.layout != "TND":
        check.fail(RELATION, "input_layout", repr(call.layout), "'TND', or a block_table: other forms are not built "
                   "yet", DOC)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.shape[1] != G or len(tensor) != len(key):
            check.fail(RELATION, name, describe(tensor), f"(Tkv, {G}, D), Tkv alike in key and value", DOC)
    if key.shape[2] != D:
        check.fail(RELATION, "key", describe(key), f"last axis {D}, as query", DOC)
    widths = (D, value.shape[2])
    if call.key_rope is not None:
        if call.key_rope.shape[:-1] != key.shape[:-1]:
            check.fail(RELATION, "key_rope", describe(call.key_rope), f"(Tkv, {G}, Dr) for key {describe(key)}", DOC)
        if widths != (128, 128):
            unbuilt = ". D = 512 without a block_table is not built yet" if D == 512 else ""
            check.fail(SIZE, "query", f"D = {D} with values of {widths[1]}", "128 and 128 beside rope" + unbuilt, DOC)
    elif widths not in PACKED_WIDTHS:
        check.fail(SIZE, "query", f"D = {D} with values of {widths[1]}", "64/64, 128/128, 192/128 or 192/192 in layout "
                   "TND; for D = 256 call once per request in layout BSND", "vllm-ascend: issue 8045")
    elif widths[1] == 192 and N != G:
        check.fail(SIZE, "value", describe(value), "last axis 128, or as many key heads as query heads", DOC)
    _check_group(check, N, G)
    q_lens = _check_cumulative(check, "actual_seq_qlen", call.qlen, "query", T)
    kv_ends = _check_count(check, call.kvlen, len(q_lens))
    return q_lens, _check_cumulative(check, "actual_seq_kvlen", kv_ends, "key", len(key))


def _check_paged(check: Check, call: Call, block_table: Tensor, block_size: int, want_lse: bool
                 ) -> tuple[Sequence[int], Sequence[int]]:
    """TND or TND_NTD over pages, which is absorbed MLA; returns both lengths of each request."""
    query, key, query_rope, key_rope = call.query, call.key, call.query_rope, call.key_rope
    if call.layout == "BSND" or query_rope is None or key_rope is None:
        check.fail(RELATION, "block_table", describe(block_table), "None, or layout TND or TND_NTD with query_rope and "
                   "key_rope (absorbed MLA): other paged forms are not built yet", DOC)
        return [], []
    T, N, D = query.shape
    if call.G != 1:
        check.fail(RELATION, "num_key_value_heads", call.G, "1: the heads of absorbed MLA share one latent", DOC)
    if D != 512:
        check.fail(SIZE, "query", describe(query), "D = 512, the latent, over paged keys with rope", DOC)
    if N not in MLA_HEADS:
        larger = next((heads for heads in MLA_HEADS if heads >= N), None)
        advice = f": pad the heads with zeros to {larger} and slice the result" if larger else ""
        check.fail(SIZE, "num_query_heads", N, "1, 2, 4, 8, 16, 32, 64 or 128 when D is 512" + advice, TILING, "SB-06")
    if block_size < 1:
        check.fail(RELATION, "block_size", block_size, "the number of rows in a page", DOC)
    if block_size % 16 or block_size > 1024:
        check.fail(SIZE, "block_size", block_size, "a multiple of 16, at most 1024", TILING)
    for name, pool, width in (("key", key, D), ("value", call.value, D), ("key_rope", key_rope, query_rope.shape[2])):
        page = pool.shape[1:]
        if page not in ((block_size, width), (1, block_size, width)) or len(page) + 1 != key.dim() \
                or len(pool) != len(key):
            check.fail(RELATION, name, describe(pool), f"(pages, {block_size}, {width}) or (pages, 1, {block_size}, "
                       f"{width}), pages and axes alike in key, value and key_rope", DOC)

    q_lens = _check_cumulative(check, "actual_seq_qlen", call.qlen, "query", T)
    kv_lens = _check_count(check, call.kvlen, len(q_lens))
    if max(q_lens) > 16:
        check.fail(SIZE, "actual_seq_qlen", f"{max(q_lens)} rows in one request", "at most 16 when D is 512",
                   "cann-ops-transformer: aclnnFusedInferAttentionScoreV4.md")
    if block_table.dtype != torch.int32:
        check.fail(DTYPE, "block_table", describe(block_table), "int32", DOC)
    if block_table.dim() != 2 or len(block_table) != len(q_lens):
        check.fail(RELATION, "block_table", describe(block_table), f"{len(q_lens)} rows, one for each request", DOC,
                   "SB-04")
    if not block_table.is_contiguous():
        check.fail(SIZE, "block_table", f"not contiguous: {describe(block_table)}", "a contiguous tensor", DOC)
    columns = block_table.shape[1]
    if min(kv_lens) < 0 or max(kv_lens) > columns * block_size:
        check.fail(RELATION, "actual_seq_kvlen", list(kv_lens), f"lengths of each request (not cumulative over pages) "
                   f"from 0 to {columns * block_size}: {columns} columns in block_table, {block_size} rows a page", DOC)
    _check_block_ids(check, block_table, kv_lens, block_size, len(key))
    if want_lse and call.layout == "TND_NTD":
        check.fail(SIZE, "return_softmax_lse", True, "False in layout TND_NTD; layout TND returns it", TILING)
    return q_lens, kv_lens


def _check_batched(check: Check, call: Call) -> tuple[Sequence[int], Sequence[int]]:
    """BSND, keys batched like the queries; returns both lengths of each request."""
    query, key, value, G = call.query, call.key, call.value, call.G
    B, S, N, D = query.shape
    if call.query_rope is not None:
        check.fail(RELATION, "query_rope", describe(call.query_rope), "None: rope apart is not built yet in layout "
                   "BSND", DOC)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 4 or len(tensor) != B or tensor.shape[2] != G or tensor.shape[1] != key.shape[1]:
            check.fail(RELATION, name, describe(tensor), f"({B}, Skv, {G}, D), Skv alike in key and value", DOC)
    if key.shape[3] != D:
        check.fail(RELATION, "key", describe(key), f"last axis {D}, as query", DOC)
    if value.shape[3] != D:
        check.fail(SIZE, "value", describe(value), f"last axis {D}, as query and key", DOC)
    if D % 16 or D > 512:
        check.fail(SIZE, "query", describe(query), "D a multiple of 16, at most 512", DOC)
    if B > 65536:
        check.fail(SIZE, "query", describe(query), "at most 65536 requests", DOC)
    _check_group(check, N, G)
    return (_check_per_request(check, "actual_seq_qlen", call.qlen, B, S),
            _check_per_request(check, "actual_seq_kvlen", call.kvlen, B, key.shape[1]))


def _check_memory(check: Check, call: Call) -> None:
    dtype = call.query.dtype
    if dtype not in float_dtypes(check):
        check.fail(DTYPE, "query", dtype, "float16 or bfloat16", DOC)
    for name, tensor in zip(call._fields[:5], call[:5], strict=True):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            check.fail(DTYPE, name, tensor.dtype, f"{dtype}, as query", DOC)
        if not tensor.is_contiguous():
            check.fail(SIZE, name, f"not contiguous: {describe(tensor)} with strides {tensor.stride()}",
                       "a contiguous tensor: call .contiguous() on what a split or transpose made", DOC)


def _check_heads(check: Check, query: Tensor, num_query_heads: int, G: int) -> None:
    N = query.shape[-2]
    if num_query_heads != N:
        check.fail(RELATION, "num_query_heads", num_query_heads, f"{N}, the heads of query {describe(query)}", DOC)
    if G < 1 or N % G:
        check.fail(RELATION, "num_key_value_heads", G, f"a divisor of the {N} query heads", DOC)
    if N > 256:
        check.fail(SIZE, "num_query_heads", N, "at most 256", DOC)


def _check_group(check: Check, N: int, G: int) -> None:
    if N > 64 * G:
        check.fail(SIZE, "num_key_value_heads", G, f"at most 64 query heads for each; there are {N}", DOC)


def _check_rope(check: Check, call: Call) -> None:
    query, query_rope, key_rope = call.query, call.query_rope, call.key_rope
    if query_rope is None and key_rope is None:
        return
    if query_rope is None or key_rope is None:
        check.fail(RELATION, "query_rope" if query_rope is None else "key_rope", None, "both ropes, or neither", DOC)
        return
    if query_rope.shape[:-1] != query.shape[:-1]:
        check.fail(RELATION, "query_rope", describe(query_rope), f"{list(query.shape[:-1])} and a width, as query", DOC)
    if query_rope.shape[-1] != key_rope.shape[-1]:
        check.fail(RELATION, "key_rope", describe(key_rope), f"last axis {query_rope.shape[-1]}, as query_rope", DOC)
    if query_rope.shape[-1] != 64:
        check.fail(SIZE, "query_rope", describe(query_rope), "last axis 64", DOC)
    if query.numel() == 0 or call.key.numel() == 0:
        check.fail(SIZE, "query" if query.numel() == 0 else "key", "empty", "at least one row where rope is given", DOC)


def _check_mode(check: Check, sparse_mode: int, mask: Tensor | None) -> None:
    if sparse_mode == 3:
        check_causal_mask(check, mask)
    elif sparse_mode != 0:
        known = "is not built yet" if sparse_mode in UNBUILT_MODES else "does not exist"
        check.fail(RELATION, "sparse_mode", f"{sparse_mode}, which {known}", "0 (no mask) or 3 (causal)", DOC)
    elif mask is not None:
        check.fail(RELATION, "atten_mask", describe(mask), "None: in sparse_mode 0 a device applies any mask as a full "
                   "one, which is not built yet. Causal attention is sparse_mode 3", DOC)


def _check_cumulative(check: Check, argument: str, ends: Sequence[int] | None, of: str, rows: int) -> list[int]:
    """The length of each request, from end offsets in a tensor of ``rows`` rows."""
    if not ends:
        check.fail(RELATION, argument, ends, f"the end offset of each request in {of}, of one request at least", DOC)
        return []
    lengths, start = [], 0
    for end in ends:
        if end < start:
            check.fail(RELATION, argument, list(ends), "cumulative: never negative, never decreasing", DOC)
        lengths.append(end - start)
        start = end
    if start != rows:
        remedy = (f"cover the other {rows - start} rows by a request of their own, or cut {of} to {start} rows"
                  if start < rows else f"{of} lacks {start - rows} of the planned rows")
        check.fail(RELATION, argument, f"{start} in its last element, for {rows} rows of {of}",
                   f"{of}T({rows}) must equal the last element of {argument}({start}): {remedy}", TILING, "SB-03")
    if len(ends) > 4096:
        check.fail(SIZE, argument, f"{len(ends)} requests", "at most 4096", DOC)
    return lengths


def _check_count(check: Check, kvlen: Sequence[int] | None, requests: int) -> Sequence[int]:
    if kvlen is None or len(kvlen) != requests:
        got = None if kvlen is None else f"{len(kvlen)} lengths"
        check.fail(RELATION, "actual_seq_kvlen", got, f"{requests} lengths, one for each of actual_seq_qlen", DOC,
                   "SB-04")
    return kvlen or ()


def _check_per_request(check: Check, argument: str, lengths: Sequence[int] | None, B: int, S: int) -> Sequence[int]:
    if lengths is None:
        return [S] * B
    if len(lengths) != 1 and len(lengths) < B:
        check.fail(RELATION, argument, f"{len(lengths)} lengths", f"1, or one for each of {B} requests", DOC, "SB-04")
    lengths = [lengths[0]] * B if len(lengths) == 1 else lengths[:B]
    if any(not 0 <= length <= S for length in lengths):
        check.fail(RELATION, argument, list(lengths), f"lengths of each request (not cumulative) from 0 to {S}", DOC)
    return lengths


def _check_block_ids(check: Check, table: Tensor, kv_lens: Sequence[int], block_size: int, pages: int) -> None:
    read = -(-max(kv_lens) // block_size)
    if read == 0:
        return
    low, high = table[:, :read].aminmax()
    if low.item() >= 0 and high.item() < pages:
        return
    # Entries past a request's own length are not read: they may hold anything.
    for b, (ids, kv_len) in enumerate(zip(table.tolist(), kv_lens, strict=True)):
        for column in range(-(-kv_len // block_size)):
            if not 0 <= ids[column] < pages:
                check.fail(RELATION, f"block_table[{b}, {column}]", ids[column], f"0 to {pages - 1}: request {b} reads "
                           "this page, and a device would read foreign memory", DOC)

"""What both versions of the operator demand of a call.

A device enforces part of this, documents a part, and leaves the rest to its caller: nobody checks block ids or the
content of a mask, and a wrong one gives a wrong answer, or foreign memory, without an error.

Not built, and refused: quantised queries, keys or outputs, left padding, shared prefixes, lists of key tensors.

Only warned about: a scale of 1.0, which is the default, so mostly it was forgotten, but it is legal where the queries
come scaled already; and a mode that has no effect because each request has one query row.
"""
import warnings
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import FOREVER, V1, V2, Call, Names, v1, v2
from trueup.core.ops.attention.fused_infer_attention.contract_keys import check_contiguous, check_paged
from trueup.core.ops.attention.fused_infer_attention.contract_lengths import check_cumulative, check_per_request, most
from trueup.core.ops.attention.fused_infer_attention.contract_masks import check_mask
from trueup.core.ops.attention.fused_infer_attention.contract_widths import check_widths
from trueup.core.ops.attention.fused_infer_attention.layouts import LAYOUTS, Layout
from trueup.core.ops.attention.fused_infer_attention.lengths import query_lengths
from trueup.core.ops.attention.fused_infer_attention.masks import lone
from trueup.core.ops.attention.fused_infer_attention.points import SINK_LSE
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, active_profile, describe
from trueup.core.ops.registry import float_dtypes

CONSISTENCY = "cann-ops-transformer: op_host/fused_infer_attention_score_tiling_check_consistency.cpp"


def contract_v2(check: Check, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> None:
    """Refuse a call that a device would refuse, read wrongly or answer wrongly.

    Raises:
        ContractError: says the rule, its source, and what to change.
    """
    call = v2(query, key, value, **rest)
    if call.rest:
        _refuse_unbuilt_v2(check, call.rest)
    check_call(check, V2, call)


def contract_v1(check: Check, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> None:
    """The same for version 1, which has no tree mask."""
    call = v1(query, key, value, **rest)
    if call.rest:
        _refuse_unbuilt_v1(check, call.rest)
    if call.sparse_mode == 9:
        check.fail(RELATION, "sparse_mode", 9, "0 to 4: the tree mask, 9, is in version 2 only", V1["page"])
    check_call(check, V1, call)


def _refuse_unbuilt_v2(check: Check, rest: dict[str, Any]) -> None:
    for argument in ("dequant_scale_query", "dequant_scale_key", "dequant_offset_key", "dequant_scale_value",
                     "dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out",
                     "quant_scale_p"):
        if rest.get(argument) is not None:
            check.fail(RELATION, argument, describe(rest[argument]), "None: quantised forms are not built yet",
                       V2["page"])
    for argument in ("query_quant_mode", "key_quant_mode", "value_quant_mode"):
        if rest.get(argument):
            check.fail(RELATION, argument, rest[argument], "0: quantised forms are not built yet", V2["page"])
    for argument in ("query_dtype", "key_dtype", "value_dtype", "query_rope_dtype", "key_rope_dtype",
                     "key_shared_prefix_dtype", "value_shared_prefix_dtype", "dequant_scale_query_dtype",
                     "dequant_scale_key_dtype", "dequant_scale_value_dtype", "dequant_scale_key_rope_dtype",
                     "out_dtype"):
        if rest.get(argument) is not None:
            check.fail(RELATION, argument, rest[argument], "None: low-bit types are not built yet", V2["page"])


def _refuse_unbuilt_v1(check: Check, rest: dict[str, Any]) -> None:
    for argument in ("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2",
                     "antiquant_scale", "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset",
                     "value_antiquant_scale", "value_antiquant_offset", "key_rope_antiquant_scale"):
        if rest.get(argument) is not None:
            check.fail(RELATION, argument, describe(rest[argument]), "None: quantised forms are not built yet",
                       V1["page"])
    for argument in ("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"):
        if rest.get(argument):
            check.fail(RELATION, argument, rest[argument], "0: quantised forms are not built yet", V1["page"])
    for argument in ("query_padding_size", "kv_padding_size"):
        if rest.get(argument) is not None:
            check.fail(RELATION, argument, describe(rest[argument]), "None: padding on the left is not built yet",
                       V1["page"])
    for argument in ("key_shared_prefix", "value_shared_prefix", "actual_shared_prefix_len"):
        if rest.get(argument) is not None:
            check.fail(RELATION, argument, "given", "None: shared prefixes are not built yet", V1["page"])


def check_call(check: Check, names: Names, call: Call) -> None:
    """All rules of a call, general ones first.  ``names``: what its version calls some arguments."""
    layout, query = LAYOUTS.get(call.input_layout), call.query
    if layout is None:
        check.fail(RELATION, "input_layout", f"{call.input_layout!r}, which does not exist",
                   "BSH, BSND, BNSD, TND, NTD, or one of BNSD_BSND, BSH_BNSD, BSND_BNSD, NTD_TND, TND_NTD, BSH_NBSD, "
                   "BSND_NBSD, BNSD_NBSD", names["page"])
        return
    if query.dim() != len(layout.query):
        check.fail(RELATION, "query", describe(query), f"{len(layout.query)} axes in layout {call.input_layout}",
                   names["page"])
    _check_memory(check, names, call)
    D = _check_heads(check, names, call, layout)
    Dr = 0 if call.query_rope is None is call.key_rope else _check_rope(check, names, call, layout)
    S = rows = layout.rows(query)
    if layout.packed:
        q_lens = check_cumulative(check, names["q_lens"], call.actual_seq_qlen, "query", S, names["page"])
        rows = most(q_lens)
    else:
        check_per_request(check, names["q_lens"], call.actual_seq_qlen, layout.requests(query), S, names["page"])
        q_lens = query_lengths(call, layout)
    if call.block_table is None:
        kv_lens, width, keys = check_contiguous(check, names, call, layout, len(q_lens), D, Dr)
    else:
        kv_lens, width, keys = check_paged(check, names, call, layout, len(q_lens), D, Dr)
    check_widths(check, names, call, layout, D, width, rows)
    if call.sparse_mode or call.atten_mask is not None:
        check_mask(check, names, call, layout, D, q_lens, kv_lens, rows, keys)
    if call.pse_shift is not None:
        _check_shift(check, names, call, layout, call.pse_shift, len(q_lens), rows, keys)
    if call.learnable_sink is not None:
        _check_sink(check, names, call, call.learnable_sink, width)
    if call.inner_precise:
        _check_precision(check, names, call, layout, D)
    if call.softmax_scale == 1.0 and active_profile() != "paper":
        warnings.warn(f"{check.operator}: {names['scale']} is 1.0, its default, so scores are not divided by sqrt(D)",
                      stacklevel=4)
    if (call.sparse_mode == 2 or (call.sparse_mode == 4 and call.pre_tokens < FOREVER)) and lone(call, layout):
        warnings.warn(f"{check.operator}: sparse_mode {call.sparse_mode} has no effect where each request has one "
                      "query row: it sees all keys", stacklevel=4)


def _check_memory(check: Check, names: Names, call: Call) -> None:
    dtype = call.query.dtype
    if dtype not in float_dtypes(check):
        check.fail(DTYPE, "query", dtype, "float16 or bfloat16", names["page"])
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value),
                         ("query_rope", call.query_rope), ("key_rope", call.key_rope)):
        if tensor is None or (name == "value" and tensor is call.key):
            continue
        if tensor.dtype != dtype:
            check.fail(DTYPE, name, tensor.dtype, f"{dtype}, as query", names["page"])
        if not tensor.is_contiguous():
            check.fail(SIZE, name, f"not contiguous: {describe(tensor)} with strides {tensor.stride()}",
                       "a contiguous tensor: call .contiguous() on what a split or transpose made", names["page"])


def _check_heads(check: Check, names: Names, call: Call, layout: Layout) -> int:
    """Returns D, the width of one head of the query."""
    query, N, G = call.query, call.num_query_heads, call.key_heads
    if N < 1:
        check.fail(RELATION, names["heads"], N, "the number of query heads", names["page"])
    if layout.query == "BSH":
        if query.shape[2] % N:
            check.fail(RELATION, names["heads"], N, f"a divisor of H, the last axis of query {describe(query)}",
                       names["page"])
        D = query.shape[2] // N
    else:
        heads, D = query.shape[layout.head_axis], query.shape[-1]
        if heads != N:
            check.fail(RELATION, names["heads"], N, f"{heads}, the heads of query {describe(query)}", names["page"])
    if D < 1:
        check.fail(RELATION, "query", describe(query), "heads at least 1 wide", names["page"])
    if G < 1 or N % G:
        check.fail(RELATION, "num_key_value_heads", G, f"a divisor of the {N} query heads", names["page"])
    if N > 256:
        check.fail(SIZE, names["heads"], N, "at most 256", names["page"])
    return D


def _check_rope(check: Check, names: Names, call: Call, layout: Layout) -> int:
    """Returns the width of one head of the rope parts."""
    query, query_rope, key_rope = call.query, call.query_rope, call.key_rope
    if query_rope is None or key_rope is None:
        check.fail(RELATION, "query_rope" if query_rope is None else "key_rope", None, "both ropes, or neither",
                   names["page"])
        return 0
    heads = call.num_query_heads if layout.query == "BSH" else 1
    shape = query_rope.shape
    Dr = shape[-1] // heads
    if shape[:-1] != query.shape[:-1] or shape[-1] % heads:
        check.fail(RELATION, "query_rope", describe(query_rope), f"{list(query.shape[:-1])} and a width, as query",
                   names["page"])
    if Dr != 64:
        check.fail(SIZE, "query_rope", f"{describe(query_rope)}, {Dr} for each head", "a width of 64 for each head",
                   names["page"])
    if not query.numel() or not call.key.numel():
        check.fail(SIZE, "key" if query.numel() else "query", "empty", "at least one row where rope is given",
                   names["page"])
    return Dr


def _check_shift(check: Check, names: Names, call: Call, layout: Layout, shift: Tensor, requests: int, rows: int,
                 keys: int) -> None:
    """``pse_shift``, added to the scaled scores."""
    N = call.num_query_heads
    if shift.dim() != 4 or shift.shape[0] not in (1, requests) or shift.shape[1] != N or shift.shape[2] < rows or \
            shift.shape[3] < keys:
        check.fail(RELATION, "pse_shift", describe(shift), f"({requests} or 1, {N}, at least {rows}, at least {keys}): "
                   "requests, heads, query rows, and keys, over pages all that fit in a row of block_table",
                   CONSISTENCY)
    if layout.packed or call.query_rope is not None:
        check.fail(SIZE, "pse_shift", describe(shift), "None in packed layouts and beside rope", names["page"])
    if shift.dtype != call.query.dtype:
        check.fail(DTYPE, "pse_shift", shift.dtype, f"{call.query.dtype}, as query", names["page"])
    if not shift.is_contiguous():
        check.fail(SIZE, "pse_shift", f"not contiguous: {describe(shift)}", "a contiguous tensor", names["page"])


def _check_sink(check: Check, names: Names, call: Call, sink: Tensor, width: int) -> None:
    """``learnable_sink``, a score without a value."""
    if sink.shape != (call.num_query_heads,):
        check.fail(RELATION, "learnable_sink", describe(sink), f"({call.num_query_heads},), a score for each query "
                   "head", names["page"])
    if call.input_layout not in ("TND", "NTD_TND"):
        check.fail(SIZE, "input_layout", repr(call.input_layout), "TND or NTD_TND beside learnable_sink", names["page"])
    if width > 128:
        check.fail(SIZE, "value", f"heads {width} wide", "at most 128 beside learnable_sink", names["page"])
    if sink.dtype != torch.bfloat16 and not (check.host_floats and sink.dtype == call.query.dtype):
        check.fail(DTYPE, "learnable_sink", sink.dtype, "bfloat16", names["page"])
    if not sink.is_contiguous():
        check.fail(SIZE, "learnable_sink", f"not contiguous: {describe(sink)}", "a contiguous tensor", names["page"])
    if call.return_softmax_lse:
        check.fail(RELATION, names["lse"], True, "False beside learnable_sink: whether the lse counts the sink is not "
                   "documented", names["page"], unless=SINK_LSE)


def _check_precision(check: Check, names: Names, call: Call, layout: Layout, D: int) -> None:
    """``inner_precise``: bit 0 high performance, bit 1 zeros for rows that see nothing."""
    precise = call.inner_precise
    if precise not in (1, 2, 3):
        check.fail(RELATION, "inner_precise", precise, "0, 1, 2 or 3", names["page"])
    if precise > 1 and not layout.packed and layout.rows(call.query) == 1:
        check.fail(SIZE, "inner_precise", precise, "0 or 1 where each request has one query row", names["page"])
    if layout.packed and D != 512 and call.num_query_heads == call.key_heads:
        if call.query.dtype == torch.bfloat16:
            check.fail(SIZE, "inner_precise", precise, "0 for packed bfloat16 rows with as many key heads as query "
                       "heads", names["page"])
        if precise > 1:
            check.fail(SIZE, "inner_precise", precise, "0 or 1 for packed rows with as many key heads as query heads",
                       names["page"])

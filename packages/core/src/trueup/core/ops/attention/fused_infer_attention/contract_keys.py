"""The rules of keys and values, as tensors of their own or in pages."""
from collections.abc import Sequence

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import Call, Names
from trueup.core.ops.attention.fused_infer_attention.contract_lengths import (
    TILING,
    check_count,
    check_cumulative,
    check_per_request,
)
from trueup.core.ops.attention.fused_infer_attention.layouts import Layout, key_shape, value_width
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe

V4 = "cann-ops-transformer: aclnnFusedInferAttentionScoreV4.md"
Found = tuple[Sequence[int], int, int]  # keys of each request, the width of a value's head, keys there is room for


def check_contiguous(check: Check, names: Names, call: Call, layout: Layout, requests: int, D: int, Dr: int) -> Found:
    """Keys and values laid out like the query."""
    axes, G, key, value, key_rope = layout.query, call.key_heads, call.key, call.value, call.key_rope
    if key.dim() != len(axes) or value.dim() != len(axes):
        check.fail(RELATION, "key" if key.dim() != len(axes) else "value",
                   describe(key if key.dim() != len(axes) else value), f"{layout.keys} in layout {call.input_layout}",
                   names["page"])
    Skv, Dv = layout.rows(key), value_width(layout, value, G, False)
    if key.shape != (shape := key_shape(axes, requests, Skv, G, D)):
        check.fail(RELATION, "key", describe(key), f"{list(shape)}: {layout.keys} with G = {G}, B as in query, and "
                   "heads as wide as those of query", names["page"])
    if value.shape != (shape := key_shape(axes, requests, Skv, G, Dv)) or not Dv:
        check.fail(RELATION, "value", describe(value), f"{list(shape)}: {layout.keys} with as many rows as key, and "
                   "heads of a width of their own", names["page"])
    if key_rope is not None and key_rope.shape != (shape := key_shape(axes, requests, Skv, G, Dr)):
        check.fail(RELATION, "key_rope", describe(key_rope), f"{list(shape)}: {layout.keys} with as many rows as "
                   "key, and heads as wide as those of query_rope", names["page"])
    if layout.packed:
        ends = check_count(check, names["kv_lens"], call.actual_seq_kvlen, requests, names["q_lens"], names["page"])
        kv_lens = check_cumulative(check, names["kv_lens"], ends, "key", Skv, names["page"])
        Skv = max(kv_lens, default=0)
    else:
        kv_lens = check_per_request(check, names["kv_lens"], call.actual_seq_kvlen, requests, Skv, names["page"])
        if Skv > 262144 and layout.rows(call.query) == 1:
            check.fail(SIZE, "key", describe(key), "at most 262144 keys of a request with one query row", names["page"])
    return kv_lens, Dv, Skv


def check_paged(check: Check, names: Names, call: Call, layout: Layout, requests: int, D: int, Dr: int) -> Found:
    """Keys and values in pages, which ``block_table`` names."""
    key, value, table, P, G = call.key, call.value, call.block_table, call.block_size, call.key_heads
    assert table is not None
    if P < 1:
        check.fail(RELATION, "block_size", P, "the number of rows in a page", names["page"])
    pages, axes, Dv = key.shape[0], key.dim(), D
    _check_pool(check, names, "key", key, pages, axes, P, G, D)
    if value is not key and value.shape != key.shape:
        if value.dim() not in (3, 4, 5) or not value.shape[-1]:
            check.fail(RELATION, "value", describe(value), "3, 4 or 5 axes beside a block_table", names["page"])
        Dv = value_width(layout, value, G, True)
        _check_pool(check, names, "value", value, pages, axes, P, G, Dv)
    if call.key_rope is not None:
        _check_pool(check, names, "key_rope", call.key_rope, pages, axes, P, G, Dr)
    _check_store(check, names, call, layout, axes, D, Dv)
    if layout.packed or call.query_rope is not None:
        if P % 16 or P > 1024:
            check.fail(SIZE, "block_size", P, "a multiple of 16, at most 1024, in packed layouts and beside rope",
                       TILING)
    elif layout.rows(call.query) > 1:
        if P % 128 or P > 512:
            check.fail(SIZE, "block_size", P, "a multiple of 128, at most 512, where requests have several query rows",
                       names["page"])
    elif P % 16 or P > 512:
        check.fail(SIZE, "block_size", P, "a multiple of 16, at most 512, where each request has one query row",
                   names["page"])

    if table.dtype != torch.int32:
        check.fail(DTYPE, "block_table", describe(table), "int32", names["page"])
        if table.is_floating_point() or table.dtype == torch.bool:
            check.fail(RELATION, "block_table", describe(table), "page ids", names["page"])
    if table.dim() != 2 or table.shape[0] != requests:
        check.fail(RELATION, "block_table", describe(table), f"{requests} rows, one for each request", names["page"],
                   "SB-04")
    if not table.is_contiguous():
        check.fail(SIZE, "block_table", f"not contiguous: {describe(table)}", "a contiguous tensor", names["page"])
    if call.actual_seq_kvlen is None or (layout.packed and len(call.actual_seq_kvlen) != requests):
        check_count(check, names["kv_lens"], call.actual_seq_kvlen, requests, names["q_lens"] if layout.packed else
                    "the requests", names["page"])
    room = table.shape[1] * P
    kv_lens = check_per_request(check, names["kv_lens"], call.actual_seq_kvlen, requests, room, names["page"])
    _check_block_ids(check, names, table, kv_lens, P, pages)
    return kv_lens, Dv, room


def _check_pool(check: Check, names: Names, name: str, pool: Tensor, pages: int, axes: int, P: int, G: int,
                width: int) -> None:
    """One pool has as many pages and axes as the keys, and pages of a shape that holds P rows of G heads."""
    shape = pool.shape
    if shape == ((pages, P, G * width) if axes == 3 else (pages, G, P, width)):
        return
    if axes == 5 == len(shape) and shape[0] == pages and shape[1] == G and shape[3] == P and \
            shape[2] * shape[4] == width:
        if shape[4] != 16:
            check.fail(SIZE, name, describe(pool), "tiles of 16 columns, the last axis, in pages of 5 axes",
                       names["page"])
        return
    check.fail(RELATION, name, describe(pool), f"(pages, {P}, {G * width}), (pages, {G}, {P}, {width}) or (pages, {G}, "
               f"{width}/16, {P}, 16): block_size rows of heads as wide as the query's; pages and axes alike in key, "
               "value and key_rope", names["page"])


def _check_store(check: Check, names: Names, call: Call, layout: Layout, axes: int, D: int, Dv: int) -> None:
    """Which shape of pages goes with which layout of the query."""
    G = call.key_heads
    if axes == 3 and (G * D > 65535 or G * Dv > 65535):
        check.fail(SIZE, "key", f"{describe(call.key)}, rows of {G * D}", "at most 65535 columns; (pages, G, "
                   "block_size, D) has no such limit", names["page"])
    if axes == 4 and layout.query not in ("BNSD", "TND"):
        check.fail(SIZE, "key", describe(call.key), f"(pages, block_size, G*D) in layout {call.input_layout}: heads "
                   "before rows go with BNSD and TND queries", names["page"])
    if axes == 5 and layout.query == "BNSD":
        check.fail(SIZE, "key", describe(call.key), "3 or 4 axes beside BNSD queries", V4)
    if axes == 5 and call.query_rope is None and (D, Dv) not in ((64, 64), (128, 128), (192, 128)):
        check.fail(SIZE, "key", f"D = {D} with values of {Dv}", "64 and 64, 128 and 128, or 192 and 128 in pages of 5 "
                   "axes", TILING)
    if axes < 5 and Dv != D:
        check.fail(SIZE, "value", f"D = {D} with values of {Dv}", "keys and values alike in pages", names["page"])
    if axes > 3 and layout.packed and D != 512 and call.num_query_heads == G:
        check.fail(SIZE, "key", describe(call.key), "(pages, block_size, G*D) for packed rows with as many key heads "
                   "as query heads", names["page"])


def _check_block_ids(check: Check, names: Names, table: Tensor, kv_lens: Sequence[int], P: int, pages: int) -> None:
    """Of the pages that are read: entries past a request's length may hold anything."""
    if table.numel() <= 16:  # a list is faster
        ids = table.flatten().tolist() or [0]
        low, high = min(ids), max(ids)
    else:
        low, high = map(Tensor.item, table.aminmax())
        if low < 0 or high >= pages:  # where nothing is read, perhaps
            low, high = map(Tensor.item, table[:, :max(1, -(-max(kv_lens) // P))].aminmax())
    if low >= 0 and high < pages:
        return
    for b, (row, kv_len) in enumerate(zip(table.tolist(), kv_lens, strict=True)):
        for column in range(-(-kv_len // P)):
            if not 0 <= row[column] < pages:
                check.fail(RELATION, f"block_table[{b}, {column}]", row[column], f"0 to {pages - 1}: request {b} reads "
                           "this page, and a device would read foreign memory", names["page"])

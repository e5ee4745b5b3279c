"""The rules of sparse_mode, ``atten_mask``, pre_tokens and next_tokens (see masks.py)."""
from collections.abc import Sequence
from operator import gt

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import Call, Names
from trueup.core.ops.attention.fused_infer_attention.causal_mask import check_causal_mask
from trueup.core.ops.attention.fused_infer_attention.contract_lengths import TILING
from trueup.core.ops.attention.fused_infer_attention.contract_widths import absorbed
from trueup.core.ops.attention.fused_infer_attention.layouts import Layout
from trueup.core.ops.attention.fused_infer_attention.masks import Band, Mask, band_of, limits, mask_of
from trueup.core.ops.attention.fused_infer_attention.points import MASKED_ROW, MORE_ROWS, PAGED_MASK, TREE_FORWARD
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe

PAGED_ISSUE = "vllm-ascend: issue 15503"
CHECKER = "ops-transformer: fused_infer_attention_score/op_host/checkers/mask_checker.cpp"
Lengths = Sequence[int]


def check_mask(check: Check, names: Names, call: Call, layout: Layout, D: int, q_lens: Lengths, kv_lens: Lengths,
               rows: int, keys: int) -> None:
    """Of a call with a mode, or a mask.  ``rows``, ``keys``: what a mask that spells everything out must hold."""
    mode, mask = call.sparse_mode, call.atten_mask
    if mode not in (0, 1, 2, 3, 4, 9):
        check.fail(RELATION, "sparse_mode", f"{mode}, which does not exist", "0 to 4, or the tree mask, 9, of version "
                   "2", names["page"])
    if layout.packed and mode in (0, 1, 2):
        check.fail(SIZE, "sparse_mode", f"{mode} with a mask" if mode == 0 else mode, "0 without a mask, 3 or 4 in "
                   "packed layouts (9 for trees)", names["page"])
    if absorbed(call, D) and mode in (1, 2):
        check.fail(SIZE, "sparse_mode", mode, "0, 3, 4 or, in version 2, 9 with D = 512", TILING)
    if mode in (2, 3, 4):
        check_causal_mask(check, mask)
    elif mask is None:
        check.fail(RELATION, "atten_mask", None, f"a mask: sparse_mode {mode} reads it", names["page"])
        return
    else:
        _check_content(check, names, mask)
        if mode == 9:
            _check_tree(check, names, call, layout, D, mask, q_lens, kv_lens, rows)
        else:
            _check_full(check, names, call, mask, len(q_lens), rows, keys)
            if rows == 1 and call.block_table is not None and max(kv_lens, default=0) > 512:
                check.fail(SIZE, "atten_mask", f"{describe(mask)} over {max(kv_lens)} paged keys", "at most 512 paged "
                           "keys where each request has one query row: a device was seen to ignore a mask past them, "
                           "without an error; a pse_shift for all heads works", PAGED_ISSUE, unless=PAGED_MASK)
    band = band_of(call, layout)
    if mode == 3:
        if any(map(gt, q_lens, kv_lens)):
            _check_more_keys(check, names, q_lens, kv_lens)
    elif band is not None and mode != 2:
        _check_tokens(check, names, call)
    if call.inner_precise < 2 and mode not in (2, 3):
        _check_sight(check, names, call, layout, band, q_lens, kv_lens)


def _check_content(check: Check, names: Names, mask: Tensor) -> None:
    """Of masks that say something themselves."""
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        check.fail(DTYPE, "atten_mask", describe(mask), "bool, int8 or uint8", names["page"])
    if not mask.is_contiguous():
        check.fail(SIZE, "atten_mask", f"not contiguous: {describe(mask)}", "a contiguous tensor", names["page"])
    if mask.dtype != torch.bool and mask.numel():
        low, high = mask.aminmax()
        if low.item() < 0 or high.item() > 1:
            check.fail(RELATION, "atten_mask", f"from {low.item()} to {high.item()}", "0 (a key is seen) or 1 (it is "
                       "not)", names["page"])


def _check_full(check: Check, names: Names, call: Call, mask: Tensor, requests: int, rows: int, keys: int) -> None:
    """Modes 0 and 1: which keys each row does not see."""
    shape = mask.shape
    if mask.dim() == 4:
        fits = shape[0] in (1, requests) and shape[1] == 1 and shape[2] >= rows and shape[3] >= keys
    elif mask.dim() == 3:
        fits = shape[0] == 1 and shape[1] >= rows and shape[2] >= keys
    else:
        fits = mask.dim() == 2 and (shape[0] == requests if rows == 1 else shape[0] >= rows) and shape[1] >= keys
        if call.query_rope is not None or call.input_layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND"):
            check.fail(SIZE, "atten_mask", describe(mask), "3 or 4 axes beside rope and outside BSH, BSND, BNSD and "
                       "BNSD_BSND", names["page"])
    if not fits:
        check.fail(RELATION, "atten_mask", describe(mask), f"({requests} or 1, 1, {rows}, {keys}), (1, {rows}, {keys}) "
                   f"or ({rows}, {keys}), with one query row ({requests}, {keys}), or longer last axes: query rows, "
                   "and keys, over pages all that fit in a row of block_table", names["page"])


def _check_tree(check: Check, names: Names, call: Call, layout: Layout, D: int, mask: Tensor, q_lens: Lengths,
                kv_lens: Lengths, rows: int) -> None:
    """Mode 9: which of the last keys, as many as query rows, each row does not see."""
    if not absorbed(call, D):
        check.fail(SIZE, "sparse_mode", 9, "0 to 4: the tree mask is for absorbed MLA, which is rope beside D = 512",
                   names["page"])
    if layout.packed:
        squares = sum(q * q for q in q_lens)
        if mask.shape != (squares,):
            check.fail(RELATION, "atten_mask", describe(mask), f"({squares},): a square of its query rows for each "
                       "request, one after the other", names["page"])
    elif mask.shape != (len(q_lens), rows, rows):
        check.fail(RELATION, "atten_mask", describe(mask), f"({len(q_lens)}, {rows}, {rows}): a square of its query "
                   "rows for each request", names["page"])
    for b, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if q > kv > 0:
            check.fail(RELATION, names["kv_lens"], f"{kv} keys for the {q} query rows of request {b}", f"at least {q}: "
                       "the rows' own keys are the last ones", CHECKER)
    trees = mask_of(call, layout, list(q_lens))
    assert trees is not None
    for b, tree in enumerate(trees.matrices):
        if not (tree != 0).logical_or(torch.ones_like(tree, dtype=torch.bool).tril()).all():
            check.fail(RELATION, "atten_mask", f"the tree of request {b} shows a row others behind it", "1 above the "
                       "diagonal: parents come before their children", CHECKER, unless=TREE_FORWARD)


def _check_more_keys(check: Check, names: Names, q_lens: Lengths, kv_lens: Lengths) -> None:
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if q_len > kv_len > 0:
            check.fail(RELATION, names["kv_lens"], f"{kv_len} keys for the {q_len} query rows of request {b}",
                       f"at least {q_len}: in sparse_mode 3 the last row sees all keys, so the first {q_len - kv_len} "
                       "rows would see none", names["page"], unless=MORE_ROWS)


def _check_tokens(check: Check, names: Names, call: Call) -> None:
    before, after = call.pre_tokens, call.next_tokens
    if before < 0 and after < 0:
        check.fail(RELATION, "next_tokens", f"{after}, with pre_tokens {before}", "not both negative", TILING)
    if -after > before:
        check.fail(RELATION, "next_tokens", f"{after}, with pre_tokens {before}", f"at least {-before}: the band ends "
                   "where it starts, or behind", TILING)


def _check_sight(check: Check, names: Names, call: Call, layout: Layout, band: Band | None, q_lens: Lengths,
                 kv_lens: Lengths) -> None:
    """Every row of a request that has keys sees one, as long as ``inner_precise`` does not make zeros of the others."""
    mask = mask_of(call, layout, list(q_lens))
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if not q_len or not kv_len:
            continue
        if band is not None:  # it moves with the rows: if any sees nothing, the first or the last does
            shift = kv_len - q_len if band.right else 0
            if shift + band.after < 0 or q_len + shift - band.before > kv_len:
                check.fail(RELATION, "pre_tokens", f"{band.before} and next_tokens {band.after}, for {q_len} query "
                           f"rows and {kv_len} keys of request {b}", "a key for every row in between, or inner_precise "
                           "2 or 3, which makes zeros of rows without", names["page"], unless=MASKED_ROW)
        if mask is None:
            continue
        blind = _first_blind(mask, b, band, q_len, kv_len)
        if blind is not None:
            check.fail(RELATION, "atten_mask", f"without a key for row {blind} of request {b}", "a key for every row, "
                       "or inner_precise 2 or 3, which makes zeros of such rows", names["page"], unless=MASKED_ROW)


def _first_blind(mask: Mask, request: int, band: Band | None, q_len: int, kv_len: int) -> int | None:
    hidden = mask.hides(request, slice(q_len), kv_len)  # [q, kv]
    if band is not None:
        starts, ends = limits(band, q_len, kv_len)
        key = torch.arange(kv_len, device=hidden.device)  # [kv]
        hidden = hidden | (key >= torch.tensor(ends, device=hidden.device)[:, None])  # [q, kv]
        if starts:
            hidden = hidden | (key < torch.tensor(starts, device=hidden.device)[:, None])  # [q, kv]
    rows = hidden.all(1)  # [q]
    return int(rows.int().argmax()) if rows.any() else None

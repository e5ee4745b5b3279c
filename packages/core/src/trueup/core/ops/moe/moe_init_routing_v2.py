"""Rows to experts, second version: by rank, with a capacity, and quantised on the way.

A pair (t, j) is entry t*K + j of ``expert_idx``; moe_init_routing.py tells how this fits with its neighbours.
"""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.indices import span
from trueup.core.ops.registry import accumulator, float_dtypes, poison, reference, refuse_unbuilt

PAGE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_init_routing_v2.md"
HOST = "op-plugin: op_plugin/ops/opapi/MoeInitRoutingV2KernelNpuOpApi.cpp"
TILING = "ops-transformer: moe/moe_init_routing_v3/op_host/moe_init_routing_v3_tiling.cpp"
MOST_EXPERTS = 10240
MOST_EXPERTS_AS_PAIRS = 5120
NO_QUANT, STATIC, DYNAMIC = -1, 0, 1  # quant_mode
SCATTER = 1  # row_idx_type; 0 is gather
CUMSUM, COUNT, PAIRS = 0, 1, 2  # expert_tokens_num_type
MINUS_ONE = open_point(
    "moe-expert-minus-one",
    "An expert id of -1 in npu_moe_init_routing_v2: a new page of the kernel below says that such a pair is left out, "
    "the page of torch_npu wants ids of experts.",
    "refused; otherwise the pair is left out")


def moe_init_routing_v2_contract(
    check: Check, x: Tensor, expert_idx: Tensor, *, scale: Tensor | None = None, offset: Tensor | None = None,
    active_num: int = -1, expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False, quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (), row_idx_type: int = 0, **rest: Any,
) -> None:
    """What ``npu_moe_init_routing_v2`` demands; raises ContractError.

    Stricter than the operator page in one point: ``active_expert_range`` must be given.  The page makes it
    optional, but the host code keeps the default in a function-static variable, so a later call with another
    ``expert_num`` counts over the first call's experts; earlier versions refuse an empty range outright.

    ``x_dtype`` and the quantisations of Ascend 950 (fp8, hif8, mx, int4) are not built.
    Source: torch_npu docs: npu_moe_init_routing_v2.
    """
    refuse_unbuilt(check, rest)
    if x.ndim != 2:
        check.fail(RELATION, "x", describe(x), "[T, H]: one row a token", PAGE)
    if expert_idx.ndim != 2:
        check.fail(RELATION, "expert_idx", describe(expert_idx), "[T, K]: one row a token", PAGE)
    if len(expert_idx) != len(x):
        check.fail(RELATION, "expert_idx", describe(expert_idx, "T, K"),
                   f"[{len(x)}, K], as many rows as x {describe(x, 'T, H')}", PAGE)
    if expert_num < 1:
        check.fail(RELATION, "expert_num", expert_num, "the number of experts; the default -1 stands for none", PAGE)
    if len(active_expert_range) == 0:
        check.fail(RELATION, "active_expert_range", "empty (the default)",
                   f"[first, last + 1], [0, {expert_num}] for all: the host remembers the default of the first call, "
                   "and a later call with another expert_num would use that", HOST)
    first, end = active_expert_range if len(active_expert_range) == 2 else (0, 0)
    if not 0 <= first < end <= expert_num:
        check.fail(RELATION, "active_expert_range", list(active_expert_range),
                   f"[first, last + 1] with 0 <= first <= last < {expert_num} (expert_num)", PAGE)
    _ids_contract(check, expert_idx, expert_num)
    _quant_contract(check, x, scale, offset, quant_mode, end - first)
    if active_num < -1:
        check.fail(RELATION, "active_num", active_num, "a number of rows, or 0 or -1 for all", PAGE)
    if expert_tokens_num_type not in (CUMSUM, COUNT, PAIRS):
        check.fail(RELATION, "expert_tokens_num_type", expert_tokens_num_type,
                   "0 (running sum), 1 (count) or 2 (expert and count)", PAGE)
    if row_idx_type not in (0, 1):
        check.fail(RELATION, "row_idx_type", row_idx_type, "0 (gather) or 1 (scatter)", PAGE)
    if drop_pad_mode not in (0, 1):
        check.fail(RELATION, "drop_pad_mode", drop_pad_mode, "0 (all rows) or 1 (expert_capacity rows an expert)", PAGE)
    if drop_pad_mode == 1:
        if not 1 <= expert_capacity <= len(x):
            check.fail(RELATION, "expert_capacity", expert_capacity,
                       f"1 to {len(x)} (T) in drop_pad_mode 1: more than T rows no expert can get", TILING)
        if row_idx_type == SCATTER:
            check.fail(RELATION, "row_idx_type", row_idx_type, "0 (gather) in drop_pad_mode 1", TILING)
        if (first, end) != (0, expert_num):
            check.fail(RELATION, "active_expert_range", list(active_expert_range),
                       f"[0, {expert_num}], all experts, in drop_pad_mode 1", TILING)
        if expert_tokens_num_flag and expert_tokens_num_type != COUNT:
            check.fail(RELATION, "expert_tokens_num_type", expert_tokens_num_type, "1 (count) in drop_pad_mode 1",
                       TILING)
    if expert_num > MOST_EXPERTS:
        check.fail(SIZE, "expert_num", expert_num, f"at most {MOST_EXPERTS}", PAGE)
    if expert_num > MOST_EXPERTS_AS_PAIRS and expert_tokens_num_type == PAIRS:
        check.fail(SIZE, "expert_num", expert_num, f"at most {MOST_EXPERTS_AS_PAIRS} with expert_tokens_num_type 2",
                   PAGE)
    if expert_idx.dtype != torch.int32:
        check.fail(DTYPE, "expert_idx", describe(expert_idx, "T, K"), "int32", PAGE)


def _ids_contract(check: Check, expert_idx: Tensor, expert_num: int) -> None:
    low, high = map(int, torch.aminmax(expert_idx)) if expert_idx.numel() else (0, 0)
    if low < -1 or high >= expert_num:
        check.fail(RELATION, "expert_idx", span(expert_idx),
                   f"expert ids 0 to {expert_num - 1} (expert_num {expert_num}); to drop a padding row, raise "
                   f"expert_num by one and give the row the id {expert_num}, outside active_expert_range",
                   PAGE, "SB-08")
    if low == -1:
        check.fail(RELATION, "expert_idx", span(expert_idx),
                   f"expert ids 0 to {expert_num - 1} (expert_num {expert_num}), not -1; to drop a padding row, raise "
                   f"expert_num by one and give the row the id {expert_num}, outside active_expert_range",
                   PAGE, "SB-08", unless=MINUS_ONE)


def _quant_contract(check: Check, x: Tensor, scale: Tensor | None, offset: Tensor | None, quant_mode: int,
                    experts: int) -> None:
    T, H = x.shape
    if quant_mode not in (NO_QUANT, STATIC, DYNAMIC):
        check.fail(RELATION, "quant_mode", quant_mode,
                   "-1 (none), 0 (static int8) or 1 (dynamic int8): the others, of Ascend 950, are not built", PAGE)
    if quant_mode == NO_QUANT and scale is not None and scale.shape != (T,):
        check.fail(RELATION, "scale", describe(scale), f"[{T}], one number a row of x, without quantisation", PAGE)
    if quant_mode == STATIC and (scale is None or scale.shape != (1,)):
        check.fail(RELATION, "scale", describe(scale) if scale is not None else None,
                   "[1], one number for all, in quant_mode 0", PAGE)
    if quant_mode == STATIC and (offset is None or offset.shape != (1,)):
        check.fail(RELATION, "offset", describe(offset) if offset is not None else None,
                   "[1], one number for all, in quant_mode 0", PAGE)
    if quant_mode == DYNAMIC and scale is not None and scale.shape not in ((1, H), (experts, H)):
        check.fail(RELATION, "scale", describe(scale),
                   f"[1, {H}] or [{experts}, {H}], a row for each expert in active_expert_range (H of x), in "
                   "quant_mode 1", PAGE)
    if quant_mode != STATIC and offset is not None:
        check.fail(RELATION, "offset", describe(offset), "None, but in quant_mode 0", PAGE)
    floats = (torch.float32, *float_dtypes(check))
    if quant_mode == NO_QUANT and x.dtype != torch.int8 and x.dtype not in floats:
        check.fail(DTYPE, "x", describe(x, "T, H"), "float16, bfloat16, float32 or int8", PAGE)
    if quant_mode != NO_QUANT and x.dtype not in floats:
        check.fail(DTYPE, "x", describe(x, "T, H"), "float16, bfloat16 or float32, to be quantised", PAGE)
    for name, numbers in (("scale", scale), ("offset", offset)):
        if numbers is not None and numbers.dtype != torch.float32:
            check.fail(DTYPE, name, describe(numbers), "float32", PAGE)


def _axes(call: Mapping[str, Any]) -> str:
    padded = call["drop_pad_mode"] == 1
    kinds = {CUMSUM: "[E]", COUNT: "[E]", PAIRS: "[all_experts 2]"}
    counts = f"counts {kinds[call['expert_tokens_num_type']]}" if call["expert_tokens_num_flag"] else "counts~ []"
    rows, scales = ("[E C H]", "[E*C]") if padded else ("[S H]", "[S]")
    if call["quant_mode"] == STATIC:
        scale, scales = "[1]", "~ []"
    elif call["quant_mode"] == DYNAMIC:
        scale = "[1 H]" if call["scale"] is None or len(call["scale"]) == 1 else "[E H]"
        scales = " " + scales
    else:
        scale, scales = "[T]", ("~ " if call["scale"] is None else " ") + scales
    return (f"x [T H], expert_idx [T K], scale {scale}, offset [1] -> expanded_x {rows}, expanded_row_idx [T*K], "
            f"{counts}, expanded_scale{scales} where S = T*K")


FORMS: tuple[dict[str, Any], ...] = (
    {}, {"expert_tokens_num_flag": True}, {"expert_tokens_num_flag": True, "expert_tokens_num_type": PAIRS},
    {"quant_mode": STATIC}, {"quant_mode": DYNAMIC}, {"drop_pad_mode": 1})


@reference("npu_moe_init_routing_v2", moe_init_routing_v2_contract, _axes, FORMS)
def npu_moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor, *, scale: Tensor | None = None, offset: Tensor | None = None, active_num: int = -1,
    expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0, expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False, quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (), row_idx_type: int = 0, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy each token's row once for every expert it goes to, ordered by expert, then by token.

    Pairs whose expert lies outside ``active_expert_range`` (another rank's expert) are left out.  R is the
    number of the others, S = T*K, or min(active_num, T*K) where ``active_num`` is positive.

    With ``drop_pad_mode`` 1 each expert has C = ``expert_capacity`` rows: the pairs beyond are dropped, rows that no
    pair fills are zeros.  Dropped pairs are still counted.

    Args:
        x: rows [T, H]; fp16, bf16, fp32, or int8 without quantisation.
        expert_idx: experts of each token [T, K] int32, in [0, expert_num).
        scale: fp32.  quant_mode -1: a number for each row of x [T], copied along, or None.  0: [1].  1: factors
            before quantisation, [1, H] or one row for each expert in range [E, H], or None.
        offset: [1] fp32 in quant_mode 0, None otherwise.
        active_num: most rows of expanded_x; 0 and -1 for all.  Of no effect in drop_pad_mode 1.
        active_expert_range: [first, last + 1]; all experts in drop_pad_mode 1.
        expert_tokens_num_type: what to count per expert: 0 running sums, 1 counts, 2 (expert, count) of those that
            have rows.  Must agree with the ``group_list_type`` of npu_grouped_matmul (0, 1 and 2 there too).
        quant_mode: -1 none; 0 int8 = round(x * scale + offset); 1 int8 = round(x * scale / s), where each row's
            s = max |x * scale| / 127 goes to expanded_scale.
        row_idx_type: 0 gather, 1 scatter; see below.

    Returns:
        expanded_x [S, H], rows from R on unwritten, or [E, C, H]; x's dtype, or int8.  expanded_row_idx [T*K] int32.
        counts int64: [experts in range]; type 2: [expert_num, 2], unwritten behind the zeros that follow the pairs;
        an unwritten scalar unless ``expert_tokens_num_flag``.  expanded_scale fp32: [S] or [E*C], unwritten without
        scale or quantisation and from R on; an unwritten scalar in quant_mode 0.

        Gather: entry t*K + j is the row of that pair (e*C + place in drop_pad_mode 1), -1 where it was left out or
        dropped.  Scatter: entry r is the pair t*K + j of row r, unwritten from R on.

    Source: torch_npu docs: npu_moe_init_routing_v2; what the modes write, from its kernel
    (ops-transformer: moe/moe_init_routing_v3/op_kernel).
    """
    pairs, K = expert_idx.numel(), expert_idx.shape[1]
    first, end = active_expert_range
    expert = expert_idx.flatten()  # [T*K]
    key = torch.where((expert >= first) & (expert < end), expert - first, end - first)  # [T*K] left-out pairs last
    counts = key.bincount(minlength=end - first + 1)[:-1]  # [E]
    routed = int(counts.sum())
    order = key.argsort(stable=True)[:routed]  # [R] pair of each row
    if drop_pad_mode:
        size = expert_num * expert_capacity
        place = torch.arange(routed, device=x.device) - (counts.cumsum(0) - counts)[key[order]]  # [R] within its expert
        kept = place < expert_capacity  # [R]
        pair = order[kept]  # [R'] of each row that is filled
        row = key[pair] * expert_capacity + place[kept]  # [R']
    else:
        size = min(active_num, pairs) if active_num > 0 else pairs
        pair = order[:size]  # [R']
        row = torch.arange(routed, device=x.device)  # [R]

    values, scales = _quantised(x, pair // K, key[pair], scale, offset, quant_mode)  # [R', H], [R']
    if drop_pad_mode:
        expanded_x = torch.zeros((size, x.shape[1]), dtype=values.dtype, device=x.device)  # [E*C, H]
        expanded_x = expanded_x.index_copy_(0, row, values).view(expert_num, expert_capacity, -1)  # [E, C, H]
    else:
        expanded_x = _unwritten_from(values, size)  # [S, H]
    if quant_mode == STATIC:
        expanded_scale = poison((), torch.float32, x.device)  # []
    elif scales is None:
        expanded_scale = poison((size,), torch.float32, x.device)  # [S]
    elif drop_pad_mode:
        expanded_scale = torch.zeros(size, device=x.device).index_copy_(0, row, scales)  # [E*C]
    else:
        expanded_scale = _unwritten_from(scales, size)  # [S]

    if row_idx_type == SCATTER:
        row_idx = _unwritten_from(order.to(torch.int32), pairs)  # [T*K]
    else:
        row_idx = torch.full((pairs,), -1, dtype=torch.int32, device=x.device)  # [T*K]
        row_idx[pair if drop_pad_mode else order] = row.to(torch.int32)  # [T*K]
    if not expert_tokens_num_flag:
        counts = poison((), torch.int64, x.device)  # []
    elif expert_tokens_num_type == CUMSUM:
        counts = counts.cumsum(0)  # [E]
    elif expert_tokens_num_type == PAIRS:
        counts = _as_pairs(counts, first, expert_num)  # [expert_num, 2]
    return expanded_x, row_idx, counts, expanded_scale


def _quantised(x: Tensor, token: Tensor, expert: Tensor, scale: Tensor | None, offset: Tensor | None,
               quant_mode: int) -> tuple[Tensor, Tensor | None]:
    """Rows ``token`` of x for experts ``expert`` (of the range), and the number that goes along with each."""
    rows = x.index_select(0, token)  # [R, H]
    if quant_mode == NO_QUANT:
        return rows, None if scale is None else scale.index_select(0, token).float()
    wide = rows.to(accumulator(x.dtype))  # [R, H]
    if quant_mode == STATIC:
        assert scale is not None and offset is not None, "the contract wants both"
        return (wide * scale + offset).round_().clamp_(-128, 127).to(torch.int8), None
    if scale is not None:
        wide = wide * (scale if len(scale) == 1 else scale.index_select(0, expert))  # [R, H]
    step = wide.abs().amax(1) / 127 if x.shape[1] else wide.new_zeros(len(wide))  # [R]
    # A row of zeros has the step 0.
    return (wide / step.masked_fill(step == 0, 1)[:, None]).round_().to(torch.int8), step.float()


def _as_pairs(counts: Tensor, first: int, expert_num: int) -> Tensor:
    """(expert, count) of the experts that have rows, then zeros in the place of the others and one more."""
    pairs = poison((expert_num, 2), torch.int64, counts.device)  # [expert_num, 2]
    pairs[:len(counts) + 1] = 0
    busy = counts.nonzero()[:, 0]  # [busy experts]
    pairs[:len(busy)] = torch.stack([busy + first, counts[busy]], 1)  # [busy experts, 2]
    return pairs


def _unwritten_from(values: Tensor, length: int) -> Tensor:
    """``values`` with unwritten memory appended along the first axis up to ``length``."""
    if len(values) == length:
        return values
    rest = poison((length - len(values), *values.shape[1:]), values.dtype, values.device)
    return torch.cat([values, rest])

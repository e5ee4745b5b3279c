"""Rows to experts and back: sort the T*K (token, expert) pairs by expert, and sum the experts' answers by token.

    gating -> npu_moe_init_routing_v2 -> npu_grouped_matmul ... -> npu_moe_finalize_routing

A pair has two numbers: its place t*K + j in ``expert_idx``, and its row after the sort.  ``expanded_row_idx``
leads from one to the other.
"""
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, poison, reference, refuse_unbuilt

INIT = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_init_routing_v2.md"
INIT_HOST = "op-plugin: op_plugin/ops/opapi/MoeInitRoutingV2KernelNpuOpApi.cpp"
FINALIZE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_finalize_routing.md"
MOST_EXPERTS = 10240
SCATTER = 1  # row_idx_type; 0 is gather
COUNT = 1  # expert_tokens_num_type; 0 is the running sum
BY_CHOICE, BY_TOKEN = 0, 2  # drop_pad_mode of finalize: the pair (t, j) is entry j*T + t, or t*K + j


def moe_init_routing_v2_contract(
    check: Check, x: Tensor, expert_idx: Tensor, *, scale: Tensor | None = None, active_num: int = -1,
    expert_capacity: int = -1, expert_num: int = -1, expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False, active_expert_range: list[int] | tuple[int, ...] = (), row_idx_type: int = 0,
    **rest: Any,
) -> None:
    """What ``npu_moe_init_routing_v2`` demands; raises ContractError.

    Stricter than the operator page in one point: ``active_expert_range`` must be given.  The page makes it
    optional, but the host code keeps the default in a function-static variable, so a later call with another
    ``expert_num`` counts over the first call's experts; earlier versions refuse an empty range outright.

    Capacity mode (``drop_pad_mode`` 1), quantisation and key-value counts are not built.
    Source: torch_npu docs: npu_moe_init_routing_v2.
    """
    refuse_unbuilt(check, rest, {"drop_pad_mode": 0, "quant_mode": -1})
    if x.ndim != 2:
        check.fail(RELATION, "x", describe(x), "[T, H]: one row a token", INIT)
    if expert_idx.ndim != 2:
        check.fail(RELATION, "expert_idx", describe(expert_idx), "[T, K]: one row a token", INIT)
    if len(expert_idx) != len(x):
        check.fail(RELATION, "expert_idx", describe(expert_idx, "T, K"),
                   f"[{len(x)}, K], as many rows as x {describe(x, 'T, H')}", INIT)
    if scale is not None and scale.shape != (len(x),):
        check.fail(RELATION, "scale", describe(scale), f"[{len(x)}], one number a row of x", INIT)
    if expert_num < 1:
        check.fail(RELATION, "expert_num", expert_num, "the number of experts; the default -1 stands for none", INIT)
    if len(active_expert_range) == 0:
        check.fail(RELATION, "active_expert_range", "empty (the default)",
                   f"[first, last + 1], [0, {expert_num}] for all: the host remembers the default of the first call, "
                   "and a later call with another expert_num would use that", INIT_HOST)
    first, end = active_expert_range if len(active_expert_range) == 2 else (0, 0)
    if not 0 <= first < end <= expert_num:
        check.fail(RELATION, "active_expert_range", list(active_expert_range),
                   f"[first, last + 1] with 0 <= first <= last < {expert_num} (expert_num)", INIT)
    if _leaves(expert_idx, expert_num):
        check.fail(RELATION, "expert_idx", _span(expert_idx),
                   f"expert ids 0 to {expert_num - 1} (expert_num {expert_num}); to drop a padding row, raise "
                   f"expert_num by one and give the row the id {expert_num}, outside active_expert_range",
                   INIT, "SB-08")
    if active_num < -1:
        check.fail(RELATION, "active_num", active_num, "a number of rows, or 0 or -1 for all", INIT)
    if expert_tokens_num_type not in (0, 1):
        check.fail(RELATION, "expert_tokens_num_type", expert_tokens_num_type,
                   "0 (running sum) or 1 (count); pairs (2) are not built yet", INIT)
    if row_idx_type not in (0, 1):
        check.fail(RELATION, "row_idx_type", row_idx_type, "0 (gather) or 1 (scatter)", INIT)
    if expert_num > MOST_EXPERTS:
        check.fail(SIZE, "expert_num", expert_num, f"at most {MOST_EXPERTS}", INIT)
    if x.dtype != torch.int8 and x.dtype not in _floats(check):
        check.fail(DTYPE, "x", describe(x, "T, H"), "float16, bfloat16, float32 or int8", INIT)
    if expert_idx.dtype != torch.int32:
        check.fail(DTYPE, "expert_idx", describe(expert_idx, "T, K"), "int32", INIT)
    if scale is not None and scale.dtype != torch.float32:
        check.fail(DTYPE, "scale", describe(scale, "T"), "float32", INIT)


@reference("npu_moe_init_routing_v2", moe_init_routing_v2_contract)
def npu_moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor, *, scale: Tensor | None = None, active_num: int = -1, expert_capacity: int = -1,
    expert_num: int = -1, expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False,
    active_expert_range: list[int] | tuple[int, ...] = (), row_idx_type: int = 0, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy each token's row once for every expert it goes to, ordered by expert, then by token.

    Pairs whose expert lies outside ``active_expert_range`` (another rank's expert) are left out.  R is the
    number of the others, S = T*K, or min(active_num, T*K) where ``active_num`` is positive.

    Args:
        x: rows [T, H].
        expert_idx: experts of each token [T, K] int32, in [0, expert_num).
        scale: a number for each row of x [T] fp32, copied along.
        active_expert_range: [first, last + 1].
        expert_tokens_num_type: what to count per expert: 0 running sums, 1 counts.  Must agree with the
            ``group_list_type`` of npu_grouped_matmul (0 and 1 there too).
        row_idx_type: 0 gather, 1 scatter; see below.

    Returns:
        expanded_x [S, H], rows from R on unwritten; expanded_row_idx [T*K] int32; counts [experts in range] int64,
        unwritten scalar unless ``expert_tokens_num_flag``; expanded_scale [S] fp32, unwritten without scale and
        from R on.  Gather: entry t*K + j is the row of that pair, -1 where it was left out.  Scatter: entry r is
        the pair t*K + j of row r, unwritten from R on.

    Source: torch_npu docs: npu_moe_init_routing_v2.
    """
    pairs, K = expert_idx.numel(), expert_idx.shape[1]
    first, end = active_expert_range
    expert = expert_idx.flatten()  # [T*K]
    key = torch.where((expert >= first) & (expert < end), expert - first, end - first)  # [T*K] left-out pairs last
    counts = key.bincount(minlength=end - first + 1)[:-1]  # [E]
    routed = int(counts.sum())
    order = key.argsort(stable=True)[:routed]  # [R] pair of each row
    size = min(active_num, pairs) if active_num > 0 else pairs
    token = order[:size] // K  # [R]

    expanded_x = _unwritten_from(x.index_select(0, token), size)  # [S, H]
    if scale is None:
        expanded_scale = poison((size,), torch.float32, x.device)  # [S]
    else:
        expanded_scale = _unwritten_from(scale.index_select(0, token), size)  # [S]
    if row_idx_type == SCATTER:
        row_idx = _unwritten_from(order.to(torch.int32), pairs)  # [T*K]
    else:
        row_idx = torch.full((pairs,), -1, dtype=torch.int32, device=x.device)  # [T*K]
        row_idx[order] = torch.arange(routed, dtype=torch.int32, device=x.device)  # [T*K]
    if not expert_tokens_num_flag:
        counts = poison((), torch.int64, x.device)  # []
    elif expert_tokens_num_type != COUNT:
        counts = counts.cumsum(0)  # [E]
    return expanded_x, row_idx, counts, expanded_scale


def moe_finalize_routing_contract(
    check: Check, expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None, bias: Tensor | None,
    scales: Tensor | None, expanded_src_to_dst_row: Tensor, export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0, k: int | None = 1,
) -> None:
    """What ``npu_moe_finalize_routing`` demands; raises ContractError.

    It cannot see whether ``drop_pad_mode`` fits the order of ``expanded_src_to_dst_row``: 0 for
    npu_moe_init_routing, 2 for npu_moe_init_routing_v2 with ``row_idx_type`` 0.  A wrong one mixes up tokens.

    Sources differ on the number of choices where ``scales`` is None (1, or ``k``), so there ``k`` must be 1.
    Capacity modes (1 and 3) are not built.
    Source: torch_npu docs: npu_moe_finalize_routing.
    """
    rows, row_idx = expanded_permuted_rows, expanded_src_to_dst_row
    if drop_pad_mode not in (None, BY_CHOICE, BY_TOKEN):
        check.fail(RELATION, "drop_pad_mode", drop_pad_mode,
                   "0 (entry j*T + t of the index) or 2 (entry t*K + j); capacity modes 1 and 3 are not built yet",
                   FINALIZE)
    if rows.ndim != 2:
        check.fail(RELATION, "expanded_permuted_rows", describe(rows), "[T*K, H]: one row a pair", FINALIZE)
    if row_idx.ndim != 1:
        check.fail(RELATION, "expanded_src_to_dst_row", describe(row_idx), "[T*K]: one entry a pair", FINALIZE)
    if scales is None:
        if k not in (None, 1):
            check.fail(RELATION, "k", k, "1 without scales; for more choices a token pass scales, of ones if need be",
                       FINALIZE)
        T, K = len(row_idx), 1
    else:
        if scales.ndim != 2:
            check.fail(RELATION, "scales", describe(scales), "[T, K]: one weight a pair", FINALIZE)
        T, K = scales.shape
        if k not in (None, 1, K):
            check.fail(RELATION, "k", k, f"{K}, as in scales {describe(scales, 'T, K')}, or left out", FINALIZE)
    if len(row_idx) != T * K:
        check.fail(RELATION, "expanded_src_to_dst_row", describe(row_idx, "T*K"),
                   f"[{T * K}]: {T} tokens, {K} choices each, as in scales", FINALIZE)
    if len(rows) != T * K:
        check.fail(RELATION, "expanded_permuted_rows", describe(rows, "T*K, H"),
                   f"[{T * K}, H]: {T} tokens, {K} choices each; rows that no expert wrote count too", FINALIZE)
    H = rows.shape[1]
    for name, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None and skip.shape != (T, H):
            check.fail(RELATION, name, describe(skip), f"[{T}, {H}], the shape of the result (T, H)", FINALIZE)
        if skip is not None and skip.dtype != rows.dtype:
            check.fail(DTYPE, name, describe(skip, "T, H"), f"{rows.dtype}, the dtype of the rows", FINALIZE)
    if skip2 is not None and skip1 is None:
        check.fail(RELATION, "skip2", describe(skip2, "T, H"), "None without skip1; one addend goes to skip1", FINALIZE)
    experts = export_for_source_row
    if experts is not None and experts.shape != (T, K):
        check.fail(RELATION, "export_for_source_row", describe(experts), f"[{T}, {K}] expert ids (T, K)", FINALIZE)
    if bias is not None:
        _bias_contract(check, bias, experts, rows, K)
    if _leaves(row_idx, T * K):
        check.fail(RELATION, "expanded_src_to_dst_row", _span(row_idx),
                   f"rows 0 to {T * K - 1}: dropless modes know no -1; point a pair that was left out at a row that "
                   "holds finite numbers, and set its scale to 0", FINALIZE)
    if rows.dtype not in _floats(check):
        check.fail(DTYPE, "expanded_permuted_rows", describe(rows, "T*K, H"), "float16, bfloat16 or float32", FINALIZE)
    if row_idx.dtype != torch.int32:
        check.fail(DTYPE, "expanded_src_to_dst_row", describe(row_idx, "T*K"), "int32", FINALIZE)
    fitting = (rows.dtype, torch.float32) if rows.dtype == torch.bfloat16 else (rows.dtype,)
    if scales is not None and scales.dtype not in fitting:
        check.fail(DTYPE, "scales", describe(scales, "T, K"), f"{' or '.join(map(str, fitting))} for {rows.dtype} rows",
                   FINALIZE)


def _bias_contract(check: Check, bias: Tensor, experts: Tensor | None, rows: Tensor, K: int) -> None:
    if bias.ndim != 2 or bias.shape[1] != rows.shape[1]:
        check.fail(RELATION, "bias", describe(bias), f"[E, {rows.shape[1]}]: H of the rows", FINALIZE)
    if experts is None:
        check.fail(RELATION, "export_for_source_row", None, "[T, K] expert ids, which say whose bias to add", FINALIZE)
    elif _leaves(experts, len(bias)):
        check.fail(RELATION, "export_for_source_row", _span(experts), f"expert ids 0 to {len(bias) - 1} (E of bias)",
                   FINALIZE)
    elif experts.dtype != torch.int32:
        check.fail(DTYPE, "export_for_source_row", describe(experts, "T, K"), "int32", FINALIZE)
    if len(bias) < K:
        check.fail(SIZE, "bias", describe(bias, "E, H"), f"at least {K} experts (K)", FINALIZE)
    if bias.dtype != rows.dtype:
        check.fail(DTYPE, "bias", describe(bias, "E, H"), f"{rows.dtype}, the dtype of the rows", FINALIZE)


@reference("npu_moe_finalize_routing", moe_finalize_routing_contract)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None, bias: Tensor | None,
    scales: Tensor | None, expanded_src_to_dst_row: Tensor, export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0, k: int | None = 1,
) -> Tensor:
    """Bring the experts' answers back to their tokens and sum them.

    ``out[t] = skip1[t] + skip2[t] + sum_j scales[t, j] * (rows[row(t, j)] + bias[expert(t, j)])``

    Args:
        expanded_permuted_rows: the experts' answers [T*K, H], ordered by expert.
        skip1, skip2: addends [T, H], such as the shared expert's answer.
        bias: [E, H].
        scales: weights [T, K]; ones if None, and then K is 1.
        expanded_src_to_dst_row: row(t, j) [T*K] int32, at j*T + t (mode 0) or t*K + j (mode 2).
        export_for_source_row: expert(t, j) [T, K] int32, read with bias only (the schema's name for
            expert_for_source_row).

    Returns:
        [T, H] in the rows' dtype.

    Source: torch_npu docs: npu_moe_finalize_routing.
    """
    rows, row_idx = expanded_permuted_rows, expanded_src_to_dst_row
    acc = accumulator(rows.dtype)
    T, K = (len(row_idx), 1) if scales is None else scales.shape
    out = torch.zeros((T, rows.shape[1]), dtype=acc, device=rows.device)  # [T, H]
    for skip in (skip1, skip2):
        if skip is not None:
            out += skip  # [T, H]
    by_choice = row_idx.view(T, K).T if drop_pad_mode == BY_TOKEN else row_idx.view(K, T)  # [K, T]
    # One choice at a time: gathering all K first costs K times the memory and more than twice the time.
    for j in range(K):
        part = rows.index_select(0, by_choice[j]).to(acc)  # [T, H]
        if bias is not None and export_for_source_row is not None:
            part = part + bias.index_select(0, export_for_source_row[:, j])  # [T, H]
        out += part if scales is None else part * scales[:, j, None]  # [T, H]
    return out.to(rows.dtype)  # [T, H]


def _floats(check: Check) -> tuple[torch.dtype, ...]:
    return (*float_dtypes(check), torch.float32)


def _leaves(ids: Tensor, count: int) -> bool:
    """Whether an id lies outside [0, count); the device would read or write foreign memory."""
    if ids.numel() == 0:
        return False
    least, most = torch.aminmax(ids)
    return int(least) < 0 or int(most) >= count


def _span(ids: Tensor) -> str:
    return f"[{', '.join(map(str, ids.shape))}] with values from {int(ids.min())} to {int(ids.max())}"


def _unwritten_from(values: Tensor, length: int) -> Tensor:
    """``values`` with unwritten memory appended along the first axis up to ``length``."""
    if len(values) == length:
        return values
    rest = poison((length - len(values), *values.shape[1:]), values.dtype, values.device)
    return torch.cat([values, rest])

"""The experts' answers brought back to their tokens: the end of a MoE layer."""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.indices import leaves, span
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_finalize_routing.md"
TILING = "ops-transformer: moe/moe_finalize_routing_v2/op_host/moe_finalize_routing_v2_tiling_membase.cpp"
WITH_CAPACITY = (1, 3)  # drop_pad_mode: rows are [E, C, H], and an index of -1 is a dropped pair
BY_TOKEN = (2, 3)  # drop_pad_mode: the pair (t, j) is entry t*K + j of the index; otherwise j*T + t


def moe_finalize_routing_contract(
    check: Check, expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None, bias: Tensor | None,
    scales: Tensor | None, expanded_src_to_dst_row: Tensor, export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0, k: int | None = 1,
) -> None:
    """What ``npu_moe_finalize_routing`` demands; raises ContractError.

    It cannot see whether ``drop_pad_mode`` fits the order of ``expanded_src_to_dst_row``: 0 and 1 for
    npu_moe_init_routing, 2 and 3 for npu_moe_init_routing_v2 with ``row_idx_type`` 0.  A wrong one mixes up tokens.

    Without ``scales`` the page takes the number of choices from ``k``, the host check takes 1, so ``k`` must be 1.
    Source: torch_npu docs: npu_moe_finalize_routing.
    """
    rows, row_idx, mode = expanded_permuted_rows, expanded_src_to_dst_row, drop_pad_mode or 0
    if mode not in (0, 1, 2, 3):
        check.fail(RELATION, "drop_pad_mode", drop_pad_mode,
                   "0 or 1 (entry j*T + t of the index), 2 or 3 (entry t*K + j); 1 and 3 for rows [E, C, H] with a "
                   "capacity", PAGE)
    if mode not in WITH_CAPACITY and rows.ndim != 2:
        check.fail(RELATION, "expanded_permuted_rows", describe(rows),
                   "[T*K, H]: one row a pair, in the modes 0 and 2", PAGE)
    if mode in WITH_CAPACITY and (rows.ndim != 3 or not len(rows) * rows.shape[1]):
        check.fail(RELATION, "expanded_permuted_rows", describe(rows),
                   "[E, C, H], E and C at least 1: C rows an expert, in the modes 1 and 3", PAGE)
    if row_idx.ndim != 1:
        check.fail(RELATION, "expanded_src_to_dst_row", describe(row_idx), "[T*K]: one entry a pair", PAGE)
    if scales is None:
        if k not in (None, 1):
            check.fail(RELATION, "k", k, "1 without scales; for more choices a token pass scales, of ones if need be",
                       TILING)
        T, K = len(row_idx), 1
    else:
        if scales.ndim != 2 or not scales.shape[1]:
            check.fail(RELATION, "scales", describe(scales), "[T, K], K >= 1: one weight a pair", PAGE)
        T, K = scales.shape
        if k not in (None, 1, K):
            check.fail(RELATION, "k", k, f"{K}, as in scales {describe(scales, 'T, K')}, or left out", PAGE)
    if len(row_idx) != T * K:
        check.fail(RELATION, "expanded_src_to_dst_row", describe(row_idx, "T*K"),
                   f"[{T * K}]: {T} tokens, {K} choices each, as in scales", PAGE)
    _rows_contract(check, rows, row_idx, mode)
    H = rows.shape[-1]
    for name, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None and skip.shape != (T, H):
            check.fail(RELATION, name, describe(skip), f"[{T}, {H}], the shape of the result (T, H)", PAGE)
        if skip is not None and skip.dtype != rows.dtype:
            check.fail(DTYPE, name, describe(skip, "T, H"), f"{rows.dtype}, the dtype of the rows", PAGE)
    if skip2 is not None and skip1 is None:
        check.fail(RELATION, "skip2", describe(skip2, "T, H"), "None without skip1; one addend goes to skip1", PAGE)
    experts = export_for_source_row
    if experts is not None and experts.shape != (T, K):
        check.fail(RELATION, "export_for_source_row", describe(experts), f"[{T}, {K}] expert ids (T, K)", PAGE)
    if bias is not None:
        _bias_contract(check, bias, experts, rows, K)
    if rows.dtype != torch.float32 and rows.dtype not in float_dtypes(check):
        check.fail(DTYPE, "expanded_permuted_rows", describe(rows), "float16, bfloat16 or float32", PAGE)
    if row_idx.dtype != torch.int32:
        check.fail(DTYPE, "expanded_src_to_dst_row", describe(row_idx, "T*K"), "int32", PAGE)
    fitting = (rows.dtype, torch.float32) if rows.dtype == torch.bfloat16 else (rows.dtype,)
    if scales is not None and scales.dtype not in fitting:
        check.fail(DTYPE, "scales", describe(scales, "T, K"), f"{' or '.join(map(str, fitting))} for {rows.dtype} rows",
                   PAGE)


def _rows_contract(check: Check, rows: Tensor, row_idx: Tensor, mode: int) -> None:
    """The index leads to rows that are there."""
    if mode in WITH_CAPACITY:
        slots = rows.shape[0] * rows.shape[1]
        if leaves(row_idx, slots, -1):
            check.fail(RELATION, "expanded_src_to_dst_row", span(row_idx),
                       f"rows 0 to {slots - 1} of [E, C, H] {list(rows.shape)}, or -1 for a dropped pair", PAGE)
        return
    pairs = len(row_idx)
    if len(rows) != pairs:
        check.fail(RELATION, "expanded_permuted_rows", describe(rows, "T*K, H"),
                   f"[{pairs}, H], as many as expanded_src_to_dst_row has entries; rows that no expert wrote count too",
                   PAGE)
    if leaves(row_idx, pairs):
        check.fail(RELATION, "expanded_src_to_dst_row", span(row_idx),
                   f"rows 0 to {pairs - 1}: dropless modes know no -1; point a pair that was left out at a row that "
                   "holds finite numbers, and set its scale to 0", PAGE)


def _bias_contract(check: Check, bias: Tensor, experts: Tensor | None, rows: Tensor, K: int) -> None:
    if bias.ndim != 2 or bias.shape[1] != rows.shape[-1]:
        check.fail(RELATION, "bias", describe(bias), f"[E, {rows.shape[-1]}]: H of the rows", PAGE)
    if rows.ndim == 3 and len(bias) != len(rows):
        check.fail(RELATION, "bias", describe(bias, "E, H"), f"{len(rows)} experts, as the rows [E, C, H] have", TILING)
    if experts is None:
        check.fail(RELATION, "export_for_source_row", None, "[T, K] expert ids, which say whose bias to add", PAGE)
    elif leaves(experts, len(bias)):
        check.fail(RELATION, "export_for_source_row", span(experts), f"expert ids 0 to {len(bias) - 1} (E of bias)",
                   PAGE)
    elif experts.dtype != torch.int32:
        check.fail(DTYPE, "export_for_source_row", describe(experts, "T, K"), "int32", PAGE)
    if len(bias) < K:
        check.fail(SIZE, "bias", describe(bias, "E, H"), f"at least {K} experts (K)", PAGE)
    if bias.dtype != rows.dtype:
        check.fail(DTYPE, "bias", describe(bias, "E, H"), f"{rows.dtype}, the dtype of the rows", PAGE)


def _axes(call: Mapping[str, Any]) -> str:
    rows = "[E C H]" if call["drop_pad_mode"] in WITH_CAPACITY else "[S H]"
    return (f"expanded_permuted_rows {rows}, skip1 [T H], skip2 [T H], bias [E H], scales [T K], "
            "expanded_src_to_dst_row [T*K], export_for_source_row [T K] -> out [T H] where S = T*K")


@reference("npu_moe_finalize_routing", moe_finalize_routing_contract, _axes,
           ({"drop_pad_mode": 0}, {"drop_pad_mode": 1}))
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None, bias: Tensor | None,
    scales: Tensor | None, expanded_src_to_dst_row: Tensor, export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0, k: int | None = 1,
) -> Tensor:
    """Bring the experts' answers back to their tokens and sum them.

    ``out[t] = skip1[t] + skip2[t] + sum_j scales[t, j] * (rows[row(t, j)] + bias[expert(t, j)])``

    With a capacity (modes 1 and 3) row(t, j) may be -1: such a pair was dropped, and its row counts as zeros.  Its
    bias is added all the same.

    Args:
        expanded_permuted_rows: the experts' answers: [T*K, H], ordered by expert, in modes 0 and 2; [E, C, H] in
            modes 1 and 3.
        skip1, skip2: addends [T, H], such as the shared expert's answer.
        bias: [E, H].
        scales: weights [T, K]; ones if None, and then K is 1.
        expanded_src_to_dst_row: row(t, j) [T*K] int32, at j*T + t (modes 0 and 1) or t*K + j (modes 2 and 3).
        export_for_source_row: expert(t, j) [T, K] int32, read with bias only (the schema's name for
            expert_for_source_row).

    Returns:
        [T, H] in the rows' dtype.

    Source: torch_npu docs: npu_moe_finalize_routing.
    """
    rows, row_idx = expanded_permuted_rows.flatten(0, -2), expanded_src_to_dst_row
    acc = accumulator(rows.dtype)
    T, K = (len(row_idx), 1) if scales is None else scales.shape
    out = torch.zeros((T, rows.shape[1]), dtype=acc, device=rows.device)  # [T, H]
    for skip in (skip1, skip2):
        if skip is not None:
            out += skip  # [T, H]
    by_choice = row_idx.view(T, K).T if drop_pad_mode in BY_TOKEN else row_idx.view(K, T)  # [K, T]
    # One choice at a time: gathering all K first costs K times the memory and more than twice the time.
    for j in range(K):
        if drop_pad_mode in WITH_CAPACITY:
            dropped = by_choice[j] < 0  # [T]
            part = rows.index_select(0, by_choice[j].clamp(min=0)).to(acc)  # [T, H]
            part = part.masked_fill(dropped[:, None], 0)  # [T, H]
        else:
            part = rows.index_select(0, by_choice[j]).to(acc)  # [T, H]
        if bias is not None and export_for_source_row is not None:
            part = part + bias.index_select(0, export_for_source_row[:, j])  # [T, H]
        out += part if scales is None else part * scales[:, j, None]  # [T, H]
    return out.to(rows.dtype)  # [T, H]

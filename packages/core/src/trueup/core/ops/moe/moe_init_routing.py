"""Rows to experts: the T*K (token, expert) pairs sorted by expert, as the experts' matrix product wants them.

    npu_moe_gating_top_k_softmax -> npu_moe_init_routing    -> ... -> npu_moe_finalize_routing, drop_pad_mode 0
    npu_moe_gating_top_k         -> npu_moe_init_routing_v2 -> ... -> npu_moe_finalize_routing, drop_pad_mode 2 (or 3)

A pair has two numbers: its place in ``expert_idx``, and its row after the sort.  ``expanded_row_idx`` leads from one
to the other.  The two versions count places differently: j*T + t in the first, t*K + j in the second.
"""
import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import float_dtypes, reference

PAGE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_init_routing.md"
TILING = "ops-transformer: moe/moe_init_routing/op_host/moe_init_routing_tiling.cpp"
MOST_PAIRS = 2**24


def moe_init_routing_contract(check: Check, x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> None:
    """What ``npu_moe_init_routing`` demands; raises ContractError.  Source: torch_npu docs: npu_moe_init_routing."""
    if x.ndim != 2:
        check.fail(RELATION, "x", describe(x), "[T, H]: one row a token", PAGE)
    if expert_idx.ndim != 2 or len(expert_idx) != len(x):
        check.fail(RELATION, "expert_idx", describe(expert_idx),
                   f"[{len(x)}, K], as many rows as x {describe(x, 'T, H')}", PAGE)
    T, K = expert_idx.shape
    if row_idx.shape != expert_idx.shape:
        check.fail(RELATION, "row_idx", describe(row_idx), f"[{T}, {K}], the shape of expert_idx", PAGE)
    if not torch.equal(row_idx.T.reshape(-1).long(), torch.arange(T * K, device=row_idx.device)):
        check.fail(RELATION, "row_idx", f"{row_idx.flatten()[:4].tolist()} ... of [{T}, {K}]",
                   f"j*{T} + t at (t, j), column by column, as npu_moe_gating_top_k_softmax returns it: the operator "
                   f"finds the token as the remainder by {T}", PAGE)
    if active_num < 0:
        check.fail(RELATION, "active_num", active_num, f"a number of tokens, {T} (T) for all", TILING)
    if T * K >= MOST_PAIRS:
        check.fail(SIZE, "expert_idx", describe(expert_idx, "T, K"), f"fewer than {MOST_PAIRS} pairs", PAGE)
    if x.dtype != torch.float32 and x.dtype not in float_dtypes(check):
        check.fail(DTYPE, "x", describe(x, "T, H"), "float16, bfloat16 or float32", PAGE)
    for name, ids in (("row_idx", row_idx), ("expert_idx", expert_idx)):
        if ids.dtype != torch.int32:
            check.fail(DTYPE, name, describe(ids, "T, K"), "int32", PAGE)


@reference("npu_moe_init_routing", moe_init_routing_contract,
           "x [T H], row_idx [T K], expert_idx [T K] -> expanded_x [S H], expanded_row_idx [T*K], "
           "expanded_expert_idx [T*K] where S = T*K")
def npu_moe_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor,
                         active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token's row once for every expert it goes to, ordered by expert.

    Among the pairs of one expert those of the first tokens come first.  There is no number of experts and no range:
    whatever ids there are get sorted, E for finished rows too, which so come last.

    Args:
        x: rows [T, H]; fp16, bf16 or fp32.
        row_idx: [T, K] int32, the place of each pair: j*T + t at (t, j), from npu_moe_gating_top_k_softmax.
        expert_idx: experts of each token [T, K] int32.
        active_num: tokens, not rows: expanded_x has min(active_num, T) * K of the T * K rows.

    Returns:
        expanded_x [min(active_num, T) * K, H] in x's dtype; expanded_row_idx [T*K] int32, at j*T + t the row of
        that pair; expanded_expert_idx [T*K] int32, the expert of each row.

    Source: torch_npu docs: npu_moe_init_routing.
    """
    T, K = expert_idx.shape
    experts, order = expert_idx.flatten().sort(stable=True)  # [T*K], [T*K]
    place = row_idx.flatten()[order].long()  # [T*K] place of each row's pair
    expanded_row_idx = torch.empty_like(experts, dtype=torch.int32)  # [T*K]
    expanded_row_idx[place] = torch.arange(T * K, dtype=torch.int32, device=x.device)  # [T*K]
    token = place[:min(active_num, T) * K] % max(T, 1)  # [S]
    return x.index_select(0, token), expanded_row_idx, experts.to(torch.int32)

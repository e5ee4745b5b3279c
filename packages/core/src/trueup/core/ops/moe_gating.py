"""The router of a mixture of experts: which K of E experts each token goes to, and with what weight."""
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, poison, reference, refuse_unbuilt

SOURCE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_gating_top_k.md"
SIGMOID = 1  # norm_type; 0 is softmax
SUM_OF_BEST_TWO = 1  # group_select_mode; 0 is the maximum
MOST_EXPERTS = 2048


def moe_gating_top_k_contract(
    check: Check, x: Tensor, k: int, *, bias: Tensor | None = None, k_group: int = 1, group_count: int = 1,
    group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20, **rest: Any,
) -> None:
    """What ``npu_moe_gating_top_k`` demands; raises ContractError.

    Routing by a table of token ids (``input_ids``, ``tid2eid``) is not built.
    Source: torch_npu docs: npu_moe_gating_top_k.
    """
    refuse_unbuilt(check, rest)
    if x.ndim != 2:
        check.fail(RELATION, "x", describe(x), "[T, E]: one row of logits a token", SOURCE)
    E = x.shape[1]
    if bias is not None and bias.shape != (E,):
        check.fail(RELATION, "bias", describe(bias), f"[{E}], one number an expert (E of x)", SOURCE)
    if group_count < 1 or E % group_count:
        check.fail(RELATION, "group_count", group_count, f"a divisor of the {E} experts", SOURCE)
    group_size = E // group_count
    if not 1 <= k_group <= group_count:
        check.fail(RELATION, "k_group", k_group, f"1 to {group_count} (group_count)", SOURCE)
    if not 1 <= k <= k_group * group_size:
        check.fail(RELATION, "k", k, f"1 to {k_group * group_size}: {k_group} groups of {group_size} experts", SOURCE)
    if norm_type not in (0, 1):
        check.fail(RELATION, "norm_type", norm_type, "0 (softmax) or 1 (sigmoid)", SOURCE)
    if group_select_mode not in (0, 1):
        check.fail(RELATION, "group_select_mode", group_select_mode, "0 (maximum) or 1 (sum of the best two)", SOURCE)
    if renorm != 0:
        check.fail(RELATION, "renorm", renorm, "0: the norm comes before the top-k, there is no other order", SOURCE)
    if E > MOST_EXPERTS:
        check.fail(SIZE, "x", describe(x, "T, E"), f"at most {MOST_EXPERTS} experts", SOURCE)
    if group_size <= 2:
        check.fail(SIZE, "group_count", group_count, f"more than 2 experts a group, of {E}", SOURCE)
    if -(-group_size // 32) * 32 * group_count > MOST_EXPERTS:
        check.fail(SIZE, "group_count", group_count,
                   f"at most {MOST_EXPERTS} experts after each group of {group_size} is filled up to a multiple of 32",
                   SOURCE)
    if x.dtype != torch.float32 and x.dtype not in float_dtypes(check):
        check.fail(DTYPE, "x", describe(x, "T, E"), "float16, bfloat16 or float32", SOURCE)
    if bias is not None and bias.dtype != x.dtype:
        check.fail(DTYPE, "bias", describe(bias, "E"), f"{x.dtype}, the dtype of x", SOURCE)


@reference("npu_moe_gating_top_k", moe_gating_top_k_contract)
def npu_moe_gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, k_group: int = 1, group_count: int = 1,
    group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose K experts a token by score plus bias; weigh them by the score alone.

    With sigmoid the K weights are divided by their sum; with softmax they are not.  Among equal scores the
    expert (or group) with the lower id comes first.

    Args:
        x: logits [T, E].
        k: experts a token.
        bias: correction [E] that takes part in the choice only.
        k_group, group_count: of so many groups of neighbouring experts, keep the k_group best.
        group_select_mode: a group is as good as its best expert (0), or as its best two together (1).
        routed_scaling_factor: multiplies the weights, after the division.

    Returns:
        weights [T, K] in x's dtype; expert ids [T, K] int32, best first; all scores [T, E] fp32, unwritten
        unless ``out_flag``.

    Source: torch_npu docs: npu_moe_gating_top_k.
    """
    logits = x.to(accumulator(x.dtype))  # [T, E]
    scores = logits.sigmoid() if norm_type == SIGMOID else logits.softmax(-1)  # [T, E]
    choice = scores if bias is None else scores + bias  # [T, E]
    if group_count > 1:
        choice = _only_best_groups(choice, k_group, group_count, group_select_mode)  # [T, E]
    expert_idx = _best(choice, k)  # [T, K]
    weights = scores.gather(1, expert_idx)  # [T, K]
    if norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)  # [T, K]
    weights = (weights * routed_scaling_factor).to(x.dtype)  # [T, K]
    # fp32 whatever x is, as torch_npu's shape inference says.
    norm_out = scores.float() if out_flag else poison(x.shape, torch.float32, x.device)  # [T, E]
    return weights, expert_idx.to(torch.int32), norm_out


def _only_best_groups(choice: Tensor, k_group: int, group_count: int, mode: int) -> Tensor:
    """``choice`` [T, E] with -inf (a zero could beat a negative bias) for all experts of the other groups."""
    groups = choice.unflatten(1, (group_count, choice.shape[1] // group_count))  # [T, G, E/G]
    counted = min(2, groups.shape[2]) if mode == SUM_OF_BEST_TWO else 1
    score = groups.topk(counted, dim=-1).values.sum(-1)  # [T, G]
    dropped = torch.ones_like(score, dtype=torch.bool).scatter_(1, _best(score, k_group), False)  # [T, G]
    return groups.masked_fill(dropped[..., None], float("-inf")).flatten(1)  # [T, E]


def _best(scores: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` best along the last axis, by falling score; among equals the lower one first."""
    values, places = scores.topk(min(count + 1, scores.shape[-1]), dim=-1)
    # topk leaves the order of equals open; where there are any, a stable sort (three times as long) settles it.
    if (values[..., 1:] == values[..., :-1]).any():
        places = scores.sort(dim=-1, descending=True, stable=True).indices
    return places[..., :count]

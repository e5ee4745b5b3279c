"""The router of a mixture of experts: which K of E experts each token goes to, and with what weight.

The experts are the best ones by score, or those that a table has for the token's id (hash routing).
"""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.indices import leaves, span
from trueup.core.ops.registry import accumulator, float_dtypes, poison, reference

SOURCE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_gating_top_k.md"
HASH_SOURCE = "ops-transformer: moe/moe_gating_top_k/docs/aclnnMoeGatingTopKV2.md"
SIGMOID = 1  # norm_type; 0 is softmax
SUM_OF_BEST_TWO = 1  # group_select_mode; 0 is the maximum
MOST_EXPERTS = 2048
MOST_HASHED = 64


def moe_gating_top_k_contract(
    check: Check, x: Tensor, k: int, *, bias: Tensor | None = None, input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None, k_group: int = 1, group_count: int = 1, group_select_mode: int = 0, renorm: int = 0,
    norm_type: int = 0, out_flag: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20,
) -> None:
    """What ``npu_moe_gating_top_k`` demands; raises ContractError.

    The page of the kernel below knows more (``norm_type`` 2, the root of a softplus; ``renorm`` 1 after softmax) than
    that of torch_npu, which counts here.
    Source: torch_npu docs: npu_moe_gating_top_k; the table, from ops-transformer: aclnnMoeGatingTopKV2.
    """
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
    if (input_ids is None) != (tid2eid is None):
        check.fail(RELATION, "tid2eid", None if tid2eid is None else describe(tid2eid),
                   "given together with input_ids: the experts of each token id, and the ids", SOURCE)
    if input_ids is not None and tid2eid is not None:
        _table_contract(check, x, k, input_ids, tid2eid)
        if k_group != group_count:
            check.fail(SIZE, "k_group", k_group, f"{group_count} (group_count) with a table, which knows no groups",
                       HASH_SOURCE)
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


def _table_contract(check: Check, x: Tensor, k: int, input_ids: Tensor, tid2eid: Tensor) -> None:
    """Every token id is a row of the table, and what stands there are experts."""
    T, E = x.shape
    if input_ids.shape != (T,):
        check.fail(RELATION, "input_ids", describe(input_ids), f"[{T}], one id a row of x", SOURCE, "SB-05")
    if tid2eid.ndim != 2 or tid2eid.shape[1] != k:
        check.fail(RELATION, "tid2eid", describe(tid2eid), f"[ids, {k}]: {k} (k) experts for each id", SOURCE)
    for name, ids in (("input_ids", input_ids), ("tid2eid", tid2eid)):
        if ids.dtype not in (torch.int32, torch.int64):
            check.fail(RELATION, name, describe(ids), "int32 or int64", SOURCE)
    if leaves(input_ids, len(tid2eid)):
        check.fail(RELATION, "input_ids", span(input_ids), f"0 to {len(tid2eid) - 1}, rows of tid2eid", HASH_SOURCE)
    elif leaves(tid2eid[input_ids.long()], E):
        check.fail(RELATION, "tid2eid", span(tid2eid[input_ids.long()]), f"expert ids 0 to {E - 1} (E of x)",
                   HASH_SOURCE)
    if k > MOST_HASHED:
        check.fail(SIZE, "k", k, f"at most {MOST_HASHED} with a table", HASH_SOURCE)


def _gating_top_k_axes(call: Mapping[str, Any]) -> str:
    return ("x [T E], bias [E], input_ids [T], tid2eid [ids K] -> weights [T K], expert_idx [T K], "
            f"scores{'' if call['out_flag'] else '~'} [T E]")


@reference("npu_moe_gating_top_k", moe_gating_top_k_contract, _gating_top_k_axes)
def npu_moe_gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, input_ids: Tensor | None = None, tid2eid: Tensor | None = None,
    k_group: int = 1, group_count: int = 1, group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0,
    out_flag: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose K experts a token by score plus bias; weigh them by the score alone.

    With sigmoid the K weights are divided by their sum; with softmax they are not.  Among equal scores the
    expert (or group) with the lower id comes first.

    Args:
        x: logits [T, E].
        k: experts a token.
        bias: correction [E] that takes part in the choice only.
        input_ids, tid2eid: token ids [T], and the experts of every id [ids, K], int32 or int64, instead of a choice;
            the weights still come from x.  ``k_group`` must then equal ``group_count``.
        k_group, group_count: of so many groups of neighbouring experts, keep the k_group best.
        group_select_mode: a group is as good as its best expert (0), or as its best two together (1).
        routed_scaling_factor: multiplies the weights, after the division.

    Returns:
        weights [T, K] in x's dtype; expert ids [T, K] int32, best first, or as in the table; all scores [T, E] fp32,
        unwritten unless ``out_flag``.

    Source: torch_npu docs: npu_moe_gating_top_k; the table, from ops-transformer: aclnnMoeGatingTopKV2.
    """
    logits = x.to(accumulator(x.dtype))  # [T, E]
    scores = logits.sigmoid() if norm_type == SIGMOID else logits.softmax(-1)  # [T, E]
    if input_ids is not None and tid2eid is not None:
        expert_idx = tid2eid[input_ids.long()].long()  # [T, K]
    else:
        choice = scores if bias is None else scores + bias  # [T, E]
        if group_count > 1:
            choice = _only_best_groups(choice, k_group, group_count, group_select_mode)  # [T, E]
        expert_idx = best(choice, k)  # [T, K]
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
    dropped = torch.ones_like(score, dtype=torch.bool).scatter_(1, best(score, k_group), False)  # [T, G]
    return groups.masked_fill(dropped[..., None], float("-inf")).flatten(1)  # [T, E]


def best(scores: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` best along the last axis, by falling score; among equals the lower one first."""
    values, places = scores.topk(min(count + 1, scores.shape[-1]), dim=-1)
    # topk leaves the order of equals open; where there are any, a stable sort (three times as long) settles it.
    if (values[..., 1:] == values[..., :-1]).any():
        places = scores.sort(dim=-1, descending=True, stable=True).indices
    return places[..., :count]

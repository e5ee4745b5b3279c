"""What npu_grouped_matmul demands, overload by overload: ``.List`` takes the ends of the groups from the host."""
from collections.abc import Sequence
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, Check, describe
from trueup.core.ops.matmul.grouped_matmul_dtypes import (
    check_activation,
    check_antiquant,
    check_bias,
    check_dtypes,
    check_floats,
    check_int8,
    check_scale,
)
from trueup.core.ops.matmul.grouped_matmul_groups import (
    COUNTS,
    ENDS,
    HOST,
    META,
    NONE,
    PAGE,
    PAIRS,
    REDUCED,
    ROWS,
    SPLIT_ITEM,
    Tensors,
    check_each_x,
    check_experts,
    check_flat,
    check_group_list,
    check_joined,
    check_lists,
    check_products,
    check_reduced,
    check_separate,
    check_total,
    group_sizes,
    is_one_tensor,
)
from trueup.core.ops.registry import refuse_unbuilt


def contract(check: Check, x: Tensors, weight: Tensors, *, bias: Tensors | None = None, scale: Tensors | None = None,
             antiquant_scale: Tensors | None = None, antiquant_offset: Tensors | None = None,
             per_token_scale: Tensors | None = None, group_list: torch.Tensor | None = None,
             split_item: int | None = 0, group_type: int | None = None, group_list_type: int | None = 0,
             act_type: int | None = 0, tuning_config: Sequence[int] | None = None, output_dtype: int | None = None,
             **rest: Any) -> None:
    """Of the overload whose group_list is a tensor."""
    refuse_unbuilt(check, rest)
    check_lists(check, x, weight)
    if group_type not in (NONE, ROWS, REDUCED):
        check.fail(RELATION, "group_type", group_type,
                   "0 (groups of rows), 2 (of the reduced axis) or -1 (no groups): the default None is for a "
                   "group_list on the host", META)
    if group_list_type not in (ENDS, COUNTS, PAIRS, None):
        check.fail(RELATION, "group_list_type", group_list_type, "0 (ends), 1 (counts) or 2 (pairs)", PAGE)
    if group_type != NONE and split_item not in (2, 3):
        check.fail(RELATION, "split_item", split_item, "2 or 3 (one y) where group_type is 0 or 2; the default is 0",
                   PAGE)
    if group_type == NONE and group_list is not None:
        check.fail(RELATION, "group_list", describe(group_list), "None where group_type is -1", PAGE)
    one, kind = is_one_tensor(weight), group_list_type or ENDS
    groups: int | None = len(weight[0]) if one else len(weight)
    rows = sum(map(len, x))
    if group_type == REDUCED:
        check_reduced(check, x, weight, kind, bias)
        groups, rows = None, x[0].shape[1]
    elif one and group_type == ROWS:
        check_experts(check, x, weight)
    else:
        check_products(check, x, weight)
        if group_type == NONE:
            check_separate(check, x, weight, split_item)
        else:
            check_flat(check, x)
            check_joined(check, x, weight)
    if group_type != NONE and (len(x) == 1 or group_list is not None):
        check_group_list(check, group_list, kind, groups, rows)
    if len(x) > 1 and group_list is not None:
        check_each_x(check, x, group_sizes(group_list, kind))
    check_dtypes(check, x, weight, one or group_type == REDUCED)
    if bias:
        check_bias(check, x, weight, bias)
    if x[0].dtype == torch.int8:
        check_int8(check, x, weight, scale, per_token_scale, group_type, output_dtype)
    else:
        check_floats(check, x, scale, per_token_scale, kind, tuning_config, output_dtype)
    if antiquant_scale or antiquant_offset or (weight[0].dtype == torch.int8 and x[0].dtype != torch.int8):
        check_antiquant(check, x, weight, antiquant_scale, antiquant_offset, group_type)
    if act_type not in (0, None):
        check_activation(check, act_type, per_token_scale)


def list_contract(check: Check, x: Tensors, weight: Tensors, *, bias: Tensors | None = None,
                  scale: Tensors | None = None, antiquant_scale: Tensors | None = None,
                  antiquant_offset: Tensors | None = None, per_token_scale: Tensors | None = None,
                  group_list: Sequence[int] | None = None, split_item: int | None = 0,
                  group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
                  output_dtype: torch.dtype | None = None, **rest: Any) -> None:
    """Of the overload whose group_list is a list of ends on the host."""
    refuse_unbuilt(check, rest)
    if group_type is not None:
        check.fail(RELATION, "group_type", group_type, "None where group_list is on the host", PAGE)
    if group_list_type not in (ENDS, None):
        check.fail(RELATION, "group_list_type", group_list_type, "0 or None where group_list is on the host: ends",
                   PAGE)
    if act_type not in (0, None):
        check.fail(RELATION, "act_type", act_type, "0 or None where group_list is on the host", PAGE)
    if per_token_scale:
        check.fail(RELATION, "per_token_scale", "given", "None where group_list is on the host", PAGE)
    if output_dtype is not None:
        check.fail(RELATION, "output_dtype", output_dtype,
                   "None where group_list is on the host: y has x's dtype, and shape inference takes no other value",
                   META)
    if not group_list:
        check.fail(RELATION, "group_list", group_list,
                   "the end of each group: without it this overload is not chosen, and shape inference refuses it",
                   META)
        return  # never reached, since a RELATION is never off; for the type checker
    if split_item not in (0, 1, 2, 3):
        check.fail(RELATION, "split_item", split_item, "0 or 1 (a y for each weight), 2 or 3 (one y)", PAGE)
    check_lists(check, x, weight)
    check_products(check, x, weight)
    check_flat(check, x)
    if split_item in (2, 3):
        check_joined(check, x, weight)
    elif len(x) != 1:
        check.fail(RELATION, "x", f"{len(x)} tensors", "one where group_list is given and split_item is 0 or 1", HOST)
    if split_item == 0:
        check.fail(RELATION, "split_item", split_item, "1 where one x is divided into several y", META,
                   unless=SPLIT_ITEM)
    if len(group_list) != len(weight):
        check.fail(RELATION, "group_list", f"{len(group_list)} ends", f"{len(weight)}: one for each weight", PAGE)
    sizes, rows = group_sizes(group_list, ENDS), sum(map(len, x))
    check_total(check, sizes, rows)
    if group_list[-1] != rows:
        check.fail(RELATION, "group_list", group_list, f"a last end of {rows}, the rows of x", PAGE)
    if len(x) > 1:
        check_each_x(check, x, sizes)
    check_dtypes(check, x, weight, True)
    if bias:
        check_bias(check, x, weight, bias)
    if x[0].dtype == torch.int8:
        check_scale(check, weight, scale)
    elif scale:
        check.fail(RELATION, "scale", "given", f"None beside x in {x[0].dtype}", PAGE)
    if scale and scale[0].dtype != torch.int64:
        check.fail(DTYPE, "scale", describe(scale[0]), "int64 where group_list is on the host", PAGE)
    if antiquant_scale or antiquant_offset or (weight[0].dtype == torch.int8 and x[0].dtype != torch.int8):
        check_antiquant(check, x, weight, antiquant_scale, antiquant_offset, ROWS)

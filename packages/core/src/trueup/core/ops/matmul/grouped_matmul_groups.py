"""How x, weight and y of npu_grouped_matmul are divided into groups.

A form is named by whether x, weight and y are one tensor or several: "one-several-one" has one x, a list of matrices
and one y.  ``group_type`` says which axis the groups divide: rows (0), the reduced axis (2), or none (-1).
"""
from collections.abc import Sequence
from typing import Any

import torch

from trueup.core.ops.contract import RELATION, SIZE, Check, describe, open_point

PAGE = "op-plugin: docs/.../torch_npu-npu_grouped_matmul.md"
HOST = "op-plugin: op_plugin/ops/opapi/GroupedMatmulKernelNpuOpApi.cpp"
KERNEL = "ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV4_en.md"
META = "torch_npu 2.13.0: op_plugin/meta/_meta_registrations.py"

MAX_GROUPS, MAX_LIST, MAX_AXIS = 1024, 128, 65536
NONE, ROWS, REDUCED = -1, 0, 2  # group_type
ENDS, COUNTS, PAIRS = 0, 1, 2  # group_list_type

SPLIT_ITEM = open_point(
    "gmm-split-item", "npu_grouped_matmul: the page takes split_item 0 and 1 alike (one result for each weight), but "
    "shape inference follows the page only in 0 with several x and in 1 with one x: what does a graph allocate?",
    "0 with several x, 1 with one x")
ONE_GROUP = open_point(
    "gmm-one-group", "npu_grouped_matmul: group_list_type 1 or 2 with a single group: refused, as older pages say?",
    "two groups or more")

Tensors = Sequence[torch.Tensor]
Sizes = Sequence[tuple[int, int]]


def group_sizes(group_list: torch.Tensor | Sequence[int], group_list_type: int) -> list[tuple[int, int]]:
    """(group, size) in the order of the rows; a size is negative where a cumulative list falls."""
    values: list[Any] = group_list.tolist() if isinstance(group_list, torch.Tensor) else list(group_list)
    if group_list_type == PAIRS:
        return [(group, size) for group, size in values]
    if group_list_type == COUNTS:
        return list(enumerate(values))
    return [(group, end - start) for group, (start, end) in enumerate(zip([0, *values], values, strict=False))]


def is_one_tensor(weight: Tensors) -> bool:
    """Whether the matrices of all groups are one tensor (E, K, N)."""
    return len(weight) == 1 and weight[0].dim() == 3


def check_lists(check: Check, x: Tensors, weight: Tensors) -> None:
    if not x or not weight:
        check.fail(RELATION, "x, weight", f"{len(x)} and {len(weight)} tensors", "at least one of each", PAGE)
    if max(len(x), len(weight)) > MAX_LIST:
        check.fail(SIZE, "x, weight", f"{len(x)} and {len(weight)} tensors", f"at most {MAX_LIST} in a list", PAGE)
    for name, tensors in (("x", x), ("weight", weight)):
        for tensor in tensors:
            if tensor.dim() < 2:
                check.fail(RELATION, name, describe(tensor), "matrices", PAGE)


def check_products(check: Check, x: Tensors, weight: Tensors) -> None:
    """Every x, or the only one, meets a matrix of its K."""
    if len(x) not in (1, len(weight)):
        check.fail(RELATION, "x", f"{len(x)} tensors", f"one, or one for each of the {len(weight)} weights", PAGE)
    for i, matrix in enumerate(weight):
        rows = x[i] if len(x) > 1 else x[0]
        if matrix.dim() != 2 or rows.shape[-1] != matrix.shape[0]:
            check.fail(RELATION, f"weight[{i}]", describe(matrix, "K, N"),
                       f"2 axes, and the K of x {list(rows.shape)}", PAGE)
        if max(matrix.shape) >= MAX_AXIS or not matrix.shape[0]:
            check.fail(SIZE, f"weight[{i}]", describe(matrix, "K, N"), f"K at least 1, K and N below {MAX_AXIS}", PAGE)
        check_dense(check, f"x[{i}]", rows)
    if len({matrix.stride(-1) == 1 for matrix in weight if min(matrix.shape) > 1}) > 1:
        check.fail(SIZE, "weight", "transposed in part", "all transposed views, or none", PAGE)


def check_separate(check: Check, x: Tensors, weight: Tensors, split_item: int | None) -> None:
    """several-several-several: independent products."""
    if split_item not in (0, 1):
        check.fail(RELATION, "split_item", split_item, "0 or 1 (a y for each x) where group_type is -1", PAGE)
    if split_item == 1:
        check.fail(RELATION, "split_item", split_item, "0 where each x has a weight of its own", META,
                   unless=SPLIT_ITEM)
    if len(x) != len(weight):
        check.fail(RELATION, "weight", f"{len(weight)} tensors", f"one for each of the {len(x)} x", PAGE)
    for i, rows in enumerate(x):
        if rows.dim() != x[0].dim() or not 2 <= rows.dim() <= 6:
            check.fail(SIZE, f"x[{i}]", describe(rows), "2 to 6 axes, all x alike", PAGE)


def check_joined(check: Check, x: Tensors, weight: Tensors) -> None:
    """one-several-one and several-several-one: a list of matrices, whose products follow each other in one y."""
    for i, matrix in enumerate(weight):
        if matrix.shape[1] != weight[0].shape[1]:
            check.fail(RELATION, f"weight[{i}]", describe(matrix, "K, N"),
                       f"N = {weight[0].shape[1]} as weight[0]: all rows of one y are as long", PAGE)


def check_flat(check: Check, x: Tensors) -> None:
    for i, rows in enumerate(x):
        if rows.dim() != 2:
            check.fail(RELATION, f"x[{i}]", describe(rows), "2 axes (M, K), unless group_type is -1", PAGE)


def check_experts(check: Check, x: Tensors, weight: Tensors) -> None:
    """one-one-one, the form of a mixture of experts: rows sorted by group meet the group's matrix."""
    rows, experts = x[0], weight[0]
    if len(x) != 1 or rows.dim() != 2 or rows.shape[1] != experts.shape[1]:
        check.fail(RELATION, "weight[0]", describe(experts, "E, K, N"),
                   f"one x (M, K) of its K, not {len(x)} x, the first {list(rows.shape)}", PAGE)
    E, K, N = experts.shape
    if not 1 <= E <= MAX_GROUPS:
        check.fail(SIZE, "weight[0]", describe(experts, "E, K, N"), f"1 to {MAX_GROUPS} groups", PAGE)
    if not 1 <= K < MAX_AXIS or N >= MAX_AXIS:
        check.fail(SIZE, "weight[0]", describe(experts, "E, K, N"), f"K at least 1, K and N below {MAX_AXIS}", PAGE)
    check_dense(check, "x[0]", rows)


def check_reduced(check: Check, x: Tensors, weight: Tensors, kind: int, bias: Tensors | None) -> None:
    """Groups of the reduced axis: y[e] is a product of e's columns of x and e's rows of weight."""
    left, right = x[0], weight[0]
    if len(x) != 1 or len(weight) != 1 or left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        check.fail(RELATION, "weight[0]", describe(right),
                   f"one (K, N) beside one x (M, K), not {len(weight)} beside {len(x)} x, the first "
                   f"{list(left.shape)}", PAGE)
    if bias:
        check.fail(RELATION, "bias", f"{len(bias)} tensors", "None where group_type is 2", KERNEL)
    if kind == PAIRS:
        check.fail(RELATION, "group_list_type", kind, "0 or 1 where group_type is 2", PAGE)
    if len(left) >= MAX_AXIS or right.shape[1] >= MAX_AXIS:
        check.fail(SIZE, "x, weight", f"M = {len(left)} and N = {right.shape[1]}", f"M and N below {MAX_AXIS}", PAGE)
    if left.stride(0) != 1 and min(left.shape) > 1:
        check.fail(SIZE, "x[0]", f"stored as (M, K), {describe(left, 'M, K')}",
                   "a transposed view of (K, M): rows of the reduced axis are read whole", PAGE)
    check_dense(check, "weight[0]", right)


def check_dense(check: Check, argument: str, rows: torch.Tensor) -> None:
    if rows.stride(-1) != 1 and min(rows.shape) > 1:
        check.fail(SIZE, argument, f"strided, {describe(rows)}", "dense rows: it may not be a transposed view", PAGE)


def check_group_list(check: Check, group_list: torch.Tensor | None, kind: int, groups: int | None, rows: int) -> None:
    """One entry for each group, as many as there are matrices; ``groups`` is None where nothing else counts them.

    The page wants them to add up to all rows.  Expert parallelism passes fewer (vllm-ascend:
    vllm_ascend/ops/fused_moe/token_dispatcher.py), and the device does not look.
    """
    if group_list is None:
        check.fail(RELATION, "group_list", None, "given: it divides the rows into groups", PAGE)
        return  # never reached, since a RELATION is never off; for the type checker
    if not group_list.dim():
        check.fail(RELATION, "group_list", describe(group_list), "an axis of groups", PAGE)
    count = group_list.shape[0] if groups is None else groups
    if kind == PAIRS and group_list.shape != (count, 2):
        check.fail(RELATION, "group_list", describe(group_list), f"[{count}, 2]: (group, size) of each group", PAGE)
    if kind != PAIRS and group_list.shape != (count,):
        check.fail(RELATION, "group_list", describe(group_list), f"[{count}]: one entry for each group", PAGE)
    if group_list.dtype != torch.int64:
        check.fail(RELATION, "group_list", describe(group_list), "int64: the device reads 8 bytes for each entry", PAGE)
    sizes = group_sizes(group_list, kind)
    check_total(check, sizes, rows)
    if kind == PAIRS and sizes != sorted(sizes, key=lambda pair: (pair[1] == 0, pair[0])):
        check.fail(RELATION, "group_list", sizes, "groups in order, and those without rows behind the others", PAGE)
    if kind == PAIRS and sorted(group for group, _ in sizes) != list(range(count)):
        check.fail(RELATION, "group_list", sizes, f"each group from 0 to {count - 1} once", PAGE)
    if not 1 <= count <= MAX_GROUPS:
        check.fail(SIZE, "group_list", f"{count} groups", f"1 to {MAX_GROUPS} groups", PAGE)
    if kind != ENDS and count == 1:
        check.fail(SIZE, "group_list", "one group", "2 groups or more in group_list_type 1 and 2", KERNEL,
                   unless=ONE_GROUP)


def check_total(check: Check, sizes: Sizes, rows: int) -> None:
    """Sizes that are not negative, and together no more than there are rows."""
    numbers = [size for _, size in sizes]
    if numbers and min(numbers) < 0:
        check.fail(RELATION, "group_list", f"of groups of {numbers} rows",
                   "no negative size, and no falling end in group_list_type 0: is it meant as the other type?", PAGE)
    if sum(numbers) > rows:
        check.fail(RELATION, "group_list", f"{sum(numbers)} rows in total", f"at most the {rows} rows of x", PAGE)


def check_each_x(check: Check, x: Tensors, sizes: Sizes) -> None:
    """Several x are the groups themselves."""
    numbers = [size for _, size in sorted(sizes)]
    if numbers != [len(rows) for rows in x]:
        check.fail(RELATION, "group_list", f"of groups of {numbers} rows",
                   f"the rows of each x, {[len(rows) for rows in x]}", PAGE)

"""Matrix products over groups of rows (experts) and over heads.

PyTorch's CPU products of 16-bit floats accumulate in fp32 and round once, with oneDNN and without it, as the
device does; so nothing is widened here.
"""
from collections.abc import Sequence
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import float_dtypes, poison, reference, refuse_unbuilt

GROUPED_PAGE = "op-plugin: docs/.../torch_npu-npu_grouped_matmul.md"
BATCH_PAGE = "op-plugin: docs/.../torch_npu-npu_transpose_batchmatmul.md"
MAX_GROUPS = 1024
MAX_AXIS = 65536
PLAIN, SWAPPED = (0, 1, 2), (1, 0, 2)


def _group_sizes(group_list: torch.Tensor, group_list_type: int) -> list[int]:
    """Rows of each group; negative where a cumulative list falls."""
    values = group_list.tolist()
    return values if group_list_type else [end - start for start, end in zip([0, *values[:-1]], values, strict=True)]


def _grouped_matmul_contract(check: Check, x: list[torch.Tensor], weight: list[torch.Tensor], *,
                             group_list: torch.Tensor | None = None, split_item: int | None = 0,
                             group_type: int | None = None, group_list_type: int | None = 0, **rest: Any) -> None:
    refuse_unbuilt(check, rest, {"act_type": 0})
    if len(x) != 1 or len(weight) != 1:
        check.fail(RELATION, "x, weight", f"{len(x)} and {len(weight)} tensors",
                   "one x (M, K) and one weight (E, K, N): other forms are not built yet", GROUPED_PAGE)
    if split_item not in (2, 3):
        check.fail(RELATION, "split_item", split_item,
                   "2 or 3 (one output); the default 0 means one output for each group, not built yet", GROUPED_PAGE)
    if group_type != 0:
        check.fail(RELATION, "group_type", group_type,
                   "0 (groups of rows): the default None is refused beside a tensor group_list", GROUPED_PAGE)
    if group_list_type not in (0, 1):
        check.fail(RELATION, "group_list_type", group_list_type, "0 (cumulative) or 1 (counts): not built yet",
                   GROUPED_PAGE)
    rows, experts = x[0], weight[0]
    if rows.dim() != 2 or experts.dim() != 3 or rows.shape[1] != experts.shape[1]:
        check.fail(RELATION, "weight[0]", describe(experts, "E, K, N"),
                   f"3 axes, and the K of x[0] {list(rows.shape)} (M, K)", GROUPED_PAGE)
    E, K, N = experts.shape
    if group_list is None or group_list.shape != (E,):
        got = "None" if group_list is None else describe(group_list)
        check.fail(RELATION, "group_list", got, f"an int64 tensor [{E}], one entry for each expert", GROUPED_PAGE)
        return  # never reached, since a RELATION is never off; for the type checker
    if group_list.dtype != torch.int64:
        check.fail(RELATION, "group_list", describe(group_list), "int64: the device reads 8 bytes for each entry",
                   GROUPED_PAGE)
    _check_group_sizes(check, group_list, group_list_type or 0, rows.shape[0])
    if E > MAX_GROUPS:
        check.fail(SIZE, "weight[0]", describe(experts, "E, K, N"), f"at most {MAX_GROUPS} groups", GROUPED_PAGE)
    if K >= MAX_AXIS or N >= MAX_AXIS:
        check.fail(SIZE, "weight[0]", describe(experts, "E, K, N"), f"K and N below {MAX_AXIS}", GROUPED_PAGE)
    if rows.stride(1) != 1:
        check.fail(SIZE, "x[0]", f"strided, {describe(rows, 'M, K')}", "dense rows: x may not be a transposed view",
                   GROUPED_PAGE)
    if rows.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "x[0]", describe(rows), "float16, bfloat16 or float32 (int8 is not built yet)", GROUPED_PAGE)
    if experts.dtype != rows.dtype:
        check.fail(DTYPE, "weight[0]", describe(experts), f"x's {rows.dtype}", GROUPED_PAGE)


def _check_group_sizes(check: Check, group_list: torch.Tensor, group_list_type: int, M: int) -> None:
    sizes = _group_sizes(group_list, group_list_type)
    if sizes and min(sizes) < 0:
        meaning = "counts (group_list_type 1)" if group_list_type else "cumulative (group_list_type 0)"
        check.fail(RELATION, "group_list", group_list.tolist(),
                   f"{meaning}: no negative and no falling entry; is it meant as the other type?", GROUPED_PAGE)
    if sum(sizes) > M:
        check.fail(RELATION, "group_list", f"{sum(sizes)} rows in total", f"at most the {M} rows of x[0]", GROUPED_PAGE)


@reference("npu_grouped_matmul", _grouped_matmul_contract)
def npu_grouped_matmul(x: list[torch.Tensor], weight: list[torch.Tensor], *, group_list: torch.Tensor,
                       group_list_type: int | None = 0, **rest: Any) -> list[torch.Tensor]:
    """The MoE form: rows are sorted by expert, and each group of rows meets its own matrix.

    The page wants the groups to add up to M.  Expert parallelism passes fewer, since the rows of other ranks'
    experts are left out of ``group_list`` (vllm-ascend: vllm_ascend/ops/fused_moe/token_dispatcher.py); the
    device does not look.  So a smaller total is legal here, and the rows past it are poisoned.

    Args:
        x: one (M, K), fp16, bf16 or fp32.
        weight: one (E, K, N), x's dtype; may be a transposed view.
        group_list: (E,) int64: cumulative ends (type 0) or counts (type 1).
        split_item: 2 or 3.
        group_type: 0.

    Returns:
        A list of one (M, N) in x's dtype.

    Source: torch_npu docs: npu_grouped_matmul.
    """
    rows, experts = x[0], weight[0]  # [M, K], [E, K, N]
    M, N = rows.shape[0], experts.shape[2]
    products, start = [], 0
    for expert, size in enumerate(_group_sizes(group_list, group_list_type or 0)):
        if size:
            products.append(rows[start:start + size] @ experts[expert])  # [size, N]
            start += size
    if start < M or not products:
        products.append(poison((M - start, N), rows.dtype, rows.device))  # [M - start, N]
    return [torch.cat(products)]  # [M, N]


def _transpose_batchmatmul_contract(check: Check, input: torch.Tensor, weight: torch.Tensor, *,
                                    perm_x1: Sequence[int] | None = None, perm_x2: Sequence[int] | None = None,
                                    perm_y: Sequence[int] | None = None, **rest: Any) -> None:
    refuse_unbuilt(check, rest, {"batch_split_factor": 1})
    if _order(perm_x1, PLAIN) not in (PLAIN, SWAPPED):
        check.fail(RELATION, "perm_x1", perm_x1, "[1, 0, 2] for input (M, B, K), or [0, 1, 2] for (B, M, K)",
                   BATCH_PAGE)
    if _order(perm_x2, PLAIN) != PLAIN:
        check.fail(RELATION, "perm_x2", perm_x2, "[0, 1, 2], with weight (B, K, N)", BATCH_PAGE)
    if _order(perm_y, SWAPPED) != SWAPPED:
        check.fail(RELATION, "perm_y", perm_y, "[1, 0, 2]: the result is (M, B, N)", BATCH_PAGE)
    if input.dim() != 3 or weight.dim() != 3:
        check.fail(RELATION, "input, weight", f"{describe(input)} and {describe(weight)}", "3 axes each", BATCH_PAGE)
    swapped = _order(perm_x1, PLAIN) == SWAPPED
    axes = "M, B, K" if swapped else "B, M, K"
    B, K, N = weight.shape
    if input.shape[1 if swapped else 0] != B or input.shape[2] != K:
        check.fail(RELATION, "weight", describe(weight, "B, K, N"),
                   f"the B and K of input {list(input.shape)}, read as ({axes})", BATCH_PAGE)
    if K % 16 or N % 16:
        check.fail(SIZE, "weight", describe(weight, "B, K, N"), "K and N multiples of 16", BATCH_PAGE)
    if max(B, K, N, B * K if swapped else 0) >= MAX_AXIS:
        check.fail(SIZE, "weight", describe(weight, "B, K, N"),
                   f"B, K and N below {MAX_AXIS}, and B * K as well where perm_x1 is [1, 0, 2]", BATCH_PAGE)
    if input.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "input", describe(input), "float16, bfloat16 or float32", BATCH_PAGE)
    if weight.dtype != input.dtype:
        check.fail(DTYPE, "weight", describe(weight), f"input's {input.dtype}", BATCH_PAGE)


def _order(perm: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """A permutation as a tuple; the host layer fills in ``default`` where none is given."""
    return default if perm is None else tuple(perm)


@reference("npu_transpose_batchmatmul", _transpose_batchmatmul_contract)
def npu_transpose_batchmatmul(input: torch.Tensor, weight: torch.Tensor, *, perm_x1: Sequence[int] | None = None,
                              **rest: Any) -> torch.Tensor:
    """y[m, b] = x[m, b] @ weight[b]: the absorbed projections of MLA, where b is a head.

    Args:
        input: (M, B, K) with perm_x1 [1, 0, 2], or (B, M, K) with [0, 1, 2] (also None); fp16, bf16 or fp32.
        weight: (B, K, N), input's dtype; perm_x2 is [0, 1, 2] (or None).
        perm_y: [1, 0, 2] (or None).

    Returns:
        (M, B, N) in input's dtype.

    Source: torch_npu docs: npu_transpose_batchmatmul; defaults of the three permutations from its host layer
    (op-plugin: op_plugin/ops/opapi/TransposeBatchMatMulKernelNpuOpApi.cpp).
    """
    by_head = input.transpose(0, 1) if _order(perm_x1, PLAIN) == SWAPPED else input  # [B, M, K]
    return torch.bmm(by_head, weight).transpose(0, 1).contiguous()  # [M, B, N]

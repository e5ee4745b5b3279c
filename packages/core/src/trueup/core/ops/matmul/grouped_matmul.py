"""Matrix products over groups of rows: the experts of a mixture of experts, mostly.

PyTorch's CPU products of 16-bit floats accumulate in fp32 and round once, with oneDNN and without it, as the
device does; so nothing is widened here unless something is added before the rounding.
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from trueup.core.ops.contract import assumed, open_point
from trueup.core.ops.matmul.grouped_matmul_contract import contract, list_contract
from trueup.core.ops.matmul.grouped_matmul_groups import ENDS, NONE, PAIRS, REDUCED, Tensors, group_sizes, is_one_tensor
from trueup.core.ops.matmul.int8 import DTYPES, int8_product, requantise
from trueup.core.ops.registry import accumulator, poison, reference

EMPTY_GROUP = open_point(
    "gmm-empty-group", "npu_grouped_matmul with group_type 2: what is y[e] where group e of the reduced axis is empty?",
    "poisoned, as if left unwritten; zeros are assumed")

Activation = Callable[[torch.Tensor], torch.Tensor]
# By act_type; 3 (GELU, erf) is not supported by any device.
ACTIVATIONS: dict[int, Activation] = {
    1: F.relu, 2: lambda y: F.gelu(y, approximate="tanh"), 4: lambda y: y * torch.sigmoid(1.702 * y), 5: F.silu,
}


def _rows(x: Tensors, groups: Sequence[tuple[int, int]] | None) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """(group, its rows of the whole, these rows) for each group; several x are groups of their own."""
    if len(x) > 1 or groups is None:
        for group, rows in enumerate(x):
            yield group, slice(None), rows
        return
    start = 0
    for group, size in groups:
        where = slice(start, start + size)
        yield group, where, x[0][where]
        start += size


def _floats(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
            offset: torch.Tensor | None) -> torch.Tensor:
    """rows @ ((matrix + offset) * scale) + bias, rounded once."""
    if bias is None and scale is None:
        return rows @ matrix  # [..., M, N]
    wide = accumulator(rows.dtype)
    matrix = matrix.to(wide)  # [K, N]
    if scale is not None and offset is not None:
        matrix = (matrix + offset.to(wide)) * scale.to(wide)  # [K, N]
    y = rows.to(wide) @ matrix  # [..., M, N]
    return (y if bias is None else y + bias).to(rows.dtype)  # [..., M, N]


def _int8(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
          per_token: torch.Tensor | None, activation: Activation | None, dtype: torch.dtype) -> torch.Tensor:
    """activation((rows @ matrix + bias) * scale * per_token), in the dtype that scale stands for."""
    sums = int8_product(rows, matrix)  # [..., M, N]
    if bias is not None:
        sums = sums.double() + bias  # [..., M, N]
    if scale is None:
        return sums.to(dtype)  # [..., M, N] int32
    if dtype == torch.int8:
        return requantise(sums, scale)  # [..., M, N]
    y = sums.float() * scale.float()  # [..., M, N]
    if per_token is not None:
        y = y * per_token[:, None]  # [M, N]
    return (y if activation is None else activation(y)).to(dtype)  # [..., M, N]


def _reduced(x: torch.Tensor, weight: torch.Tensor, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
    """y[e] = x[:, rows of e] @ weight[rows of e]."""
    shape = (x.shape[0], weight.shape[1])
    blocks, start = [], 0
    for _, size in groups:
        if size:
            blocks.append(x[:, start:start + size] @ weight[start:start + size])  # [M, N]
        elif assumed(EMPTY_GROUP):
            blocks.append(x.new_zeros(shape))  # [M, N]
        else:
            blocks.append(poison(shape, x.dtype, x.device))  # [M, N]
        start += size
    return torch.stack(blocks)  # [E, M, N]


def _multiply(x: Tensors, weight: Tensors, groups: Sequence[tuple[int, int]] | None, joined: bool, dtype: torch.dtype,
              *, bias: Tensors | None, scale: Tensors | None, antiquant_scale: Tensors | None,
              antiquant_offset: Tensors | None, per_token_scale: Tensors | None = None,
              act_type: int | None = 0) -> list[torch.Tensor]:
    """Products of all groups, in one tensor if ``joined``."""
    one, activation = is_one_tensor(weight), ACTIVATIONS.get(act_type or 0)

    def of(tensors: Tensors | None, group: int) -> torch.Tensor | None:
        return None if not tensors else tensors[0][group] if one else tensors[group]

    if joined and groups is not None:
        groups = [(group, size) for group, size in groups if size]
    y = []
    for group, where, rows in _rows(x, groups):
        matrix = weight[0][group] if one else weight[group]  # [K, N]
        if rows.dtype == torch.int8:
            per_token = per_token_scale[0][where] if per_token_scale else None  # [M]
            y.append(_int8(rows, matrix, of(bias, group), of(scale, group), per_token, activation, dtype))
        else:
            y.append(_floats(rows, matrix, of(bias, group), of(antiquant_scale, group), of(antiquant_offset, group)))
    if not joined:
        return y
    left = sum(map(len, x)) - sum(map(len, y))
    if left or not y:
        y.append(poison((left, weight[0].shape[-1]), dtype, x[0].device))  # [rows of no group, N]
    return [torch.cat(y)]  # [M, N]


def _axes(call: Mapping[str, Any]) -> str:
    """'?': an axis that is not the same in all tensors of a list."""
    several_x, one_weight = len(call["x"]) > 1, is_one_tensor(call["weight"])
    if call["group_type"] == REDUCED:
        return "x [Din S], weight [S Dout], group_list [E] -> y [E Din Dout]"
    if one_weight:
        pairs = call["group_list_type"] == PAIRS
        return ("x [S Din], weight [E Din Dout], bias [E Dout], scale [E Dout], antiquant_scale [E Dout], "
                f"antiquant_offset [E Dout], per_token_scale [S], group_list [E{' 2' if pairs else ''}] -> y [S Dout]")
    joined = call["split_item"] in (2, 3)
    x = "? ?" if several_x else "S Din"
    weight = f"{'?' if several_x else 'Din'} {'Dout' if joined else '?'}"
    column = "Dout" if joined else "?"
    columns = ", ".join(f"{name} [{column}]" for name in ("bias", "scale", "antiquant_scale", "antiquant_offset"))
    return (f"x [{x}], weight [{weight}], {columns}, group_list [{'E 2' if call['group_list_type'] == PAIRS else 'E'}] "
            f"-> y [{'S Dout' if joined else '? ?'}]")


_MATRIX = torch.empty(1, 1, device="meta")
_EXPERTS = _MATRIX[None]


@reference("npu_grouped_matmul", contract, _axes, (
    {"x": [_MATRIX], "weight": [_EXPERTS], "group_type": 0, "split_item": 2},
    {"x": [_MATRIX], "weight": [_MATRIX] * 2, "group_type": 0, "split_item": 2},
    {"x": [_MATRIX] * 2, "weight": [_MATRIX] * 2, "group_type": 0, "split_item": 2},
    {"x": [_MATRIX] * 2, "weight": [_MATRIX] * 2, "group_type": -1, "split_item": 0},
    {"x": [_MATRIX], "weight": [_MATRIX], "group_type": 2, "split_item": 2},
))
def npu_grouped_matmul(x: list[torch.Tensor], weight: list[torch.Tensor], *, bias: list[torch.Tensor] | None = None,
                       scale: list[torch.Tensor] | None = None, antiquant_scale: list[torch.Tensor] | None = None,
                       antiquant_offset: list[torch.Tensor] | None = None,
                       per_token_scale: list[torch.Tensor] | None = None, group_list: torch.Tensor | None = None,
                       group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
                       output_dtype: int | None = None, **rest: Any) -> list[torch.Tensor]:
    """y_e = x_e @ weight_e for each group e; in the form that serving uses, rows are sorted by expert.

    Rows of x past the last group are not written (op-plugin's page wants none; expert parallelism has them, since
    the rows of other ranks' experts are left out of ``group_list``): poisoned here.

    Args:
        x, weight: by ``group_type``.  0, groups of rows: one x (M, K) or one for each group, and one weight (E, K, N)
            or a list of (K, N); one y (M, N).  -1, no groups: as many x (..., K) as weights (K, N) and y (..., N).
            2, groups of the reduced axis: one x (M, K), a transposed view, one weight (K, N) and one y (E, M, N).
            Dtypes: fp16, bf16 or (one tensor each) fp32, all alike; int8; or weight in int8 beside a 16-bit x.
        bias: added before the result is rounded: fp16 beside fp16, int32 beside int8, else fp32.
        scale: beside int8; its dtype chooses that of y: int64 (packed) int8, bf16 bf16, fp32 fp16, None int32.
        per_token_scale: one fp32 (M,), beside int8 x and weight of one tensor each.
        antiquant_scale, antiquant_offset: weight in int8 stands for (weight + offset) * scale.
        bias, scale and antiquant: each one tensor (E, N) beside one weight, else a list of (N,).
        group_list: int64 (E,): ends (``group_list_type`` 0) or counts (1); or with int8 (E, 2) pairs of group and
            size (2), those of size 0 behind.  Not with ``group_type`` -1; may be None where there are several x.
        split_item: 2 or 3 (one y), or 0 with ``group_type`` -1.
        act_type: with per_token_scale: 0 none, 1 ReLU, 2 GELU (tanh), 4 fast GELU (x * sigmoid(1.702 x)), 5 SiLU.
        output_dtype: the id of y's dtype; None is x's dtype.

    Not built: int4, fp8, hif8, mx; matrices in FRACTAL_NZ.

    Source: torch_npu docs: npu_grouped_matmul; ops-transformer: gmm/grouped_matmul/docs/aclnnGroupedMatmulV4_en.md.
    """
    groups = None if group_list is None else group_sizes(group_list, group_list_type or 0)
    if group_type == REDUCED:
        return [_reduced(x[0], weight[0], groups or [])]  # [E, M, N]
    return _multiply(
        x, weight, groups, group_type != NONE, DTYPES[output_dtype] if output_dtype else x[0].dtype, bias=bias,
        scale=scale, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale, act_type=act_type,
    )


@reference("npu_grouped_matmul.List", list_contract, _axes, (
    {"x": [_MATRIX], "weight": [_MATRIX] * 2, "group_list": [1, 2], "split_item": 2},
    {"x": [_MATRIX], "weight": [_MATRIX] * 2, "group_list": [1, 2], "split_item": 1},
    {"x": [_MATRIX] * 2, "weight": [_MATRIX] * 2, "group_list": [1, 2], "split_item": 2},
))
def npu_grouped_matmul_list(x: list[torch.Tensor], weight: list[torch.Tensor], *,
                            bias: list[torch.Tensor] | None = None, scale: list[torch.Tensor] | None = None,
                            antiquant_scale: list[torch.Tensor] | None = None,
                            antiquant_offset: list[torch.Tensor] | None = None, group_list: Sequence[int],
                            split_item: int | None = 0, **rest: Any) -> list[torch.Tensor]:
    """The same with a list of ends on the host, which a captured graph keeps for ever: see the other overload.

    Args:
        x: one (M, K), or with split_item 2 or 3 one for each weight.
        weight: a list of (K, N).
        group_list: ends, the last of them the number of rows of all x.
        split_item: 1: a y for each weight; 2 or 3: one y (M, N).

    Returns:
        y in x's dtype.

    Source: torch_npu docs: npu_grouped_matmul.
    """
    return _multiply(
        x, weight, group_sizes(group_list, ENDS), split_item in (2, 3), x[0].dtype, bias=bias, scale=scale,
        antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
    )

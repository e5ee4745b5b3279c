"""A matrix for each head: the absorbed projections of MLA.

PyTorch's CPU products of 16-bit floats accumulate in fp32 and round once, with oneDNN and without it, as the
device does; so nothing is widened here.
"""
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.matmul.int8 import PACKED, requantise
from trueup.core.ops.registry import float_dtypes, reference, refuse_unbuilt

PAGE = "op-plugin: docs/.../torch_npu-npu_transpose_batchmatmul.md"
KERNEL = "ops-nn: matmul/transpose_batch_mat_mul/docs/aclnnTransposeBatchMatMul.md"
META = "torch_npu 2.13.0: op_plugin/meta/_meta_registrations.py"
MAX_AXIS = 65536
PLAIN, SWAPPED = (0, 1, 2), (1, 0, 2)

SPLIT = open_point(
    "batch-split-factor", "npu_transpose_batchmatmul: does batch_split_factor divide B (the kernel's page) or N "
    "(op-plugin's page)?", "it has to divide both")


def _order(perm: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """A permutation as a tuple; the host layer fills in ``default`` where none is given."""
    return default if perm is None else tuple(perm)


def _contract(check: Check, input: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None,
              scale: torch.Tensor | None = None, perm_x1: Sequence[int] | None = None,
              perm_x2: Sequence[int] | None = None, perm_y: Sequence[int] | None = None,
              batch_split_factor: int | None = 1, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if bias is not None:
        check.fail(RELATION, "bias", describe(bias), "None: the operator takes no bias; add it to the result", META)
    order = _order(perm_x1, PLAIN)
    if order not in (PLAIN, SWAPPED):
        check.fail(RELATION, "perm_x1", perm_x1, "[1, 0, 2] for input (M, B, K), or [0, 1, 2] for (B, M, K)", PAGE)
    if _order(perm_x2, PLAIN) != PLAIN:
        check.fail(RELATION, "perm_x2", perm_x2, "[0, 1, 2], with weight (B, K, N)", PAGE)
    if _order(perm_y, SWAPPED) != SWAPPED:
        check.fail(RELATION, "perm_y", perm_y, "[1, 0, 2]: the result is (M, B, N)", PAGE)
    if input.dim() != 3 or weight.dim() != 3:
        check.fail(RELATION, "input, weight", f"{describe(input)} and {describe(weight)}", "3 axes each", PAGE)
    B, K, N = weight.shape
    if order == SWAPPED and (input.shape[1], input.shape[2]) != (B, K):
        check.fail(RELATION, "weight", describe(weight, "B, K, N"),
                   f"the B and K of input {list(input.shape)}, read as (M, B, K)", PAGE)
    if order == PLAIN and (input.shape[0], input.shape[2]) != (B, K):
        check.fail(RELATION, "weight", describe(weight, "B, K, N"),
                   f"the B and K of input {list(input.shape)}, read as (B, M, K)", PAGE)
    if batch_split_factor not in (1, None):
        _check_split(check, batch_split_factor, B, N, scale is not None)
    if scale is not None:
        _check_scale(check, input, scale, B, N)
    if K % 16 or N % 16:
        check.fail(SIZE, "weight", describe(weight, "B, K, N"), "K and N multiples of 16", PAGE)
    if max(B, K, N) >= MAX_AXIS:
        check.fail(SIZE, "weight", describe(weight, "B, K, N"), f"B, K and N below {MAX_AXIS}", PAGE)
    if order == SWAPPED and B * K >= MAX_AXIS:
        check.fail(SIZE, "weight", describe(weight, "B, K, N"),
                   f"B * K below {MAX_AXIS} where perm_x1 is [1, 0, 2]", PAGE)
    if input.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "input", describe(input), "float16, bfloat16 or float32", PAGE)
    if weight.dtype != input.dtype:
        check.fail(DTYPE, "weight", describe(weight), f"input's {input.dtype}", PAGE)


def _check_split(check: Check, factor: int, B: int, N: int, scaled: bool) -> None:
    if factor < 1 or B * N % factor:
        check.fail(RELATION, "batch_split_factor", factor, f"a divisor of the {B * N} = B * N columns", PAGE)
    if scaled:
        check.fail(RELATION, "batch_split_factor", factor, "1 where scale is given", PAGE)
    if B % factor or N % factor:
        check.fail(RELATION, "batch_split_factor", factor, f"a divisor of B = {B} and of N = {N}", KERNEL,
                   unless=SPLIT)


def _check_scale(check: Check, input: torch.Tensor, scale: torch.Tensor, B: int, N: int) -> None:
    if scale.shape != (B * N,):
        check.fail(RELATION, "scale", describe(scale), f"[{B * N}] (B * N): one for each column of each head", PAGE)
    if scale.dtype not in PACKED:
        check.fail(RELATION, "scale", describe(scale),
                   "int64 or uint64, as npu_trans_quant_param packs it: other bits would be misread", PAGE)
    if B * N >= MAX_AXIS:
        check.fail(SIZE, "scale", describe(scale), f"B * N below {MAX_AXIS}", PAGE)
    if input.dtype != torch.float16:
        check.fail(DTYPE, "input", describe(input), "float16 where scale is given", KERNEL)


def _axes(call: Mapping[str, Any]) -> str:
    swapped = _order(call["perm_x1"], PLAIN) == SWAPPED
    takes = f"input [{'T N' if swapped else 'N T'} Din], weight [N Din Dout]"
    if call["scale"] is not None:
        return f"{takes}, scale [N*Dout] -> y [T 1 N*Dout]"
    # A part of the columns of all heads: no product of whole letters.
    return f"{takes} -> y {'[T N Dout]' if call['batch_split_factor'] in (1, None) else '[parts T columns]'}"


_SCALE = torch.empty(0, dtype=torch.int64, device="meta")


@reference("npu_transpose_batchmatmul", _contract, _axes, (
    {"perm_x1": SWAPPED}, {"perm_x1": PLAIN}, {"perm_x1": SWAPPED, "scale": _SCALE},
    {"perm_x1": SWAPPED, "batch_split_factor": 2},
))
def npu_transpose_batchmatmul(input: torch.Tensor, weight: torch.Tensor, *, scale: torch.Tensor | None = None,
                              perm_x1: Sequence[int] | None = None, batch_split_factor: int | None = 1,
                              **rest: Any) -> torch.Tensor:
    """y[m, b] = x[m, b] @ weight[b]: the absorbed projections of MLA, where b is a head.

    Args:
        input: (M, B, K) with perm_x1 [1, 0, 2], or (B, M, K) with [0, 1, 2] (also None); fp16, bf16 or fp32.
        weight: (B, K, N), input's dtype; perm_x2 is [0, 1, 2] (or None).
        scale: (B * N,) int64 or uint64 from npu_trans_quant_param; makes the result int8.  Input is fp16 then.
        perm_y: [1, 0, 2] (or None).
        batch_split_factor: f parts of the B * N columns, one after the other on the first axis.

    Returns:
        (M, B, N) in input's dtype; with f > 1 (f, M, B * N / f); with scale (M, 1, B * N) int8.

    Source: torch_npu docs: npu_transpose_batchmatmul; defaults of the three permutations from its host layer
    (op-plugin: op_plugin/ops/opapi/TransposeBatchMatMulKernelNpuOpApi.cpp); order of the parts from its test
    (op-plugin: test/test_custom_ops/test_npu_transpose_batchmatmul.py).
    """
    by_head = input.transpose(0, 1) if _order(perm_x1, PLAIN) == SWAPPED else input  # [B, M, K]
    if scale is not None:
        y = torch.bmm(by_head.float(), weight.float()).transpose(0, 1).flatten(1)  # [M, B * N]
        return requantise(y, scale)[:, None]  # [M, 1, B * N]
    y = torch.bmm(by_head, weight).transpose(0, 1)  # [M, B, N]
    if batch_split_factor not in (1, None):
        y = y.flatten(1).unflatten(1, (batch_split_factor, -1)).transpose(0, 1)  # [f, M, B * N / f]
    return y.contiguous()  # [M, B, N]

"""SwiGLU."""
from collections.abc import Mapping
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_swiglu.md"


def _swiglu_contract(check: Check, input: torch.Tensor, dim: int = -1) -> None:
    if not -input.dim() <= dim < input.dim():
        check.fail(RELATION, "dim", dim, f"an axis of input {list(input.shape)}", PAGE)
    if input.shape[dim] % 2:
        check.fail(RELATION, "input", describe(input),
                   f"an even length on axis {dim}: gate and up side by side; shape inference floors it silently", PAGE)
    if input.dim() > 8:
        check.fail(SIZE, "input", describe(input), "at most 8 axes", PAGE)
    if input.numel() == 0:
        check.fail(SIZE, "input", describe(input), "at least one element: skip the call where there are no rows", PAGE)
    if not input.is_contiguous():
        check.fail(SIZE, "input", f"strided, {describe(input)}", "a contiguous tensor: call .contiguous()", PAGE)
    if input.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "input", describe(input), "float16, bfloat16 or float32", PAGE)


def _swiglu_axes(call: Mapping[str, Any]) -> str:
    """Of a matrix: gate and up lie on axis ``dim``, by default the last."""
    return "input [2I T] -> y [I T]" if call["dim"] in (0, -2) else "input [T 2I] -> y [T I]"


@reference("npu_swiglu", _swiglu_contract, _swiglu_axes)
def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half on axis ``dim``; the gate comes first.

    Args:
        input: (..., 2 * I), contiguous, not empty; fp16, bf16 or fp32.

    Returns:
        (..., I) in ``input``'s dtype.

    Source: torch_npu docs: npu_swiglu.
    """
    gate, up = input.to(accumulator(input.dtype)).chunk(2, dim)  # [T, I], [T, I]
    return torch.nn.functional.silu(gate).mul_(up).to(input.dtype)  # [T, I]

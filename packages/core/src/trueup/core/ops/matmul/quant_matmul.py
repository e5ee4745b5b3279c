"""Products of int8 matrices, scaled."""
from collections.abc import Mapping
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.matmul.int8 import DTYPES, PACKED, int8_product, pack, requantise, unpack
from trueup.core.ops.registry import reference, refuse_unbuilt

PAGE = "op-plugin: docs/.../torch_npu-npu_quant_matmul.md"
META = "torch_npu 2.13.0: op_plugin/meta/_meta_registrations.py"
MAX_AXIS = 65535

TWO_OFFSETS = open_point(
    "quant-matmul-two-offsets", "npu_quant_matmul: beside a packed scale, which offset counts, the packed one or the "
    "argument?", "no offset beside a packed scale; the packed one counts where this is assumed")


def _contract(check: Check, x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *,
              offset: torch.Tensor | None = None, pertoken_scale: torch.Tensor | None = None,
              bias: torch.Tensor | None = None, output_dtype: int | None = None, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if not (2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6) or x1.shape[-1] != x2.shape[-2]:
        check.fail(RELATION, "x2", describe(x2), f"(..., K, N), 2 to 6 axes, and the K of x1 {list(x1.shape)} "
                   "(..., M, K)", PAGE)
    M, K, N = x1.shape[-2], x2.shape[-2], x2.shape[-1]
    batch = x1.shape[:-2] or x2.shape[:-2]
    if x1.dim() > 2 and x2.dim() > 2:
        pairs = zip(reversed(x1.shape[:-2]), reversed(x2.shape[:-2]), strict=False)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            check.fail(RELATION, "x2", describe(x2), f"leading axes that broadcast with those of x1 {list(x1.shape)}",
                       PAGE)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    if scale.shape not in ((1,), (N,)):
        check.fail(RELATION, "scale", describe(scale), f"[1], or [{N}] (N): one for each column", PAGE)
    if pertoken_scale is not None and pertoken_scale.shape != (M,):
        check.fail(RELATION, "pertoken_scale", describe(pertoken_scale), f"[{M}] (M), whatever the leading axes", PAGE)
    if bias is not None and bias.shape != (N,) and (len(batch) != 1 or bias.shape != (*batch, 1, N)):
        check.fail(RELATION, "bias", describe(bias),
                   f"[{N}] (N), or (batch, 1, N) where the result has 3 axes", PAGE)
    if output_dtype not in (None, 1, 3, 5, 15):
        check.fail(RELATION, "output_dtype", output_dtype,
                   "1 or None (int8), 3 (int32), 5 (float16) or 15 (bfloat16)", PAGE)
    if offset is not None:
        _check_offset(check, scale, offset, N, output_dtype)
    if not (M and K and N and x1.numel() and x2.numel()):
        check.fail(SIZE, "x1, x2", f"{describe(x1)} and {describe(x2)}", "no empty tensor", PAGE)
    if K > MAX_AXIS or N > MAX_AXIS:
        check.fail(SIZE, "x2", describe(x2, "K, N"), f"K and N up to {MAX_AXIS}", PAGE)
    for name, matrix in (("x1", x1), ("x2", x2)):
        if not (matrix.is_contiguous() or matrix.mT.is_contiguous()):
            check.fail(SIZE, name, f"strided, {describe(matrix)}", "contiguous, but for its last two axes", PAGE)
        if matrix.dtype != torch.int8:
            check.fail(DTYPE, name, describe(matrix), "int8 (int4 packed into int32 is not built)", PAGE)
    _check_combination(check, scale, pertoken_scale, bias, output_dtype or 1)


def _check_offset(check: Check, scale: torch.Tensor, offset: torch.Tensor, N: int, output_dtype: int | None) -> None:
    if offset.shape not in ((1,), (N,)):
        check.fail(RELATION, "offset", describe(offset), f"[1], or [{N}] (N)", PAGE)
    if output_dtype not in (None, 1):
        check.fail(RELATION, "offset", describe(offset), "None, unless the result is int8", PAGE)
    if scale.dtype in PACKED:
        check.fail(RELATION, "offset", describe(offset), "None where scale is int64: pack it in with the scale", PAGE,
                   unless=TWO_OFFSETS)
    if offset.dtype != torch.float32:
        check.fail(DTYPE, "offset", describe(offset), "float32", PAGE)


def _check_combination(check: Check, scale: torch.Tensor, pertoken_scale: torch.Tensor | None,
                       bias: torch.Tensor | None, out: int) -> None:
    """The page's table of dtypes, row by row: which scale and which bias go with which result."""
    i32, f32, bf16 = torch.int32, torch.float32, torch.bfloat16
    if pertoken_scale is not None and out in (1, 3):
        check.fail(RELATION, "pertoken_scale", describe(pertoken_scale),
                   "None, unless the result is float16 or bfloat16 (output_dtype 5 or 15; the default is int8)", PAGE)
    if pertoken_scale is not None and pertoken_scale.dtype != f32:
        check.fail(DTYPE, "pertoken_scale", describe(pertoken_scale), "float32", PAGE)
    if out == 1 and scale.dtype not in (*PACKED, f32):
        check.fail(DTYPE, "scale", describe(scale), "int64 (from npu_trans_quant_param) or float32 where the result "
                   "is int8, which is the default of output_dtype", PAGE)
    if out == 5 and pertoken_scale is None and scale.dtype not in (*PACKED, f32):
        check.fail(DTYPE, "scale", describe(scale),
                   "int64 (from npu_trans_quant_param) or float32 where the result is float16", PAGE)
    if out == 5 and pertoken_scale is not None and scale.dtype != f32:
        check.fail(DTYPE, "scale", describe(scale), "float32 where the result is float16, beside pertoken_scale", PAGE)
    if out in (3, 15) and scale.dtype not in (f32, bf16):
        check.fail(DTYPE, "scale", describe(scale), "float32 or bfloat16 where the result is bfloat16 or int32", PAGE)
    if bias is None or bias.dtype == i32:
        return
    if out in (1, 3) or (out == 5 and pertoken_scale is None):
        check.fail(DTYPE, "bias", describe(bias),
                   "int32 where the result is int8, int32, or float16 without pertoken_scale", PAGE)
    if out == 5 and bias.dtype not in (torch.float16, f32):
        check.fail(DTYPE, "bias", describe(bias), "int32, float16 or float32 where the result is float16", META)
    if out == 15 and bias.dtype not in (bf16, f32):
        check.fail(DTYPE, "bias", describe(bias), "int32, bfloat16 or float32 where the result is bfloat16", META)


def _axes(call: Mapping[str, Any]) -> str:
    """Of matrices; more axes in front of M are batch axes, and not declared."""
    scale, offset = ("1" if call[name] is not None and len(call[name]) == 1 else "Dout" for name in ("scale", "offset"))
    return (f"x1 [T Din], x2 [Din Dout], scale [{scale}], offset [{offset}], pertoken_scale [T], bias [Dout] "
            "-> y [T Dout]")


_COLUMNS = torch.empty(2, device="meta")


@reference("npu_quant_matmul", _contract, _axes, ({"scale": _COLUMNS}, {"scale": _COLUMNS[:1]}))
def npu_quant_matmul(x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *, offset: torch.Tensor | None = None,
                     pertoken_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None,
                     output_dtype: int | None = None, **rest: Any) -> torch.Tensor:
    """y = (x1 @ x2 + bias) * scale * pertoken_scale[:, None] + offset, with bias in int32.

    A float bias comes after the scales.  An int32 result is the sum alone: scale is demanded and not used.  For
    results in int8, and in fp16 without pertoken_scale, the host packs an fp32 scale, which cuts it to 19 bits.

    Args:
        x1: (..., M, K) int8.
        x2: (..., K, N) int8; leading axes broadcast.  Both contiguous, but for the last two axes.
        scale: (1,) or (N,): int64 from npu_trans_quant_param, fp32 or bf16.
        offset: (1,) or (N,) fp32, for a result in int8.
        pertoken_scale: (M,) fp32, for a result in fp16 or bf16.
        bias: (N,) or (batch, 1, N): int32; beside a bf16 result also bf16 or fp32; beside an fp16 result with
            pertoken_scale also fp16 or fp32.
        output_dtype: 1 or None int8, 3 int32, 5 fp16, 15 bf16.

    Not built: int4, fp8, hif8, mx; x2 in FRACTAL_NZ.

    Returns:
        (..., M, N).

    Source: torch_npu docs: npu_quant_matmul; op-plugin: op_plugin/ops/opapi/QuantMatmulKernelNpuOpApi.cpp; ops-nn:
    matmul/quant_batch_matmul_v3/tests/assets/qbmmv3_kernel_golden.py.
    """
    dtype = DTYPES[output_dtype or 1]
    sums = int8_product(x1, x2)  # [..., M, N]
    if bias is not None and bias.dtype == torch.int32:
        sums = sums.double() + bias  # [..., M, N]
    if dtype == torch.int32:
        return sums.to(dtype)  # [..., M, N]
    if scale.dtype not in PACKED and pertoken_scale is None and dtype != torch.bfloat16:
        scale = pack(scale, offset)  # [N]
    if dtype == torch.int8:
        return requantise(sums, scale)  # [..., M, N]
    factor = unpack(scale)[0] if scale.dtype in PACKED else scale.float()  # [N]
    y = sums.float() * factor  # [..., M, N]
    if pertoken_scale is not None:
        y = y * pertoken_scale[:, None]  # [..., M, N]
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float()  # [..., M, N]
    return y.to(dtype)  # [..., M, N]

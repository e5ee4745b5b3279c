"""Quantisation of activations to int8, with scales found on the way."""
from collections.abc import Mapping
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.registry import accumulator, float_dtypes, reference, refuse_unbuilt

PAGE = "op-plugin: docs/.../torch_npu-npu_dynamic_quant.md"
HOST = "op-plugin: op_plugin/ops/opapi/DynamicQuantKernelNpuOpApi.cpp"
MAX_EXPERTS = 1024
INT8_MAX = 127.0

MODE = open_point(
    "dynamic-quant-mode", "npu_dynamic_quant: quant_mode 'pertensor' and 'perchannel' are for Ascend 950; an A2 or A3 "
    "works by token, in a scale that the host allocates for the mode: does it write past its end?",
    "'pertoken' only")


def _contract(check: Check, input: torch.Tensor, *, smooth_scales: torch.Tensor | None = None,
              group_index: torch.Tensor | None = None, dst_type: int | None = None, quant_mode: str = "pertoken",
              dst_type_max: float = 0.0, **rest: Any) -> None:
    refuse_unbuilt(check, {"dst_type": dst_type, "dst_type_max": dst_type_max, **rest},
                   {"dst_type": 1, "dst_type_max": 0.0})
    if quant_mode not in ("pertoken", "pertensor", "perchannel"):
        check.fail(RELATION, "quant_mode", repr(quant_mode), "'pertoken', 'pertensor' or 'perchannel'", PAGE)
    if quant_mode != "pertoken":
        check.fail(RELATION, "quant_mode", repr(quant_mode), "'pertoken', unless the device is an Ascend 950", PAGE,
                   unless=MODE)
    if input.dim() < 2:
        check.fail(RELATION, "input", describe(input), "2 axes or more: (..., T, H)", HOST)
    if not input.shape[-1] or (quant_mode != "pertoken" and not input.numel()):
        check.fail(RELATION, "input", describe(input), "no empty axis that a maximum is taken over", PAGE)
    if input.dtype not in float_dtypes(check):
        check.fail(DTYPE, "input", describe(input), "float16 or bfloat16", PAGE)
    if group_index is not None:
        _check_groups(check, input, smooth_scales, group_index, quant_mode)
    elif smooth_scales is not None:
        _check_smooth(check, input, smooth_scales, quant_mode)
    if smooth_scales is not None and smooth_scales.dtype != input.dtype:
        check.fail(DTYPE, "smooth_scales", describe(smooth_scales), f"input's {input.dtype}", PAGE)


def _check_smooth(check: Check, input: torch.Tensor, smooth_scales: torch.Tensor, quant_mode: str) -> None:
    if quant_mode == "perchannel" and smooth_scales.shape != input.shape[-2:-1]:
        check.fail(RELATION, "smooth_scales", describe(smooth_scales),
                   f"[{input.shape[-2]}] (T): quant_mode 'perchannel' smooths rows", PAGE)
    if quant_mode != "perchannel" and smooth_scales.shape != input.shape[-1:]:
        check.fail(RELATION, "smooth_scales", describe(smooth_scales),
                   f"[{input.shape[-1]}] (H), or (E, H) beside group_index", PAGE)


def _check_groups(check: Check, input: torch.Tensor, smooth_scales: torch.Tensor | None, group_index: torch.Tensor,
                  quant_mode: str) -> None:
    if quant_mode != "pertoken":
        check.fail(RELATION, "quant_mode", repr(quant_mode), "'pertoken' beside group_index", PAGE)
    if smooth_scales is None:
        check.fail(RELATION, "smooth_scales", None, "given beside group_index", PAGE)
        return  # never reached, since a RELATION is never off; for the type checker
    if group_index.dim() != 1:
        check.fail(RELATION, "group_index", describe(group_index), "1 axis (E)", PAGE)
    E, H = len(group_index), input.shape[-1]
    if smooth_scales.shape != (E, H):
        check.fail(RELATION, "smooth_scales", describe(smooth_scales),
                   f"[{E}, {H}] (E, H): a row for each end in group_index", PAGE)
    if group_index.dtype != torch.int32:
        check.fail(RELATION, "group_index", describe(group_index), "int32: the device reads 4 bytes for each entry",
                   PAGE)
    if not 1 <= E <= MAX_EXPERTS:
        check.fail(SIZE, "group_index", describe(group_index), f"1 to {MAX_EXPERTS} experts", PAGE)
    ends = group_index.tolist()
    rows = input.numel() // H
    if any(end < start for start, end in zip([0, *ends], ends, strict=False)):
        check.fail(RELATION, "group_index", ends, "ends of the groups, not falling: are these counts?", PAGE)
    if (ends[-1] if ends else 0) != rows:
        check.fail(RELATION, "group_index", ends, f"a last end of {rows}, the rows of input", PAGE)


def _axes(call: Mapping[str, Any]) -> str:
    mode, smooth = call["quant_mode"], "smooth_scales [H]"
    if mode == "perchannel":
        return "input [T H], smooth_scales [T] -> y [T H], scale [H]"
    if call["group_index"] is not None:
        smooth = "smooth_scales [E H], group_index [E]"
    return f"input [T H], {smooth} -> y [T H], scale [{'T' if mode == 'pertoken' else '1'}]"


@reference("npu_dynamic_quant", _contract, _axes, (
    {}, {"group_index": torch.empty(1, dtype=torch.int32, device="meta")}, {"quant_mode": "pertensor"},
    {"quant_mode": "perchannel"},
))
def npu_dynamic_quant(input: torch.Tensor, *, smooth_scales: torch.Tensor | None = None,
                      group_index: torch.Tensor | None = None, quant_mode: str = "pertoken",
                      **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """scale = max|input * smooth| / 127; y = round(input * smooth / scale), halves to even.

    The maximum is taken over a row: one that is NaN spoils no other row (SB-07 in the bug gallery).  A row of zeros
    has scale 0 and y 0 (ops-nn: quant/dynamic_quant/tests/assets/golden.py has scale 1 there in one of its versions,
    which dequantises to the same).  Where an element is NaN or infinite scale is too, and y says nothing; here that
    element's y is 0.

    Args:
        input: (..., T, H), fp16 or bf16; may be strided.
        smooth_scales: (H,), input's dtype; (E, H) beside group_index; (T,) with quant_mode 'perchannel'.
        group_index: (E,) int32, ends of the experts' rows; the last one is the number of rows.
        quant_mode: 'pertoken'.  'pertensor' (one maximum) and 'perchannel' (one for each column) are for Ascend 950.
        dst_type: 1 (int8), or None.  Not built: int4, fp8, hif8.

    Returns:
        (y, scale): y int8 in input's shape; scale fp32: (..., T), with 'pertensor' (1,), with 'perchannel' (..., H).

    Source: torch_npu docs: npu_dynamic_quant; rounding from op-plugin: test/test_custom_ops/test_npu_dynamic_quant.py.
    """
    wide = input.to(accumulator(input.dtype))  # [..., T, H]
    if group_index is not None and smooth_scales is not None:
        sizes = group_index.diff(prepend=group_index.new_zeros(1))  # [E]
        of_row = smooth_scales.repeat_interleave(sizes, 0)  # [T, H]
        wide = wide * of_row.view(wide.shape)  # [..., T, H]
    elif smooth_scales is not None:
        wide = wide * (smooth_scales[:, None] if quant_mode == "perchannel" else smooth_scales)  # [..., T, H]
    magnitude = wide.abs()  # [..., T, H]
    if quant_mode == "pertensor":
        largest = magnitude.amax().view(1)  # [1]
    else:
        largest = magnitude.amax(-2 if quant_mode == "perchannel" else -1, keepdim=True)  # [..., T, 1] or [..., 1, H]
    scale = largest / INT8_MAX
    y = (wide / scale).nan_to_num_(0.0, 0.0, 0.0).round_().to(torch.int8)  # [..., T, H]
    if quant_mode != "pertensor":
        scale = scale.squeeze(-2 if quant_mode == "perchannel" else -1)  # [..., T] or [..., H]
    return y, scale.float()  # [..., T, H], [..., T]

"""Merges attention outputs that were computed over different parts of the keys."""
import math
from collections.abc import Mapping
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, poison, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_attention_update.md"


def _attention_update_contract(check: Check, lse: list[torch.Tensor], local_out: list[torch.Tensor],
                               update_type: int) -> None:
    if len(lse) != len(local_out) or not lse:
        check.fail(RELATION, "local_out", f"{len(local_out)} parts", f"one for each of the {len(lse)} lse", PAGE)
    if update_type not in (0, 1):
        check.fail(RELATION, "update_type", update_type, "0 (output only) or 1 (output and lse)", PAGE)
    shape = local_out[0].shape
    if len(shape) != 2:
        check.fail(RELATION, "local_out", describe(local_out[0]), "2 axes (R, D): flatten rows and heads into R", PAGE)
    R, D = shape
    for i, (part_lse, part_out) in enumerate(zip(lse, local_out, strict=True)):
        if part_out.shape != shape:
            check.fail(RELATION, f"local_out[{i}]", describe(part_out, "R, D"), f"{[R, D]} as local_out[0]", PAGE)
        if part_lse.shape != (R,):
            check.fail(RELATION, f"lse[{i}]", describe(part_lse), f"[{R}] (R), one for each row of local_out", PAGE)
        if (part_lse == math.inf).any():
            check.fail(RELATION, f"lse[{i}]", "+inf in some row",
                       "a finite value, or -inf where the part holds no key for the row: attention operators mark "
                       "such a row with +inf, which is NaN in this formula; map it to -inf before the call", PAGE)
        if part_out.dtype not in (*float_dtypes(check), torch.float32) or part_out.dtype != local_out[0].dtype:
            check.fail(DTYPE, f"local_out[{i}]", describe(part_out), "float16, bfloat16 or float32, all alike", PAGE)
        if part_lse.dtype not in (torch.float32, accumulator(part_out.dtype)):
            check.fail(DTYPE, f"lse[{i}]", describe(part_lse), "float32", PAGE)
    if len(lse) > 16:
        check.fail(SIZE, "lse", f"{len(lse)} parts", "1 to 16 parts", PAGE)
    if D % 8 or not 8 <= D <= 512:
        check.fail(SIZE, "local_out", describe(local_out[0], "R, D"), "D a multiple of 8, from 8 to 512", PAGE)


def _attention_update_axes(call: Mapping[str, Any]) -> str:
    return f"lse [T*N], local_out [T*N Dv] -> out [T*N Dv], lse_m{'' if call['update_type'] else '~'} [T*N]"


@reference("npu_attention_update", _attention_update_contract, _attention_update_axes)
def npu_attention_update(lse: list[torch.Tensor], local_out: list[torch.Tensor],
                         update_type: int) -> tuple[torch.Tensor, torch.Tensor]:
    """lse_m = ln sum_i exp(lse_i); out = sum_i out_i * exp(lse_i - lse_m).

    A part whose lse is -inf has weight 0, but its output is still multiplied and must be finite.  Where all
    parts of a row are -inf this kernel returns zeros and lse_m = -inf; what a device returns there is not
    documented (NaN by the formula): do not rely on it.

    Args:
        lse: 1 to 16 tensors (R,), fp32, natural logarithm.
        local_out: as many tensors (R, D), D a multiple of 8 from 8 to 512; fp16, bf16 or fp32, all alike.
        update_type: 0: the second result is not written (poisoned here); 1: it holds lse_m.

    Returns:
        (out, lse_m): (R, D) in ``local_out``'s dtype, and (R,) in fp32.

    Source: torch_npu docs: npu_attention_update.
    """
    stacked = torch.stack(lse)  # [parts, R]
    peak = stacked.amax(0)  # [R]
    peak = peak.masked_fill(peak == -math.inf, 0.0)  # [R]
    weights = torch.exp(stacked - peak)  # [parts, R]
    total = weights.sum(0)  # [R]
    # The part at the peak has weight 1, so only rows without any part lie below 1.
    weights /= total.clamp(min=1.0)  # [parts, R]
    out = torch.zeros_like(local_out[0], dtype=accumulator(local_out[0].dtype))  # [R, D]
    for weight, part in zip(weights, local_out, strict=True):
        out.addcmul_(part.to(out.dtype), weight[:, None].to(out.dtype))  # [R, D]
    merged = total.log_().add_(peak) if update_type else poison(total.shape, total.dtype, total.device)  # [R]
    return out.to(local_out[0].dtype), merged  # [R, D], [R]

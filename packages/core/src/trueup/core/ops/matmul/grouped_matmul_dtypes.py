"""Which dtypes npu_grouped_matmul multiplies, and which scales and biases go with them."""
from collections.abc import Sequence

import torch

from trueup.core.ops.contract import DTYPE, RELATION, Check, describe
from trueup.core.ops.matmul.grouped_matmul_groups import KERNEL, META, PAGE, PAIRS, REDUCED, Tensors, is_one_tensor
from trueup.core.ops.matmul.int8 import DTYPES
from trueup.core.ops.registry import accumulator, float_dtypes

ACTIVATIONS = (0, 1, 2, 4, 5)


def check_dtypes(check: Check, x: Tensors, weight: Tensors, fp32: bool) -> None:
    floats = (*float_dtypes(check), torch.float32) if fp32 else float_dtypes(check)
    if x[0].dtype != torch.int8 and x[0].dtype not in floats:
        check.fail(DTYPE, "x[0]", describe(x[0]),
                   "float16, bfloat16 or int8; float32 where x, weight and y are one tensor each", PAGE)
    for i, rows in enumerate(x):
        if rows.dtype != x[0].dtype:
            check.fail(DTYPE, f"x[{i}]", describe(rows), f"x[0]'s {x[0].dtype}", PAGE)
    halves = (torch.float16, torch.bfloat16)
    for i, matrix in enumerate(weight):
        if matrix.dtype != weight[0].dtype:
            check.fail(DTYPE, f"weight[{i}]", describe(matrix), f"weight[0]'s {weight[0].dtype}", PAGE)
        if matrix.dtype != x[0].dtype and not (matrix.dtype == torch.int8 and x[0].dtype in halves):
            check.fail(DTYPE, f"weight[{i}]", describe(matrix), f"x's {x[0].dtype}, or int8 beside a 16-bit float x",
                       PAGE)


def check_columns(check: Check, argument: str, given: Tensors, weight: Tensors) -> None:
    """A number for each column of each matrix: (E, N) beside one tensor of weights, else a list of (N,)."""
    if len(given) != len(weight):
        check.fail(RELATION, argument, f"{len(given)} tensors", f"as many as weight, {len(weight)}", PAGE)
    for i, (numbers, matrix) in enumerate(zip(given, weight, strict=True)):
        if numbers.shape != (*matrix.shape[:-2], matrix.shape[-1]):
            check.fail(RELATION, f"{argument}[{i}]", describe(numbers),
                       f"weight[{i}] {list(matrix.shape)} without its K axis", PAGE)


def check_bias(check: Check, x: Tensors, weight: Tensors, bias: Tensors) -> None:
    check_columns(check, "bias", bias, weight)
    kind = x[0].dtype
    wanted = kind if kind == torch.float16 else torch.int32 if kind == torch.int8 else accumulator(kind)
    for i, numbers in enumerate(bias):
        if numbers.dtype != wanted:
            check.fail(DTYPE, f"bias[{i}]", describe(numbers),
                       "float16 beside x in float16, int32 beside int8, float32 beside bfloat16 and float32", PAGE)


def check_scale(check: Check, weight: Tensors, scale: Tensors | None) -> None:
    if not scale:
        check.fail(RELATION, "scale", None, "given beside x in int8, unless the result is int32 (output_dtype 3)",
                   KERNEL)
        return
    check_columns(check, "scale", scale, weight)
    for i, numbers in enumerate(scale):
        if numbers.dtype not in (torch.int64, torch.bfloat16, torch.float32) or numbers.dtype != scale[0].dtype:
            check.fail(DTYPE, f"scale[{i}]", describe(numbers),
                       "int64 (from npu_trans_quant_param), bfloat16 or float32, all alike", PAGE)


def check_int8(check: Check, x: Tensors, weight: Tensors, scale: Tensors | None, per_token_scale: Tensors | None,
               group_type: int | None, output_dtype: int | None) -> None:
    if group_type == REDUCED:
        check.fail(RELATION, "group_type", group_type, "-1 or 0 beside x in int8", PAGE)
    if output_dtype not in (None, 3, 5, 15):
        check.fail(RELATION, "output_dtype", output_dtype,
                   "15 (bfloat16), 5 (float16), 3 (int32), or None, which is int8: shape inference refuses 1", META)
    if scale or output_dtype != 3:
        check_scale(check, weight, scale)
    if scale:
        kind = scale[0].dtype
        if output_dtype == 3:
            check.fail(RELATION, "scale", describe(scale[0]), "None where the result is int32 (output_dtype 3)", KERNEL)
        if kind == torch.int64 and output_dtype is not None:
            check.fail(RELATION, "output_dtype", output_dtype, "None (int8) where scale is int64", PAGE)
        if kind != torch.int64 and output_dtype is None:
            check.fail(RELATION, "output_dtype", None,
                       "15 (bfloat16) or 5 (float16), unless scale is int64: the default is int8", PAGE)
        if (kind == torch.bfloat16 and output_dtype != 15) or (kind == torch.float32 and output_dtype != 5):
            check.fail(DTYPE, "output_dtype", DTYPES.get(output_dtype or 1),
                       "15 (bfloat16) where scale is bfloat16, 5 (float16) where it is float32", PAGE)
    if per_token_scale:
        check_per_token(check, x, weight, scale, per_token_scale)


def check_per_token(check: Check, x: Tensors, weight: Tensors, scale: Tensors | None,
                    per_token_scale: Tensors) -> None:
    if len(x) != 1 or not is_one_tensor(weight):
        check.fail(RELATION, "per_token_scale", f"beside {len(x)} x and {len(weight)} weights",
                   "None, unless x, weight and y are one tensor each", KERNEL)
    if len(per_token_scale) != 1 or per_token_scale[0].shape != x[0].shape[:1]:
        check.fail(RELATION, "per_token_scale", describe(per_token_scale[0]), f"[{len(x[0])}]: one for each row of x",
                   PAGE)
    if not scale or scale[0].dtype == torch.int64:
        check.fail(RELATION, "per_token_scale", describe(per_token_scale[0]),
                   "None, unless scale is bfloat16 or float32", PAGE)
    if per_token_scale[0].dtype != torch.float32:
        check.fail(DTYPE, "per_token_scale", describe(per_token_scale[0]), "float32", PAGE)


def check_floats(check: Check, x: Tensors, scale: Tensors | None, per_token_scale: Tensors | None,
                 group_list_type: int | None, tuning_config: Sequence[int] | None, output_dtype: int | None) -> None:
    if scale or per_token_scale:
        check.fail(RELATION, "scale" if scale else "per_token_scale", "given", f"None beside x in {x[0].dtype}", PAGE)
    if group_list_type == PAIRS:
        check.fail(DTYPE, "group_list_type", group_list_type, f"0 or 1 beside x in {x[0].dtype}: pairs need int8", PAGE)
    if tuning_config:
        check.fail(DTYPE, "tuning_config", list(tuning_config), f"None beside x in {x[0].dtype}: it is for int8", PAGE)
    if output_dtype is not None and DTYPES.get(output_dtype) != x[0].dtype:
        check.fail(RELATION, "output_dtype", output_dtype,
                   f"None, or the id of x's {x[0].dtype} (float16 5, float32 6, bfloat16 15)", PAGE)


def check_antiquant(check: Check, x: Tensors, weight: Tensors, scale: Tensors | None, offset: Tensors | None,
                    group_type: int | None) -> None:
    """int8 matrices that are widened before the product: (weight + offset) * scale."""
    if weight[0].dtype != torch.int8 or x[0].dtype == torch.int8:
        check.fail(RELATION, "antiquant_scale, antiquant_offset", "given",
                   "None, unless weight is int8 and x is not", PAGE)
    if group_type == REDUCED:
        check.fail(RELATION, "group_type", group_type, "-1 or 0 beside weight in int8", PAGE)
    for name, given in (("antiquant_scale", scale), ("antiquant_offset", offset)):
        if not given:
            check.fail(RELATION, name, None, "given, both, where weight is int8 and x is not", PAGE)
            continue
        check_columns(check, name, given, weight)
        for i, numbers in enumerate(given):
            if numbers.dtype != x[0].dtype:
                check.fail(DTYPE, f"{name}[{i}]", describe(numbers), f"x's {x[0].dtype}", PAGE)


def check_activation(check: Check, act_type: int | None, per_token_scale: Tensors | None) -> None:
    if act_type not in ACTIVATIONS:
        check.fail(RELATION, "act_type", act_type, "0 (none), 1 (ReLU), 2 (GELU, tanh), 4 (fast GELU) or 5 (SiLU)",
                   PAGE)
    if not per_token_scale:
        check.fail(RELATION, "act_type", act_type, "0 without per_token_scale", PAGE)

"""Rotary embedding of interleaved pairs, returned in half layout."""
import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, one_or
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_interleave_rope.md"


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Regroup (x0, x1), (x2, x3), ... to [x0, x2, ..., x1, x3, ...] and rotate; wide, not yet rounded."""
    wide = accumulator(x.dtype)
    x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)  # [B, N, S, D], [B, 1, S, D], [B, 1, S, D]
    even, odd = x[..., 0::2], x[..., 1::2]  # [B, N, S, D/2] each
    regrouped = torch.cat((even, odd), -1)  # [B, N, S, D]
    quarter_turn = torch.cat((-odd, even), -1)  # [B, N, S, D]
    return (regrouped * cos).addcmul_(quarter_turn, sin)  # [B, N, S, D]


def _interleave_rope_contract(check: Check, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if x.dim() != 4:
        check.fail(RELATION, "x", describe(x), "4 axes (B, N, S, D): give decode rows as B, with S = 1", PAGE)
    B, _, S, D = x.shape
    for argument, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 4 or table.shape[0] != B or table.shape[1] != 1 or table.shape[2] not in (1, S):
            check.fail(RELATION, argument, describe(table, "B, 1, S, D"),
                       f"{B} rows as x {list(x.shape)} has, one head, S = {one_or(S)}: [{B}, 1, {S}, {D}]", PAGE)
        if table.shape[3] != D:
            check.fail(RELATION, argument, describe(table, "B, 1, S, D"),
                       f"D = {D}, the full width of x: each angle stands in both halves", PAGE)
    if cos.shape != sin.shape:
        check.fail(RELATION, "sin", describe(sin), f"the shape of cos, {list(cos.shape)}", PAGE)
    if D % 2:
        check.fail(RELATION, "x", describe(x, "B, N, S, D"), "an even D: x holds pairs", PAGE)
    if D != 64:
        check.fail(SIZE, "x", describe(x, "B, N, S, D"), "D = 64", PAGE)
    if x.dtype not in float_dtypes(check):
        check.fail(DTYPE, "x", describe(x), "float16 or bfloat16", PAGE)
    for argument, table in (("cos", cos), ("sin", sin)):
        if table.dtype != x.dtype:
            check.fail(DTYPE, argument, describe(table), f"x's {x.dtype}", PAGE)


@reference("npu_interleave_rope", _interleave_rope_contract)
def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs: z = [even, odd], y = z * cos + [-odd, even] * sin.

    The result is **regrouped**: pair i of x, at (2i, 2i + 1), comes out at (i, i + D/2).  Attention does not
    mind as long as queries and keys are regrouped alike, which npu_kv_rmsnorm_rope_cache does.

    The page asks for a contiguous x on A2 and A3.  This is not checked: servers pass the rope slice of their
    queries, which is strided (vllm-ascend: vllm_ascend/attention/sfa_v1.py, ``rope_single``).

    Args:
        x: (B, N, S, D), D = 64, fp16 or bf16.
        cos, sin: (B, 1, S, D) or (B, 1, 1, D), x's dtype.

    Returns:
        y: (B, N, S, D), a new tensor in x's dtype.

    Source: torch_npu docs: npu_interleave_rope.
    """
    return rotate_pairs(x, cos, sin).to(x.dtype)  # [B, N, S, D]

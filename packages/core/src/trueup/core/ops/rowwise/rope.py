"""Rotary embedding: pairs of numbers turned by the angle of a position.

Which numbers are a pair?  In *half* layout i and i + D/2, in *interleaved* layout 2i and 2i + 1.  The three operators
differ in what they read and what they leave behind: npu_interleave_rope reads interleaved pairs and returns half
layout, npu_rotary_mul keeps the layout it reads, and npu_apply_rotary_pos_emb knows half layout only and writes in
place.
"""
from collections.abc import Mapping
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, one_or
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_interleave_rope.md"
MUL_PAGE = "op-plugin: docs/.../torch_npu-npu_rotary_mul.md"
MUL_LIMITS = "ops-transformer: posembedding/rotary_position_embedding/docs/aclnnRotaryPositionEmbedding.md"
APPLY_PAGE = "op-plugin: docs/.../torch_npu-apply_rotary_pos_emb.md"
APPLY_HOST = "op-plugin: op_plugin/ops/opapi/ApplyRotaryPosEmbNpuOpApi.cpp"
APPLY_LIMITS = "ops-transformer: posembedding/apply_rotary_pos_emb/docs/aclnnApplyRotaryPosEmbV2.md"
MAX_WIDTH = 896
MAX_HEADS = 1000
VECTOR_CORES = 48  # of A2 and A3; machines with fewer refuse less
VECTOR_MEMORY = 192 * 1024  # bytes, of one core


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


def _interleave_rope_axes(call: Mapping[str, Any]) -> str:
    """Decode rows stand on the batch axis, one position each."""
    x, cos = call["x"], call["cos"]
    if x is None or x.shape[2:3] == (1,):
        return "x [T N 1 Dr], cos [T 1 1 Dr], sin [T 1 1 Dr] -> y [T N 1 Dr]"
    table = "B 1 1 Dr" if cos.shape[2:3] == (1,) else "B 1 S Dr"
    return f"x [B N S Dr], cos [{table}], sin [{table}] -> y [B N S Dr]"


@reference("npu_interleave_rope", _interleave_rope_contract, _interleave_rope_axes,
           ({}, {"x": torch.empty(2, 3, 5, 4, device="meta"), "cos": torch.empty(2, 1, 5, 4, device="meta")}))
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


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str,
            rotate: torch.Tensor | None = None) -> torch.Tensor:
    """x * cos + turned * sin in x's layout and dtype; cos and sin are cast to x's dtype, as the host layer does."""
    wide = accumulator(x.dtype)
    cos, sin = cos.to(x.dtype).to(wide), sin.to(x.dtype).to(wide)  # [T, 1, D] each
    rows = x.to(wide)  # [T, N, D]
    if rotate is not None:
        turned = rows @ rotate.to(wide)  # [T, N, D]
    elif rotary_mode == "interleave":
        turned = torch.stack((-rows[..., 1::2], rows[..., 0::2]), -1).flatten(-2)  # [T, N, D]
    else:
        first, second = rows.chunk(2, -1)  # [T, N, D/2] each
        turned = torch.cat((-second, first), -1)  # [T, N, D]
    return (rows * cos).addcmul_(turned, sin).to(x.dtype)  # [T, N, D]


def _rotary_mul_contract(check: Check, input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor,
                         rotary_mode: str = "half", rotate: torch.Tensor | None = None) -> None:
    if rotary_mode not in ("half", "interleave"):
        check.fail(RELATION, "rotary_mode", repr(rotary_mode),
                   "'half' or 'interleave': 'quarter' and 'interleave-half' are Ascend 950's", MUL_PAGE)
    if input.dim() not in (3, 4):
        check.fail(RELATION, "input", describe(input),
                   "(T, N, D), or 4 axes: (B, N, S, D), (B, S, N, D) or (S, B, N, D)", MUL_PAGE)
    shapes = _table_shapes(input, rotary_mode)
    if r1.shape not in shapes:
        check.fail(RELATION, "r1", f"{describe(r1)} in mode {rotary_mode!r}",
                   f"input's {list(input.shape)} with 1 for B and N, in mode 'half' also with 1 for N alone or with "
                   f"none: one of {shapes}", MUL_PAGE)
    if r2.shape != r1.shape:
        check.fail(RELATION, "r2", describe(r2), f"the shape of r1, {list(r1.shape)}: the sines", MUL_PAGE)
    D = input.shape[-1]
    if D % 2:
        check.fail(RELATION, "input", describe(input), "an even D: it holds pairs", MUL_PAGE)
    if rotate is not None and rotate.shape != (D, D):
        check.fail(RELATION, "rotate", describe(rotate), f"[{D}, {D}], a matrix for rows of input's D", MUL_PAGE)
    if not input.numel():
        check.fail(SIZE, "input", describe(input), "at least one row: only Ascend 950 takes none", MUL_PAGE)
    if D >= MAX_WIDTH:
        check.fail(SIZE, "input", describe(input), f"a D below {MAX_WIDTH}", MUL_PAGE)
    _check_rotary_heads(check, input, r1, rotary_mode)
    if rotary_mode == "half" and rotate is None and input.dim() == 4 and r1.shape[:2] == (1, 1):
        _check_shared_tables(check, input)
    if input.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "input", describe(input), "float16, bfloat16 or float32", MUL_PAGE)
    for argument, table in (("r1", r1), ("r2", r2)):
        if not table.dtype.is_floating_point:
            check.fail(DTYPE, argument, describe(table), "a float, which the host layer casts to input's", MUL_PAGE)
    if rotate is not None and rotate.dtype != input.dtype:
        check.fail(DTYPE, "rotate", describe(rotate), f"input's {input.dtype}", MUL_PAGE)


def _table_shapes(x: torch.Tensor, rotary_mode: str) -> tuple[tuple[int, ...], ...]:
    """The shapes that r1 and r2 may have: one angle for each position, in half mode also for each head or request."""
    half = rotary_mode == "half"
    if x.dim() == 3:
        T, N, D = x.shape
        return ((T, 1, D), (T, N, D)) if half else ((T, 1, D),)
    a, b, c, D = x.shape
    shared = ((1, 1, c, D), (1, b, 1, D), (a, 1, 1, D))
    return (*shared, (a, 1, c, D), (a, b, 1, D), (a, b, c, D)) if half else shared


def _check_rotary_heads(check: Check, x: torch.Tensor, r1: torch.Tensor, rotary_mode: str) -> None:
    """Limits of requests and heads.  S is the one long axis that has angles of its own; T has no limit."""
    if rotary_mode == "interleave":
        if x.shape.numel() >= MAX_HEADS * r1.shape.numel():
            check.fail(SIZE, "input", f"{describe(x)} with r1 {list(r1.shape)}",
                       f"fewer than {MAX_HEADS} rows to one angle (B * N; N in TND)", MUL_PAGE)
        return
    axes = list(x.shape[:-1])
    axes.remove(axes[0] if x.dim() == 3 else max(n for n, m in zip(axes, r1.shape[:-1], strict=True) if n == m))
    if max(axes) >= MAX_HEADS:
        check.fail(SIZE, "input", f"{describe(x)} with r1 {list(r1.shape)}",
                   f"B and N below {MAX_HEADS} in mode 'half'", MUL_PAGE)


def _check_shared_tables(check: Check, x: torch.Tensor) -> None:
    """Half mode with x (B, N, S, D) and tables (1, 1, S, D): the device refuses what it would be slow at."""
    B, N, S, D = x.shape
    if B == 1 or N == 1 or S == 1:
        return
    aligned = D // 2 * x.element_size() % 32 == 0
    if aligned and B * N > 8 * S:
        check.fail(SIZE, "input", f"{describe(x, 'B, N, S, D')}, {B * N} rows to one angle",
                   f"B * N of at most 8 * S = {8 * S} where r1 is (1, 1, S, D): give r1 as (B, 1, S, D), or put N "
                   "behind S", MUL_LIMITS)
    if not aligned and D < 80 and 2 * B * N > -(-S // VECTOR_CORES):
        check.fail(SIZE, "input", describe(x, "B, N, S, D"),
                   f"2 * B * N of at most S / {VECTOR_CORES}, or halves of D that fill blocks of 32 bytes: give r1 as "
                   "(B, 1, S, D), or put N behind S", MUL_LIMITS)


def _rotary_mul_axes(call: Mapping[str, Any]) -> str:
    x, r1 = call["input"], call["r1"]
    letters = "B N S"
    if x.dim() == 3:
        letters = "T N"
    elif r1.shape[:1] == (1,) and r1.shape[1:2] != (1,):
        letters = "B S N"
    elif r1.shape[:1] != (1,) and r1.shape[2:3] == (1,):
        letters = "S B N"
    sizes = zip(letters.split(), x.shape, r1.shape, strict=False)
    table = " ".join(letter if n == m else "1" for letter, n, m in sizes)
    return f"input [{letters} Dr], r1 [{table} Dr], r2 [{table} Dr], rotate [Dr Dr] -> y [{letters} Dr]"


def _rotary_mul_form(*shape: int, table: tuple[int, ...]) -> dict[str, Any]:
    return {"input": torch.empty(*shape, device="meta"), "r1": torch.empty(table, device="meta")}


@reference("npu_rotary_mul", _rotary_mul_contract, _rotary_mul_axes, (
    _rotary_mul_form(2, 3, 4, table=(2, 1, 4)), _rotary_mul_form(2, 3, 5, 4, table=(1, 1, 5, 4)),
    _rotary_mul_form(2, 3, 5, 4, table=(1, 3, 1, 4)), _rotary_mul_form(2, 3, 5, 4, table=(2, 1, 1, 4)),
    _rotary_mul_form(2, 3, 5, 4, table=(2, 1, 5, 4)),
))
def npu_rotary_mul(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half",
                   rotate: torch.Tensor | None = None) -> torch.Tensor:
    """y = input * r1 + turned * r2, in the layout of ``input``.

    ``turned`` is [-second half, first half] in mode 'half', every pair (x0, x1) as (-x1, x0) in mode 'interleave',
    and ``input @ rotate`` where a matrix is given.  Unlike npu_interleave_rope, nothing is regrouped.

    Which axis is which is read from the shape of the tables.  Their documented range, -1 to 1, is not checked.

    Args:
        input: (T, N, D), or (B, N, S, D), (B, S, N, D), (S, B, N, D); D even and below 896; fp16, bf16 or fp32; may
            be strided.
        r1, r2: cosines and sines, one shape: input's with 1 for B and N; mode 'half' also takes a 1 for N alone, and
            input's own shape.  Cast to input's dtype.
        rotary_mode: "half" or "interleave".
        rotate: (D, D) or None, input's dtype.

    Returns:
        y: a new tensor, input's shape and dtype.

    Source: torch_npu docs: npu_rotary_mul; the limits of (1, 1, S, D) tables from aclnnRotaryPositionEmbedding.
    """
    return _rotate(input, r1, r2, rotary_mode, rotate)  # [T, N, D]


def _apply_rotary_pos_emb_contract(check: Check, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor,
                                   sin: torch.Tensor, layout: str = "BSND", rotary_mode: str = "half") -> None:
    if layout not in ("BSND", "TND"):
        check.fail(RELATION, "layout", repr(layout),
                   "'BSND' or 'TND': only Ascend 950 has 'SBND' and 'BNSD', and any other word is read as 'BSND'",
                   APPLY_HOST)
    if rotary_mode != "half":
        check.fail(RELATION, "rotary_mode", repr(rotary_mode), "'half': the others are Ascend 950's", APPLY_PAGE)
    axes = 4 if layout == "BSND" else 3
    for argument, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        if tensor.dim() != axes:
            check.fail(RELATION, argument, describe(tensor), f"{axes} axes ({', '.join(layout)})", APPLY_PAGE)
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        check.fail(RELATION, "key", describe(key, ", ".join(layout)),
                   f"the rows and the D of query {list(query.shape)}; N may differ", APPLY_PAGE)
    for argument, table in (("cos", cos), ("sin", sin)):
        if table.shape != (*query.shape[:-2], 1, query.shape[-1]):
            check.fail(RELATION, argument, describe(table, ", ".join(layout)),
                       f"{[*query.shape[:-2], 1, query.shape[-1]]}: the rows and the D of query, one head", APPLY_PAGE)
    N, D = query.shape[-2] + key.shape[-2], query.shape[-1]
    if D % 2:
        check.fail(RELATION, "query", describe(query, ", ".join(layout)), "an even D: it holds pairs", APPLY_PAGE)
    if not (query.numel() and key.numel()):
        check.fail(SIZE, "query, key", f"{describe(query)} and {describe(key)}",
                   "at least one row and one head each: skip the call where there are none", APPLY_PAGE)
    if D not in (64, 128):
        check.fail(SIZE, "query", describe(query, ", ".join(layout)), "D = 64 or 128", APPLY_PAGE)
    cast = query.dtype == torch.bfloat16
    size = query.element_size()
    if N * D * (4 if cast else size) * 5 + D * (4 * size + 8 * cast) > VECTOR_MEMORY:
        check.fail(SIZE, "query, key", f"{N} heads of {D} in {query.dtype}",
                   "the heads of one position in the memory of one core: 5 * N * D * c + D * 4 * size (+ D * 8 in "
                   f"bfloat16) of at most {VECTOR_MEMORY} bytes, c = 2 in float16, else 4", APPLY_LIMITS)
    if query.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "query", describe(query), "float16, bfloat16 or float32", APPLY_PAGE)
    for argument, tensor in (("key", key), ("cos", cos), ("sin", sin)):
        if tensor.dtype != query.dtype:
            check.fail(DTYPE, argument, describe(tensor), f"query's {query.dtype}", APPLY_PAGE)


def _apply_rotary_pos_emb_axes(call: Mapping[str, Any]) -> str:
    rows = "T" if call["layout"] == "TND" else "B S"
    heads = f"query! [{rows} N D], key! [{rows} G D]"
    return f"{heads}, cos [{rows} 1 D], sin [{rows} 1 D] -> {heads}"


@reference("npu_apply_rotary_pos_emb", _apply_rotary_pos_emb_contract, _apply_rotary_pos_emb_axes,
           ({"layout": "BSND"}, {"layout": "TND"}))
def npu_apply_rotary_pos_emb(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                             layout: str = "BSND", rotary_mode: str = "half") -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of every query and key head, **in place**: x * cos + [-second half, first half] * sin.

    The schema does not say that query and key are written, so a compiler may drop the writes: use what is returned.

    Args:
        query, key: (B, S, N, D) or (T, N, D), each with its own N; D = 64 or 128; fp16, bf16 or fp32; may be strided.
        cos, sin: the same with N = 1, query's dtype.
        layout: "BSND" or "TND".
        rotary_mode: "half".

    Returns:
        (query, key): the two input tensors themselves.

    Source: torch_npu docs: npu_apply_rotary_pos_emb (page apply_rotary_pos_emb); how many heads fit from
    aclnnApplyRotaryPosEmbV2.
    """
    for heads in (query, key):
        heads.copy_(_rotate(heads, cos, sin, rotary_mode))  # [B, S, N, D]
    return query, key

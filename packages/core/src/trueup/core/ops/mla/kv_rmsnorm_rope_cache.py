"""Norm of the latent, rotation of the rope part, and both written into the caches of MLA."""
from collections.abc import Mapping
from typing import Any

import torch

from trueup.core.ops.cache.slots import (
    check_caches,
    check_slot_dtype,
    check_slots,
    slots_of_pages,
    tile_width,
    write_slots,
)
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, one_or
from trueup.core.ops.registry import float_dtypes, poison, reference, refuse_unbuilt
from trueup.core.ops.rowwise.norm import normalise
from trueup.core.ops.rowwise.rope import rotate_pairs

FUSED_PAGE = "op-plugin: docs/.../torch_npu-npu_kv_rmsnorm_rope_cache.md"
FUSED_TILING = "ops-transformer: posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_base_tiling.cpp"
FUSED_ACLNN = "ops-transformer: posembedding/kv_rms_norm_rope_cache/docs/aclnnKvRmsNormRopeCacheV2.md"
BY_TOKEN = ("PA", "PA_BNSD", "PA_NZ")
BY_PAGE = ("PA_BLK_BNSD", "PA_BLK_NZ")
TILED = ("PA_NZ", "PA_BLK_NZ")


def _kv_rmsnorm_rope_cache_contract(check: Check, kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor,
                                    sin: torch.Tensor, index: torch.Tensor, k_cache: torch.Tensor,
                                    ckv_cache: torch.Tensor, *, k_rope_scale: torch.Tensor | None = None,
                                    c_kv_scale: torch.Tensor | None = None, k_rope_offset: torch.Tensor | None = None,
                                    c_kv_offset: torch.Tensor | None = None, v: torch.Tensor | None = None,
                                    epsilon: float = 1e-5, cache_mode: str = "Norm", is_output_kv: bool = False,
                                    **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if v is not None:
        check.fail(RELATION, "v", describe(v),
                   "None: the form that stores keys of 192 and values of 128 (GQA) is not built yet", FUSED_ACLNN)
    for name, offset in (("k_rope_offset", k_rope_offset), ("c_kv_offset", c_kv_offset)):
        if offset is not None:
            check.fail(RELATION, name, describe(offset), "None: A2 and A3 ignore it without a word", FUSED_ACLNN)
    if cache_mode != "Norm" and cache_mode not in BY_TOKEN and cache_mode not in BY_PAGE:
        check.fail(RELATION, "cache_mode", repr(cache_mode),
                   f"'Norm' or one of {BY_TOKEN + BY_PAGE}: the device reads any other word as 'Norm'", FUSED_TILING)
    if kv.dim() != 4 or kv.shape[1] != 1 or gamma.dim() != 1:
        check.fail(RELATION, "kv", f"{describe(kv)} with gamma {list(gamma.shape)}",
                   "(B, 1, S, R + D) with gamma (R,): give decode rows as B, with S = 1", FUSED_TILING)
    B, _, S, width = kv.shape
    quantised = k_rope_scale is not None or c_kv_scale is not None
    _check_rows(check, kv, cos, sin, quantised or cache_mode in TILED or cache_mode in BY_PAGE)
    R, D = gamma.shape[0], cos.shape[3]
    if width != R + D or D % 2:
        check.fail(RELATION, "kv", describe(kv, "B, 1, S, R + D"),
                   f"R + D = {R} + {D}, the widths of gamma and cos, D even", FUSED_PAGE)
    if cache_mode == "Norm":
        _check_caches_by_request(check, kv, k_cache, ckv_cache, D, R)
    else:
        check_caches(check, {"k_cache": k_cache, "ckv_cache": ckv_cache}, 1, (D, R),
                     "k_cache is the rope cache and comes first, ckv_cache is the latent cache", FUSED_PAGE)
    _check_scales(check, cache_mode, k_rope_scale, c_kv_scale, k_cache, ckv_cache, D, R)
    if cache_mode in TILED and (R % tile_width(ckv_cache.dtype) or D % tile_width(k_cache.dtype)):
        check.fail(RELATION, "kv", describe(kv, "B, 1, S, R + D"),
                   f"R and D multiples of {tile_width(k_cache.dtype)}: rows of FRACTAL_NZ tiles, 32 bytes of "
                   f"{k_cache.dtype}", FUSED_TILING)
    _check_index(check, kv, index, k_cache, ckv_cache, cache_mode)
    if is_output_kv and cache_mode == "Norm":
        check.fail(RELATION, "is_output_kv", is_output_kv,
                   "False in cache_mode 'Norm', which leaves k_rope and c_kv unwritten", FUSED_PAGE)
    if not B * S:
        check.fail(SIZE, "kv", describe(kv), "at least one row: skip the call where there are none", FUSED_TILING)
    if (R, D) != (512, 64):
        check.fail(SIZE, "kv", describe(kv, "B, 1, S, R + D"), f"R = 512 and D = 64, not {R} and {D}", FUSED_PAGE)
    if cache_mode != "Norm" and k_cache.shape[1] % (32 if quantised else 16):
        check.fail(SIZE, "k_cache", describe(k_cache), "a block_size that is a multiple of 16, of 32 for int8",
                   FUSED_TILING)
    if kv.dtype not in float_dtypes(check):
        check.fail(DTYPE, "kv", describe(kv), "float16 or bfloat16", FUSED_PAGE)
    for argument, tensor in (("gamma", gamma), ("cos", cos), ("sin", sin)):
        if tensor.dtype != kv.dtype:
            check.fail(DTYPE, argument, describe(tensor), f"kv's {kv.dtype}", FUSED_PAGE)
    for argument, tensor in (("k_cache", k_cache), ("ckv_cache", ckv_cache)):
        if tensor.dtype != kv.dtype and not quantised:
            check.fail(DTYPE, argument, describe(tensor), f"kv's {kv.dtype}", FUSED_PAGE)


def _check_rows(check: Check, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, own: bool) -> None:
    """kv, cos and sin describe the same rows; ``own``: each row has its own angle."""
    B, _, S, _ = kv.shape
    together = "cut or pad kv, cos, sin and index together, before this call"
    for argument, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 4 or table.shape[:3] not in ((B, 1, S), (B, 1, 1)):
            check.fail(RELATION, argument, f"{table.shape[0]} rows, {describe(table, 'B, 1, S, D')}",
                       f"{B} rows, as kv {list(kv.shape)} has, and S = {one_or(S)}: {together}", FUSED_TILING, "SB-05")
        if own and table.shape[2] != S:
            check.fail(RELATION, argument, describe(table, "B, 1, S, D"),
                       f"S = {S} as kv: one table for all rows of a request goes with 'Norm', 'PA' and 'PA_BNSD' only, "
                       "and with no scales", FUSED_ACLNN)
    if cos.shape != sin.shape:
        check.fail(RELATION, "sin", describe(sin), f"the shape of cos, {list(cos.shape)}", FUSED_TILING)


def _check_caches_by_request(check: Check, kv: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor, D: int,
                             R: int) -> None:
    """Mode 'Norm': each request has its own row of both caches."""
    B, _, S, _ = kv.shape
    for name, cache, width in (("k_cache", k_cache, D), ("ckv_cache", ckv_cache, R)):
        if cache.dim() != 4 or cache.shape != (B, 1, k_cache.shape[2], width):
            check.fail(RELATION, name, describe(cache),
                       f"[{B}, 1, cache_length, {width}], both caches with the same length: the default is 'Norm'; "
                       "caches of pages need another cache_mode", FUSED_PAGE, "SB-26")
        if not cache.is_contiguous():
            check.fail(RELATION, name, f"strided, {describe(cache)}",
                       "a contiguous tensor: a write to a hidden copy would be lost", FUSED_PAGE)
    if k_cache.shape[2] < S:
        check.fail(SIZE, "k_cache", describe(k_cache, "B, 1, cache_length, D"), f"a cache_length of at least S = {S}",
                   FUSED_PAGE)


def _check_scales(check: Check, cache_mode: str, k_rope_scale: torch.Tensor | None, c_kv_scale: torch.Tensor | None,
                  k_cache: torch.Tensor, ckv_cache: torch.Tensor, D: int, R: int) -> None:
    """int8 caches and their scales come together."""
    if (k_rope_scale is None) != (c_kv_scale is None):
        given = "c_kv_scale" if k_rope_scale is None else "k_rope_scale"
        check.fail(RELATION, "k_rope_scale, c_kv_scale", f"{given} alone",
                   "both or neither: both caches are int8, or none", FUSED_PAGE)
    for name, scale, cache_name, cache, width in (("k_rope_scale", k_rope_scale, "k_cache", k_cache, D),
                                                  ("c_kv_scale", c_kv_scale, "ckv_cache", ckv_cache, R)):
        if scale is None and cache.dtype == torch.int8:
            check.fail(RELATION, name, f"None with {cache_name} {describe(cache)}", f"a scale for an int8 {cache_name}",
                       FUSED_PAGE)
        if scale is not None and cache_mode == "Norm":
            check.fail(RELATION, name, describe(scale), "None: 'Norm' has no int8 caches on A2 and A3", FUSED_ACLNN)
        if scale is not None and cache.dtype != torch.int8:
            check.fail(RELATION, cache_name, describe(cache), f"int8, since there is a {name}", FUSED_PAGE)
        if scale is not None and scale.shape not in ((width,), (1, width)):
            check.fail(RELATION, name, describe(scale), f"[{width}] or [1, {width}], a factor for each column",
                       FUSED_ACLNN)
        if scale is not None and scale.dtype != torch.float32:
            check.fail(DTYPE, name, describe(scale), "float32", FUSED_PAGE)


def _check_index(check: Check, kv: torch.Tensor, index: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor,
                 cache_mode: str) -> None:
    """One index for each row (in mode 'Norm' within its request), or for each page that a request begins."""
    B, _, S, _ = kv.shape
    if cache_mode == "Norm":
        if index.shape != (B, S):
            check.fail(RELATION, "index", describe(index), f"[{B}, {S}], as kv {list(kv.shape)} has rows", FUSED_PAGE)
    elif cache_mode in BY_PAGE:
        pages = -(-S // k_cache.shape[1])
        if index.shape != (B * pages,):
            check.fail(RELATION, "index", describe(index),
                       f"[{B * pages}]: for each of {B} requests the {pages} pages that its {S} rows fill", FUSED_PAGE)
    elif index.shape != (B * S,):
        check.fail(RELATION, "index", f"{index.numel()} rows, {describe(index)}",
                   f"{B * S} rows, as kv {list(kv.shape)} has, on one axis: cut or pad kv, cos, sin and index "
                   "together, before this call", FUSED_TILING, "SB-05")
    check_slot_dtype(check, "index", index, k_cache, ckv_cache, FUSED_PAGE)
    values = index.tolist()
    if cache_mode == "Norm":
        _check_positions(check, values, k_cache.shape[2])
        return
    if cache_mode in BY_PAGE and any(value > 0 and value % k_cache.shape[1] for value in values):
        check.fail(RELATION, "index", values,
                   f"the first slot of a page, a multiple of block_size {k_cache.shape[1]}: the rows of a request fill "
                   "its pages from the front", FUSED_PAGE)
    check_slots(check, "index", values, k_cache, FUSED_PAGE)


def _check_positions(check: Check, values: list[list[int]], length: int) -> None:
    for request, row in enumerate(values):
        written = [position for position in row if position >= 0]
        if written and max(written) >= length:
            check.fail(RELATION, "index", f"position {max(written)} of request {request}",
                       f"positions below {length}, the cache_length: the device writes into foreign memory", FUSED_PAGE)
        if len(set(written)) != len(written):
            check.fail(RELATION, "index", f"{row} for request {request}",
                       "a position of its own for each row: which row stays is not defined", FUSED_PAGE)


def _axes(call: Mapping[str, Any], returns: str) -> str:
    mode, left = call["cache_mode"], "" if call["is_output_kv"] else "~"
    kv, cos = call["kv"], call["cos"]
    packed = mode != "Norm" and (kv is None or kv.shape[2:3] == (1,))  # a decode row for each B
    rows = "T 1 1" if packed else "B 1 S"
    table = "B 1 1" if not packed and cos is not None and cos.shape[2:3] == (1,) else rows
    index = "B S" if mode == "Norm" else "starts" if mode in BY_PAGE else "T" if packed else "B*S"
    place = "B 1 L" if mode == "Norm" else "pages P 1"
    caches = f"k_cache! [{place} Dr], ckv_cache! [{place} R]"
    results = {"k_cache": f"k_cache! [{place} Dr]", "ckv_cache": f"ckv_cache! [{place} R]",
               "k_rope": f"k_rope{left} [{rows} Dr]", "c_kv": f"c_kv{left} [{rows} R]"}
    if returns.startswith("k_rope, c_kv, "):  # the functional form writes to copies
        caches = caches.replace("!", "")
        results = {name: text.replace("!", "") for name, text in results.items()}
    return (f"kv [{rows} R+Dr], gamma [R], cos [{table} Dr], sin [{table} Dr], index [{index}], {caches} "
            f"-> {', '.join(results[name] for name in returns.split(', '))}")


FORMS = ({"cache_mode": "PA"}, {"cache_mode": "PA_BLK_BNSD"}, {"cache_mode": "Norm"})


@reference("npu_kv_rmsnorm_rope_cache", _kv_rmsnorm_rope_cache_contract,
           lambda call: _axes(call, "k_cache, ckv_cache, k_rope, c_kv"), FORMS)
def npu_kv_rmsnorm_rope_cache(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                              index: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor, *,
                              k_rope_scale: torch.Tensor | None = None, c_kv_scale: torch.Tensor | None = None,
                              epsilon: float = 1e-5, cache_mode: str = "Norm", is_output_kv: bool = False,
                              **rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of the latent, rotation of the rope part, and both written to their caches, in place.

    The rope part goes through npu_interleave_rope: it is read as pairs and stored regrouped.  Rows with a
    negative index are computed but not written.  Duplicate slots are refused outside page 0, the dummy page.

    The page also asks for block_num >= ceil(S / block_size) * B.  With one token for each B, as servers call it,
    that would be a page for each token.  The host check on a device does not have this rule; neither has ours.

    Not built: ``v``, the form that keeps keys and values apart, and the 8-bit floats of Ascend 950.

    Args:
        kv: (B, 1, S, R + D), latent before rope; R = 512, D = 64; fp16 or bf16.
        gamma: (R,).
        cos, sin: (B, 1, S, D), or (B, 1, 1, D) in the modes 'Norm', 'PA' and 'PA_BNSD' without scales.
        index: int64.  'PA...': (B * S,), slots in the whole pool.  'PA_BLK...': (B * ceil(S / block_size),), the first
            slot of each page that a request fills.  'Norm': (B, S), positions in the request's own cache.  int32 is
            refused as DTYPE, and as RELATION (never off) once a cache has more than 2^31 - 1 elements.
        k_cache: the **rope** cache (block_num, block_size, 1, D), or (B, 1, cache_length, D) in mode 'Norm'; block_size
            a multiple of 16, of 32 for int8.
        ckv_cache: the latent cache, the same with R.
        k_rope_scale, c_kv_scale: (D,) and (R,) fp32, together or not at all.  With them both caches are int8 and hold
            round(value * scale), saturated; ties go to even.
        cache_mode: "Norm", "PA" or "PA_BNSD" (the same thing), "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ".  With NZ the
            caches are declared in the same shape, but a page lies in memory as (D / C0, block_size, C0), C0 = 16,
            32 for int8: read it with an operator that knows.

    Returns:
        (k_cache, ckv_cache, k_rope, c_kv): the two input tensors themselves, then (B, 1, S, D) and (B, 1, S, R),
        unquantised, which are written only where ``is_output_kv`` (poisoned here otherwise).

    Source: torch_npu docs: npu_kv_rmsnorm_rope_cache; negative indices and rounding from its test
    (op-plugin: test/test_custom_ops/test_npu_kv_rms_norm_rope_cache.py).
    """
    B, _, S, _ = kv.shape
    R, D = gamma.shape[0], cos.shape[3]
    latent, _ = normalise(kv[..., :R], gamma, epsilon)  # [B, 1, S, R]
    rope = rotate_pairs(kv[..., R:], cos, sin)  # [B, 1, S, D]
    slots = index.long()  # [B*S]
    if cache_mode == "Norm":
        length = k_cache.shape[2]
        starts = torch.arange(B, device=slots.device).mul_(length).view(B, 1)  # [B, 1]
        slots = torch.where(slots < 0, slots, slots + starts).flatten()  # [B*S]
        places = k_cache.view(B, length, 1, D), ckv_cache.view(B, length, 1, R)  # [B, L, 1, D], [B, L, 1, R]
    else:
        places = k_cache, ckv_cache  # [pages, P, 1, D], [pages, P, 1, R]
    if cache_mode in BY_PAGE:
        slots = slots_of_pages(slots, torch.full((B,), S, device=slots.device), k_cache.shape[1])  # [B*S]
    for cache, rows, scale in zip(places, (rope, latent), (k_rope_scale, c_kv_scale), strict=True):
        stored = rows if scale is None else (rows * scale).round_().clamp_(-128, 127)  # [B, 1, S, D]
        write_slots(cache, slots, stored.view(B * S, 1, -1), tiled=cache_mode in TILED)
    if not is_output_kv:
        return k_cache, ckv_cache, poison(rope.shape, kv.dtype, kv.device), poison(latent.shape, kv.dtype, kv.device)
    return k_cache, ckv_cache, rope.to(kv.dtype), latent.to(kv.dtype)  # ..., [B, 1, S, D], [B, 1, S, R]


@reference("npu_kv_rmsnorm_rope_cache_v2", _kv_rmsnorm_rope_cache_contract, lambda call: _axes(call, "k_rope, c_kv"),
           FORMS)
def npu_kv_rmsnorm_rope_cache_v2(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                                 index: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor,
                                 **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_kv_rmsnorm_rope_cache with a schema that says that the caches are written; returns (k_rope, c_kv) alone.

    Source: torch_npu docs: npu_kv_rmsnorm_rope_cache_v2.
    """
    _, _, rope, latent = npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, k_cache, ckv_cache, **options)
    return rope, latent  # [B, 1, S, D], [B, 1, S, R]


@reference("npu_kv_rmsnorm_rope_cache_v2_functional", _kv_rmsnorm_rope_cache_contract,
           lambda call: _axes(call, "k_rope, c_kv, k_cache, ckv_cache"), FORMS)
def npu_kv_rmsnorm_rope_cache_v2_functional(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: torch.Tensor,
    k_cache: torch.Tensor, ckv_cache: torch.Tensor, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_kv_rmsnorm_rope_cache_v2 on copies of the caches: (k_rope, c_kv, k_cache, ckv_cache).

    Source: the Meta kernel of torch_npu 2.13.0 (op_plugin/meta/_meta_registrations.py).
    """
    copies = k_cache.clone(), ckv_cache.clone()  # [pages, P, 1, D], [pages, P, 1, R]
    _, _, rope, latent = npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, *copies, **options)
    return rope, latent, *copies  # [B, 1, S, D], [B, 1, S, R], ...

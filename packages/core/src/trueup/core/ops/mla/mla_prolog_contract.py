"""What the versions of npu_mla_prolog demand of a call.

Versions 1 and 2 read the quantisation off the dtypes, version 3 is told it in modes; after that the rules are the same.
One file checks all versions on a device, so most rules are cited from there.
"""
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.cache.slots import check_caches, check_slot_dtype, check_slots, tile_width
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.registry import refuse_unbuilt

V1_PAGE = "op-plugin: docs/.../torch_npu-npu_mla_prolog.md"
V2_TEST = "op-plugin: test/test_custom_ops/test_mla_prolog_v2.py"
V3_PAGE = "op-plugin: docs/.../torch_npu-npu_mla_prolog_v3.md"
V3_ACLNN = "ops-transformer: attention/mla_prolog_v3/docs/aclnnMlaPrologV3WeightNz.md"
TILING = "ops-transformer: attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp"
BY_TOKEN = ("PA_BSND", "PA_NZ")
BY_PAGE = ("PA_BLK_BSND", "PA_BLK_NZ")
DENSE = ("BSND", "TND")
TILED = ("PA_NZ", "PA_BLK_NZ")
# weight_quant_mode to the kv_cache_quant_modes that go with it
MODES = {0: (0,), 1: (0, 2, 3), 2: (0, 1, 3)}
HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
TILE = 128
MINUS_ONE = open_point(
    "prolog-minus-one",
    "A cache_index of -1 in npu_mla_prolog, all versions: documents only allow indices >= 0, the kernel leaves such "
    "rows out.",
    "refused; otherwise such a row is left out")


def mla_prolog_contract(check: Check, token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                        weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor,
                        rope_cos: Tensor, cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor, *,
                        dequant_scale_x: Tensor | None = None, dequant_scale_w_dq: Tensor | None = None,
                        dequant_scale_w_dkv_kr: Tensor | None = None, **options: Any) -> None:
    for name, scale in (("dequant_scale_x", dequant_scale_x), ("dequant_scale_w_dq", dequant_scale_w_dq),
                        ("dequant_scale_w_dkv_kr", dequant_scale_w_dkv_kr)):
        if scale is not None:
            check.fail(RELATION, name, describe(scale), "None: version 1 keeps it for later", V1_PAGE)
    for name, tensor in (("token_x", token_x), ("weight_dq", weight_dq), ("weight_dkv_kr", weight_dkv_kr)):
        if tensor.dtype == torch.int8:
            check.fail(RELATION, name, describe(tensor), "a float: version 1 takes int8 as weight_uq_qr only", V1_PAGE)
    mla_prolog_v2_contract(check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                           rmsnorm_gamma_ckv, rope_sin, rope_cos, cache_index, kv_cache, kr_cache, **options)


def mla_prolog_v2_contract(check: Check, token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                           weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor,
                           rope_sin: Tensor, rope_cos: Tensor, cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor,
                           *, dequant_scale_x: Tensor | None = None, dequant_scale_w_dq: Tensor | None = None,
                           dequant_scale_w_uq_qr: Tensor | None = None, dequant_scale_w_dkv_kr: Tensor | None = None,
                           quant_scale_ckv: Tensor | None = None, quant_scale_ckr: Tensor | None = None,
                           smooth_scales_cq: Tensor | None = None, rmsnorm_epsilon_cq: float = 1e-5,
                           rmsnorm_epsilon_ckv: float = 1e-5, cache_mode: str = "PA_BSND") -> None:
    weights, caches = modes_of(token_x, weight_uq_qr, kv_cache)
    if cache_mode not in BY_TOKEN:
        check.fail(RELATION, "cache_mode", repr(cache_mode), f"one of {BY_TOKEN}: versions 1 and 2 have no others",
                   TILING)
    _check_int8(check, weights, caches, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, kv_cache, kr_cache)
    _check_weights(check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                   rmsnorm_gamma_ckv, rope_sin, rope_cos)
    N, D, R = weight_uk.shape
    Dr, Hcq = rope_sin.shape[-1], weight_dq.shape[1]
    _check_paged_caches(check, kv_cache, kr_cache, cache_mode, R, Dr)
    _check_scales(check, weights, caches, token_x, Hcq, N * (D + Dr), R, Dr, (1, R), dequant_scale_x,
                  dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr, quant_scale_ckv, quant_scale_ckr,
                  smooth_scales_cq)
    if caches == 1 and quant_scale_ckv is not None and bool((quant_scale_ckv != quant_scale_ckv[0, 0]).any()):
        check.fail(RELATION, "quant_scale_ckv", f"{describe(quant_scale_ckv)} of several values",
                   "one number in every place: beside an int8 token_x the device reads the first", V2_TEST)
    _check_slots(check, token_x, cache_index, kv_cache, kr_cache)
    if Hcq != 1536:
        check.fail(SIZE, "weight_dq", describe(weight_dq, "H, Hcq"), "Hcq = 1536 in versions 1 and 2", TILING)
    if D != 128:
        check.fail(SIZE, "weight_uk", describe(weight_uk, "N, D, R"), "D = 128 in versions 1 and 2", TILING)
    _check_sizes(check, token_x, weight_uk, rope_sin, kv_cache, cache_mode)
    _check_floats(check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                  rmsnorm_gamma_ckv, rope_sin, rope_cos, kv_cache, kr_cache)


def mla_prolog_v3_contract(check: Check, token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                           weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor,
                           rope_sin: Tensor, rope_cos: Tensor, kv_cache: Tensor, kr_cache: Tensor, *,
                           cache_index: Tensor | None = None, dequant_scale_x: Tensor | None = None,
                           dequant_scale_w_dq: Tensor | None = None, dequant_scale_w_uq_qr: Tensor | None = None,
                           dequant_scale_w_dkv_kr: Tensor | None = None, quant_scale_ckv: Tensor | None = None,
                           quant_scale_ckr: Tensor | None = None, smooth_scales_cq: Tensor | None = None,
                           actual_seq_len: Tensor | None = None, k_nope_clip_alpha: Tensor | None = None,
                           rmsnorm_epsilon_cq: float = 1e-5, rmsnorm_epsilon_ckv: float = 1e-5,
                           cache_mode: str = "PA_BSND", query_norm_flag: bool = False, weight_quant_mode: int = 0,
                           kv_cache_quant_mode: int = 0, query_quant_mode: int = 0, ckvkr_repo_mode: int = 0,
                           quant_scale_repo_mode: int = 0, tile_size: int = TILE, qc_qr_scale: float = 1.0,
                           kc_scale: float = 1.0, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    _check_modes(check, token_x, cache_mode, weight_quant_mode, kv_cache_quant_mode, query_quant_mode,
                 ckvkr_repo_mode, quant_scale_repo_mode)
    _check_int8(check, weight_quant_mode, kv_cache_quant_mode, token_x, weight_dq, weight_uq_qr, weight_uk,
                weight_dkv_kr, kv_cache, kr_cache)
    _check_weights(check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                   rmsnorm_gamma_ckv, rope_sin, rope_cos)
    N, D, R = weight_uk.shape
    Dr, Hcq = rope_sin.shape[-1], weight_dq.shape[1]
    if kv_cache_quant_mode == 3:
        _check_combined_cache(check, token_x, kv_cache, kr_cache, cache_mode, tile_size, R, Dr)
    elif cache_mode in DENSE:
        _check_dense_caches(check, token_x, kv_cache, kr_cache, R, Dr)
    else:
        _check_paged_caches(check, kv_cache, kr_cache, cache_mode, R, Dr)
    _check_scales(check, weight_quant_mode, kv_cache_quant_mode, token_x, Hcq, N * (D + Dr), R, Dr, (1,),
                  dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr, quant_scale_ckv,
                  quant_scale_ckr, smooth_scales_cq)
    if (k_nope_clip_alpha is not None) != (kv_cache_quant_mode == 3):
        check.fail(RELATION, "k_nope_clip_alpha",
                   "None" if k_nope_clip_alpha is None else describe(k_nope_clip_alpha),
                   "a tensor [1] with kv_cache_quant_mode 3, else None", TILING)
    if k_nope_clip_alpha is not None and k_nope_clip_alpha.shape != (1,):
        check.fail(RELATION, "k_nope_clip_alpha", describe(k_nope_clip_alpha), "[1]", TILING)
    if k_nope_clip_alpha is not None and k_nope_clip_alpha.dtype != torch.float32:
        check.fail(DTYPE, "k_nope_clip_alpha", describe(k_nope_clip_alpha), "float32", TILING)
    _check_lengths(check, token_x, actual_seq_len, cache_mode)
    _check_index(check, token_x, cache_index, actual_seq_len, kv_cache, kr_cache, cache_mode)
    if tile_size != TILE:
        check.fail(SIZE, "tile_size", tile_size, f"{TILE}", TILING)
    if Hcq not in (1536, 2048):
        check.fail(SIZE, "weight_dq", describe(weight_dq, "H, Hcq"), "Hcq = 1536 or 2048", TILING)
    if D not in (128, 192):
        check.fail(SIZE, "weight_uk", describe(weight_uk, "N, D, R"), "D = 128 or 192", TILING)
    _check_sizes(check, token_x, weight_uk, rope_sin, kv_cache, cache_mode)
    _check_floats(check, token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                  rmsnorm_gamma_ckv, rope_sin, rope_cos, kv_cache, kr_cache)


def modes_of(token_x: Tensor, weight_uq_qr: Tensor, kv_cache: Tensor) -> tuple[int, int]:
    """weight_quant_mode and kv_cache_quant_mode of version 3 for a call of version 1 or 2."""
    weights = 2 if token_x.dtype == torch.int8 else int(weight_uq_qr.dtype == torch.int8)
    return weights, 0 if kv_cache.dtype != torch.int8 else 1 if weights == 2 else 2


def _check_modes(check: Check, token_x: Tensor, cache_mode: str, weight_quant_mode: int, kv_cache_quant_mode: int,
                 query_quant_mode: int, ckvkr_repo_mode: int, quant_scale_repo_mode: int) -> None:
    if cache_mode not in (*BY_TOKEN, *BY_PAGE, *DENSE):
        check.fail(RELATION, "cache_mode", repr(cache_mode), f"one of {BY_TOKEN + BY_PAGE + DENSE}", TILING)
    if cache_mode in DENSE and token_x.dim() != (3 if cache_mode == "BSND" else 2):
        check.fail(RELATION, "token_x", f"{describe(token_x)} in cache_mode {cache_mode!r}",
                   "(B, S, H) in cache_mode 'BSND', (T, H) in 'TND'", TILING)
    if weight_quant_mode not in MODES:
        check.fail(RELATION, "weight_quant_mode", weight_quant_mode,
                   "0 (floats), 1 (weight_uq_qr in int8) or 2 (token_x and three weights in int8): the 8-bit floats of "
                   "3 to 5 are Ascend 950's", TILING)
    if kv_cache_quant_mode not in MODES.get(weight_quant_mode, ()):
        check.fail(RELATION, "kv_cache_quant_mode", f"{kv_cache_quant_mode} with weight_quant_mode {weight_quant_mode}",
                   "0; with weight_quant_mode 1 also 2 (scale by column) or 3 (by tile); with weight_quant_mode 2 "
                   "also 1 (one scale) or 3", V3_PAGE)
    if query_quant_mode != (kv_cache_quant_mode == 1):
        check.fail(RELATION, "query_quant_mode", query_quant_mode, "1 with kv_cache_quant_mode 1, else 0", TILING)
    for name, mode in (("ckvkr_repo_mode", ckvkr_repo_mode), ("quant_scale_repo_mode", quant_scale_repo_mode)):
        if mode != (kv_cache_quant_mode == 3):
            check.fail(RELATION, name, mode,
                       "1 with kv_cache_quant_mode 3, where one row holds latent, rope and scales; else 0", TILING)
    if kv_cache_quant_mode == 3 and cache_mode not in ("PA_BSND", *DENSE):
        check.fail(RELATION, "cache_mode", repr(cache_mode), "'PA_BSND', 'BSND' or 'TND' with kv_cache_quant_mode 3",
                   V3_ACLNN)


def _check_int8(check: Check, weights: int, caches: int, token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor,
                weight_uk: Tensor, weight_dkv_kr: Tensor, kv_cache: Tensor, kr_cache: Tensor) -> None:
    """Which tensors are int8; what floats the others are is a later question."""
    for name, tensor, int8 in (
            ("token_x", token_x, weights == 2), ("weight_dq", weight_dq, weights == 2),
            ("weight_uq_qr", weight_uq_qr, weights > 0), ("weight_uk", weight_uk, False),
            ("weight_dkv_kr", weight_dkv_kr, weights == 2), ("kv_cache", kv_cache, caches > 0),
            ("kr_cache", kr_cache, caches == 2 or (caches == 3 and kr_cache.dtype == torch.int8))):
        if (tensor.dtype == torch.int8) != int8:
            check.fail(RELATION, name, f"{describe(tensor)} with weight mode {weights}, cache mode {caches}",
                       "int8 for what is quantised, else a float.  Weight mode 1: weight_uq_qr; 2: also token_x, "
                       "weight_dq and weight_dkv_kr.  Cache mode 1 and 3: kv_cache; 2: also kr_cache", V3_PAGE)


def _check_weights(check: Check, token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                   weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor,
                   rope_cos: Tensor) -> None:
    if token_x.dim() not in (2, 3):
        check.fail(RELATION, "token_x", describe(token_x), "(T, H) or (B, S, H)", TILING)
    H = token_x.shape[-1]
    if weight_dq.dim() != 2 or weight_dq.shape[0] != H:
        check.fail(RELATION, "weight_dq", describe(weight_dq, "H, Hcq"), f"2 axes, H = {H} of token_x", TILING)
    if weight_uk.dim() != 3:
        check.fail(RELATION, "weight_uk", describe(weight_uk), "3 axes (N, D, R)", TILING)
    if rope_sin.shape[:-1] != token_x.shape[:-1]:
        check.fail(RELATION, "rope_sin", describe(rope_sin),
                   f"the rows of token_x {list(token_x.shape)}, Dr wide: cut or pad them together", TILING, "SB-05")
    if rope_cos.shape != rope_sin.shape:
        check.fail(RELATION, "rope_cos", describe(rope_cos), f"the shape of rope_sin, {list(rope_sin.shape)}", TILING)
    Hcq, (N, D, R), Dr = weight_dq.shape[1], weight_uk.shape, rope_sin.shape[-1]
    for name, tensor, shape in (
            ("weight_uq_qr", weight_uq_qr, (Hcq, N * (D + Dr))), ("weight_dkv_kr", weight_dkv_kr, (H, R + Dr)),
            ("rmsnorm_gamma_cq", rmsnorm_gamma_cq, (Hcq,)), ("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv, (R,))):
        if tensor.shape != shape:
            check.fail(RELATION, name, describe(tensor),
                       f"{list(shape)}, as token_x, weight_dq, weight_uk (N, D, R) and rope_sin (Dr) have it", TILING)
    if Dr % 2:
        check.fail(RELATION, "rope_sin", describe(rope_sin), "an even Dr: the rope part holds pairs", TILING)
    for name, tensor in (("token_x", token_x), ("weight_dq", weight_dq), ("weight_uq_qr", weight_uq_qr),
                         ("weight_uk", weight_uk), ("weight_dkv_kr", weight_dkv_kr), ("rope_sin", rope_sin),
                         ("rope_cos", rope_cos)):
        if not tensor.is_contiguous():
            check.fail(SIZE, name, f"strided, {describe(tensor)}", "a contiguous tensor: call .contiguous()", V3_PAGE)


def _check_paged_caches(check: Check, kv_cache: Tensor, kr_cache: Tensor, cache_mode: str, R: int, Dr: int) -> None:
    check_caches(check, {"kv_cache": kv_cache, "kr_cache": kr_cache}, 1, (R, Dr),
                 "kv_cache holds the latent and comes first, kr_cache the rope part", TILING)
    if cache_mode in TILED and (R % tile_width(kv_cache.dtype) or Dr % tile_width(kr_cache.dtype)):
        check.fail(RELATION, "kv_cache, kr_cache", f"{describe(kv_cache)} and {describe(kr_cache)}",
                   "widths of whole FRACTAL_NZ tiles: multiples of 16, in int8 of 32", TILING)


def _check_dense_caches(check: Check, token_x: Tensor, kv_cache: Tensor, kr_cache: Tensor, R: int, Dr: int) -> None:
    for name, cache, width in (("kv_cache", kv_cache, R), ("kr_cache", kr_cache, Dr)):
        if cache.shape != (*token_x.shape[:-1], 1, width) or not cache.is_contiguous():
            check.fail(RELATION, name, describe(cache),
                       f"contiguous {[*token_x.shape[:-1], 1, width]}: a row for each of token_x", TILING)
        if not cache.numel():
            check.fail(SIZE, name, describe(cache), "at least one row in cache_mode 'BSND' and 'TND'", V3_PAGE)


def _check_combined_cache(check: Check, token_x: Tensor, kv_cache: Tensor, kr_cache: Tensor, cache_mode: str,
                          tile_size: int, R: int, Dr: int) -> None:
    """kv_cache_quant_mode 3: one int8 row holds the latent, the rope part in bf16 and a scale for each tile."""
    if tile_size < 1 or R % tile_size:
        check.fail(RELATION, "tile_size", tile_size, f"a divisor of R = {R}", TILING)
    if kr_cache.numel():
        check.fail(RELATION, "kr_cache", describe(kr_cache), "an empty tensor: the rope part stands in kv_cache",
                   TILING)
    width = R + 2 * Dr + 4 * (R // tile_size)
    if kv_cache.shape[-2:] != (1, width) or not kv_cache.is_contiguous():
        check.fail(RELATION, "kv_cache", describe(kv_cache),
                   f"contiguous rows [1, {width}]: R = {R} int8, Dr = {Dr} bfloat16, {R // tile_size} float32", TILING)
    places = kv_cache.shape[:-2]
    if (places != token_x.shape[:-1]) if cache_mode in DENSE else (len(places) != 2):
        check.fail(RELATION, "kv_cache", f"{describe(kv_cache)} in cache_mode {cache_mode!r}",
                   f"(block_num, block_size, 1, width); in 'BSND' and 'TND' the rows of token_x {list(token_x.shape)} "
                   "come first", TILING)


def _check_scales(check: Check, weights: int, caches: int, token_x: Tensor, Hcq: int, heads: int, R: int, Dr: int,
                  of_caches: tuple[int, ...], dequant_scale_x: Tensor | None, dequant_scale_w_dq: Tensor | None,
                  dequant_scale_w_uq_qr: Tensor | None, dequant_scale_w_dkv_kr: Tensor | None,
                  quant_scale_ckv: Tensor | None, quant_scale_ckr: Tensor | None,
                  smooth_scales_cq: Tensor | None) -> None:
    for name, scale, needed, shape in (
            ("dequant_scale_x", dequant_scale_x, weights == 2, (token_x.shape[:-1].numel(), 1)),
            ("dequant_scale_w_dq", dequant_scale_w_dq, weights == 2, (1, Hcq)),
            ("dequant_scale_w_uq_qr", dequant_scale_w_uq_qr, weights > 0, (1, heads)),
            ("dequant_scale_w_dkv_kr", dequant_scale_w_dkv_kr, weights == 2, (1, R + Dr)),
            ("quant_scale_ckv", quant_scale_ckv, caches in (1, 2), of_caches if caches == 1 else (1, R)),
            ("quant_scale_ckr", quant_scale_ckr, caches == 2, (1, Dr)),
            ("smooth_scales_cq", smooth_scales_cq, weights > 0, (1, Hcq))):
        if scale is None:
            if needed and name != "smooth_scales_cq":
                check.fail(RELATION, name, f"None with weight mode {weights}, cache mode {caches}",
                           f"a float32 tensor {list(shape)} for what is int8", V3_PAGE)
            continue
        if not needed:
            check.fail(RELATION, name, f"{describe(scale)} with weight mode {weights}, cache mode {caches}",
                       "None: nothing is int8 that it belongs to", TILING)
        if scale.shape != shape:
            check.fail(RELATION, name, describe(scale), f"{list(shape)}", TILING)
        if scale.dtype != torch.float32:
            check.fail(DTYPE, name, describe(scale), "float32", TILING)


def _check_lengths(check: Check, token_x: Tensor, actual_seq_len: Tensor | None, cache_mode: str) -> None:
    """The ends of the requests in packed rows, which only the modes by page ask for."""
    needed = token_x.dim() == 2 and cache_mode in BY_PAGE
    if (actual_seq_len is not None) != needed:
        check.fail(RELATION, "actual_seq_len", "None" if actual_seq_len is None else describe(actual_seq_len),
                   "the ends of the requests (B,) with token_x (T, H) in the modes 'PA_BLK...', else None", TILING)
    if actual_seq_len is None:
        return
    if actual_seq_len.dim() != 1 or actual_seq_len.dtype != torch.int32:
        check.fail(RELATION, "actual_seq_len", describe(actual_seq_len), "(B,) int32", TILING)
    ends = actual_seq_len.tolist()
    if ends != sorted(ends) or min(ends, default=0) < 0 or (ends[-1] if ends else 0) != token_x.shape[0]:
        check.fail(RELATION, "actual_seq_len", ends,
                   f"cumulative: never falling, with the last one the T = {token_x.shape[0]} of token_x", V3_ACLNN)


def _check_index(check: Check, token_x: Tensor, cache_index: Tensor | None, actual_seq_len: Tensor | None,
                 kv_cache: Tensor, kr_cache: Tensor, cache_mode: str) -> None:
    if (cache_index is None) != (cache_mode in DENSE):
        check.fail(RELATION, "cache_index", "None" if cache_index is None else describe(cache_index),
                   "None in 'BSND' and 'TND', which write every row in its place; else a tensor", V3_PAGE)
    if cache_index is None:
        return
    if cache_mode in BY_TOKEN:
        _check_slots(check, token_x, cache_index, kv_cache, kr_cache)
        return
    block_num, block_size = kv_cache.shape[:2]
    if actual_seq_len is None:
        shape: tuple[int, ...] = (token_x.shape[0], -(-token_x.shape[1] // block_size))
    else:
        ends = actual_seq_len.tolist()
        shape = (sum(-(-(end - start) // block_size) for start, end in zip([0, *ends], ends, strict=False)),)
    if cache_index.shape != shape:
        check.fail(RELATION, "cache_index", describe(cache_index),
                   f"{list(shape)}: every page that a request fills, block_size {block_size}", V3_PAGE)
    check_slot_dtype(check, "cache_index", cache_index, kv_cache, kr_cache, V3_PAGE)
    ids = cache_index.flatten().tolist()
    if ids and max(ids) >= block_num and kv_cache.numel():
        check.fail(RELATION, "cache_index", f"page {max(ids)}",
                   f"pages below {block_num}, not slots: the device writes into foreign memory", V3_PAGE)
    if ids and min(ids) < 0:
        check.fail(RELATION, "cache_index", f"page {min(ids)}", "pages >= 0", V3_PAGE, "SB-09", unless=MINUS_ONE)
    real = [page for page in ids if page > 0]
    if len(set(real)) != len(real):
        check.fail(RELATION, "cache_index", ids,
                   "every page once, but for the dummy page 0: which rows stay is not defined", V3_PAGE)


def _check_slots(check: Check, token_x: Tensor, cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor) -> None:
    """A slot for each row, in the modes by token."""
    if cache_index.shape != token_x.shape[:-1]:
        check.fail(RELATION, "cache_index", describe(cache_index),
                   f"{list(token_x.shape[:-1])}, a slot for each row of token_x: cut or pad them together", TILING,
                   "SB-05")
    check_slot_dtype(check, "cache_index", cache_index, kv_cache, kr_cache, TILING)
    slots = cache_index.flatten().tolist()
    if slots and min(slots) < 0:
        check.fail(RELATION, "cache_index", f"slot {min(slots)} in row {slots.index(min(slots))}",
                   "slots >= 0: send padded rows to the dummy page 0", V3_PAGE, "SB-09", unless=MINUS_ONE)
    if kv_cache.numel():  # an empty cache is legal, and nothing is written
        check_slots(check, "cache_index", slots, kv_cache, V3_PAGE)


def _check_sizes(check: Check, token_x: Tensor, weight_uk: Tensor, rope_sin: Tensor, kv_cache: Tensor,
                 cache_mode: str) -> None:
    """Sizes that all versions share."""
    N, _, R = weight_uk.shape
    if token_x.shape[-1] not in HIDDEN:
        check.fail(SIZE, "token_x", describe(token_x), f"H one of {HIDDEN}", TILING)
    if token_x.dim() == 3 and token_x.shape[0] > 65536:
        check.fail(SIZE, "token_x", describe(token_x, "B, S, H"), "B of at most 65536", TILING)
    if N not in HEADS:
        check.fail(SIZE, "weight_uk", describe(weight_uk, "N, D, R"), f"N one of {HEADS}", TILING)
    if R != 512:
        check.fail(SIZE, "weight_uk", describe(weight_uk, "N, D, R"), "R = 512", TILING)
    if rope_sin.shape[-1] != 64:
        check.fail(SIZE, "rope_sin", describe(rope_sin), "Dr = 64", TILING)
    if cache_mode not in DENSE and (kv_cache.shape[1] % 16 or not 16 <= kv_cache.shape[1] <= 1024):
        check.fail(SIZE, "kv_cache", describe(kv_cache), "a block_size from 16 to 1024, a multiple of 16", TILING)


def _check_floats(check: Check, token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                  weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor,
                  rope_cos: Tensor, kv_cache: Tensor, kr_cache: Tensor) -> None:
    """Everything that is not int8 has one float dtype."""
    dtype = rope_sin.dtype
    if dtype != torch.bfloat16 and not (check.host_floats and dtype in (torch.float32, torch.float64)):
        check.fail(DTYPE, "rope_sin", describe(rope_sin), "bfloat16", TILING)
    for name, tensor in (
            ("rope_cos", rope_cos), ("weight_uk", weight_uk), ("rmsnorm_gamma_cq", rmsnorm_gamma_cq),
            ("rmsnorm_gamma_ckv", rmsnorm_gamma_ckv), ("token_x", token_x), ("weight_dq", weight_dq),
            ("weight_uq_qr", weight_uq_qr), ("weight_dkv_kr", weight_dkv_kr), ("kv_cache", kv_cache),
            ("kr_cache", kr_cache)):
        if tensor.dtype != dtype and tensor.dtype != torch.int8:
            check.fail(DTYPE, name, describe(tensor), f"rope_sin's {dtype}, or int8 where quantised", TILING)

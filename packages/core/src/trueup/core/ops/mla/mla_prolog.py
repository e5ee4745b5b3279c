"""Everything of MLA that comes before attention, in one kernel: ``npu_mla_prolog``.

    token_x -> weight_dq -> norm -> weight_uq_qr -+-> weight_uk -> query       (absorbed: as wide as the latent)
            |                                     +-> rotation  -> query_rope
            +> weight_dkv_kr -+-> norm     -> kv_cache
                              +-> rotation -> kr_cache

Four operators share one computation and differ in what they hand out.  Sines come **before** cosines here, unlike in
npu_kv_rmsnorm_rope_cache, and the latent cache before the rope cache.

A device wants weight_dq, weight_uq_qr and weight_dkv_kr in the format FRACTAL_NZ, which changes no shape and no value;
the kernels here do not look.
"""
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.cache.slots import slots_of_pages, write_slots
from trueup.core.ops.matmul.dynamic_quant import npu_dynamic_quant
from trueup.core.ops.matmul.int8 import int8_product
from trueup.core.ops.mla.mla_prolog_contract import (
    BY_PAGE,
    BY_TOKEN,
    DENSE,
    TILE,
    TILED,
    mla_prolog_contract,
    mla_prolog_v2_contract,
    mla_prolog_v3_contract,
    modes_of,
)
from trueup.core.ops.registry import poison, reference
from trueup.core.ops.rowwise.norm import normalise
from trueup.core.ops.rowwise.rope import rotate_pairs


class Prolog(NamedTuple):
    """All that a call computes, apart from what it writes to the caches; scales are None where nothing is int8."""

    query: Tensor  # [T, N, R] or [B, S, N, R]
    query_rope: Tensor  # [T, N, Dr] or [B, S, N, Dr]
    query_scale: Tensor | None  # [T, N, 1]
    norm: Tensor  # [T, Hcq] or [B, S, Hcq]
    norm_scale: Tensor | None  # [T, 1]


def _prolog(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, weight_dkv_kr: Tensor,
            rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor, kv_cache: Tensor,
            kr_cache: Tensor, *, cache_index: Tensor | None, kv_cache_quant_mode: int,
            dequant_scale_x: Tensor | None = None, dequant_scale_w_dq: Tensor | None = None,
            dequant_scale_w_uq_qr: Tensor | None = None, dequant_scale_w_dkv_kr: Tensor | None = None,
            quant_scale_ckv: Tensor | None = None, quant_scale_ckr: Tensor | None = None,
            smooth_scales_cq: Tensor | None = None, actual_seq_len: Tensor | None = None,
            k_nope_clip_alpha: Tensor | None = None, rmsnorm_epsilon_cq: float = 1e-5,
            rmsnorm_epsilon_ckv: float = 1e-5, cache_mode: str = "PA_BSND", tile_size: int = TILE,
            qc_qr_scale: float = 1.0, kc_scale: float = 1.0) -> Prolog:
    lead, dtype = token_x.shape[:-1], rope_sin.dtype
    N, D, R = weight_uk.shape
    x, sin, cos = token_x.flatten(0, -2), rope_sin.flatten(0, -2), rope_cos.flatten(0, -2)  # [T, H], [T, Dr] twice
    T, Dr = sin.shape

    low = _product(x, weight_dq, dequant_scale_x, dequant_scale_w_dq)  # [T, Hcq]
    norm = normalise(low, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)[0] * qc_qr_scale  # [T, Hcq]
    norm_scale = None
    if dequant_scale_w_uq_qr is None:
        norm = norm.to(dtype)  # [T, Hcq]
    else:
        norm, scale = npu_dynamic_quant(norm if smooth_scales_cq is None else norm * smooth_scales_cq)  # [T, Hcq], [T]
        norm_scale = scale[:, None]  # [T, 1]
    heads = _product(norm, weight_uq_qr, norm_scale, dequant_scale_w_uq_qr).view(T, N, D + Dr)  # [T, N, D+Dr]
    query_rope = rotate_pairs(heads[..., D:], cos[:, None], sin[:, None]).to(dtype)  # [T, N, Dr]
    nope = heads[..., :D].to(dtype).transpose(0, 1)  # [N, T, D]
    query = torch.bmm(nope, weight_uk).transpose(0, 1).contiguous()  # [T, N, R]
    query_scale = None
    if kv_cache_quant_mode == 1 and quant_scale_ckv is not None:
        query, scale = npu_dynamic_quant(query)  # [T, N, R], [T, N]
        query_scale = scale[..., None]  # [T, N, 1]
        # So that one factor turns both parts of a score back: the other part is int8 times int8.
        query_rope = (query_rope * (quant_scale_ckv.flatten()[0] / query_scale)).to(dtype)  # [T, N, Dr]

    latent_rope = _product(x, weight_dkv_kr, dequant_scale_x, dequant_scale_w_dkv_kr)  # [T, R+Dr]
    latent = normalise(latent_rope[:, :R], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0] * kc_scale  # [T, R]
    rope = rotate_pairs(latent_rope[:, R:], cos, sin)  # [T, Dr]
    slots = _slots(cache_index, actual_seq_len, lead, kv_cache, cache_mode)  # [T]
    if k_nope_clip_alpha is not None:
        _store(kv_cache, slots, _combined(latent, rope, k_nope_clip_alpha, tile_size), None, cache_mode)
    else:
        _store(kv_cache, slots, latent, quant_scale_ckv, cache_mode)
        _store(kr_cache, slots, rope, quant_scale_ckr, cache_mode)
    return Prolog(query.view(*lead, N, R), query_rope.view(*lead, N, Dr), query_scale,
                  norm.view(*lead, weight_dq.shape[1]), norm_scale)


def _product(x: Tensor, weight: Tensor, row_scale: Tensor | None, column_scale: Tensor | None) -> Tensor:
    """x @ weight: of floats rounded to their dtype, of int8 times both scales in fp32."""
    if row_scale is None or column_scale is None:
        return x @ weight  # [T, Dout]
    return (int8_product(x, weight) * row_scale * column_scale).float()  # [T, Dout]


def _combined(latent: Tensor, rope: Tensor, alpha: Tensor, tile_size: int) -> Tensor:
    """Bytes of one row for quantisation by tile: the latent in int8, the rope part in bf16, fp32 scales of the tiles.

    A tile is cut off at alpha times its largest value first.
    """
    tiles = latent.unflatten(1, (latent.shape[1] // tile_size, tile_size))  # [T, tiles, tile_size]
    limit = tiles.abs().amax(-1, keepdim=True) * alpha  # [T, tiles, 1]
    scale = limit / 127  # [T, tiles, 1]
    whole = (tiles.clamp(-limit, limit) / scale).nan_to_num_(0.0).round_().to(torch.int8)  # [T, tiles, tile_size]
    parts = (whole.flatten(1), rope.to(torch.bfloat16), scale.flatten(1).float())  # [T, R], [T, Dr], [T, tiles]
    return torch.cat([part.contiguous().view(torch.int8) for part in parts], 1)  # [T, R + 2*Dr + 4*tiles]


def _slots(cache_index: Tensor | None, actual_seq_len: Tensor | None, lead: torch.Size, cache: Tensor,
           cache_mode: str) -> Tensor:
    """The slot of every row; the modes by page name pages instead, and dense caches have a place for each row."""
    if cache_index is None:
        return torch.arange(lead.numel(), device=cache.device)  # [T]
    index = cache_index.long().flatten()  # [T], or a page each
    if cache_mode in BY_TOKEN:
        return index  # [T]
    if actual_seq_len is None:
        lengths = torch.full((lead[0],), lead[1], device=index.device)  # [B]
    else:
        lengths = actual_seq_len.long().diff(prepend=actual_seq_len.new_zeros(1).long())  # [B]
    return slots_of_pages(index * cache.shape[1], lengths, cache.shape[1])  # [T]


def _store(cache: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None, cache_mode: str) -> None:
    if not cache.numel():  # no page: nothing is written
        return
    if scale is not None:
        rows = (rows * scale).round_().clamp_(-128, 127)  # [T, R]
    if cache_mode in DENSE:
        cache = cache.flatten(0, -3)[None]  # [1, T, 1, R]
    write_slots(cache, slots, rows[:, None], tiled=cache_mode in TILED)


def _placeholder(like: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return poison((size,), dtype, like.device)  # [0] or [1]


def _axes(call: Mapping[str, Any], returns: str) -> str:
    packed = call["token_x"] is None or call["token_x"].dim() == 2
    mode = call["cache_mode"]
    rows, flat = ("T", "T") if packed else ("B S", "B*S")
    by_page = mode in BY_PAGE
    combined = call.get("kv_cache_quant_mode") == 3
    place = rows if mode in DENSE else "pages P"
    mark = "" if returns.endswith("kv_cache, kr_cache") else "!"  # the functional form writes to copies
    latent, rope = ("R+2Dr+4tiles", "0") if combined else ("R", "Dr")
    kv, kr = f"kv_cache{mark} [{place} 1 {latent}]", f"kr_cache{mark} [{'0' if combined else f'{place} 1 {rope}'}]"
    index = "pages_of_rows" if by_page and packed else "B pages_of_request" if by_page else rows
    scaled, normed = call.get("kv_cache_quant_mode") == 1, call.get("query_norm_flag", False)
    quantised = call.get("weight_quant_mode", 0) > 0
    if "weight_quant_mode" not in call and call["token_x"] is not None:
        scaled = modes_of(call["token_x"], call["weight_uq_qr"], call["kv_cache"])[1] == 1
    results = {
        "query": f"query [{rows} N R]", "query_rope": f"query_rope [{rows} N Dr]", "kv_cache": kv, "kr_cache": kr,
        "query_scale": f"dequant_scale_q_nope [{flat} N 1]" if scaled else "dequant_scale_q_nope~ [placeholder]",
        "norm": f"query_norm [{rows} Hcq]" if normed else "query_norm~ [placeholder]",
        "norm_scale": (f"dequant_scale_q_norm [{flat} 1]" if normed and quantised
                       else "dequant_scale_q_norm~ [placeholder]"),
    }
    return (f"token_x [{rows} H], weight_dq [H Hcq], weight_uq_qr [Hcq N*D+N*Dr], weight_uk [N D R], "
            f"weight_dkv_kr [H R+Dr], rmsnorm_gamma_cq [Hcq], rmsnorm_gamma_ckv [R], rope_sin [{rows} Dr], "
            f"rope_cos [{rows} Dr], cache_index [{index}], {kv}, {kr}, dequant_scale_x [{flat} 1], "
            "dequant_scale_w_dq [1 Hcq], dequant_scale_w_uq_qr [1 N*D+N*Dr], dequant_scale_w_dkv_kr [1 R+Dr], "
            "quant_scale_ckr [1 Dr], smooth_scales_cq [1 Hcq]"
            f"{', actual_seq_len [B]' if 'actual_seq_len' in call else ''} "
            f"-> {', '.join(results[name] for name in returns.split(', '))}")


def _returning(returns: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda call: _axes(call, returns)


V3_FORMS: tuple[dict[str, Any], ...] = (
    {}, {"cache_mode": "PA_BLK_BSND"}, {"cache_mode": "TND"}, {"kv_cache_quant_mode": 3},
)


@reference("npu_mla_prolog", mla_prolog_contract, _returning("query, query_rope, kv_cache, kr_cache"))
def npu_mla_prolog(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, weight_dkv_kr: Tensor,
                   rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor,
                   cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor,
                   **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """npu_mla_prolog_v2 without its last result, and with token_x in floats only.  Deprecated by its page.

    Source: torch_npu docs: npu_mla_prolog.
    """
    return npu_mla_prolog_v2(token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                             rmsnorm_gamma_ckv, rope_sin, rope_cos, cache_index, kv_cache, kr_cache, **options)[:4]


@reference("npu_mla_prolog_v2", mla_prolog_v2_contract,
           _returning("query, query_rope, kv_cache, kr_cache, query_scale"))
def npu_mla_prolog_v2(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                      weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor,
                      rope_cos: Tensor, cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor,
                      **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries for absorbed MLA, and the latent and the rotated key of each row written to the caches, in place.

    As npu_mla_prolog_v3, with these differences: cache_index stands before the caches; cache_mode is 'PA_BSND' or
    'PA_NZ'; Hcq = 1536 and D = 128; the dtypes say what is quantised, where token_x int8 with kv_cache int8 is
    kv_cache_quant_mode 1, with ``quant_scale_ckv`` (1, R) holding one number in every place.

    Returns:
        (query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope): the caches are the two input tensors themselves;
        the last one is (T, N, 1) fp32 where query is int8, else a placeholder of one element, never to be read.

    Source: torch_npu docs: npu_mla_prolog_v2.
    """
    _, caches = modes_of(token_x, weight_uq_qr, kv_cache)
    query, query_rope, scale, _, _ = _prolog(
        token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin,
        rope_cos, kv_cache, kr_cache, cache_index=cache_index, kv_cache_quant_mode=caches, **options)
    return query, query_rope, kv_cache, kr_cache, _placeholder(query, 1) if scale is None else scale


@reference("npu_mla_prolog_v3", mla_prolog_v3_contract,
           _returning("query, query_rope, query_scale, norm, norm_scale"), V3_FORMS)
def npu_mla_prolog_v3(token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor,
                      weight_dkv_kr: Tensor, rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor,
                      rope_cos: Tensor, kv_cache: Tensor, kr_cache: Tensor, *, cache_index: Tensor | None = None,
                      query_norm_flag: bool = False, kv_cache_quant_mode: int = 0, weight_quant_mode: int = 0,
                      query_quant_mode: int = 0, ckvkr_repo_mode: int = 0, quant_scale_repo_mode: int = 0,
                      token_x_dtype: None = None, weight_dq_dtype: None = None, weight_uq_qr_dtype: None = None,
                      weight_dkv_kr_dtype: None = None, kv_cache_dtype: None = None,
                      **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries for absorbed MLA, and the latent and the rotated key of each row written to the caches, in place.

        norm       = rms_norm(token_x @ weight_dq) * qc_qr_scale
        query      = (norm @ weight_uq) @ weight_uk         of each head
        query_rope = interleave_rope(norm @ weight_qr)      of each head
        kv_cache   = rms_norm(token_x @ weight_dkv) * kc_scale
        kr_cache   = interleave_rope(token_x @ weight_kr)

    weight_uq_qr holds D + Dr columns of each head, one head after another.  No rows (T, B or S of 0) and no pages are
    legal, and nothing is written then.  Not built: the 8-bit floats of Ascend 950.

    Args:
        token_x: (T, H) or (B, S, H), bf16; int8 with weight_quant_mode 2.  H from a list (1024 to 8192).
        weight_dq: (H, Hcq), Hcq = 1536 or 2048.
        weight_uq_qr: (Hcq, N * (D + Dr)); N a power of two up to 128, D = 128 or 192, Dr = 64.
        weight_uk: (N, D, R), R = 512.
        weight_dkv_kr: (H, R + Dr).
        rmsnorm_gamma_cq, rmsnorm_gamma_ckv: (Hcq,) and (R,).
        rope_sin, rope_cos: (T, Dr) or (B, S, Dr), full width, **sines first**.
        kv_cache, kr_cache: 'PA...': (block_num, block_size, 1, R) and (..., Dr), block_size 16 to 1024.  With NZ a page
            lies in memory as (D / C0, block_size, C0).  'BSND' and 'TND': (B, S, 1, R) or (T, 1, R), as token_x's rows.
        cache_index: int64.  'PA_BSND', 'PA_NZ': the slot of each row, (T,) or (B, S).  'PA_BLK_BSND', 'PA_BLK_NZ': the
            page (not its first slot) of each block_size rows of a request: (B, ceil(S / block_size)), or one request
            after another.  'BSND', 'TND': None.
        actual_seq_len: (B,) int32 cumulative, with (T, H) in the modes by page only.
        weight_quant_mode: 0; 1: weight_uq_qr is int8; 2: token_x, weight_dq, weight_uq_qr and weight_dkv_kr are.
            ``norm`` is then quantised by row, as npu_dynamic_quant does, after smooth_scales_cq (1, Hcq) if given.
        kv_cache_quant_mode: 0; 1 (with 2): kv_cache int8 times one quant_scale_ckv (1,), and query int8 by row and
            head; 2 (with 1): both caches int8, quant_scale_ckv (1, R) and quant_scale_ckr (1, Dr); 3 (with 1 or 2):
            int8 rows of R + 2 * Dr + 4 * R / 128 bytes that hold latent, rope part and scales, kr_cache empty.
        dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr: fp32, by row (T, 1) and by
            column (1, ...), for what is int8.
        query_quant_mode, ckvkr_repo_mode, quant_scale_repo_mode: follow from kv_cache_quant_mode.

    Returns:
        (query, query_rope, dequant_scale_q_nope, query_norm, dequant_scale_q_norm): (T, N, R), (T, N, Dr), (T, N, 1),
        (T, Hcq) and (T, 1), or with B, S instead of T (scales: B*S).  The third is there with kv_cache_quant_mode 1,
        the fourth with ``query_norm_flag``, the last with both that and an int8 weight; otherwise each is a placeholder
        of no elements (of one before CANN 8.5).

    Source: torch_npu docs: npu_mla_prolog_v3; where the two scales stand: aclnnMlaPrologV3WeightNz; rounding and
    query_rope in int8 calls: op-plugin: test/test_custom_ops/test_mla_prolog_v3.py; tiles: ops-transformer:
    attention/mla_prolog/op_kernel/arch22/mla_prolog_vector_comm_arch22.h.
    """
    query, query_rope, scale, norm, norm_scale = _prolog(
        token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin,
        rope_cos, kv_cache, kr_cache, cache_index=cache_index, kv_cache_quant_mode=kv_cache_quant_mode, **options)
    return (query, query_rope, _placeholder(query, 0) if scale is None else scale,
            norm if query_norm_flag else _placeholder(query, 0, norm.dtype),
            norm_scale if query_norm_flag and norm_scale is not None else _placeholder(query, 0))


@reference("npu_mla_prolog_v3_functional", mla_prolog_v3_contract,
           _returning("query, query_rope, query_scale, norm, norm_scale, kv_cache, kr_cache"), V3_FORMS)
def npu_mla_prolog_v3_functional(
    token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor, kv_cache: Tensor,
    kr_cache: Tensor, **options: Any,
) -> tuple[Tensor, ...]:
    """npu_mla_prolog_v3 on copies of the caches, which are two more results.

    Source: the Meta kernel of torch_npu 2.13.0 (op_plugin/meta/_meta_registrations.py).
    """
    copies = kv_cache.clone(), kr_cache.clone()  # [pages, P, 1, R], [pages, P, 1, Dr]
    results = npu_mla_prolog_v3(token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
                                rmsnorm_gamma_ckv, rope_sin, rope_cos, *copies, **options)
    return *results, *copies

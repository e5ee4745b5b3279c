"""npu_mla_prolog, _v2, _v3 and _v3_functional.

Not among the random calls: kv_cache_quant_mode 3, whose rows are bytes of several dtypes, which no tolerance fits
(tests/core/test_mla_prolog.py has it).
"""
import math

import torch

from operators.case import Case, unwritten
from operators.case_mla_prolog_calls import Dr, H, R, prolog, prolog_v1, prolog_v2
from operators.case_mla_prolog_wrong import WRONG_FUNCTIONAL, WRONG_V1, WRONG_V2, WRONG_V3
from operators.kv_rmsnorm_rope_cache import store


def naive(token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin,
          rope_cos, kv_cache, kr_cache, *, cache_index=None, dequant_scale_x=None, dequant_scale_w_dq=None,
          dequant_scale_w_uq_qr=None, dequant_scale_w_dkv_kr=None, quant_scale_ckv=None, quant_scale_ckr=None,
          smooth_scales_cq=None, actual_seq_len=None, rmsnorm_epsilon_cq=1e-5, rmsnorm_epsilon_ckv=1e-5,
          cache_mode="PA_BSND", query_norm_flag=False, weight_quant_mode=0, kv_cache_quant_mode=0, query_quant_mode=0,
          qc_qr_scale=1.0, kc_scale=1.0):
    rows, (N, D, _), Hcq = token_x.shape[:-1], weight_uk.shape, weight_dq.shape[1]
    x, sin, cos = token_x.double().view(-1, H), rope_sin.view(-1, Dr), rope_cos.view(-1, Dr)
    low, latent_rope = x @ weight_dq.double(), x @ weight_dkv_kr.double()
    if weight_quant_mode == 2:
        low = low * dequant_scale_x * dequant_scale_w_dq
        latent_rope = latent_rope * dequant_scale_x * dequant_scale_w_dkv_kr
    T, uq_qr = len(x), weight_uq_qr.double()
    query, query_rope = torch.zeros(T, N, R).double(), torch.zeros(T, N, Dr).double()
    query_scale, norms, norm_scale = torch.zeros(T, N, 1), torch.zeros(T, Hcq).double(), torch.zeros(T, 1)
    for t in range(T):
        norm = rms_norm(low[t], rmsnorm_gamma_cq, rmsnorm_epsilon_cq) * qc_qr_scale
        if weight_quant_mode:
            norm, norm_scale[t] = to_int8(norm if smooth_scales_cq is None else norm * smooth_scales_cq[0])
            heads = norm @ uq_qr * norm_scale[t] * dequant_scale_w_uq_qr[0]
        else:
            heads = norm @ uq_qr
        norms[t] = norm
        for n in range(N):
            head = heads[n * (D + Dr):(n + 1) * (D + Dr)]
            query[t, n], query_rope[t, n] = head[:D] @ weight_uk[n], rope(head[D:], cos[t], sin[t])
            if kv_cache_quant_mode == 1:
                query[t, n], query_scale[t, n] = to_int8(query[t, n])
                query_rope[t, n] *= quant_scale_ckv.flatten()[0] / query_scale[t, n]
        if place := where(cache_index, actual_seq_len, cache_mode, t, rows, kv_cache):
            latent = rms_norm(latent_rope[t, :R], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale
            for cache, row, scale in ((kv_cache, latent, quant_scale_ckv),
                                      (kr_cache, rope(latent_rope[t, R:], cos[t], sin[t]), quant_scale_ckr)):
                store(cache[None] if cache_mode == "TND" else cache, place, row, scale, cache_mode)
    int8 = torch.int8 if weight_quant_mode else torch.float64
    return (query.view(*rows, N, R).to(torch.int8 if kv_cache_quant_mode == 1 else torch.float64),
            query_rope.view(*rows, N, Dr), query_scale if kv_cache_quant_mode == 1 else unwritten((0,)),
            norms.view(*rows, Hcq).to(int8) if query_norm_flag else unwritten((0,), int8),
            norm_scale if query_norm_flag and weight_quant_mode else unwritten((0,)))


def rms_norm(x, gamma, epsilon):
    return x / math.sqrt((x ** 2).mean() + epsilon) * gamma


def rope(x, cos, sin):
    even, odd = x.view(-1, 2).T
    return torch.cat((even, odd)) * cos + torch.cat((-odd, even)) * sin


def to_int8(x):
    scale = x.abs().max() / 127
    return (x / scale).round() if scale else x, scale  # a row of zeros stays one


def where(cache_index, actual_seq_len, cache_mode, t, rows, kv_cache):
    """(page, offset) of row t, or its place in a dense cache; None where there are no pages."""
    if cache_index is None:
        return (0, t) if cache_mode == "TND" else divmod(t, rows[1])
    if not kv_cache.numel():
        return None
    block_size = kv_cache.shape[1]
    if not cache_mode.startswith("PA_BLK"):
        return divmod(int(cache_index.flatten()[t]), block_size)
    if actual_seq_len is None:
        request, row = divmod(t, rows[1])
        return int(cache_index[request, row // block_size]), row % block_size
    start = entry = 0
    for end in actual_seq_len.tolist():
        if t < end:
            return int(cache_index[entry + (t - start) // block_size]), (t - start) % block_size
        start, entry = end, entry + math.ceil((end - start) / block_size)


def naive_v2(token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin,
             rope_cos, cache_index, kv_cache, kr_cache, **options):
    mode = 2 if token_x.dtype == torch.int8 else int(weight_uq_qr.dtype == torch.int8)
    caches = (3 - mode) * (kv_cache.dtype == torch.int8)
    query, query_rope, scale, _, _ = naive(
        token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin,
        rope_cos, kv_cache, kr_cache, cache_index=cache_index, weight_quant_mode=mode, kv_cache_quant_mode=caches,
        **options)
    return query, query_rope, kv_cache, kr_cache, scale if caches == 1 else unwritten((1,))


def naive_v1(*args, **options):
    return naive_v2(*args, **options)[:4]


def naive_functional(*args, **options):
    *args, kv_cache, kr_cache = args
    copies = kv_cache.clone(), kr_cache.clone()
    return *naive(*args, *copies, **options), *copies


CASES = {
    "npu_mla_prolog": Case(prolog_v1, naive_v1, WRONG_V1, wide=2**-6),
    "npu_mla_prolog_v2": Case(prolog_v2, naive_v2, WRONG_V2, wide=2**-6),
    "npu_mla_prolog_v3": Case(prolog, naive, WRONG_V3, wide=2**-6),
    "npu_mla_prolog_v3_functional": Case(prolog, naive_functional, WRONG_FUNCTIONAL, wide=2**-6),
}

"""Legal calls of npu_mla_prolog in all versions."""
import functools
import math
from random import Random

import torch

from operators.case import Call, floats, ints

H, R, Dr = 1024, 512, 64
MODES = ((0, 0), (1, 0), (1, 2), (2, 0), (2, 1))  # (weight_quant_mode, kv_cache_quant_mode)
CACHES = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND")
OF_VERSION_3 = ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode", "query_norm_flag", "qc_qr_scale",
                "kc_scale")


@functools.cache  # large, and never written
def weights(mode: int, N: int, D: int, Hcq: int) -> Call:
    r, w = Random(f"{mode} {N} {D} {Hcq}"), {}
    for name, int8, rows, columns in (("dq", mode == 2, H, Hcq), ("uq_qr", mode > 0, Hcq, N * (D + Dr)),
                                      ("dkv_kr", mode == 2, H, R + Dr)):
        w[f"weight_{name}"] = (ints(r, -128, 128, rows, columns, dtype=torch.int8) if int8
                               else floats(r, rows, columns, scale=rows ** -0.5))
        if int8:
            w[f"dequant_scale_w_{name}"] = scales(r, 1, columns) / (70 * rows ** 0.5)
    if mode == 1:  # products below 256: a rounding to bf16 that turns into one step of int8 would be too much
        w["weight_dq"] = ints(r, -1, 2, H, Hcq, dtype=torch.bfloat16)
    return w | dict(weight_uk=floats(r, N, D, R, scale=D ** -0.5), rmsnorm_gamma_cq=scales(r, Hcq).bfloat16(),
                    rmsnorm_gamma_ckv=scales(r, R).bfloat16())


def prolog(r: Random, modes: tuple[int, int] | None = None, cache_mode: str | None = None,
           packed: bool | None = None, sizes: tuple[int, ...] | None = None) -> Call:
    """A call of version 3: requests of any length, 0 among them; each slot or page at most once; seldom no pages.

    ``sizes``: rows of each request, all alike where they are not ``packed``.
    """
    (mode, caches), cache_mode = modes or r.choice(MODES), cache_mode or r.choice(CACHES)
    packed = cache_mode == "TND" or (cache_mode != "BSND" and r.random() < 0.5) if packed is None else packed
    block_size, by_page = r.choice((16, 32)), cache_mode.startswith("PA_BLK")
    if sizes is None:
        B = r.randint(1, 2) if cache_mode in ("BSND", "TND") else r.randint(0, 2)
        sizes = tuple(random_length(r, by_page, block_size, cache_mode) for _ in range(B if packed else 1))
        sizes = sizes if packed else sizes * B
        S = sizes[0] if sizes else 2
    else:
        S = sizes[0]
    B, T = len(sizes), sum(sizes)
    rows = (T,) if packed else (B, S)
    call = dict(weights(mode, r.choice((1, 2)), *r.choice(((128, 1536), (192, 1536), (128, 2048)))))
    call |= dict(rope_sin=floats(r, *rows, Dr).sin(), rope_cos=floats(r, *rows, Dr).cos(), cache_mode=cache_mode,
                 weight_quant_mode=mode, kv_cache_quant_mode=caches, query_quant_mode=int(caches == 1),
                 query_norm_flag=r.random() < 0.5, qc_qr_scale=r.choice((1.0, 0.5)), kc_scale=r.choice((1.0, 2.0)))
    if mode == 2:
        call |= dict(token_x=ints(r, -128, 128, *rows, H, dtype=torch.int8),
                     dequant_scale_x=scales(r, T, 1))
    else:
        call |= dict(token_x=ints(r, -2, 3, *rows, H, dtype=torch.bfloat16) if mode else floats(r, *rows, H))
    if mode and r.random() < 0.5:
        call |= dict(smooth_scales_cq=scales(r, 1, call["weight_dq"].shape[1]))
    if caches:
        call |= dict(quant_scale_ckv=scales(r, *((1,) if caches == 1 else (1, R))) * 30)
    if caches == 2:
        call |= dict(quant_scale_ckr=scales(r, 1, Dr) * 30)
    places = list(rows)
    if cache_mode.startswith("PA"):
        entries = sum(math.ceil(size / block_size) for size in sizes) if by_page else T
        pages = (entries if by_page else math.ceil(T / block_size)) + r.randint(0, 2)
        index = torch.tensor(r.sample(range(pages if by_page else pages * block_size), entries), dtype=torch.long)
        places = [0 if r.random() < 0.05 else pages, block_size]
        call |= dict(cache_index=index if packed else index.view(B, math.ceil(S / block_size) if by_page else S))
        if by_page and packed:
            call |= dict(actual_seq_len=torch.tensor([sum(sizes[:i + 1]) for i in range(B)], dtype=torch.int32))
    for name, int8, width in (("kv_cache", caches > 0, R), ("kr_cache", caches == 2, Dr)):
        call[name] = (ints(r, -128, 128, *places, 1, width, dtype=torch.int8) if int8
                      else floats(r, *places, 1, width))
    return call


def scales(r: Random, *shape: int) -> torch.Tensor:
    """Around 1, all of one order: else one column's rounding is as large as another's results."""
    return floats(r, *shape, dtype=torch.float32, scale=0.3).exp()


def random_length(r: Random, by_page: bool, block_size: int, cache_mode: str) -> int:
    if cache_mode in ("BSND", "TND"):
        return r.randint(1, 2)
    return r.choice((0, 1, block_size, r.randint(block_size + 1, 2 * block_size))) if by_page else r.randint(0, 2)


def prolog_v2(r: Random, modes=None, cache_mode=None, packed=None, sizes=None) -> Call:
    """The calls of version 3 that versions 1 and 2 also know."""
    call = prolog(r, modes, cache_mode or r.choice(("PA_BSND", "PA_NZ")), packed, sizes)
    call |= weights(call["weight_quant_mode"], call["weight_uk"].shape[0], 128, 1536)
    if "smooth_scales_cq" in call:
        call["smooth_scales_cq"] = call["smooth_scales_cq"][:, :1536].contiguous()
    if call["kv_cache_quant_mode"] == 1:
        call["quant_scale_ckv"] = call["quant_scale_ckv"].repeat(1, R)
    return {name: x for name, x in call.items() if name not in OF_VERSION_3}


def prolog_v1(r: Random) -> Call:
    return prolog_v2(r, r.choice(((0, 0), (1, 0), (1, 2))))


def tokens(r: Random, modes: tuple[int, int] = (0, 0), cache_mode: str = "PA_BSND") -> Call:
    """3 packed rows, 3 pages of 16 slots."""
    call = prolog(r, modes, cache_mode, True, (3,)) | dict(cache_index=torch.tensor([16, 40, 3]))
    return call | {name: (x.new_zeros if x.dtype == torch.int8 else x.new_ones)((3, 16, 1, x.shape[-1]))
                   for name, x in call.items() if name in ("kv_cache", "kr_cache")}


def pages(r: Random, packed: bool = True) -> Call:
    """Two requests of 20 rows, which fill two pages of 16 each."""
    call = prolog(r, (0, 0), "PA_BLK_BSND", packed, (20, 20))
    index = torch.tensor([[3, 0], [1, 4]])
    return call | dict(cache_index=index.flatten() if packed else index, kv_cache=floats(r, 5, 16, 1, R),
                       kr_cache=floats(r, 5, 16, 1, Dr))


def dense(r: Random) -> Call:
    return prolog(r, (0, 0), "TND", True, (3,))


def combined(r: Random) -> Call:
    """kv_cache_quant_mode 3."""
    modes = dict(kv_cache_quant_mode=3, ckvkr_repo_mode=1, quant_scale_repo_mode=1)
    return tokens(r, (1, 0)) | modes | dict(
        kv_cache=torch.zeros(3, 16, 1, R + 2 * Dr + 16, dtype=torch.int8), kr_cache=floats(r, 0),
        k_nope_clip_alpha=torch.ones(1))


def of(modes: tuple[int, int]):
    return lambda r: tokens(r, modes)


def resized(c: Call, H: int = H, Hcq: int | None = None, N: int | None = None, D: int | None = None, R: int = R,
            Dr: int = Dr) -> Call:
    """Everything that a size stands in, cut to a smaller one (N may also grow)."""
    (N0, D0, _), Hcq0, Dr0 = c["weight_uk"].shape, c["weight_dq"].shape[1], c["rope_sin"].shape[-1]
    N, D, Hcq = N or N0, D or D0, Hcq or Hcq0
    heads = c["weight_uq_qr"].view(Hcq0, N0, D0 + Dr0).repeat(1, N, 1)[:Hcq, :N, :D + Dr].reshape(Hcq, -1)
    new = dict(token_x=c["token_x"][..., :H], weight_dq=c["weight_dq"][:H, :Hcq], weight_uq_qr=heads,
               weight_uk=c["weight_uk"].repeat(N, 1, 1)[:N, :D, :R], weight_dkv_kr=c["weight_dkv_kr"][:H, :R + Dr],
               rmsnorm_gamma_cq=c["rmsnorm_gamma_cq"][:Hcq], rmsnorm_gamma_ckv=c["rmsnorm_gamma_ckv"][:R],
               kv_cache=c["kv_cache"][..., :R], kr_cache=c["kr_cache"][..., :Dr])
    new |= {name: c[name][..., :Dr] for name in ("rope_sin", "rope_cos")}
    return {name: x.contiguous() for name, x in new.items()}


def many(c: Call) -> Call:
    """More requests than a device takes, without a row."""
    return {name: c[name].new_zeros(65537, 0, c[name].shape[-1]) for name in ("token_x", "rope_sin", "rope_cos")} | {
        "cache_index": torch.zeros(65537, 0, dtype=torch.long)}

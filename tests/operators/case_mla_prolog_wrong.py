"""Calls of npu_mla_prolog that must be refused."""
from random import Random

import torch

from operators.case import Call, Wrong
from operators.case_mla_prolog_calls import (
    OF_VERSION_3,
    Dr,
    H,
    R,
    combined,
    dense,
    many,
    of,
    pages,
    prolog_v2,
    resized,
    tokens,
    weights,
)

SHARED = [
    Wrong("a mode that is none", lambda c: {"cache_mode": "PA"}, "RELATION", "one of", tokens),
    Wrong("another kind of rows", lambda c: {"token_x": c["token_x"][0]}, "RELATION", r"\(T, H\) or \(B, S, H\)",
          tokens),
    Wrong("a weight for another H", lambda c: {"weight_dq": c["weight_dq"][:512]}, "RELATION", "H = 1024 of token_x",
          tokens),
    Wrong("a flat weight_uk", lambda c: {"weight_uk": c["weight_uk"].flatten(1)}, "RELATION", "3 axes", tokens),
    Wrong("sines for fewer rows", lambda c: {"rope_sin": c["rope_sin"][:2]}, "RELATION",
          "(?s)the rows of token_x.*SB-05", tokens),
    Wrong("cosines of another shape", lambda c: {"rope_cos": c["rope_cos"][:, :32]}, "RELATION", "shape of rope_sin",
          tokens),
    Wrong("a weight without rope columns", lambda c: {"weight_dkv_kr": c["weight_dkv_kr"][:, :R]}, "RELATION",
          r"\[1024, 576\]", tokens),
    Wrong("an odd rope part", lambda c: resized(c, Dr=7), "RELATION", "even Dr", tokens),
    Wrong("strided rows", lambda c: {"token_x": c["token_x"].repeat(1, 2)[:, :H]}, "SIZE", "contiguous", tokens),
    Wrong("the caches swapped", lambda c: {"kv_cache": c["kr_cache"], "kr_cache": c["kv_cache"]}, "RELATION",
          "holds the latent and comes first", tokens),
    Wrong("tiles, a rope part of 8", lambda c: resized(c, Dr=8), "RELATION", "whole FRACTAL_NZ tiles",
          lambda r: tokens(r, cache_mode="PA_NZ")),
    Wrong("a scale is missing", lambda c: {"dequant_scale_w_uq_qr": None}, "RELATION", "a float32 tensor",
          of((1, 0))),
    Wrong("a scale for floats", lambda c: {"quant_scale_ckr": torch.ones(1, Dr)}, "RELATION", "nothing is int8",
          tokens),
    Wrong("a scale of another shape", lambda c: {"quant_scale_ckr": torch.ones(Dr)}, "RELATION", r"\[1, 64\]",
          of((1, 2))),
    Wrong("a scale in bf16", lambda c: {"quant_scale_ckr": torch.ones(1, Dr).bfloat16()}, "DTYPE", "float32",
          of((1, 2))),
    Wrong("fewer slots than rows", lambda c: {"cache_index": c["cache_index"][:2]}, "RELATION",
          "(?s)a slot for each row.*SB-05", tokens),
    Wrong("32-bit slots", lambda c: {"cache_index": c["cache_index"].int()}, "DTYPE", "(?s)int64.*SB-25", tokens),
    Wrong("a negative slot", lambda c: {"cache_index": torch.tensor([16, -1, 3])}, "RELATION",
          "(?s)slot -1 in row 1.*SB-09.*prolog-minus-one", tokens),
    Wrong("a slot past the end", lambda c: {"cache_index": torch.tensor([16, 48, 3])}, "RELATION",
          "below 48 = 3 pages of 16", tokens),
    Wrong("a slot twice", lambda c: {"cache_index": torch.tensor([40, 40, 3])}, "RELATION", r"slot 40 in rows \[0, 1\]",
          tokens),
    Wrong("a low rank of 1024", lambda c: resized(c, Hcq=1024), "SIZE", "Hcq = 1536", tokens),
    Wrong("heads of 64", lambda c: resized(c, D=64), "SIZE", "D = 128", tokens),
    Wrong("a hidden size of 512", lambda c: resized(c, H=512), "SIZE", "H one of", tokens),
    Wrong("three heads", lambda c: resized(c, N=3), "SIZE", "N one of", tokens),
    Wrong("a latent of 256", lambda c: resized(c, R=256), "SIZE", "R = 512", tokens),
    Wrong("a rope part of 32", lambda c: resized(c, Dr=32), "SIZE", "Dr = 64", tokens),
    Wrong("too many requests", many, "SIZE", "at most 65536", tokens),
    Wrong("pages of 8", lambda c: {name: c[name].view(6, 8, 1, -1) for name in ("kv_cache", "kr_cache")}, "SIZE",
          "from 16 to 1024", tokens),
    Wrong("fp16", lambda c: {name: x.half() for name, x in c.items() if isinstance(x, torch.Tensor)
                             and x.is_floating_point()}, "DTYPE", "bfloat16", tokens),
    Wrong("one weight in fp32", lambda c: {"weight_uk": c["weight_uk"].float()}, "DTYPE", "rope_sin's torch.bfloat16",
          tokens),
]


def older(wrong: Wrong) -> Wrong:
    """The same for versions 1 and 2."""
    def make(r: Random) -> Call:
        call = wrong.of(r)
        call |= weights(call["weight_quant_mode"], call["weight_uk"].shape[0], 128, 1536)
        return {name: x for name, x in call.items() if name not in OF_VERSION_3 and name != "smooth_scales_cq"}

    return wrong._replace(of=make)


OLDER = [older(wrong) for wrong in SHARED]

WRONG_V1 = [
    *OLDER,
    Wrong("a scale that is kept for later", lambda c: {"dequant_scale_x": torch.ones(3, 1)}, "RELATION",
          "keeps it for later"),
    Wrong("token_x in int8", lambda c: {"token_x": c["token_x"].char()}, "RELATION", "as weight_uq_qr only"),
]

WRONG_V2 = [
    *OLDER,
    Wrong("several scales beside an int8 token_x", lambda c: {"quant_scale_ckv": torch.rand(1, R)}, "RELATION",
          "reads the first", lambda r: prolog_v2(r, (2, 1), "PA_BSND", True, (3,))),
    Wrong("one weight in floats", lambda c: {"weight_dq": c["weight_dq"].bfloat16()}, "RELATION", "Weight mode 1",
          lambda r: prolog_v2(r, (2, 0), "PA_BSND", True, (3,))),
]

WRONG_V3 = [
    *SHARED,
    Wrong("a dtype of Ascend 950", lambda c: {"token_x_dtype": 290}, "RELATION", "not built yet", tokens),
    Wrong("packed rows in BSND", lambda c: {"cache_mode": "BSND"}, "RELATION", r"\(B, S, H\) in cache_mode 'BSND'",
          dense),
    Wrong("fp8 weights", lambda c: {"weight_quant_mode": 4}, "RELATION", "Ascend 950's", tokens),
    Wrong("int8 caches of floats", lambda c: {"kv_cache_quant_mode": 2}, "RELATION", "with weight_quant_mode 1",
          tokens),
    Wrong("int8 queries beside a cache of floats", lambda c: {"query_quant_mode": 1}, "RELATION",
          "1 with kv_cache_quant_mode 1", tokens),
    Wrong("one cache, quantised by column", lambda c: {"ckvkr_repo_mode": 1}, "RELATION", "holds latent, rope",
          of((1, 2))),
    Wrong("tiles of two kinds", lambda c: {"cache_mode": "PA_NZ"}, "RELATION", "'PA_BSND', 'BSND' or 'TND'",
          combined),
    Wrong("floats called int8", lambda c: {"weight_quant_mode": 1}, "RELATION", "Weight mode 1", tokens),
    Wrong("a dense cache of fewer rows", lambda c: {"kr_cache": c["kr_cache"][:2]}, "RELATION",
          "a row for each of token_x", dense),
    Wrong("a dense cache without rows", lambda c: {name: c[name][:0] for name in (
        "token_x", "rope_sin", "rope_cos", "kv_cache", "kr_cache")}, "SIZE", "at least one row", dense),
    Wrong("tiles that do not divide the latent", lambda c: {"tile_size": 96}, "RELATION", "a divisor of R",
          combined),
    Wrong("a rope cache beside combined rows", lambda c: {"kr_cache": torch.zeros(3, 16, 1, Dr).bfloat16()},
          "RELATION", "an empty tensor", combined),
    Wrong("combined rows without scales", lambda c: {"kv_cache": c["kv_cache"][..., :640].contiguous()}, "RELATION",
          r"\[1, 656\]", combined),
    Wrong("combined rows without pages", lambda c: {"kv_cache": c["kv_cache"].flatten(0, 1)}, "RELATION",
          "block_num, block_size, 1, width", combined),
    Wrong("no clip factor", lambda c: {"k_nope_clip_alpha": None}, "RELATION", "with kv_cache_quant_mode 3",
          combined),
    Wrong("a clip factor for each tile", lambda c: {"k_nope_clip_alpha": torch.ones(4)}, "RELATION", r"\[1\]",
          combined),
    Wrong("a clip factor in fp64", lambda c: {"k_nope_clip_alpha": torch.ones(1).double()}, "DTYPE", "float32",
          combined),
    Wrong("tiles of 64", lambda c: {"tile_size": 64, "kv_cache": torch.zeros(3, 16, 1, 672, dtype=torch.int8)},
          "SIZE", "tile_size is 64\n.*128", combined),
    Wrong("no lengths", lambda c: {"actual_seq_len": None}, "RELATION", "the ends of the requests", pages),
    Wrong("lengths where none are asked for", lambda c: {"actual_seq_len": torch.tensor([3]).int()}, "RELATION",
          "else None", tokens),
    Wrong("64-bit lengths", lambda c: {"actual_seq_len": c["actual_seq_len"].long()}, "RELATION", "int32", pages),
    Wrong("counts instead of ends", lambda c: {"actual_seq_len": torch.tensor([20, 20]).int()}, "RELATION",
          "cumulative", pages),
    Wrong("no index", lambda c: {"cache_index": None}, "RELATION", "else a tensor", tokens),
    Wrong("an index into a dense cache", lambda c: {"cache_index": torch.arange(3)}, "RELATION", "every row in its",
          dense),
    Wrong("a page too few", lambda c: {"cache_index": c["cache_index"][:3]}, "RELATION", r"\[4\]: every page", pages),
    Wrong("pages of two requests in a row", lambda c: {"cache_index": c["cache_index"].flatten()}, "RELATION",
          r"\[2, 2\]: every page", lambda r: pages(r, packed=False)),
    Wrong("slots instead of pages", lambda c: {"cache_index": torch.tensor([48, 0, 16, 64])}, "RELATION",
          "pages below 5, not slots", pages),
    Wrong("a negative page", lambda c: {"cache_index": torch.tensor([3, 0, -1, 4])}, "RELATION",
          "(?s)page -1.*prolog-minus-one", pages),
    Wrong("a page twice", lambda c: {"cache_index": torch.tensor([3, 0, 3, 4])}, "RELATION", "every page once",
          pages),
]

WRONG_FUNCTIONAL = [
    Wrong("a dtype of Ascend 950", lambda c: {"kv_cache_dtype": 290}, "RELATION", "not built yet", tokens),
]

"""npu_kv_rmsnorm_rope_cache, _v2 and _v2_functional: one operator, three ways to hand out its results."""
import math
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half, ints, unwritten

R, D = 512, 64
MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


def fused(r: Random, mode: str | None = None, int8: bool | None = None, B: int | None = None, S: int | None = None,
          dtype: torch.dtype | None = None, shared: bool | None = None) -> Call:
    """Some rows skipped, page 0 used like any other, each slot at most once."""
    mode, dtype = mode or r.choice(MODES), dtype or half(r)
    int8 = (mode != "Norm" and r.random() < 0.4) if int8 is None else int8
    block_size = 32 if int8 else r.choice((16, 32))
    by_page = mode.startswith("PA_BLK")
    B = B or r.randint(1, 3)
    S = S or (r.choice((1, block_size, r.randint(2, 2 * block_size + 3))) if by_page else r.randint(1, 4))
    if mode == "Norm":
        length = S + r.randint(0, 3)
        places = [B, 1, length]
        index = torch.tensor([[skipped(r, i) for i in r.sample(range(length), S)] for _ in range(B)])
    else:
        entries = B * math.ceil(S / block_size) if by_page else B * S
        pages = (entries if by_page else math.ceil(entries / block_size)) + r.randint(0, 2)
        free = range(0, pages * block_size, block_size if by_page else 1)
        places = [pages, block_size, 1]
        index = torch.tensor([skipped(r, i) for i in r.sample(free, entries)])
    if shared is None:  # one angle for all rows of a request
        shared = not int8 and mode in ("Norm", "PA", "PA_BNSD") and r.random() < 0.3
    angles = (B, 1, 1 if shared else S, D)
    call = dict(kv=floats(r, B, 1, S, R + D, dtype=dtype), gamma=floats(r, R, dtype=dtype),
                cos=floats(r, *angles, dtype=dtype), sin=floats(r, *angles, dtype=dtype), index=index)
    for name, width in (("k_cache", D), ("ckv_cache", R)):
        call[name] = ints(r, -128, 128, *places, width, dtype=torch.int8) if int8 else floats(r, *places, width,
                                                                                             dtype=dtype)
    if int8:
        for name, width in (("k_rope_scale", D), ("c_kv_scale", R)):
            call[name] = floats(r, *r.choice(((width,), (1, width))), dtype=torch.float32, scale=40)
    return call | dict(cache_mode=mode, epsilon=r.choice((1e-5, 1e-2)),
                       is_output_kv=mode != "Norm" and r.random() < 0.5)


def skipped(r: Random, slot: int) -> int:
    return slot if r.random() < 0.8 else r.choice((-1, -7))


def naive(kv, gamma, cos, sin, index, k_cache, ckv_cache, *, k_rope_scale=None, c_kv_scale=None, epsilon=1e-5,
          cache_mode="Norm", is_output_kv=False):
    B, _, S, _ = kv.shape
    k_rope, c_kv = torch.empty(B, 1, S, D).double(), torch.empty(B, 1, S, R).double()
    for b in range(B):
        for s in range(S):
            x, t = kv[b, 0, s], 0 if cos.shape[2] == 1 else s
            c, z = cos[b, 0, t], sin[b, 0, t]
            even, odd = x[R:].view(-1, 2).T
            k_rope[b, 0, s] = torch.cat((even, odd)) * c + torch.cat((-odd, even)) * z
            c_kv[b, 0, s] = x[:R] / math.sqrt((x[:R] ** 2).sum() / R + epsilon) * gamma
            place = where(index, cache_mode, b, s, S, k_cache.shape[1])
            if place is not None:
                store(k_cache, place, k_rope[b, 0, s], k_rope_scale, cache_mode)
                store(ckv_cache, place, c_kv[b, 0, s], c_kv_scale, cache_mode)
    if not is_output_kv:
        k_rope, c_kv = unwritten(k_rope.shape), unwritten(c_kv.shape)
    return k_cache, ckv_cache, k_rope, c_kv


def where(index, mode, b, s, S, block_size):
    """(request or page, position in it) of row s of request b; None where it is skipped."""
    if mode == "Norm":
        return (b, int(index[b, s])) if index[b, s] >= 0 else None
    if mode.startswith("PA_BLK"):
        start = int(index[b * math.ceil(S / block_size) + s // block_size])
        return (start // block_size, s % block_size) if start >= 0 else None
    slot = int(index[b * S + s])
    return divmod(slot, block_size) if slot >= 0 else None


def store(cache, place, row, scale, mode):
    if scale is not None:
        row = (row * scale.flatten()).round().clamp(-128, 127)
    width, (page, offset) = len(row), place
    if mode == "Norm":
        cache[page, 0, offset] = row
    elif mode.endswith("NZ"):  # [pages, width / C0, block_size, C0]
        C0, block_size = 16 if scale is None else 32, cache.shape[1]
        column = torch.arange(width)
        element = (page * width + column // C0 * C0) * block_size + offset * C0 + column % C0
        cache.view(-1)[element] = row.to(cache.dtype)
    else:
        cache[page, offset, 0] = row


def naive_v2(*args, **options):
    return naive(*args, **options)[2:]


def naive_functional(kv, gamma, cos, sin, index, k_cache, ckv_cache, **options):
    first, second, k_rope, c_kv = naive(kv, gamma, cos, sin, index, k_cache.clone(), ckv_cache.clone(), **options)
    return k_rope, c_kv, first, second


def decode(r: Random) -> Call:
    """4 decode rows in 3 pages of 16 slots."""
    return fused(r, "PA", int8=False, B=4, S=1, dtype=torch.bfloat16) | {
        "index": torch.tensor([16, 17, 3, -1]), "k_cache": floats(r, 3, 16, 1, D), "ckv_cache": floats(r, 3, 16, 1, R)}


def int8_pages(r: Random) -> Call:
    return fused(r, "PA", int8=True, B=2, S=2)


def prompt(r: Random) -> Call:
    """2 requests of 20 rows, which fill two pages of 16 each."""
    pages = {"k_cache": floats(r, 4, 16, 1, D), "ckv_cache": floats(r, 4, 16, 1, R)}
    return fused(r, "PA_BLK_BNSD", int8=False, B=2, S=20, dtype=torch.bfloat16) | pages | {
        "index": torch.tensor([48, 0, -1, 16])}


def by_request(r: Random) -> Call:
    return fused(r, "Norm", B=2, S=2, dtype=torch.bfloat16)


def three_rows(r: Random) -> Call:
    return fused(r, "PA_NZ", int8=False, B=2, S=3)


def first_row(c: Call) -> Call:
    return {name: c[name][..., :1, :] for name in ("cos", "sin")}


def columns(c: Call, r: int, d: int) -> Call:
    """The same call with a latent of r and a rope part of d."""
    return {"kv": c["kv"][..., :r + d], "gamma": c["gamma"][:r], "cos": c["cos"][..., :d], "sin": c["sin"][..., :d],
            "k_cache": c["k_cache"][..., :d].contiguous(), "ckv_cache": c["ckv_cache"][..., :r].contiguous()}


def strided(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, 1, 1, 2)[..., : x.shape[3]]


CASES = {
    "npu_kv_rmsnorm_rope_cache": Case(fused, naive, [
        Wrong("keys and values apart", lambda c: {"v": c["kv"]}, "RELATION", "GQA", decode),
        Wrong("an offset", lambda c: {"k_rope_offset": torch.zeros(D)}, "RELATION", "ignore it", int8_pages),
        Wrong("a mode that is none", lambda c: {"cache_mode": "PA_BSND"}, "RELATION", "any other word as 'Norm'",
              decode),
        Wrong("no head axis", lambda c: {"kv": c["kv"][:, 0]}, "RELATION", r"\(B, 1, S, R \+ D\)", decode),
        Wrong("fewer angles than rows", lambda c: {"cos": c["cos"][:3]}, "RELATION", "(?s)4 rows, as kv.*SB-05",
              decode),
        Wrong("tiles, one angle for three rows", first_row, "RELATION", "goes with 'Norm', 'PA'", three_rows),
        Wrong("cos for all rows, sin for one", lambda c: {"sin": c["sin"][:, :, :1]}, "RELATION", "the shape of cos",
              lambda r: fused(r, "PA", int8=False, B=1, S=3, shared=False)),
        Wrong("a gamma that is too short", lambda c: {"gamma": c["gamma"][:256]}, "RELATION", r"256 \+ 64", decode),
        Wrong("the caches swapped", lambda c: {"k_cache": c["ckv_cache"], "ckv_cache": c["k_cache"]}, "RELATION",
              "the rope cache and comes first", decode),
        Wrong("caches of other pages", lambda c: {"ckv_cache": c["ckv_cache"][:2]}, "RELATION", "the same pages",
              decode),
        Wrong("a strided cache", lambda c: {"k_cache": strided(c["k_cache"])}, "RELATION", "hidden copy", decode),
        Wrong("pages in mode Norm", lambda c: {"cache_mode": "Norm"}, "RELATION", "the default is 'Norm'", decode),
        Wrong("Norm, a strided cache", lambda c: {"ckv_cache": strided(c["ckv_cache"])}, "RELATION", "hidden copy",
              by_request),
        Wrong("a cache shorter than the rows", lambda c: {
            "k_cache": c["k_cache"][:, :, :1].contiguous(), "ckv_cache": c["ckv_cache"][:, :, :1].contiguous(),
            "index": torch.tensor([[0, -1], [-1, 0]])}, "SIZE", "at least S = 2", by_request),
        Wrong("one scale", lambda c: {"c_kv_scale": None}, "RELATION", "k_rope_scale alone", int8_pages),
        Wrong("int8 caches without scales", lambda c: {"k_rope_scale": None, "c_kv_scale": None}, "RELATION",
              "a scale for an int8 k_cache", int8_pages),
        Wrong("scales in mode Norm", lambda c: {"k_rope_scale": torch.ones(D), "c_kv_scale": torch.ones(R)},
              "RELATION", "'Norm' has no int8", by_request),
        Wrong("scales for a cache of floats", lambda c: {"k_rope_scale": torch.ones(D), "c_kv_scale": torch.ones(R)},
              "RELATION", "int8, since there is", decode),
        Wrong("a scale of one number", lambda c: {"c_kv_scale": torch.ones(1)}, "RELATION", "each column", int8_pages),
        Wrong("a scale in bf16", lambda c: {"c_kv_scale": c["c_kv_scale"].bfloat16()}, "DTYPE", "float32", int8_pages),
        Wrong("tiles, a rope part of 8", lambda c: columns(c, R, 8), "RELATION", "multiples of 16", three_rows),
        Wrong("Norm, one axis of positions", lambda c: {"index": c["index"].flatten()}, "RELATION", r"\[2, 2\]",
              by_request),
        Wrong("pages by row", lambda c: {"index": torch.arange(40)}, "RELATION", r"\[4\]: for each of 2 requests",
              prompt),
        Wrong("fewer slots than rows", lambda c: {"index": c["index"][:3]}, "RELATION", "4 rows, as kv", decode),
        Wrong("32-bit slots", lambda c: {"index": c["index"].int()}, "DTYPE", "(?s)int64.*SB-25", decode),
        Wrong("slots in floats", lambda c: {"index": c["index"].float()}, "RELATION", "int64", decode),
        Wrong("a position past the end", lambda c: {"index": torch.tensor([[0, 1], [0, 9]])}, "RELATION",
              "position 9 of request 1", by_request),
        Wrong("a position twice", lambda c: {"index": torch.tensor([[0, 1], [1, 1]])}, "RELATION",
              "a position of its own", by_request),
        Wrong("the second row of a page", lambda c: {"index": torch.tensor([48, 0, 17, 16])}, "RELATION",
              "the first slot of a page", prompt),
        Wrong("a page twice", lambda c: {"index": torch.tensor([48, 0, -1, 48])}, "RELATION", "slot 48 in rows",
              prompt),
        Wrong("a slot past the end", lambda c: {"index": torch.tensor([16, 17, 18, 48])}, "RELATION",
              "below 48 = 3 pages of 16", decode),
        Wrong("a slot twice", lambda c: {"index": torch.tensor([16, 40, 0, 40])}, "RELATION",
              r"slot 40 in rows \[1, 3\]", decode),
        Wrong("results in mode Norm", lambda c: {"is_output_kv": True}, "RELATION", "unwritten", by_request),
        Wrong("no rows", lambda c: {name: c[name][:0] for name in ("kv", "cos", "sin", "index")}, "SIZE",
              "at least one row", decode),
        Wrong("a latent of 256", lambda c: columns(c, 256, D), "SIZE", "not 256 and 64", decode),
        Wrong("pages of 8", lambda c: {name: c[name].view(6, 8, 1, -1) for name in ("k_cache", "ckv_cache")}, "SIZE",
              "multiple of 16", decode),
        Wrong("int8 pages of 16", lambda c: {name: c[name].view(-1, 16, 1, c[name].shape[3])
                                             for name in ("k_cache", "ckv_cache")}, "SIZE", "of 32 for int8",
              int8_pages),
        Wrong("fp32", lambda c: {name: x.float() for name, x in c.items() if isinstance(x, torch.Tensor)
                                 and x.is_floating_point()}, "DTYPE", "float16 or bfloat16", decode),
        Wrong("sin in fp16", lambda c: {"sin": c["sin"].half()}, "DTYPE", "sin is .*\n.*kv's torch.bfloat16", decode),
        Wrong("a cache in fp16", lambda c: {"ckv_cache": c["ckv_cache"].half()}, "DTYPE",
              "ckv_cache is .*\n.*kv's torch.bfloat16", decode),
    ]),
    "npu_kv_rmsnorm_rope_cache_v2": Case(fused, naive_v2, [
        Wrong("a cache of an 8-bit float", lambda c: {"k_cache_dtype": 290}, "RELATION", "not built yet", decode),
    ]),
    "npu_kv_rmsnorm_rope_cache_v2_functional": Case(fused, naive_functional, [
        Wrong("a cache of an 8-bit float", lambda c: {"ckv_cache_dtype": 290}, "RELATION", "not built yet", decode),
    ]),
}

"""Random legal calls of dense attention (FIA), of every form, with the argument names of version 2.

A call starts as a :class:`Scene`: requests with their lengths, and widths.  Rows of queries and keys are drawn for each
request and then laid out as the scene's layout wants them.  Whatever a device does not read holds NaN: rows past a
request's length, and pages that no request owns.
"""
from functools import cache
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from operators.case import Call, floats, half
from operators.case_fia_naive import FOREVER, V1, hidden, visible

CAUSAL_SHAPES = ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048))
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
MLA_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


class Scene(NamedTuple):
    """What a call is about, before it is laid out."""

    layout: str
    heads: tuple[int, int]  # of queries, of keys
    widths: tuple[int, int, int]  # of a query and key, of a value, of a rope (0: none)
    q: list[int]  # rows of each request
    kv: list[int]
    q_arg: list[int] | None  # as the call says them
    kv_arg: list[int] | None
    S: int  # rows of a batched query
    Skv: int  # rows of batched keys, or what fits in the pages of one request
    page: int  # rows of a page; 0: keys are not paged
    store: str  # shape of the pages: BnBsH, BnNBsD, NZ
    dtype: torch.dtype


def chance(r: Random, p: float) -> bool:
    return r.random() < p


def call_v2(r: Random) -> Call:
    return r.choice((batched, packed, expanded, absorbed))(r, 2)


def call_v1(r: Random) -> Call:
    return v1_names(r.choice((batched, packed, expanded, absorbed))(r, 1))


def v1_names(call: Call) -> Call:
    return {V1.get(name, name): x for name, x in call.items()}


# Forms


def batched(r: Random, version: int = 2) -> Call:
    """One tensor row for each request; no rope."""
    layout = r.choice(("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD"))
    S = r.randint(2, 7) if layout == "BNSD_BSND" else r.choice((1, r.randint(0 if chance(r, 0.05) else 2, 9)))
    D = 16 * r.choice((4, 8) if layout.endswith("_BNSD") else (1, 2, 4, 5, 8, 16))
    page, most = 0, 0 if chance(r, 0.03) else r.randint(1, 70)
    if chance(r, 0.4):
        page, most = r.choice((128, 256)) if S > 1 else 16 * r.randint(1, 8), r.randint(1, 300)
    stores = ("BnBsH", "BnNBsD") if layout[:4] == "BNSD" else ("BnBsH", "NZ") if D in (64, 128) else ("BnBsH",)
    scene = batched_scene(r, layout, grouped(r), (D, D, 0), S, most, page, stores)
    call = laid_out(r, scene)
    if chance(r, 0.3):
        B = len(scene.q) if page or chance(r, 0.5) else 1
        pse = floats(r, B, scene.heads[0], longer_rows(r, S), longer(r, scene.Skv), dtype=scene.dtype)
        pse[:, :, S:] = pse[..., scene.Skv:] = float("nan")
        call["pse_shift"] = pse
    call |= r.choice((no_mask, full_mask, band, causal, from_the_left))(r, scene)
    return valid_rows(r, scene, call, may_correct=S > 1)


def packed(r: Random, version: int = 2) -> Call:
    """The rows of all requests one after the other; no rope."""
    layout, (N, G) = r.choice(("TND", "NTD", "NTD_TND")), grouped(r)
    page = 16 * r.choice((1, 2, 8, 64)) if chance(r, 0.4) else 0
    widths = [(128, 128, 0)] + ([(64, 64, 0)] if layout != "NTD_TND" else []) + ([(192, 128, 0)] if not page else [])
    widths += [(192, 192, 0)] if layout == "TND" and N == G and not page else []
    stores = ("BnBsH",) + (("NZ", "BnNBsD") if layout == "TND" else ("NZ",)) * (N > G)
    scene = packed_scene(r, layout, (N, G), r.choice(widths), 9, 40, page, stores)
    call = laid_out(r, scene)
    if version == 2 and layout != "NTD" and scene.widths[1] <= 128 and scene.dtype == torch.bfloat16 and chance(r, 0.3):
        call |= {"learnable_sink": floats(r, N, dtype=torch.bfloat16), "return_softmax_lse": False}
    call |= r.choice((no_mask, causal, band))(r, scene)
    return valid_rows(r, scene, call, may_correct=N != G)


def expanded(r: Random, version: int = 2) -> Call:
    """Multi-head latent attention before absorption: widths of 128, and rope apart."""
    layout = r.choice(("BSH", "BSND", "TND", "BNSD", "NTD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND", "NTD_TND"))
    page = 16 * r.choice((1, 2, 8)) if chance(r, 0.3) else 0
    make = packed_scene if "T" in layout else batched_scene
    N, G = grouped(r)
    stores = ("BnBsH", "BnNBsD") if layout[:4] == "BNSD" or (layout == "TND" and N > G) else ("BnBsH",)
    scene = make(r, layout, (N, G), (128, 128, 64), r.randint(2, 7), r.randint(1, 40), page, stores)
    modes = (no_mask, causal, band) + ((full_mask, from_the_left) if "B" in layout else ())
    call = laid_out(r, scene) | r.choice(modes)(r, scene)
    return valid_rows(r, scene, call, may_correct=False)


def absorbed(r: Random, version: int = 2) -> Call:
    """Multi-head latent attention after absorption: all heads share one latent of 512, and rope apart."""
    layout = r.choice(("BSH", "BSND", "BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND", "TND_NTD"))
    stores = ("BnBsH", "BnNBsD") if layout[:4] == "BNSD" else ("BnBsH", "NZ")
    stores += ("BnNBsD",) if "T" in layout else ()
    page = 16 * r.choice((1, 2, 8)) if "T" in layout or chance(r, 0.6) else 0
    make = packed_scene if "T" in layout else batched_scene
    rows = r.randint(2, 16) if "NBSD" in layout else r.randint(1, 16) if chance(r, 0.7) else 1
    scene = make(r, layout, (r.choice(MLA_HEADS[:5] if chance(r, 0.8) else MLA_HEADS), 1), (512, 512, 64), rows,
                 r.randint(1, 60), page, stores)
    call = laid_out(r, scene)
    if chance(r, 0.5):
        call["value"] = call["key"]  # the same latents, not a copy
    if "_" in layout:
        call["return_softmax_lse"] = False
    modes = (no_mask, causal, band) + ((tree,) if version == 2 and "_" not in layout else ())
    call |= r.choice(modes + ((full_mask,) if "B" in layout else ()))(r, scene)
    if call.get("sparse_mode") == 1:
        call["sparse_mode"] = 0
    return valid_rows(r, scene, call, may_correct=False)


# Scenes


def grouped(r: Random) -> tuple[int, int]:
    G = r.randint(1, 3)
    return G * r.choice((1, 1, 2, 3, 8)), G


def batched_scene(r: Random, layout: str, heads: tuple[int, int], widths: tuple[int, int, int], S: int, most: int,
                  page: int, stores: tuple[str, ...]) -> Scene:
    B, Skv = r.randint(1, 3), most
    if page:
        Skv = page * (-(-most // page) + r.randint(0, 1))
    q, q_arg = lengths(r, B, S, may_miss=True)
    kv, kv_arg = lengths(r, B, most if page else Skv, may_miss=not page)
    if S == 1:  # the list is without effect
        q = [1] * B
    return Scene(layout, heads, widths, q, kv, q_arg, kv_arg, S, Skv, page, r.choice(stores), half(r))


def packed_scene(r: Random, layout: str, heads: tuple[int, int], widths: tuple[int, int, int], rows: int, most: int,
                 page: int, stores: tuple[str, ...]) -> Scene:
    B = r.randint(1, 4)
    q, kv = ([0 if chance(r, 0.1) else r.randint(1, n) for _ in range(B)] for n in (rows, most))
    if widths[2]:  # no empty tensor beside rope
        q[0], kv[0] = q[0] or 1, kv[0] or 1
    Skv = page * (-(-max(kv) // page) + r.randint(0, 1)) if page else 0
    ends = [[sum(x[:b + 1]) for b in range(B)] for x in (q, kv)]
    return Scene(layout, heads, widths, q, kv, ends[0], kv if page else ends[1], 0, Skv or page, page, r.choice(stores),
                 half(r))


def lengths(r: Random, B: int, most: int, may_miss: bool) -> tuple[list[int], list[int] | None]:
    """Rows of each request, and how a call says so: not at all, once for all, for each, or with some to spare."""
    how = r.choice(("not at all", "once", "each", "more")) if may_miss else r.choice(("once", "each", "more"))
    if how == "not at all":
        return [most] * B, None
    if how == "once":
        n = r.randint(0, most)
        return [n] * B, [n]
    given = [r.choice((0, most, r.randint(0, most))) for _ in range(B + (how == "more") * r.randint(1, 2))]
    return given[:B], given


# Tensors


def laid_out(r: Random, scene: Scene) -> Call:
    N, G = scene.heads
    D, Dv, Dr = scene.widths

    def queries(width: int) -> Tensor:
        parts = [floats(r, n, N, width, dtype=scene.dtype) for n in scene.q]
        return rows_as(scene.layout.partition("_")[0], parts, scene.S)

    def keys(width: int) -> Tensor:
        parts = [floats(r, n, G, width, dtype=scene.dtype) for n in scene.kv]
        if scene.page:
            return pages_as(scene, parts, table, pages)
        return rows_as(scene.layout.partition("_")[0], parts, scene.Skv)

    call: Call = {}
    if scene.page:
        table, pages = block_table(r, scene)
        call |= {"block_table": table, "block_size": scene.page}
    call |= {"query": queries(D), "key": keys(D), "value": keys(Dv)}
    if Dr:
        call |= {"query_rope": queries(Dr), "key_rope": keys(Dr)}
    if scene.q_arg is not None:
        call["actual_seq_qlen"] = scene.q_arg
    if scene.kv_arg is not None:
        call["actual_seq_kvlen"] = scene.kv_arg
    if scene.dtype == torch.float16 and chance(r, 0.3):
        call["inner_precise"] = 1
    return call | {
        "num_query_heads": N, "num_key_value_heads": 0 if N == G and chance(r, 0.5) else G,
        "softmax_scale": r.choice((0.5, 1.5)) * (D + Dr) ** -0.5, "input_layout": scene.layout,
        "return_softmax_lse": chance(r, 0.5),
    }


def rows_as(layout: str, parts: list[Tensor], S: int) -> Tensor:
    """Rows of requests, each [rows, heads, width], as one tensor of a layout."""
    if "T" in layout:
        x = torch.cat(parts)
        return (x.transpose(0, 1) if layout == "NTD" else x).contiguous()
    x = torch.full((len(parts), S, *parts[0].shape[1:]), float("nan"), dtype=parts[0].dtype)
    for b, part in enumerate(parts):
        x[b, :len(part)] = part
    return {"BSH": x.flatten(2), "BSND": x, "BNSD": x.transpose(1, 2)}[layout].contiguous()


def block_table(r: Random, scene: Scene) -> tuple[Tensor, int]:
    """Pages in any order, with ids that nobody reads past the end of a request; and how many pages there are."""
    needed = [-(-n // scene.page) for n in scene.kv]
    pages = max(1, sum(needed)) + r.randint(0, 2)
    ids = list(range(pages))
    r.shuffle(ids)
    table = torch.full((len(needed), scene.Skv // scene.page), r.choice((0, -1, 10**6)), dtype=torch.int32)
    for b, n in enumerate(needed):
        table[b, :n] = torch.tensor([ids.pop() for _ in range(n)])
    if min(scene.kv[:2]) >= scene.page and chance(r, 0.5):  # a prefix in common
        table[:2, 0] = table[0, 0].clone()
    return table, pages


def pages_as(scene: Scene, parts: list[Tensor], table: Tensor, pages: int) -> Tensor:
    P = scene.page
    pool = torch.full((pages, P, *parts[0].shape[1:]), float("nan"), dtype=scene.dtype)
    for b, part in enumerate(parts):
        for start in range(0, len(part), P):
            rows = part[start:start + P]
            pool[table[b, start // P], :len(rows)] = rows
    if scene.store == "BnBsH":
        return pool.flatten(2)
    if scene.store == "BnNBsD":
        return pool.transpose(1, 2).contiguous()
    return pool.unflatten(3, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous()


# Masks


@cache
def causal_mask(dtype: torch.dtype, shape: tuple[int, ...] = (2048, 2048)) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(dtype).view(shape)


def any_causal_mask(r: Random) -> Tensor:
    return causal_mask(r.choice(MASK_DTYPES), r.choice(CAUSAL_SHAPES))


def no_mask(r: Random, scene: Scene) -> Call:
    return {"pre_tokens": 1, "next_tokens": 1} if chance(r, 0.2) else {}  # without effect


def from_the_left(r: Random, scene: Scene) -> Call:
    return {"sparse_mode": 2, "atten_mask": any_causal_mask(r)}


def causal(r: Random, scene: Scene) -> Call:
    """Mode 3, where no request has more query rows than keys; nothing else is settled."""
    if any(q > kv > 0 for q, kv in zip(scene.q, scene.kv, strict=True)):
        return band(r, scene)
    return {"sparse_mode": 3, "atten_mask": any_causal_mask(r)}


def tokens(r: Random) -> Call:
    while True:
        before, after = (r.choice((FOREVER, r.randint(-3, 9), r.randint(0, 30))) for _ in range(2))
        if before + after >= 0:
            return {"pre_tokens": before, "next_tokens": after}


def band(r: Random, scene: Scene) -> Call:
    return {"sparse_mode": 4, "atten_mask": any_causal_mask(r), **tokens(r)}


def full_mask(r: Random, scene: Scene) -> Call:
    """Modes 0 and 1: what each row does not see."""
    B, S, rows, Skv = len(scene.q), scene.S, longer_rows(r, scene.S), longer(r, scene.Skv)
    shapes = [(B, 1, rows, Skv)]
    if not scene.page:
        shapes += [(1, 1, rows, Skv), (1, rows, Skv)]
        if not scene.widths[2] and not scene.layout.endswith("_BNSD"):
            shapes += [(B, Skv) if S == 1 else (rows, Skv)]
    mask = floats(r, *r.choice(shapes), dtype=torch.float32) > r.choice((-0.5, 0.5, 1.5))
    mode = {"sparse_mode": 1} if chance(r, 0.5) else {} if chance(r, 0.5) else tokens(r)
    return {"atten_mask": mask.to(r.choice(MASK_DTYPES)), **mode}


def longer(r: Random, n: int) -> int:
    """A size, or the next multiple of 16: a mask and a shift may be larger than what they are for."""
    return n + (-n % 16) * r.randint(0, 1)


def longer_rows(r: Random, S: int) -> int:
    return longer(r, S) if S > 1 else S


def tree(r: Random, scene: Scene) -> Call:
    """Mode 9: a square over the last keys of each request; each token sees itself and some before it."""
    if any(q > kv for q, kv in zip(scene.q, scene.kv, strict=True)):
        return no_mask(r, scene)
    squares = [(floats(r, n, n, dtype=torch.float32) > 0).logical_or_(torch.ones(n, n).triu(1).bool()).fill_diagonal_(0)
               for n in scene.q]
    if "T" in scene.layout:
        mask = torch.cat([square.flatten() for square in squares])
    else:
        mask = torch.ones(len(squares), scene.S, scene.S, dtype=torch.bool)
        for b, square in enumerate(squares):
            mask[b, :len(square), :len(square)] = square
    return {"sparse_mode": 9, "atten_mask": mask.to(r.choice(MASK_DTYPES))}


def valid_rows(r: Random, scene: Scene, call: Call, may_correct: bool) -> Call:
    """A row that sees nothing needs inner_precise 2 or 3; where those are refused it is given something to see."""
    mode, mask = call.get("sparse_mode", 0), call.get("atten_mask")
    if mask is None and mode == 0:
        return call
    lone = scene.S == 1 and not scene.widths[2]
    tokens = call.get("pre_tokens", FOREVER), call.get("next_tokens", FOREVER)

    def blind() -> list[tuple[int, int]]:
        return [(b, i) for b, (q, kv) in enumerate(zip(scene.q, scene.kv, strict=True)) for i in range(q) if kv and not
                (visible(i, q, kv, mode, *tokens, lone) & ~hidden(mask, b, i, scene.q, kv, mode, lone)).any()]

    if blind() and may_correct:
        return call | {"inner_precise": r.choice((2, 3))}
    if blind():
        call |= {"pre_tokens": FOREVER, "next_tokens": FOREVER}
        tokens = FOREVER, FOREVER
    if blind():
        call["atten_mask"] = torch.zeros_like(mask)
    return call

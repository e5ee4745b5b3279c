"""Writes by index: npu_scatter_pa_kv_cache, its functional form, _npu_reshape_and_cache, npu_scatter_nd_update."""
import itertools
from random import Random

import torch
from torch import Tensor

from operators.case import Call, Case, Wrong, floats, half, ints

# ---- paged caches


def slots_for(r: Random, T: int, pages: int, P: int, dtype: torch.dtype) -> Tensor:
    """T slots: different ones outside page 0, any in page 0."""
    real = r.sample(range(P, pages * P), min(T, (pages - 1) * P))
    slots = [real.pop() if real and r.random() < 0.7 else r.randrange(P) for _ in range(T)]
    return torch.tensor(slots, dtype=dtype)


def values(r: Random, *shape: int, dtype: torch.dtype) -> Tensor:
    return ints(r, -128, 128, *shape, dtype=dtype) if dtype == torch.int8 else floats(r, *shape, dtype=dtype)


def alike_where_slots_are(rows: Tensor, slots: Tensor) -> Tensor:
    """Of rows that share a slot an arbitrary one stays, so the test gives them the same values."""
    first = {slot: t for t, slot in reversed(list(enumerate(slots.tolist())))}
    return rows[[first[slot] for slot in slots.tolist()]]


def paged(r: Random, tiled: bool, int32: bool = False) -> Call:
    T, N, pages, P = r.randint(1, 6), r.randint(1, 3), r.randint(2, 4), r.choice((1, 3, 16))
    dtype = r.choice((half(r), torch.int8))
    C0 = 32 if dtype == torch.int8 else 16
    slots = slots_for(r, T, pages, P, torch.int32 if int32 else r.choice((torch.int32, torch.int64)))
    call: Call = {}
    for name in ("key", "value"):
        D = C0 * r.randint(1, 2) if tiled else r.randint(1, 9)
        shape = (pages, N * D // C0, P, C0) if tiled else (pages, P, N, D)
        call[name] = alike_where_slots_are(values(r, T, N, D, dtype=dtype), slots)
        call[f"{name}_cache"] = values(r, *shape, dtype=dtype)
    return call | {"slot_indices" if int32 else "slot_mapping": slots}


def norm(r: Random) -> Call:
    return paged(r, tiled=False) | {"cache_mode": r.choice(("Norm", None))}


def tiles(r: Random) -> Call:
    return paged(r, tiled=True) | r.choice(({}, {"cache_mode": "PA_NZ"}))  # it is the default


def either(r: Random) -> Call:
    return r.choice((norm, tiles))(r)


def plain(r: Random) -> Call:
    return paged(r, tiled=False, int32=True)


def naive_scatter(key, value, key_cache, value_cache, slot_mapping, cache_mode="PA_NZ"):
    for rows, cache in ((key, key_cache), (value, value_cache)):
        block_size = cache.shape[2] if cache_mode == "PA_NZ" else cache.shape[1]
        for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
            page, place = divmod(slot, block_size)
            if cache_mode != "PA_NZ":
                cache[page, place] = row
                continue
            width = cache.shape[3]
            for piece in range(cache.shape[1]):
                cache[page, piece, place] = row.flatten()[piece * width : (piece + 1) * width]


def naive_functional(key, value, key_cache, value_cache, slot_mapping, cache_mode="PA_NZ"):
    caches = key_cache.clone(), value_cache.clone()
    naive_scatter(key, value, *caches, slot_mapping, cache_mode)
    return caches


def naive_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    naive_scatter(key, value, key_cache, value_cache, slot_indices, "Norm")


def with_slot(name: str, row: int, slot: int):
    def change(c: Call) -> Call:
        slots = c[name].clone()
        slots[row] = slot
        return {name: slots}

    return change


def past_the_end(name: str):
    def change(c: Call) -> Call:
        pages, P = c["key_cache"].shape[:2]
        return with_slot(name, 0, pages * P)(c)

    return change


def two_rows(r: Random) -> Call:
    """Rows 0 and 1 of a plain cache, 4 pages of 3."""
    rows = {name: floats(r, 2, 1, 8) for name in ("key", "value")}
    caches = {f"{name}_cache": floats(r, 4, 3, 1, 8) for name in rows}
    return rows | caches | {"slot_mapping": torch.tensor([4, 7]), "cache_mode": "Norm"}


def two_tiled_rows(r: Random) -> Call:
    rows = {name: floats(r, 2, 2, 16) for name in ("key", "value")}
    caches = {f"{name}_cache": floats(r, 4, 2, 3, 16) for name in rows}
    return rows | caches | {"slot_mapping": torch.tensor([4, 7])}


def two_atb_rows(r: Random) -> Call:
    call = two_rows(r)
    del call["cache_mode"]
    return call | {"slot_indices": call.pop("slot_mapping").int()}


def strided(name: str):
    return lambda c: {name: c[name].repeat_interleave(2, -1)[..., ::2]}


def rows_are_wrong(slots: str, of, form: str = "plain") -> list[Wrong]:
    """What is refused whatever the form of the caches."""
    found = [
        Wrong("two axes", lambda c: {"key": c["key"].flatten(1)}, "RELATION", "the same rows and heads", of),
        Wrong("fewer values", lambda c: {"value": c["value"][:1]}, "RELATION", "the same rows and heads", of),
        Wrong("fewer slots", lambda c: {slots: c[slots][:1]}, "RELATION", f"{slots} is 1 rows(.*\n)*.*SB-05", of),
        Wrong("slots in floats", lambda c: {slots: c[slots].float()}, "RELATION", "int32 or int64", of),
        Wrong("no rows", lambda c: {n: c[n][:0] for n in ("key", "value", slots)}, "SIZE", "at least one row", of),
        Wrong("slot -1", with_slot(slots, 1, -1), "RELATION", "slot -1 in row 1(.*\n)*.*SB-09(.*\n)*.*minus-one", of),
        Wrong("slot past the end", with_slot(slots, 1, 12), "RELATION", "below 12 = 4 pages of 3", of),
        Wrong("a slot twice", with_slot(slots, 1, 4), "RELATION", r"slot 4 in rows \[0, 1\]", of),
        Wrong("strided key", strided("key"), "SIZE", "key is strided", of),
        Wrong("strided value", strided("value"), "SIZE", "value is strided", of),
        Wrong("strided slots", strided(slots), "SIZE", f"{slots} is strided", of),
        Wrong("strided cache", strided("value_cache"), "RELATION", "hidden copy", of),
        Wrong("one page fewer", lambda c: {"value_cache": c["value_cache"][:3]}, "RELATION", "pages", of),
        Wrong("fp32", lambda c: {n: c[n].float() for n in c if n[:3] in ("key", "val")}, "DTYPE", "or int8", of),
        Wrong("cache in another dtype", lambda c: {"key_cache": c["key_cache"].half()}, "DTYPE", "as its rows", of),
    ]
    return [wrong._replace(name=f"{form}: {wrong.name}") for wrong in found]


TILES_ARE_WRONG = [
    Wrong("a plain cache", lambda c: {"value_cache": c["value_cache"].transpose(1, 2).contiguous()}, "RELATION",
          "N.D/C0(.*\n)*.*SB-26", two_tiled_rows),
    Wrong("too many tiles", lambda c: {"key_cache": c["key_cache"].repeat(1, 2, 1, 1)}, "RELATION", "the 32 values",
          two_tiled_rows),
    Wrong("wide tiles", lambda c: {"key_cache": c["key_cache"].reshape(4, 1, 3, 32)}, "SIZE", "C0 = 16: 32 bytes",
          two_tiled_rows),
    Wrong("heads of half a tile", lambda c: {"key": c["key"].reshape(2, 4, 8), "value": c["value"].reshape(2, 4, 8)},
          "SIZE", "key is .*\n.*a head fills whole tiles", two_tiled_rows),
    Wrong("a page of 65535", lambda c: {n: torch.zeros(1, 2, 65535, 16).bfloat16() for n in c if "cache" in n}, "SIZE",
          "below 65535", two_tiled_rows),
    Wrong("value in another dtype", lambda c: {n: c[n].half() for n in ("value", "value_cache")}, "DTYPE",
          "scatter-mixed-dtypes", two_tiled_rows),
]
PLAIN_IS_WRONG = [
    Wrong("a head more", lambda c: {"key_cache": c["key_cache"].repeat(1, 1, 2, 1)}, "RELATION", "N = 1 (.*\n)*.*SB-26",
          two_rows),
    Wrong("value in another dtype", lambda c: {n: c[n].half() for n in ("value", "value_cache")}, "DTYPE",
          "value is .*\n.*key's torch.bfloat16", two_rows),
    Wrong("an unknown mode", lambda c: {"cache_mode": "PA"}, "RELATION", "'PA_NZ' .the default.", two_rows),
    Wrong("the mode left out", lambda c: {"cache_mode": "PA_NZ"}, "RELATION", "N.D/C0", two_rows),
    Wrong("compressed", lambda c: {"seq_lens": torch.ones(4)}, "RELATION", "seq_lens is .*\n.*not built", two_rows),
]

# ---- any tensor


def scatter_nd(r: Random) -> Call:
    if r.random() < 0.1:
        return pages(r)
    rank = r.randint(1, 4)
    shape, depth = [r.randint(1, 5) for _ in range(rank)], r.randint(1, rank)
    if r.random() < 0.3:
        rank, shape, depth = 2, [12, 8], 1  # a cache, seen as slots
    dtype = r.choice((half(r), torch.float32, torch.bool, torch.int64, torch.int8))

    def draw(*sizes: int) -> Tensor:
        if dtype.is_floating_point:
            return floats(r, *sizes, dtype=dtype)
        return ints(r, 0 if dtype == torch.bool else -9, 2 if dtype == torch.bool else 9, *sizes, dtype=dtype)

    input = draw(*shape)
    if shape[-1] > 1 and r.random() < 0.2:
        input = input.repeat_interleave(2, -1)[..., ::2]
    places = list(itertools.product(*map(range, shape[:depth])))
    chosen = r.sample(places, r.randint(0, len(places)))
    padding = r.choice((0, 0, 2, 3))  # padded rows may share row 0, or a place of page 0: any of their values may stay
    if padding:
        shared = r.choice([place for place in places if place[0] == 0])
        chosen = [place for place in chosen if place != shared] + [shared] * padding
    indices = torch.tensor(chosen, dtype=r.choice((torch.int32, torch.int64))).reshape(-1, depth)
    updates = draw(len(chosen), *shape[depth:])
    updates[len(chosen) - padding :] = draw(*shape[depth:])
    if len(chosen) % 2 == 0:
        half_of = len(chosen) // 2
        indices, updates = indices.reshape(2, half_of, depth), updates.reshape(2, half_of, *shape[depth:])
    return dict(input=input, indices=indices, updates=updates)


def naive_scatter_nd_(input, indices, updates):
    for place in itertools.product(*map(range, indices.shape[:-1])):
        input[tuple(indices[place].tolist())] = updates[place]
    return input


def naive_scatter_nd(input, indices, updates):
    return naive_scatter_nd_(input.clone(), indices, updates)


def cache_rows(r: Random) -> Call:
    return dict(input=floats(r, 6, 4), indices=torch.tensor([[2], [5]]), updates=floats(r, 2, 4))


def matrix(r: Random) -> Call:
    return dict(input=floats(r, 6, 4), indices=torch.tensor([[2, 1], [5, 0]]), updates=floats(r, 2))


def pages(r: Random) -> Call:
    """A cache by page and offset: rows on pages 3 and 2, and two padded ones at one place of the dummy page."""
    padded = floats(r, 1, 8)
    return dict(input=floats(r, 4, 2, 8), indices=torch.tensor([[3, 0], [3, 1], [2, 0], [0, 1], [0, 1]]),
                updates=torch.cat([floats(r, 3, 8), padded, padded]))


def index(*values: int):
    return lambda c: {"indices": torch.tensor(values).reshape(c["indices"].shape)}


ND_IS_WRONG = [
    Wrong("slots on one axis", lambda c: {"indices": c["indices"][:, 0]}, "RELATION", "slots as .T, 1.", cache_rows),
    Wrong("an index too long", lambda c: {"indices": c["indices"].repeat(1, 3)}, "RELATION", "1 to 2 on the last axis",
          cache_rows),
    Wrong("a row fewer", lambda c: {"updates": c["updates"][:1]}, "RELATION", r"\[2, 4\](.*\n)*.*SB-05", cache_rows),
    Wrong("rows too wide", lambda c: {"updates": c["updates"].repeat(1, 2)}, "RELATION", r"\[2, 4\]", cache_rows),
    Wrong("float indices", lambda c: {"indices": c["indices"].float()}, "RELATION", "int32 or int64", cache_rows),
    Wrong("past the end", index(2, 6), "RELATION", "6 in column 0\n.*below 6, axis 0", cache_rows),
    Wrong("past the end of an axis", index(2, 4, 5, 0), "RELATION", "4 in column 1\n.*below 4, axis 1", matrix),
    Wrong("-1", index(-1, 2), "RELATION", "-1 in column 0(.*\n)*.*SB-09(.*\n)*.*scatter-minus-one", cache_rows),
    Wrong("a row twice", index(5, 5), "RELATION", "5 twice", cache_rows),
    Wrong("an element twice", index(2, 1, 2, 1), "RELATION", r"\(2, 1\) twice", matrix),
    Wrong("a place of page 3 twice", index(3, 0, 3, 0, 2, 0, 0, 1, 0, 1), "RELATION", r"\(3, 0\) twice", pages),
    Wrong("nine axes", lambda c: {"input": c["input"][(None,) * 7], "indices": torch.zeros(1, 1, dtype=torch.int64),
                                  "updates": c["input"][(None,) * 7]}, "SIZE", "1 to 8 axes", cache_rows),
    Wrong("fp64", lambda c: {n: c[n].double() for n in ("input", "updates")}, "DTYPE", "bool, int64 or int8",
          cache_rows),
    Wrong("updates in another dtype", lambda c: {"updates": c["updates"].float()}, "DTYPE", "the dtype of input",
          cache_rows),
]

CASES = {
    "npu_scatter_pa_kv_cache": Case(either, naive_scatter, [
        *rows_are_wrong("slot_mapping", two_rows), *rows_are_wrong("slot_mapping", two_tiled_rows, "tiled"),
        *TILES_ARE_WRONG, *PLAIN_IS_WRONG]),
    "npu_scatter_pa_kv_cache_functional": Case(either, naive_functional, [TILES_ARE_WRONG[0], PLAIN_IS_WRONG[0]]),
    # Tiled caches are told by their memory format, which a copy does not have: tests/core/test_scatter.py.
    "atb::_npu_reshape_and_cache": Case(plain, naive_reshape_and_cache, [
        *rows_are_wrong("slot_indices", two_atb_rows),
        Wrong("int64 slots", lambda c: {"slot_indices": c["slot_indices"].long()}, "DTYPE", "call .int", two_atb_rows),
        Wrong("a head more", lambda c: {"key_cache": c["key_cache"].repeat(1, 1, 2, 1)}, "RELATION",
              "N = 1 (.*\n)*.*SB-26", two_atb_rows),
        Wrong("value in another dtype", lambda c: {n: c[n].half() for n in ("value", "value_cache")}, "DTYPE",
              "only tiled caches", two_atb_rows),
    ]),
    "npu_scatter_nd_update_": Case(scatter_nd, naive_scatter_nd_, [
        *ND_IS_WRONG,
        Wrong("expanded", lambda c: {"input": c["input"][:1].expand(6, 4)}, "RELATION", "memory of its own",
              cache_rows),
    ]),
    "npu_scatter_nd_update": Case(scatter_nd, naive_scatter_nd, ND_IS_WRONG),
}

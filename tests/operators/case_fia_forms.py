"""Calls of dense attention (FIA) to start from, and changes to them, for the tables of what must be refused."""
from collections.abc import Callable
from functools import cache
from random import Random

import torch
from torch import Tensor

from operators.case import LEFT_OUT, Call
from operators.case_fia_calls import absorbed, batched, causal_mask, expanded, packed

RELATION, SIZE, DTYPE = "RELATION", "SIZE", "DTYPE"
MASK = causal_mask(torch.bool)


def such(make: Callable[[Random], Call], test: Callable[[Call], bool]) -> Callable[[Random], Call]:
    """The first of a form's random calls that has some property; looked for once, as many tables start from it."""

    @cache
    def first(seed: int) -> Call:
        r = Random(seed)
        while not test(call := make(r)):
            pass
        return call

    return lambda r: dict(first(r.getrandbits(32)))


def paged(call: Call) -> bool:
    return "block_table" in call


def bare(call: Call) -> bool:
    """No mask, no shift, no sink; keys for every request."""
    return not {"atten_mask", "pse_shift", "learnable_sink"} & call.keys() and call["key"].numel() > 0 \
        and min(call.get("actual_seq_kvlen", [1])) > 0


def plain(call: Call) -> bool:
    return bare(call) and not paged(call)


def rows(call: Call) -> int:
    return call["query"].shape[2 if call["input_layout"].startswith("BNSD") else 1]


def masked(call: Call, mode: int) -> bool:
    return call.get("sparse_mode", 0) == mode and "atten_mask" in call


def layout(call: Call, *names: str) -> bool:
    return call["input_layout"] in names


def heads(call: Call) -> tuple[int, int]:
    N = call["num_query_heads"]
    return N, call["num_key_value_heads"] or N


BSND = such(batched, lambda c: layout(c, "BSND") and plain(c) and rows(c) > 1 and len(c["query"]) == 3)
BNSD = such(batched, lambda c: layout(c, "BNSD") and plain(c) and rows(c) > 1)
BSH = such(batched, lambda c: layout(c, "BSH") and plain(c) and rows(c) > 1)
MOVED = such(batched, lambda c: layout(c, "BSND_BNSD") and plain(c) and rows(c) > 1)
SINGLE = such(batched, lambda c: layout(c, "BSND") and plain(c) and rows(c) == 1)
FULL = such(batched, lambda c: masked(c, 0) and not paged(c) and rows(c) > 1 and "pse_shift" not in c)
CAUSAL = such(batched, lambda c: masked(c, 3) and not paged(c) and rows(c) > 1)
BAND = such(batched, lambda c: masked(c, 4) and not paged(c) and rows(c) > 1)
SHIFT = such(batched, lambda c: "pse_shift" in c and not paged(c) and "atten_mask" not in c and rows(c) > 1)
TND = such(packed, lambda c: layout(c, "TND") and plain(c) and len(c["actual_seq_qlen"]) > 2
           and c["query"].shape[2] == 128 and heads(c)[0] > heads(c)[1])
MHA = such(packed, lambda c: layout(c, "TND") and plain(c) and heads(c)[0] == heads(c)[1])
NTD = such(packed, lambda c: layout(c, "NTD") and plain(c))
SINK = such(packed, lambda c: "learnable_sink" in c and layout(c, "TND") and not paged(c) and "atten_mask" not in c
            and c["key"].numel() > 0)
PAGED_TND = such(packed, lambda c: layout(c, "TND") and paged(c) and bare(c) and c["key"].dim() == 3
                 and len(c["actual_seq_kvlen"]) > 1)
PAGED_GROUPS = such(packed, lambda c: layout(c, "TND") and paged(c) and bare(c) and c["key"].dim() == 4)
PAGED_BSND = such(batched, lambda c: layout(c, "BSND") and paged(c) and bare(c) and rows(c) > 1 and c["key"].dim() == 3
                  and len(c["query"]) > 1)
PAGED_BNSD = such(batched, lambda c: layout(c, "BNSD") and paged(c) and bare(c) and c["key"].dim() == 4)
PAGED_SINGLE = such(batched, lambda c: layout(c, "BSND") and paged(c) and bare(c) and rows(c) == 1
                    and c["key"].dim() == 3)
NZ = such(batched, lambda c: layout(c, "BSND") and paged(c) and bare(c) and c["key"].dim() == 5)
ROPE = such(expanded, lambda c: layout(c, "BSND") and plain(c))
ROPE_TND = such(expanded, lambda c: layout(c, "TND") and plain(c))
MLA = such(absorbed, lambda c: layout(c, "BSND") and plain(c))
MLA_TND = such(absorbed, lambda c: layout(c, "TND") and paged(c) and bare(c) and c["key"].dim() == 3
               and len(c["actual_seq_qlen"]) > 1)
MLA_NBSD = such(absorbed, lambda c: layout(c, "BSND_NBSD") and plain(c))
TREE_TND = such(absorbed, lambda c: masked(c, 9) and layout(c, "TND"))


MANY_KEYS = such(absorbed, lambda c: layout(c, "BSND") and not paged(c) and rows(c) > 1 and min(
    c.get("actual_seq_qlen", [2])) > 1 and min(c.get("actual_seq_kvlen", [c["key"].shape[1]])) >= 16)


def TREE(r: Random) -> Call:
    """Each row of a request sees itself and those before it."""
    call = MANY_KEYS(r)
    squares = torch.ones(len(call["query"]), rows(call), rows(call), dtype=torch.bool).triu(1)
    return call | {"sparse_mode": 9, "atten_mask": squares}


def strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def each(call: Call, change: Callable[[Tensor], Tensor], *names: str) -> Call:
    return {name: change(call[name]) for name in names}


def cut(name: str, axis: int) -> Callable[[Call], Call]:
    """One row less of some axis."""
    return lambda c: {name: c[name].narrow(axis, 0, c[name].shape[axis] - 1).contiguous()}


def with_heads(call: Call, N: int, G: int) -> Call:
    """BSND with other numbers of heads."""
    changed = {name: call[name][:, :, :1].repeat(1, 1, n, 1) for name, n in (("query", N), ("key", G), ("value", G))}
    return changed | {"num_query_heads": N, "num_key_value_heads": G}


def with_width(call: Call, D: int, Dv: int | None = None) -> Call:
    """Heads of other widths, in any layout but BSH."""
    widths = (("query", D), ("key", D), ("value", Dv or D))
    return {name: call[name][..., :1].repeat_interleave(width, -1) for name, width in widths}


def last_end(ends: list[int], more: int) -> list[int]:
    return [*ends[:-1], ends[-1] + more]


def with_id(call: Call, row: int, column: int, value: int) -> Call:
    table = call["block_table"].clone()
    table[row, column] = value
    return {"block_table": table}


def with_pages(call: Call, P: int) -> Call:
    """BnBsH pages of P rows; their content does not matter."""
    smaller = call["block_size"] // P
    return each(call, lambda x: x.view(-1, P, x.shape[2]), "key", "value") | {
        "block_size": P, "block_table": call["block_table"].repeat_interleave(smaller, 1) * 0}


def with_many_pages(call: Call, keys: int) -> Call:
    """BnBsH pages for more keys of each request."""
    B, P = call["block_table"].shape[0], call["block_size"]
    columns = -(-keys // P)
    return each(call, lambda x: x[:1, :1].repeat(B * columns, P, 1), "key", "value") | {
        "block_table": torch.arange(B * columns, dtype=torch.int32).view(B, columns), "actual_seq_kvlen": [keys]}


def without_rope(call: Call) -> Call:
    return {"query_rope": LEFT_OUT, "key_rope": LEFT_OUT}

"""Calls of npu_grouped_matmul: random ones of every form, and some of one form."""
from functools import partial
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from operators.case import Call, floats, half, ints
from operators.case_int8 import BF16, FP16, INT8, INT32, packed

# A random call: first x and weight of a form, then the numbers that go with their dtype, then how groups are said.


def matrices(r: Random, form: str, dtype: torch.dtype, counts: list[int], on_device: bool) -> tuple[list, list]:
    """x and weight: the rows of x[i], or of x's i-th group, are counts[i]."""
    one_k, one_n = r.randint(1, 8), r.randint(1, 8)
    several_k = form in ("several", "separate")
    ks = [r.randint(1, 8) if several_k else one_k for _ in counts]
    ns = [r.randint(1, 8) if form in ("separate", "divided") else one_n for _ in counts]
    lead = [r.randint(1, 2) for _ in range(r.choice((0, 0, 2)))] if form == "separate" else []

    def numbers(*shape: int, transposed: bool = False) -> Tensor:
        shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        plain = ints(r, -9, 10, *shape, dtype=dtype) if dtype == torch.int8 else floats(r, *shape, dtype=dtype)
        return plain.mT if transposed else plain

    if form == "reduced":
        K = sum(counts) + r.choice((0, 2))
        return [numbers(one_k, K, transposed=True)], [numbers(K, one_n)]
    transposed = r.random() < 0.4
    if form == "experts":
        weight = [numbers(len(counts), one_k, one_n, transposed=transposed)]
    else:
        weight = [numbers(k, n, transposed=transposed) for k, n in zip(ks, ns, strict=True)]
    if several_k:
        return [numbers(*lead, m, k) for m, k in zip(counts, ks, strict=True)], weight
    more = r.choice((0, 0, 2)) if on_device else 0  # rows of other ranks' experts
    return [numbers(sum(counts) + more, one_k)], weight


def columns(weight: list[Tensor], make) -> list[Tensor]:
    return [make(*w.shape[:-2], w.shape[-1]) for w in weight]


def extras(r: Random, form: str, number: str, x: list[Tensor], weight: list[Tensor], on_device: bool) -> Call:
    """Bias, scales and output_dtype."""
    call: Call = {}
    if form != "reduced" and r.random() < 0.5:
        dtype = {torch.float16: torch.float16, torch.int8: torch.int32}.get(x[0].dtype, torch.float32)
        make = partial(ints, r, -20, 20) if number == "int8" else partial(floats, r, dtype=dtype)
        call["bias"] = columns(weight, make)
    if number == "antiquant":
        for name in ("antiquant_scale", "antiquant_offset"):
            call[name] = columns(weight, partial(floats, r, dtype=x[0].dtype))
    elif number == "int8":
        out = r.choice((INT8, INT32, FP16, BF16)) if on_device else INT8
        if out != INT8:
            call["output_dtype"] = out
        if out == INT8:
            call["scale"] = columns(weight, partial(packed, r))
        elif out != INT32:
            dtype, size = {FP16: torch.float32, BF16: torch.bfloat16}[out], r.choice((1.0, 0.01))
            call["scale"] = columns(weight, partial(floats, r, dtype=dtype, scale=size))
            if form == "experts" and r.random() < 0.6:
                call["per_token_scale"] = [floats(r, len(x[0]), dtype=torch.float32).abs()]
                call["act_type"] = r.choice((0, 1, 2, 4, 5))
    elif on_device and r.random() < 0.3:
        call["output_dtype"] = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: 6}[x[0].dtype]
    return call


def groups(r: Random, kind: int, counts: list[int]) -> Tensor:
    if kind == 2:
        pairs = sorted(enumerate(counts), key=lambda pair: (pair[1] == 0, pair[0]))
        return torch.tensor(pairs).view(-1, 2)
    return torch.tensor(counts if kind == 1 else list(accumulate(counts)))


FORMS = {"experts": 0, "matrices": 0, "several": 0, "separate": -1, "reduced": 2}  # with their group_type


def grouped(r: Random, form: str | None = None, number: str | None = None, kind: int | None = None) -> Call:
    form = form or r.choice(("experts", "experts", *FORMS))
    floating = ("half", "half", "fp32") if form in ("experts", "reduced") else ("half",)
    number = number or r.choice(floating if form == "reduced" else (*floating, "int8", "antiquant"))
    kind = r.choice((0, 1, 2) if number == "int8" else (0, 1)) if kind is None else kind
    counts = [r.randint(0 if form != "reduced" else 1, 3) for _ in range(r.randint(2, 4))]
    dtype = {"fp32": torch.float32, "int8": torch.int8}.get(number) or half(r)
    x, weight = matrices(r, form, dtype, counts, on_device=True)
    if number == "antiquant":
        weight = [ints(r, -9, 10, *w.shape, dtype=torch.int8) for w in weight]
    call = dict(x=x, weight=weight, group_type=FORMS[form], split_item=0 if form == "separate" else r.choice((2, 3)))
    call |= extras(r, form, number, x, weight, on_device=True)
    if form != "separate" and (form != "several" or r.random() < 0.5):
        call |= dict(group_list=groups(r, kind, counts), group_list_type=kind)
    return call


def grouped_list(r: Random, form: str | None = None, number: str | None = None) -> Call:
    form = form or r.choice(("matrices", "several", "divided"))
    number = number or r.choice(("half", "fp32", "int8", "antiquant"))
    counts = [r.randint(0, 3) for _ in range(r.randint(1, 4))]
    dtype = {"fp32": torch.float32, "int8": torch.int8}.get(number) or half(r)
    x, weight = matrices(r, form, dtype, counts, on_device=False)
    if number == "antiquant":
        weight = [ints(r, -9, 10, *w.shape, dtype=torch.int8) for w in weight]
    return dict(x=x, weight=weight, group_list=list(accumulate(counts)),
                split_item=1 if form == "divided" else r.choice((2, 3)),
                **extras(r, form, number, x, weight, on_device=False))


def of(form: str, number: str = "half", kind: int = 1):
    return lambda r: grouped(r, form, number, kind) | {"act_type": 0}


def quantised(out: int, form: str = "experts"):
    """A call in int8 with that result, and per_token_scale where it may be."""

    def make(r: Random) -> Call:
        call = grouped(r, form, "int8", 1)
        for name in ("scale", "per_token_scale", "output_dtype", "act_type"):
            call.pop(name, None)
        x, weight = call["x"], call["weight"]
        if out == INT8:
            return call | {"scale": columns(weight, partial(packed, r))}
        if out == INT32:
            return call | {"output_dtype": INT32}
        scale = columns(weight, partial(floats, r, dtype={FP16: torch.float32, BF16: torch.bfloat16}[out]))
        per_token = {"per_token_scale": [torch.ones(len(x[0]))]} if form == "experts" else {}
        return call | {"scale": scale, "output_dtype": out, **per_token}

    return make


def two_matrices(r: Random) -> Call:
    return dict(x=[floats(r, 6, 4)], weight=[floats(r, 4, 5), floats(r, 4, 5)], group_type=0, split_item=2,
                group_list=torch.tensor([2, 4]), group_list_type=1)


def two_x(r: Random) -> Call:
    return two_matrices(r) | dict(x=[floats(r, 2, 4), floats(r, 4, 4)])


def two_experts(r: Random) -> Call:
    return two_matrices(r) | dict(weight=[floats(r, 2, 4, 5)])


def two_reduced(r: Random) -> Call:
    return dict(x=[floats(r, 6, 4).T], weight=[floats(r, 6, 5)], group_type=2, split_item=2,
                group_list=torch.tensor([2, 6]))


def pairs(r: Random) -> Call:
    """Two experts of int8, and sizes beside the numbers of the experts."""
    return dict(x=[ints(r, -9, 9, 6, 4, dtype=torch.int8)], weight=[ints(r, -9, 9, 2, 4, 5, dtype=torch.int8)],
                scale=[torch.ones(2, 5).bfloat16()], output_dtype=BF16, group_type=0, split_item=2,
                group_list=torch.tensor([[0, 2], [1, 4]]), group_list_type=2)


def on_host(call):
    """The same call of the overload .List."""

    def make(r: Random) -> Call:
        given = call(r)
        return {name: given[name] for name in ("x", "weight", "split_item")} | {"group_list": [2, 6]}

    return make

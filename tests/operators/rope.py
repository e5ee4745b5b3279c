"""npu_interleave_rope, npu_rotary_mul and npu_apply_rotary_pos_emb."""
from itertools import product
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def positions(x, table):
    """Every row of x with the row of a table that belongs to it: axes of size 1 in the table are shared."""
    for index in product(*map(range, x.shape[:-1])):
        yield index, x[index], table[tuple(0 if n == 1 else i for i, n in zip(index, table.shape, strict=False))]


# npu_interleave_rope


def interleave_rope(r: Random, D: int = 64) -> Call:
    B, N, S, dtype = r.randint(0, 3), r.randint(1, 3), r.randint(1, 3), half(r)
    x = floats(r, B, N, S, 2 * D, dtype=dtype)[..., D:] if r.random() < 0.3 else floats(r, B, N, S, D, dtype=dtype)
    rows = r.choice((1, S))
    return dict(x=x, cos=floats(r, B, 1, rows, D, dtype=dtype), sin=floats(r, B, 1, rows, D, dtype=dtype))


def three_rows(r: Random, D: int = 64) -> Call:
    tables = {name: floats(r, 3, 1, 1, D) for name in ("cos", "sin")}
    return dict(x=floats(r, 3, 2, 4, D), **tables)


def naive_interleave_rope(x, cos, sin):
    y, h = torch.empty_like(x), x.shape[-1] // 2
    for (index, row, c), (_, _, s) in zip(positions(x, cos), positions(x, sin), strict=True):
        even, odd = row.view(h, 2).T
        y[index][:h], y[index][h:] = even * c[:h] - odd * s[:h], odd * c[h:] + even * s[h:]
    return y


# npu_rotary_mul


def rotary_mul(r: Random) -> Call:
    """In a random layout, with tables for positions alone or, in half mode, for requests or heads as well."""
    mode, layout = r.choice(("half", "interleave")), r.choice(("TND", "BNSD", "BSND", "SBND"))
    sizes = dict(T=r.randint(1, 5), B=r.randint(1, 3), N=r.randint(1, 3), S=r.randint(2, 4))
    of_tables = r.choice(("T", "S", "ST")) if mode == "interleave" else r.choice(("ST", "STB", "STBN"))
    return rotary_call(r, mode, layout, sizes, of_tables + "TS", r.random() < 0.3)


def rotary_call(r: Random, mode: str, layout: str, sizes: dict, of_tables: str, matrix: bool = False,
                D: int | None = None, dtype=None) -> Call:
    # One table for all heads of BNSD, and a width whose halves do not fill blocks of 32 bytes: refused when short.
    D = D or r.choice((32, 64, 80) if layout == "BNSD" else (2, 6, 16, 64))
    dtype = dtype or r.choice((half(r), FLOAT32))
    shape = [sizes[axis] for axis in layout[:-1]]
    table = [size if axis in of_tables else 1 for axis, size in zip(layout, shape, strict=False)]
    of_r = r.choice((dtype, FLOAT32))
    call = dict(input=floats(r, *shape, D, dtype=dtype), r1=floats(r, *table, D, dtype=of_r),
                r2=floats(r, *table, D, dtype=of_r), rotary_mode=mode)
    if matrix:
        call["rotate"] = floats(r, D, D, dtype=dtype, scale=D ** -0.5)
    return call


def packed(r: Random, mode: str = "half", T: int = 3, N: int = 2, D: int = 16, matrix: bool = False) -> Call:
    return rotary_call(r, mode, "TND", dict(T=T, N=N), "T", matrix, D, BFLOAT16)


def shared(r: Random, S: int, D: int = 32) -> Call:
    """(B, N, S, D) = (2, 4, S, D) with one table for all requests and heads."""
    return rotary_call(r, "half", "BNSD", dict(B=2, N=4, S=S), "S", False, D, BFLOAT16)


def repeated(call: Call, axis: int, times: int) -> Call:
    return {"input": call["input"].repeat_interleave(times, axis)}


def naive_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    y, D = torch.empty_like(input), input.shape[-1]
    for (index, x, c), (_, _, s) in zip(positions(input, r1), positions(input, r2), strict=True):
        turned = torch.empty_like(x)
        first, second = (slice(D // 2), slice(D // 2, D)) if rotary_mode == "half" else (slice(0, D, 2), slice(1, D, 2))
        turned[first], turned[second] = -x[second], x[first]
        if rotate is not None:
            turned = sum(x[i] * rotate[i] for i in range(D))
        y[index] = x * c + turned * s
    return y


# npu_apply_rotary_pos_emb


def apply_rotary(r: Random, layout: str | None = None) -> Call:
    layout = layout or r.choice(("BSND", "TND"))
    rows = [r.randint(1, 3) for _ in layout[:-2]]
    D, dtype = r.choice((64, 128)), r.choice((half(r), FLOAT32))
    query = floats(r, *rows, r.randint(1, 3), 2 * D, dtype=dtype)[..., :D]  # strided: written through the view
    call = dict(query=query, key=floats(r, *rows, r.randint(1, 3), D, dtype=dtype),
                cos=floats(r, *rows, 1, D, dtype=dtype), sin=floats(r, *rows, 1, D, dtype=dtype))
    return call if layout == "BSND" and r.random() < 0.5 else call | dict(layout=layout, rotary_mode="half")


def naive_apply_rotary(query, key, cos, sin, layout="BSND", rotary_mode="half"):
    for heads in (query, key):
        heads.copy_(naive_rotary_mul(heads.clone(), cos, sin))
    return query, key


def batched(r: Random) -> Call:
    return apply_rotary(r, "BSND")


def narrow(call: Call) -> Call:
    return {name: x[..., :32] for name, x in call.items() if isinstance(x, torch.Tensor)}


def as_dtype(call: Call, dtype) -> Call:
    return {name: x.to(dtype) for name, x in call.items() if isinstance(x, torch.Tensor)}


CASES = {
    "npu_interleave_rope": Case(interleave_rope, naive_interleave_rope, [
        Wrong("x has 3 axes", lambda c: {"x": c["x"][0]}, "RELATION", r"4 axes \(B, N, S, D\)", three_rows),
        Wrong("fewer tables than rows", lambda c: {"cos": c["cos"][:2]}, "RELATION", "3 rows as x", three_rows),
        Wrong("a table for each head", lambda c: {"sin": c["sin"].expand(3, 2, 1, 64)}, "RELATION",
              "sin is .*\n.*one head", three_rows),
        Wrong("tables of half the width", lambda c: {"cos": c["cos"][..., :32]}, "RELATION", "both halves", three_rows),
        Wrong("cos for all, sin for one", lambda c: {"cos": c["cos"].expand(3, 1, 4, 64)}, "RELATION",
              "the shape of cos", three_rows),
        Wrong("an odd width", lambda c: {name: x[..., :7] for name, x in c.items()}, "RELATION", "even D", three_rows),
        Wrong("another width", lambda c: {name: x[..., :32] for name, x in c.items()}, "SIZE", "D = 64", three_rows),
        Wrong("fp32", lambda c: as_dtype(c, FLOAT32), "DTYPE", "float16 or bfloat16", three_rows),
        Wrong("sin in fp32", lambda c: {"sin": c["sin"].float()}, "DTYPE", "x's torch.bfloat16", three_rows),
    ]),
    "npu_rotary_mul": Case(rotary_mul, naive_rotary_mul, [
        Wrong("a mode of Ascend 950", lambda c: {"rotary_mode": "quarter"}, "RELATION", "Ascend 950's", packed),
        Wrong("2 axes", lambda c: {"input": c["input"][0]}, "RELATION", "or 4 axes", packed),
        Wrong("tables of fewer rows", lambda c: {"r1": c["r1"][:2]}, "RELATION", r"r1 is .*\n.*\(3, 1, 16\)", packed),
        Wrong("interleaved, a table for each head",
              lambda c: {name: c[name].expand(3, 2, 16) for name in ("r1", "r2")}, "RELATION", "with 1 for B and N",
              lambda r: packed(r, "interleave")),
        Wrong("sines of another shape", lambda c: {"r2": c["r2"].expand(3, 2, 16)}, "RELATION", "shape of r1", packed),
        Wrong("an odd width", lambda c: {name: c[name][..., :7] for name in ("input", "r1", "r2")}, "RELATION",
              "even D", packed),
        Wrong("a matrix of another width", lambda c: {"rotate": c["rotate"][:, :8]}, "RELATION",
              r"rotate is .*\n.*\[16, 16\]", lambda r: packed(r, matrix=True)),
        Wrong("no rows", lambda c: {name: c[name][:0] for name in ("input", "r1", "r2")}, "SIZE", "at least one row",
              packed),
        Wrong("a width of 896", lambda c: {name: c[name].repeat(1, 1, 56) for name in ("input", "r1", "r2")}, "SIZE",
              "below 896", packed),
        Wrong("half, 1000 heads", lambda c: repeated(c, 1, 500), "SIZE", "B and N below 1000", packed),
        Wrong("interleaved, 1000 heads", lambda c: repeated(c, 1, 500), "SIZE", r"B \* N; N in TND",
              lambda r: packed(r, "interleave")),
        Wrong("40 rows share 4 tables", lambda c: repeated(c, 1, 5), "SIZE", r"8 \* S = 32",
              lambda r: shared(r, S=4)),
        Wrong("few rows share tables of odd halves",
              lambda c: {name: c[name][..., :48] for name in ("input", "r1", "r2")}, "SIZE", "blocks of 32 bytes",
              lambda r: shared(r, S=4, D=64)),
        Wrong("int8", lambda c: {"input": c["input"].char()}, "DTYPE", "float16, bfloat16 or float32", packed),
        Wrong("cosines in int8", lambda c: {"r1": c["r1"].char()}, "DTYPE", "r1 is .*\n.*a float", packed),
        Wrong("a matrix in fp32", lambda c: {"rotate": c["rotate"].float()}, "DTYPE", "rotate is .*\n.*input's",
              lambda r: packed(r, matrix=True)),
    ]),
    "npu_apply_rotary_pos_emb": Case(apply_rotary, naive_apply_rotary, [
        Wrong("a layout of Ascend 950", lambda c: {"layout": "BNSD"}, "RELATION", "'BSND' or 'TND'", batched),
        Wrong("a layout that is none", lambda c: {"layout": "bsnd"}, "RELATION", "read as 'BSND'", batched),
        Wrong("interleaved", lambda c: {"rotary_mode": "interleave"}, "RELATION", "Ascend 950's", batched),
        Wrong("packed, called BSND", lambda c: {"layout": "BSND"}, "RELATION", r"4 axes \(B, S, N, D\)",
              lambda r: apply_rotary(r, "TND")),
        Wrong("key has fewer rows", lambda c: {"key": c["key"][:-1]}, "RELATION", "the rows and the D of query",
              batched),
        Wrong("a cosine for each head", lambda c: {"cos": c["cos"].repeat(1, 1, 2, 1)}, "RELATION",
              "cos is .*\n.*one head", batched),
        Wrong("sines for half of the width", lambda c: {"sin": c["sin"][..., :32]}, "RELATION", "sin is .*\n.*the D",
              batched),
        Wrong("an odd width", lambda c: {name: c[name][..., :7] for name in ("query", "key", "cos", "sin")},
              "RELATION", "even D", batched),
        Wrong("no key heads", lambda c: {"key": c["key"][:, :, :0]}, "SIZE", "at least one row and one head", batched),
        Wrong("a width of 32", narrow, "SIZE", "D = 64 or 128", batched),
        Wrong("more heads than fit into a core", lambda c: {"query": c["query"].repeat(1, 1, 160, 1)}, "SIZE",
              "memory of one core", batched),
        Wrong("int8", lambda c: as_dtype(c, torch.int8), "DTYPE", "float16, bfloat16 or float32", batched),
        Wrong("sines in fp64", lambda c: {"sin": c["sin"].double()}, "DTYPE", "sin is .*\n.*query's", batched),
    ]),
}

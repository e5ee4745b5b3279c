"""Memory formats.  A copy has no tag, so here a cast changes nothing; tests/core/test_format.py follows the tags."""
from random import Random

import torch
from torch import Tensor

from operators.case import Call, Case, Wrong, floats, half, ints

ND, FRACTAL_NZ = 2, 29


def drawn(r: Random, least: int = 1, most: int = 5) -> Tensor:
    shape, dtype = [r.randint(1, 4) for _ in range(r.randint(least, most))], r.choice((half(r), torch.int8))
    return ints(r, -9, 9, *shape, dtype=dtype) if dtype == torch.int8 else floats(r, *shape, dtype=dtype)


def cast(r: Random) -> Call:
    acl_format = r.choice((ND, FRACTAL_NZ))
    return dict(input=drawn(r, 2 if acl_format == FRACTAL_NZ else 1), acl_format=acl_format)


def like(r: Random) -> Call:
    return dict(input=drawn(r), dst=drawn(r))


def itself(r: Random) -> Call:
    x = drawn(r)
    return dict(input=x, src=x)


def tiled(r: Random) -> Call:
    return dict(input=floats(r, 4, 6), acl_format=FRACTAL_NZ)


NOT_BUILT = Wrong("another element type", lambda c: {"customize_dtype": 1}, "RELATION", "customize_dtype is 1")
CAST_IS_WRONG = [
    Wrong("a format of convolutions", lambda c: {"acl_format": 3}, "RELATION", r"2 \(ND\) or 29"),
    Wrong("a vector", lambda c: {"input": c["input"][0]}, "RELATION", "silently stays ND", tiled),
    Wrong("seven axes", lambda c: {"input": c["input"][(None,) * 5]}, "RELATION", "2 to 6 axes", tiled),
    Wrong("int64", lambda c: {"input": c["input"].long()}, "DTYPE", "for FRACTAL_NZ", tiled),
    Wrong("fp64", lambda c: {"input": c["input"].double()}, "DTYPE", "for FRACTAL_NZ", tiled),
    NOT_BUILT,
]

CASES = {
    "npu_format_cast": Case(cast, lambda input, acl_format: input, CAST_IS_WRONG),
    "npu_format_cast.Tensor": Case(like, lambda input, dst: input, [NOT_BUILT]),
    "npu_format_cast_.acl_format": Case(cast, lambda input, acl_format: input, CAST_IS_WRONG),
    "npu_format_cast_": Case(itself, lambda input, src: input, [
        Wrong("another tensor", lambda c: {"src": c["src"].clone()}, "RELATION", "format-cast-by-example"),
        NOT_BUILT,
    ]),
    "get_npu_format": Case(lambda r: dict(input=drawn(r)), lambda input: {4: 0, 5: 30}.get(input.dim(), ND), []),
}

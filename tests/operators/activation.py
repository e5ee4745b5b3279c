"""npu_swiglu."""
import math
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half


def swiglu(r: Random) -> Call:
    shape = [r.randint(1, 4) for _ in range(r.randint(1, 3))]
    dim = r.randrange(-len(shape), len(shape))
    shape[dim] *= 2
    return dict(input=floats(r, *shape, dtype=r.choice((half(r), torch.float32)), scale=3.0), dim=dim)


def naive(input, dim=-1):
    axis = input.movedim(dim, -1)
    half = axis.shape[-1] // 2
    out = torch.empty(*axis.shape[:-1], half, dtype=torch.float64)
    for place in torch.cartesian_prod(*[torch.arange(n) for n in out.shape]).view(-1, out.dim()).tolist():
        *row, i = place
        gate, up = axis[(*row, i)].item(), axis[(*row, i + half)].item()
        out[(*row, i)] = gate / (1 + math.exp(-gate)) * up
    return out.movedim(-1, dim)


def rows(r: Random) -> Call:
    return dict(input=floats(r, 2, 8))


CASES = {
    "npu_swiglu": Case(swiglu, naive, [
        Wrong("no such axis", lambda c: {"dim": 2}, "RELATION", r"an axis of input \[2, 8\]", rows),
        Wrong("an odd length", lambda c: {"input": c["input"][:, :7]}, "RELATION", "even length", rows),
        Wrong("no rows", lambda c: {"input": c["input"][:0]}, "SIZE", "skip the call", rows),
        Wrong("strided", lambda c: {"input": c["input"][:, :4]}, "SIZE", "contiguous", rows),
        Wrong("9 axes", lambda c: {"input": c["input"].view([1] * 8 + [16])}, "SIZE", "at most 8 axes", rows),
        Wrong("fp64", lambda c: {"input": c["input"].double()}, "DTYPE", "float16, bfloat16 or float32", rows),
    ]),
}

"""npu_transpose_batchmatmul."""
from random import Random

import torch

from operators.case import LEFT_OUT, Call, Case, Wrong, floats, half
from operators.case_int8 import packed, requantised


def batched(r: Random, form: str | None = None) -> Call:
    """Heads in front or second; whole, in parts, or quantised."""
    form = form or r.choice(("whole", "whole", "parts", "int8"))
    dtype = torch.float16 if form == "int8" else r.choice((half(r), torch.float32))
    M, B, K, N = r.randint(0, 3), r.choice((2, 4)), r.choice((16, 32)), r.choice((16, 32))
    swapped = r.random() < 0.6
    x = floats(r, M, B, K, dtype=dtype) if swapped else floats(r, B, M, K, dtype=dtype)
    weight = floats(r, B, N, K, dtype=dtype).mT if r.random() < 0.3 else floats(r, B, K, N, dtype=dtype)
    call = dict(input=x, weight=weight)
    if swapped or r.random() < 0.5:
        call |= dict(perm_x1=[1, 0, 2] if swapped else [0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    if form == "parts":
        call["batch_split_factor"] = r.choice((1, 2, B))
    if form == "int8":
        call["scale"] = packed(r, B * N)
    return call


def naive(input, weight, *, perm_x1=None, scale=None, batch_split_factor=1, **rest):
    by_row = input if perm_x1 == [1, 0, 2] else input.transpose(0, 1)
    M, (B, _, N) = len(by_row), weight.shape
    y = torch.empty(M, B, N, dtype=torch.float64)
    for m in range(M):
        for b in range(B):
            y[m, b] = by_row[m, b] @ weight[b]
    if scale is not None:
        flat = [[requantised(v, s) for v, s in zip(row, scale.tolist(), strict=True)] for row in y.flatten(1).tolist()]
        return torch.tensor(flat, dtype=torch.int8).view(M, 1, B * N)
    if batch_split_factor == 1:
        return y
    width = B * N // batch_split_factor
    return torch.stack([y.flatten(1)[:, i * width:(i + 1) * width] for i in range(batch_split_factor)])


def heads(r: Random) -> Call:
    return dict(input=floats(r, 5, 4, 16), weight=floats(r, 4, 16, 32), perm_x1=[1, 0, 2])


def to_int8(r: Random) -> Call:
    return batched(r, "int8")


CASES = {
    "npu_transpose_batchmatmul": Case(batched, naive, [
        Wrong("bias", lambda c: {"bias": c["weight"]}, "RELATION", "takes no bias"),
        Wrong("perm_x1 swaps K", lambda c: {"perm_x1": [0, 2, 1]}, "RELATION", r"perm_x1 is \[0, 2, 1\]"),
        Wrong("perm_x2", lambda c: {"perm_x2": [0, 2, 1]}, "RELATION", "weight .B, K, N."),
        Wrong("perm_y", lambda c: {"perm_y": [0, 1, 2]}, "RELATION", "the result is .M, B, N."),
        Wrong("2 axes", lambda c: {"input": c["input"][0]}, "RELATION", "3 axes each"),
        Wrong("perm_x1 is left out", lambda c: {"perm_x1": LEFT_OUT}, "RELATION",
              r"input \[5, 4, 16\], read as .B, M, K.", heads),
        Wrong("K differs", lambda c: {"input": c["input"][..., :8]}, "RELATION", "read as .M, B, K.", heads),
        Wrong("a part of a column", lambda c: {"batch_split_factor": 3}, "RELATION", "a divisor of the 128 = B", heads),
        Wrong("parts of a head", lambda c: {"batch_split_factor": 8}, "RELATION", "batch-split-factor", heads),
        Wrong("parts of int8", lambda c: {"batch_split_factor": 2}, "RELATION", "1 where scale is given", to_int8),
        Wrong("a scale for each head", lambda c: {"scale": c["scale"][:4]}, "RELATION", "each column of each", to_int8),
        Wrong("a plain scale", lambda c: {"scale": c["scale"].float()}, "RELATION", "would be misread", to_int8),
        Wrong("int8 from bf16", lambda c: {"input": c["input"].bfloat16(), "weight": c["weight"].bfloat16()}, "DTYPE",
              "float16 where scale", to_int8),
        Wrong("too many columns of int8",
              lambda c: {"input": torch.zeros(1, 2, 16).half(), "weight": torch.zeros(2, 16, 32768).half(),
                         "perm_x1": [1, 0, 2], "scale": torch.zeros(65536, dtype=torch.int64)},
              "SIZE", "B . N below 65536", to_int8),
        Wrong("K is no multiple of 16", lambda c: {"weight": c["weight"][..., :8]}, "SIZE", "multiples of 16", heads),
        Wrong("N is too long", lambda c: {"weight": torch.empty(4, 16, 65536).bfloat16()}, "SIZE",
              "B, K and N below 65536", heads),
        Wrong("B * K is too long", lambda c: {"input": c["input"][:, :1].expand(5, 4096, 16),
                                              "weight": c["weight"][:1].expand(4096, 16, 32)},
              "SIZE", "B . K below 65536", heads),
        Wrong("fp64", lambda c: {"input": c["input"].double(), "weight": c["weight"].double()}, "DTYPE",
              "float16, bfloat16 or float32", heads),
        Wrong("weight in fp32", lambda c: {"weight": c["weight"].float()}, "DTYPE", "input's torch.bfloat16", heads),
    ]),
}

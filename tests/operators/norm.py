"""npu_rms_norm and npu_add_rms_norm."""
import math
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half


def rms_norm(r: Random) -> Call:
    lead, axes = [r.randint(0, 4) for _ in range(r.randint(1, 2))], [r.randint(1, 9) for _ in range(r.randint(1, 2))]
    dtype = half(r)
    gamma = floats(r, *axes, dtype=r.choice((dtype, torch.float32)))
    return dict(input=floats(r, *lead, *axes, dtype=dtype), gamma=gamma, epsilon=r.choice((1e-6, 1e-3)))


def naive_rms_norm(input, gamma, epsilon=1e-6):
    y, rstd = torch.empty_like(input), torch.empty(*input.shape[:input.dim() - gamma.dim()], *[1] * gamma.dim())
    rows = input.reshape(-1, gamma.numel()), y.view(-1, gamma.numel()), rstd.double().view(-1)
    for x, out, r in zip(*rows, strict=True):
        r.fill_(1 / math.sqrt(sum(v * v for v in x.tolist()) / gamma.numel() + epsilon))
        out.copy_(x * r * gamma.flatten())
    return y, rows[2].view(rstd.shape)


def add_rms_norm(r: Random) -> Call:
    T, H, dtype = r.randint(1, 5), r.randint(1, 9), half(r)
    return {name: floats(r, *shape, dtype=dtype) for name, shape in (("x1", (T, H)), ("x2", (T, H)), ("gamma", (H,)))}


def naive_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    x = x1 + x2
    return *naive_rms_norm(x, gamma, epsilon), x


CASES = {
    "npu_rms_norm": Case(rms_norm, naive_rms_norm, [
        Wrong("gamma is too long", lambda c: {"gamma": c["gamma"].repeat(2)}, "RELATION", "last axes of input"),
        Wrong("gamma is fp16 beside bf16", lambda c: {"input": c["input"].bfloat16(), "gamma": c["gamma"].half()},
              "DTYPE", "float32 or input's torch.bfloat16"),
        Wrong("fp64", lambda c: {"input": c["input"].double(), "gamma": c["gamma"].double()}, "DTYPE",
              "float16, bfloat16 or float32"),
    ]),
    "npu_add_rms_norm": Case(add_rms_norm, naive_add_rms_norm, [
        Wrong("x2 has fewer rows", lambda c: {"x2": c["x2"][:-1]}, "RELATION", "nothing is broadcast"),
        Wrong("gamma in fp32", lambda c: {"gamma": c["gamma"].float()}, "DTYPE", "gamma is .*\n.*x1's"),
    ], wide=2**-8),
}

"""npu_attention_update."""
import math
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half, unwritten


def update(r: Random) -> Call:
    parts, R, D, dtype = r.choice((1, 2, 3, 16)), r.randint(0, 4), r.choice((8, 16)), r.choice((half(r), torch.float32))
    lse = [floats(r, R, dtype=torch.float32, scale=r.choice((1, 100))) for _ in range(parts)]
    for part in lse:
        for row in range(R):
            if r.random() < 0.2:
                part[row] = -math.inf  # no key of this part
    return dict(lse=lse, local_out=[floats(r, R, D, dtype=dtype) for _ in range(parts)],
                update_type=r.choice((0, 1)))


def naive(lse, local_out, update_type):
    out = torch.zeros_like(local_out[0])
    merged = torch.full_like(lse[0], -math.inf)
    for row in range(len(out)):
        present = [(part[row].item(), rows[row]) for part, rows in zip(lse, local_out, strict=True)
                   if part[row] != -math.inf]
        if not present:
            continue
        peak = max(value for value, _ in present)
        total = sum(math.exp(value - peak) for value, _ in present)
        merged[row] = peak + math.log(total)
        for value, numbers in present:
            out[row] += math.exp(value - merged[row].item()) * numbers
    return out, merged if update_type else unwritten((len(out),))


def two(r: Random) -> Call:
    return dict(lse=[torch.zeros(3)] * 2, local_out=[floats(r, 3, 8)] * 2, update_type=0)


def second(name, value):
    """Another second part."""
    return lambda c: {name: [c[name][0], value(c[name][1])]}


CASES = {
    "npu_attention_update": Case(update, naive, [
        Wrong("one output", lambda c: {"local_out": c["local_out"][:1]}, "RELATION", "each of the 2 lse", two),
        Wrong("update_type 2", lambda c: {"update_type": 2}, "RELATION", "0 .output only. or 1", two),
        Wrong("heads apart", lambda c: {"local_out": [t[:, None] for t in c["local_out"]]}, "RELATION",
              "flatten rows and heads", two),
        Wrong("fewer rows", second("local_out", lambda t: t[:2]), "RELATION", r"local_out\[1\] is \[2, 8\]", two),
        Wrong("lse has 2 axes", second("lse", lambda t: t[:, None]), "RELATION", "one for each row", two),
        Wrong("a row without keys, as attention marks it", second("lse", lambda t: t + math.inf), "RELATION",
              "map it to -inf", two),
        Wrong("+inf beside NaN", second("lse", lambda t: torch.tensor([0, math.inf, math.nan])), "RELATION",
              "map it to -inf", two),
        Wrong("17 parts", lambda c: {"lse": c["lse"][:1] * 17, "local_out": c["local_out"][:1] * 17}, "SIZE",
              "1 to 16 parts", two),
        Wrong("D is 12", lambda c: {"local_out": [torch.zeros(3, 12).half()] * 2}, "SIZE", "multiple of 8", two),
        Wrong("D is 520", lambda c: {"local_out": [torch.zeros(3, 520).half()] * 2}, "SIZE", "8 to 512", two),
        Wrong("another dtype", second("local_out", lambda t: t.half()), "DTYPE", "all alike", two),
        Wrong("fp64", lambda c: {"local_out": [t.double() for t in c["local_out"]]}, "DTYPE", "or float32", two),
        Wrong("lse in bf16", second("lse", lambda t: t.bfloat16()), "DTYPE", "float32", two),
    ]),
}

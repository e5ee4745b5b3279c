"""npu_top_k_top_p; without k in tests/core/test_top_k_top_p.py, because the real shape inference demands it."""
import math
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half


def filtered(r: Random) -> Call:
    B, V, dtype = r.randint(0, 4), r.randint(1, 12), r.choice((half(r), torch.float32))
    logits = floats(r, B, V, dtype=dtype, scale=2.0)
    if r.random() < 0.5:
        logits = logits.round()  # ties
    if V > 1 and r.random() < 0.3:
        logits[:, 0] = -math.inf  # filtered before
    p = torch.tensor([r.choice((0.0, 0.3, 0.7, 0.95, 1.0)) for _ in range(B)], dtype=dtype)
    k = torch.tensor([r.randint(1, V) for _ in range(B)], dtype=torch.int32)
    return dict(logits=logits, p=r.choice((None, p, p)), k=k)


def naive(logits, p=None, k=None):
    out = logits.clone()
    for b, row in enumerate(logits.tolist()):
        kept = sorted(range(len(row)), key=lambda v: (row[v], v))  # ascending, stable
        if k is not None:
            threshold = row[kept[-k[b]]]
            kept = [v for v in kept if row[v] >= threshold]
        if p is not None:
            odds = [math.exp(row[v] - row[kept[-1]]) for v in kept]
            total, below = sum(odds), 0.0
            for odd in odds[:-1]:
                below += odd / total
                if below <= 1 - p[b].item() + 1e-9:
                    kept = kept[1:]
        for v in set(range(len(row))) - set(kept):
            out[b, v] = -math.inf
    return out


def two(r: Random) -> Call:
    return dict(logits=floats(r, 2, 5), p=torch.tensor([0.5, 1.0]).bfloat16(), k=torch.tensor([1, 5]).int())


def many(r: Random) -> Call:
    return dict(logits=floats(r, 1, 2000), k=torch.tensor([1024]).int())


CASES = {
    "npu_top_k_top_p": Case(filtered, naive, [
        Wrong("one row", lambda c: {"logits": c["logits"][0]}, "RELATION", "2 axes .B, V.", two),
        Wrong("no filter", lambda c: {"p": None, "k": None}, "RELATION", "at least one of them", two),
        Wrong("fp64", lambda c: {"logits": c["logits"].double(), "p": c["p"].double()}, "DTYPE", "or float32", two),
        Wrong("one p", lambda c: {"p": c["p"][:1]}, "RELATION", r"p is \[1\].*\n.*\[2\] .B.", two),
        Wrong("p in fp32", lambda c: {"p": c["p"].float()}, "DTYPE", "logits' torch.bfloat16", two),
        Wrong("p above 1", lambda c: {"p": c["p"] * 2}, "RELATION", "from 0 to 1", two),
        Wrong("p is NaN", lambda c: {"p": c["p"] * math.nan}, "RELATION", "from 0 to 1", two),
        Wrong("one k", lambda c: {"k": c["k"][:1]}, "RELATION", r"k is \[1\].*\n.*\[2\] .B.", two),
        Wrong("k in int64", lambda c: {"k": c["k"].long()}, "RELATION", "reads 4 bytes", two),
        Wrong("k is 0", lambda c: {"k": c["k"] - 1}, "RELATION", r"(?s)k is \[0, 4\].*top-k-range", two),
        Wrong("k above V", lambda c: {"k": c["k"] + 1}, "RELATION", "from 1 to V = 5", two),
        Wrong("k is 1025", lambda c: {"k": c["k"] + 1}, "SIZE", "up to 1024", many),
    ]),
}

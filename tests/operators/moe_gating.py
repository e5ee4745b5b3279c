"""npu_moe_gating_top_k, npu_moe_gating_top_k_softmax and its second version."""
import math
from random import Random

import torch
from torch import Tensor

from operators.case import Call, Case, Wrong, floats, half, ints, unwritten

# Few different logits, so that ties are common: the lower id comes first.  They differ by more than fp16 rounds away.
LEVELS = torch.tensor([-1.3, -0.6, 0.2, 0.9, 1.7])
CORRECTIONS = torch.tensor([-0.7, 0.0, 0.31])


def logits(r: Random, *shape: int, dtype: torch.dtype) -> Tensor:
    return LEVELS[ints(r, 0, len(LEVELS), *shape, dtype=torch.int64)].to(dtype)


def best(numbers: list[float], k: int) -> list[int]:
    return sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:k]


def softmax(numbers: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in numbers)
    return [math.exp(v) / total for v in numbers]


# ---- by score, or by a table


def gating(r: Random) -> Call:
    T, groups, size = r.randint(0, 5), r.randint(1, 4), r.randint(3, 6)
    dtype = r.choice((half(r), torch.float32))
    kept = r.randint(1, groups)
    call = dict(x=logits(r, T, groups * size, dtype=dtype), k=r.randint(1, kept * size), k_group=kept,
                group_count=groups, group_select_mode=r.randint(0, 1), norm_type=r.randint(0, 1),
                out_flag=r.random() < 0.5, routed_scaling_factor=r.choice((1.0, 1.8)), eps=r.choice((1e-20, 1e-3)))
    if r.random() < 0.5:
        call["bias"] = CORRECTIONS[ints(r, 0, 3, groups * size, dtype=torch.int64)].to(dtype)
    return call


def hashed(r: Random) -> Call:
    call = gating(r)
    T, E = call["x"].shape
    k, ids = r.randint(1, E), r.randint(1, 9)
    call |= dict(k=k, k_group=call["group_count"])
    call["input_ids"] = ints(r, 0, ids, T, dtype=r.choice((torch.int32, torch.int64)))
    call["tid2eid"] = ints(r, 0, E, ids, k, dtype=r.choice((torch.int32, torch.int64)))
    return call


def naive_gating(x, k, *, bias=None, input_ids=None, tid2eid=None, k_group=1, group_count=1, group_select_mode=0,
                 renorm=0, norm_type=0, out_flag=False, routed_scaling_factor=1.0, eps=1e-20):
    T, E = x.shape
    weights, ids, every = x.new_zeros(T, k), torch.zeros(T, k, dtype=torch.int32), unwritten((T, E))
    for t, row in enumerate(x.tolist()):
        scores = softmax(row) if norm_type == 0 else [1 / (1 + math.exp(-v)) for v in row]
        choice = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        size = E // group_count
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(group_count)]
        kept = best([sum(g[: 1 + group_select_mode]) for g in groups], k_group)
        ranked = [e for e in best(choice, E) if e // size in kept]
        chosen = ranked[:k] if input_ids is None else tid2eid[input_ids[t]].tolist()
        total = sum(scores[e] for e in chosen) + eps if norm_type == 1 else 1
        ids[t] = torch.tensor(chosen)
        weights[t] = torch.tensor([scores[e] / total * routed_scaling_factor for e in chosen])
        if out_flag:
            every[t] = torch.tensor(scores)
    return weights, ids, every


def sixteen(r: Random) -> Call:
    return dict(x=floats(r, 4, 16), k=2)


def from_table(r: Random) -> Call:
    return dict(x=floats(r, 4, 16), k=2, input_ids=torch.tensor([0, 2, 2, 1]), tid2eid=ints(r, 0, 16, 3, 2))


def to(**arguments):
    return lambda c: arguments


GATING_IS_WRONG = [
    Wrong("a batch axis", lambda c: {"x": c["x"][None]}, "RELATION", "one row of logits a token", sixteen),
    Wrong("bias too short", to(bias=torch.zeros(15)), "RELATION", r"\[16\], one number an expert", sixteen),
    Wrong("bias with two axes", to(bias=torch.zeros(1, 16)), "RELATION", r"\[16\], one number an expert", sixteen),
    Wrong("groups of no size", to(group_count=5), "RELATION", "a divisor of the 16 experts", sixteen),
    Wrong("no groups", to(group_count=0), "RELATION", "a divisor", sixteen),
    Wrong("more groups than there are", to(group_count=4, k_group=5), "RELATION", "1 to 4", sixteen),
    Wrong("k_group alone", to(k_group=2), "RELATION", "1 to 1", sixteen),
    Wrong("k beyond the kept groups", to(group_count=4, k_group=2, k=9), "RELATION", "2 groups of 4", sixteen),
    Wrong("k is 0", to(k=0), "RELATION", "1 to 16", sixteen),
    Wrong("an unknown norm", to(norm_type=2), "RELATION", "sigmoid", sixteen),
    Wrong("an unknown group score", to(group_select_mode=2), "RELATION", "best two", sixteen),
    Wrong("renorm", to(renorm=1), "RELATION", "before the top-k", sixteen),
    Wrong("many experts", to(x=torch.zeros(1, 4096).bfloat16()), "SIZE", "at most 2048", sixteen),
    Wrong("groups of two", to(group_count=8, k_group=2), "SIZE", "more than 2 experts a group", sixteen),
    Wrong("groups that fill up", to(x=torch.zeros(1, 390).bfloat16(), group_count=130), "SIZE", "multiple of 32",
          sixteen),
    Wrong("integers", lambda c: {"x": c["x"].int()}, "DTYPE", "bfloat16", sixteen),
    Wrong("fp64", lambda c: {"x": c["x"].double()}, "DTYPE", "bfloat16", sixteen),
    Wrong("bias in another dtype", to(bias=torch.zeros(16)), "DTYPE", "torch.bfloat16, the dtype of x", sixteen),
    Wrong("ids alone", to(input_ids=torch.zeros(4, dtype=torch.int32)), "RELATION", "together with input_ids", sixteen),
    Wrong("fewer ids", lambda c: {"input_ids": c["input_ids"][:3]}, "RELATION", "one id a row(.*\n)*.*SB-05",
          from_table),
    Wrong("table of another k", lambda c: {"tid2eid": c["tid2eid"][:, :1]}, "RELATION", "experts for each id",
          from_table),
    Wrong("float ids", lambda c: {"input_ids": c["input_ids"].float()}, "RELATION", "int32 or int64", from_table),
    Wrong("an id without a row", lambda c: {"input_ids": c["input_ids"] + 1}, "RELATION", "0 to 2, rows of tid2eid",
          from_table),
    Wrong("an expert that is not there", lambda c: {"tid2eid": c["tid2eid"] + 16}, "RELATION", "expert ids 0 to 15",
          from_table),
    Wrong("table and groups", to(group_count=4, k_group=2), "SIZE", "knows no groups", from_table),
    Wrong("table of 65", lambda c: {"x": c["x"].repeat(1, 5), "k": 65, "tid2eid": c["tid2eid"][:, :1].repeat(1, 65)},
          "SIZE", "at most 64 with a table", from_table),
]

# ---- softmax first


def two_or_three_axes(r: Random) -> Call:
    rows, E = [r.randint(0, 4) for _ in range(r.randint(1, 2))], r.randint(1, 12)
    call = dict(x=logits(r, *rows, E, dtype=r.choice((half(r), torch.float32))), k=r.randint(1, E))
    if r.random() < 0.4:
        call["finished"] = ints(r, 0, 2, *rows).bool()
    return call


def second(r: Random) -> Call:
    call = two_or_three_axes(r) | dict(renorm=r.choice((0, 1, None)), output_softmax=r.random() < 0.5)
    if call["x"].dim() == 3 or call["renorm"] is None:
        # Here torch_npu's shape inference is wrong about the scores, its host code is not: tests/core/test_moe_ops.py.
        call["output_softmax"] = False
    return call


def naive_softmax(x, finished=None, k=1):
    weights, ids, _ = naive_second(x, k=k, finished=finished)
    rows = weights[..., 0].numel()
    row_idx = torch.tensor([[j * rows + t for j in range(k)] for t in range(rows)], dtype=torch.int32)
    return weights, ids, row_idx.reshape(ids.shape)


def naive_second(x, *, k=1, finished=None, renorm=0, output_softmax=False):
    E, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
    weights, ids = x.new_zeros(len(rows), k), torch.zeros(len(rows), k, dtype=torch.int32)
    every = [softmax(row) for row in rows.tolist()]
    for t, row in enumerate(rows.tolist()):
        chosen = best(row, k)
        weights[t] = torch.tensor(softmax([row[e] for e in chosen]) if renorm else [every[t][e] for e in chosen])
        ids[t] = torch.tensor(chosen) if finished is None or not finished.flatten()[t] else E
    scores = torch.tensor(every, dtype=torch.float64).reshape(x.shape)
    shape = *x.shape[:-1], k
    return weights.view(shape), ids.view(shape), scores if output_softmax and not renorm else scores.new_zeros(0)


SOFTMAX_IS_WRONG = [
    Wrong("one axis", lambda c: {"x": c["x"][0]}, "RELATION", "one row of logits a token", sixteen),
    Wrong("four axes", lambda c: {"x": c["x"][None, None]}, "RELATION", "one row of logits a token", sixteen),
    Wrong("fewer flags", to(finished=torch.zeros(3, dtype=torch.bool)), "RELATION", "one flag a row", sixteen),
    Wrong("k is 0", to(k=0), "RELATION", "1 to 16", sixteen),
    Wrong("k beyond E", to(k=17), "RELATION", "1 to 16", sixteen),
    Wrong("k is 1025", lambda c: {"x": c["x"].repeat(1, 128), "k": 1025}, "SIZE", "at most 1024", sixteen),
    Wrong("fp64", lambda c: {"x": c["x"].double()}, "DTYPE", "bfloat16", sixteen),
    Wrong("flags in integers", to(finished=torch.zeros(4, dtype=torch.int32)), "DTYPE", "bool", sixteen),
]

CASES = {
    "npu_moe_gating_top_k": Case(lambda r: r.choice((gating, gating, hashed))(r), naive_gating, GATING_IS_WRONG),
    "npu_moe_gating_top_k_softmax": Case(two_or_three_axes, naive_softmax, SOFTMAX_IS_WRONG),
    "npu_moe_gating_top_k_softmax_v2": Case(second, naive_second, [
        *SOFTMAX_IS_WRONG, Wrong("renorm 2", to(renorm=2), "RELATION", "then softmax of them", sixteen)]),
}

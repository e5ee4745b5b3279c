"""npu_moe_init_routing, npu_moe_init_routing_v2 and npu_moe_finalize_routing."""
from random import Random

import torch
from torch import Tensor

from operators.case import LEFT_OUT, Call, Case, Wrong, floats, half, ints, unwritten


def some_float(r: Random) -> torch.dtype:
    return r.choice((half(r), torch.float32))


def to(**arguments):
    return lambda c: arguments


def fp64(*names: str):
    return lambda c: {name: c[name].double() for name in names}


# ---- npu_moe_init_routing


def init(r: Random) -> Call:
    T, K = r.randint(0, 6), r.randint(1, 4)
    row_idx = torch.arange(T * K, dtype=torch.int32).view(K, T).T
    return dict(x=floats(r, T, r.randint(1, 5), dtype=some_float(r)), row_idx=r.choice((row_idx, row_idx.contiguous())),
                expert_idx=ints(r, 0, 5, T, K), active_num=r.randint(0, T + 2))


def naive_init(x, row_idx, expert_idx, active_num):
    T, K = expert_idx.shape
    pairs = sorted((expert_idx[t, j].item(), t, j) for t in range(T) for j in range(K))
    row_of = torch.zeros(T * K, dtype=torch.int32)
    for row, (_, t, j) in enumerate(pairs):
        row_of[row_idx[t, j]] = row
    tokens = [t for _, t, _ in pairs][: min(active_num, T) * K]
    return x[tokens], row_of, torch.tensor([e for e, _, _ in pairs], dtype=torch.int32)


def four_tokens(r: Random) -> Call:
    return dict(x=floats(r, 4, 6), row_idx=torch.arange(8, dtype=torch.int32).view(2, 4).T,
                expert_idx=ints(r, 0, 3, 4, 2), active_num=4)


INIT_IS_WRONG = [
    Wrong("three axes", lambda c: {"x": c["x"][None]}, "RELATION", "one row a token", four_tokens),
    Wrong("fewer tokens", lambda c: {"x": c["x"][:3]}, "RELATION", r"\[3, K\], as many rows", four_tokens),
    Wrong("flat experts", lambda c: {"expert_idx": c["expert_idx"].flatten()}, "RELATION", r"\[4, K\]", four_tokens),
    Wrong("places of another shape", lambda c: {"row_idx": c["row_idx"].T}, "RELATION", "the shape of expert_idx",
          four_tokens),
    Wrong("places row by row", to(row_idx=torch.arange(8, dtype=torch.int32).view(4, 2)), "RELATION",
          "column by column", four_tokens),
    Wrong("fewer than no tokens", to(active_num=-1), "RELATION", "4 .T. for all", four_tokens),
    Wrong("int8", lambda c: {"x": c["x"].to(torch.int8)}, "DTYPE", "float32", four_tokens),
    Wrong("fp64", fp64("x"), "DTYPE", "float32", four_tokens),
    Wrong("int64 experts", lambda c: {"expert_idx": c["expert_idx"].long()}, "DTYPE", "int32", four_tokens),
    Wrong("int64 places", lambda c: {"row_idx": c["row_idx"].long()}, "DTYPE", "row_idx is .*\n.*int32", four_tokens),
]

# ---- npu_moe_init_routing_v2


def init_v2(r: Random) -> Call:
    T, K, E, H = r.randint(0, 6), r.randint(1, 4), r.randint(1, 6), r.randint(1, 5)
    first = r.randint(0, E - 1)
    last = r.randint(first, E - 1)
    quant_mode = r.choice((-1, -1, 0, 1))
    dtype = torch.int8 if quant_mode == -1 and r.random() < 0.2 else some_float(r)
    x = ints(r, -9, 9, T, H, dtype=dtype) if dtype == torch.int8 else floats(r, T, H, dtype=dtype)
    if T and r.random() < 0.2:
        x[0] = 0
    call = dict(x=x, expert_idx=ints(r, 0, E, T, K), expert_num=E, active_expert_range=[first, last + 1],
                active_num=r.randint(-1, T * K + 2), expert_tokens_num_flag=r.random() < 0.8,
                expert_tokens_num_type=r.randint(0, 2), row_idx_type=r.randint(0, 1), quant_mode=quant_mode)
    if T and r.random() < 0.4:
        first, last = 0, E - 1
        call |= dict(drop_pad_mode=1, expert_capacity=r.randint(1, T), row_idx_type=0, expert_tokens_num_type=1,
                     active_expert_range=[0, E])
    if quant_mode == 0:
        call |= dict(scale=floats(r, 1, dtype=torch.float32, scale=30), offset=floats(r, 1, dtype=torch.float32))
    elif r.random() < 0.6:
        shape = (T,) if quant_mode == -1 else (r.choice((1, last + 1 - first)), H)
        call["scale"] = floats(r, *shape, dtype=torch.float32)
    return call


def naive_init_v2(x, expert_idx, *, scale=None, offset=None, active_num=-1, expert_capacity=-1, expert_num=-1,
                  drop_pad_mode=0, expert_tokens_num_type=0, expert_tokens_num_flag=False, quant_mode=-1,
                  active_expert_range=(), row_idx_type=0):
    (T, K), H, (first, end) = expert_idx.shape, x.shape[1], active_expert_range
    padded = drop_pad_mode == 1
    size = expert_num * expert_capacity if padded else min(active_num, T * K) if active_num > 0 else T * K
    dtype = x.dtype if quant_mode == -1 else torch.int8
    rows = torch.zeros(size, H, dtype=dtype) if padded else unwritten((size, H), dtype)
    along = torch.zeros(size, dtype=torch.float64) if padded else unwritten((size,))
    row_of = [-1] * (T * K)
    source = unwritten((T * K,), torch.int32)
    counts, row = [0] * expert_num, 0
    for expert in range(first, end):
        for t in range(T):
            for j in range(K):
                if expert_idx[t, j] != expert:
                    continue
                place = expert * expert_capacity + counts[expert] if padded else row
                counts[expert] += 1
                if padded and counts[expert] > expert_capacity:
                    continue
                row_of[t * K + j] = place
                if not padded:
                    source[row] = t * K + j
                    row += 1
                if place < size:
                    rows[place], along[place] = copied_row(x, t, expert - first, scale, offset, quant_mode)
    if quant_mode == 0:
        along = unwritten(())
    elif quant_mode == -1 and scale is None:
        along = unwritten((size,))
    return (rows.view(expert_num, expert_capacity, H) if padded else rows,
            source if row_idx_type == 1 else torch.tensor(row_of, dtype=torch.int32),
            counted(counts, first, end, expert_tokens_num_type) if expert_tokens_num_flag
            else unwritten((), torch.int64), along)


def copied_row(x: Tensor, t: int, expert: int, scale, offset, quant_mode: int) -> tuple[Tensor, float]:
    if quant_mode == -1:
        return x[t], 0.0 if scale is None else scale[t].item()
    if quant_mode == 0:
        return torch.tensor([max(-128, min(127, round(v * scale.item() + offset.item()))) for v in x[t].tolist()]), 0.0
    row = x[t] if scale is None else x[t] * scale[expert if len(scale) > 1 else 0]
    step = row.abs().max().item() / 127
    return torch.tensor([round(v / step) if step else 0 for v in row.tolist()]), step


def counted(counts: list[int], first: int, end: int, kind: int) -> Tensor:
    if kind == 2:
        pairs = unwritten((len(counts), 2), torch.int64)
        pairs[: end - first + 1] = 0
        for i, e in enumerate([e for e in range(first, end) if counts[e]]):
            pairs[i] = torch.tensor([e, counts[e]])
        return pairs
    return torch.tensor([sum(counts[first : e + 1]) if kind == 0 else counts[e] for e in range(first, end)])


def two_of_three(r: Random) -> Call:
    """Four tokens, two of three experts each."""
    return dict(x=floats(r, 4, 6), expert_idx=ints(r, 0, 3, 4, 2), expert_num=3, active_expert_range=[0, 3])


def with_capacity(r: Random) -> Call:
    return two_of_three(r) | dict(drop_pad_mode=1, expert_capacity=2, expert_tokens_num_type=1,
                                  expert_tokens_num_flag=True)


def static(r: Random) -> Call:
    return two_of_three(r) | dict(quant_mode=0, scale=torch.ones(1), offset=torch.zeros(1))


def dynamic(r: Random) -> Call:
    return two_of_three(r) | dict(quant_mode=1, scale=torch.ones(3, 6))


def experts(*ids: int):
    return lambda c: {"expert_idx": torch.tensor(ids, dtype=torch.int32).view(4, 2)}


INIT_V2_IS_WRONG = [
    Wrong("three axes", lambda c: {"x": c["x"][None]}, "RELATION", "T, H.: one row a token", two_of_three),
    Wrong("flat experts", lambda c: {"expert_idx": c["expert_idx"].flatten()}, "RELATION", "T, K.: one row a token",
          two_of_three),
    Wrong("fewer tokens", lambda c: {"expert_idx": c["expert_idx"][:3]}, "RELATION", r"\[4, K\], as many rows",
          two_of_three),
    Wrong("scale of another length", to(scale=torch.zeros(5)), "RELATION", "one number a row of x", two_of_three),
    Wrong("scale with two axes", to(scale=torch.zeros(4, 1)), "RELATION", "one number a row of x", two_of_three),
    Wrong("no number of experts", to(expert_num=LEFT_OUT), "RELATION", "the default -1", two_of_three),
    Wrong("no range", to(active_expert_range=LEFT_OUT), "RELATION", "remembers the default of the first call",
          two_of_three),
    Wrong("range past the experts", to(active_expert_range=[0, 4]), "RELATION", "last < 3", two_of_three),
    Wrong("empty range", to(active_expert_range=[2, 2]), "RELATION", "first <= last", two_of_three),
    Wrong("negative range", to(active_expert_range=[-1, 2]), "RELATION", "0 <= first", two_of_three),
    Wrong("half a range", to(active_expert_range=[3]), "RELATION", "first, last . 1", two_of_three),
    Wrong("an expert that is not there", experts(0, 1, 2, 3, 0, 0, 0, 0), "RELATION", "from 0 to 3(.*\n)*.*SB-08",
          two_of_three),
    Wrong("expert -2", experts(0, 1, -2, 1, 0, 0, 0, 0), "RELATION", "drop a padding row(.*\n)*.*SB-08", two_of_three),
    Wrong("expert -1", experts(0, 1, -1, -1, 0, 0, 0, 0), "RELATION",
          "not -1(.*\n)*.*SB-08(.*\n)*.*moe-expert-minus-one", two_of_three),
    Wrong("fewer than no rows", to(active_num=-2), "RELATION", "-1 for all", two_of_three),
    Wrong("an unknown count", to(expert_tokens_num_type=3), "RELATION", "expert and count", two_of_three),
    Wrong("an unknown index", to(row_idx_type=2), "RELATION", "scatter", two_of_three),
    Wrong("an unknown mode", to(drop_pad_mode=2), "RELATION", "expert_capacity rows an expert", two_of_three),
    Wrong("fp8", to(quant_mode=2), "RELATION", "of Ascend 950", two_of_three),
    Wrong("another element type", to(x_dtype=1), "RELATION", "x_dtype is 1\n.*not built", two_of_three),
    Wrong("offset without quantisation", to(offset=torch.zeros(1)), "RELATION", "None, but in quant_mode 0",
          two_of_three),
    Wrong("no static scale", to(scale=None), "RELATION", "scale is None\n.*one number for all", static),
    Wrong("static scale a channel", to(scale=torch.ones(6)), "RELATION", "one number for all", static),
    Wrong("no static offset", to(offset=None), "RELATION", "offset is None\n.*one number for all", static),
    Wrong("dynamic scale a row", to(scale=torch.ones(4)), "RELATION", r"\[1, 6\] or \[3, 6\]", dynamic),
    Wrong("dynamic offset", to(offset=torch.zeros(1)), "RELATION", "None, but in quant_mode 0", dynamic),
    Wrong("no capacity", to(expert_capacity=LEFT_OUT), "RELATION", "1 to 4 .T.", with_capacity),
    Wrong("capacity beyond the tokens", to(expert_capacity=5), "RELATION", "1 to 4 .T.", with_capacity),
    Wrong("capacity and scatter", to(row_idx_type=1), "RELATION", "0 .gather. in drop_pad_mode 1", with_capacity),
    Wrong("capacity on a rank", to(active_expert_range=[0, 2]), "RELATION", "all experts, in drop_pad_mode",
          with_capacity),
    Wrong("capacity and running sums", to(expert_tokens_num_type=0), "RELATION", "1 .count. in drop_pad_mode",
          with_capacity),
    Wrong("many experts", to(expert_num=10241), "SIZE", "at most 10240", two_of_three),
    Wrong("many experts in pairs", to(expert_num=5121, expert_tokens_num_type=2), "SIZE", "at most 5120", two_of_three),
    Wrong("int32 rows", lambda c: {"x": c["x"].int()}, "DTYPE", "or int8", two_of_three),
    Wrong("fp64", fp64("x"), "DTYPE", "or int8", two_of_three),
    Wrong("int8 to be quantised", lambda c: {"x": c["x"].to(torch.int8)}, "DTYPE", "to be quantised", dynamic),
    Wrong("int64 experts", lambda c: {"expert_idx": c["expert_idx"].long()}, "DTYPE", "int32", two_of_three),
    Wrong("bf16 scale", to(scale=torch.zeros(4).bfloat16()), "DTYPE", "float32", two_of_three),
    Wrong("bf16 offset", to(offset=torch.zeros(1).bfloat16()), "DTYPE", "offset is .*\n.*float32", static),
]

# ---- npu_moe_finalize_routing


def finalize(r: Random) -> Call:
    T, K, H, E, mode = r.randint(0, 5), r.randint(1, 4), r.randint(1, 5), r.randint(4, 6), r.randint(0, 3)
    dtype = some_float(r)
    call: Call = dict(skip1=None, skip2=None, bias=None, scales=None, export_for_source_row=None, drop_pad_mode=mode)
    if r.random() < 0.8:
        call["scales"] = floats(r, T, K, dtype=r.choice((dtype, torch.float32)) if dtype == torch.bfloat16 else dtype)
    else:
        K = 1
    if mode in (1, 3):
        C = r.randint(1, 3)
        call["expanded_permuted_rows"] = floats(r, E, C, H, dtype=dtype)
        call["expanded_src_to_dst_row"] = ints(r, -1, E * C, T * K)
    else:
        call["expanded_permuted_rows"] = floats(r, T * K, H, dtype=dtype)
        call["expanded_src_to_dst_row"] = torch.tensor(r.sample(range(T * K), T * K), dtype=torch.int32)
    for name in ("skip1", "skip2")[: r.randint(0, 2)]:
        call[name] = floats(r, T, H, dtype=dtype)
    if r.random() < 0.5:
        call |= dict(bias=floats(r, E, H, dtype=dtype), export_for_source_row=ints(r, 0, E, T, K))
    return call


def naive_finalize(expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row, export_for_source_row,
                   drop_pad_mode=0, k=1):
    rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    K = 1 if scales is None else scales.shape[1]
    T = len(expanded_src_to_dst_row) // K
    out = rows.new_zeros(T, rows.shape[1])
    for t in range(T):
        for skip in (skip1, skip2):
            out[t] += 0 if skip is None else skip[t]
        for j in range(K):
            row = expanded_src_to_dst_row[t * K + j if drop_pad_mode in (2, 3) else j * T + t].item()
            answer = rows[row] if row >= 0 else torch.zeros_like(out[t])
            if bias is not None:
                answer = answer + bias[export_for_source_row[t, j]]
            out[t] += answer * (1 if scales is None else scales[t, j])
    return out


def eight_pairs(r: Random) -> Call:
    return dict(expanded_permuted_rows=floats(r, 8, 6), skip1=None, skip2=None, bias=None, scales=floats(r, 4, 2),
                expanded_src_to_dst_row=torch.arange(8, dtype=torch.int32), export_for_source_row=None, drop_pad_mode=2)


def biased(r: Random) -> Call:
    return eight_pairs(r) | dict(bias=floats(r, 3, 6), export_for_source_row=ints(r, 0, 3, 4, 2))


def dropped(r: Random) -> Call:
    return biased(r) | dict(expanded_permuted_rows=floats(r, 3, 2, 6), drop_pad_mode=3,
                            expanded_src_to_dst_row=torch.tensor([0, 1, 2, 3, 4, 5, -1, -1], dtype=torch.int32))


def rows(*places: int):
    return to(expanded_src_to_dst_row=torch.tensor(places, dtype=torch.int32))


FINALIZE_IS_WRONG = [
    Wrong("an unknown mode", to(drop_pad_mode=4), "RELATION", "0 or 1 .entry j.T . t", eight_pairs),
    Wrong("a capacity in a mode without", to(expanded_permuted_rows=torch.zeros(2, 4, 6)), "RELATION",
          "T.K, H.: one row a pair", eight_pairs),
    Wrong("no capacity in a mode with one", to(drop_pad_mode=1), "RELATION", "C rows an expert", eight_pairs),
    Wrong("index with two axes", to(expanded_src_to_dst_row=torch.zeros(4, 2, dtype=torch.int32)), "RELATION",
          "one entry a pair", eight_pairs),
    Wrong("flat scales", lambda c: {"scales": c["scales"].flatten()}, "RELATION", "one weight a pair", eight_pairs),
    Wrong("fewer scales", lambda c: {"scales": c["scales"][:3]}, "RELATION", r"\[6\]: 3 tokens, 2 choices",
          eight_pairs),
    Wrong("a short index", rows(0, 1, 2), "RELATION", r"\[8\]: 4 tokens", eight_pairs),
    Wrong("fewer rows", lambda c: {"expanded_permuted_rows": c["expanded_permuted_rows"][:7]}, "RELATION", r"\[8, H\]",
          eight_pairs),
    Wrong("another k", to(k=3), "RELATION", "2, as in scales", eight_pairs),
    Wrong("k without scales", to(scales=None, k=2), "RELATION", "of ones", eight_pairs),
    Wrong("narrow addend", to(skip1=torch.zeros(4, 5).bfloat16()), "RELATION", r"\[4, 6\], the shape of the result",
          eight_pairs),
    Wrong("short addend", to(skip1=torch.zeros(4, 6).bfloat16(), skip2=torch.zeros(3, 6).bfloat16()), "RELATION",
          r"skip2 is .*\n.*\[4, 6\]", eight_pairs),
    Wrong("the second addend alone", to(skip2=torch.zeros(4, 6).bfloat16()), "RELATION", "None without skip1",
          eight_pairs),
    Wrong("experts of another K", to(export_for_source_row=torch.zeros(4, 3, dtype=torch.int32)), "RELATION",
          r"\[4, 2\] expert ids", eight_pairs),
    Wrong("bias without experts", to(export_for_source_row=None), "RELATION", "whose bias", biased),
    Wrong("narrow bias", lambda c: {"bias": c["bias"][:, :5]}, "RELATION", "H of the rows", biased),
    Wrong("bias of fewer experts than rows", lambda c: {"bias": c["bias"][:2]}, "RELATION", "3 experts, as the rows",
          dropped),
    Wrong("an expert without bias", lambda c: {"export_for_source_row": c["export_for_source_row"] + 3}, "RELATION",
          r"0 to 2 \(E of bias\)", biased),
    Wrong("-1 without a capacity", rows(0, 1, 2, 3, 4, 5, 6, -1), "RELATION", "know no -1", eight_pairs),
    Wrong("past the rows", rows(0, 1, 2, 3, 4, 5, 6, 8), "RELATION", "rows 0 to 7", eight_pairs),
    Wrong("past the capacity", rows(0, 1, 2, 3, 4, 5, 6, -1), "RELATION", "rows 0 to 5 of", dropped),
    Wrong("-2", rows(0, 1, 2, 3, 4, 5, -2, -1), "RELATION", "or -1 for a dropped pair", dropped),
    Wrong("fewer experts than choices", lambda c: {"bias": c["bias"][:1], "export_for_source_row":
                                                   torch.zeros(4, 2, dtype=torch.int32)}, "SIZE", "at least 2 experts",
          biased),
    Wrong("integers", lambda c: {"expanded_permuted_rows": c["expanded_permuted_rows"].int()}, "DTYPE",
          "float16, bfloat16 or float32", eight_pairs),
    Wrong("int64 index", lambda c: {"expanded_src_to_dst_row": c["expanded_src_to_dst_row"].long()}, "DTYPE", "int32",
          eight_pairs),
    Wrong("fp16 scales", lambda c: {"scales": c["scales"].half()}, "DTYPE", "for torch.bfloat16 rows", eight_pairs),
    Wrong("fp32 scales for fp16 rows", lambda c: {"expanded_permuted_rows": c["expanded_permuted_rows"].half(),
                                                  "scales": c["scales"].float()}, "DTYPE", "for torch.float16 rows",
          eight_pairs),
    Wrong("fp32 addend", to(skip1=torch.zeros(4, 6)), "DTYPE", "the dtype of the rows", eight_pairs),
    Wrong("fp32 bias", lambda c: {"bias": c["bias"].float()}, "DTYPE", "the dtype of the rows", biased),
    Wrong("int64 experts", lambda c: {"export_for_source_row": c["export_for_source_row"].long()}, "DTYPE", "int32",
          biased),
]

CASES = {
    "npu_moe_init_routing": Case(init, naive_init, INIT_IS_WRONG),
    "npu_moe_init_routing_v2": Case(init_v2, naive_init_v2, INIT_V2_IS_WRONG),
    "npu_moe_finalize_routing": Case(finalize, naive_finalize, FINALIZE_IS_WRONG),
}

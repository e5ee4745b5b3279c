"""npu_dynamic_quant and npu_quant_matmul."""
import struct
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half, ints
from operators.case_int8 import BF16, FP16, INT8, INT32, packed, requantised, unpacked


def dynamic(r: Random, form: str | None = None) -> Call:
    """By token; quant_mode 'pertensor' and 'perchannel' are in tests/core/test_quantised.py."""
    form = form or r.choice(("plain", "smooth", "experts"))
    dtype, H = half(r), r.randint(1, 9)
    lead = [r.randint(0, 3) for _ in range(r.randint(1, 2))]
    x = floats(r, *lead, H, dtype=dtype)
    if r.random() < 0.3:
        x = floats(r, H, *lead, dtype=dtype).movedim(0, -1)  # strided
    flat = x.reshape(-1, H)
    if len(flat) and r.random() < 0.5:
        x.select(-2, 0).zero_()
    if form == "plain":
        return dict(input=x) | r.choice(({}, dict(dst_type=1, quant_mode="pertoken")))
    if form == "smooth":
        return dict(input=x, smooth_scales=floats(r, H, dtype=dtype))
    ends = [*sorted(r.randint(0, len(flat)) for _ in range(r.randint(0, 3))), len(flat)]
    return dict(input=x, smooth_scales=floats(r, len(ends), H, dtype=dtype),
                group_index=torch.tensor(ends, dtype=torch.int32))


def naive_dynamic(input, *, smooth_scales=None, group_index=None, **rest):
    H = input.shape[-1]
    y, scale = torch.zeros(input.shape, dtype=torch.int8), torch.zeros(input.shape[:-1], dtype=torch.float64)
    for i, row in enumerate(input.reshape(-1, H).tolist()):
        smooth = [1.0] * H
        if group_index is not None:
            smooth = smooth_scales[sum(end <= i for end in group_index.tolist())].tolist()
        elif smooth_scales is not None:
            smooth = smooth_scales.tolist()
        row = [v * s for v, s in zip(row, smooth, strict=True)]
        largest = max(map(abs, row))
        scale.view(-1)[i] = largest / 127
        if largest:
            y.view(-1, H)[i] = torch.tensor([round(v * 127 / largest) for v in row])
    return y, scale


def product(r: Random, out: int | None = None, per_token: bool | None = None, bias: bool | None = None) -> Call:
    out = out or r.choice((INT8, INT32, FP16, BF16))
    per_token = (r.random() < 0.5 and out in (FP16, BF16)) if per_token is None else per_token
    M, K, N = r.randint(1, 4), r.choice((1, 5, 9, 1500)), r.randint(1, 5)
    lead1, lead2 = r.choice((((), ()), ((2,), ()), ((2,), (1,)), ((), (3,)), ((2, 1), (3,)), ((1, 3), (2, 3))))
    x1 = ints(r, -128, 128, *lead1, M, K, dtype=torch.int8)
    x2 = ints(r, -128, 128, *lead2, K, N, dtype=torch.int8)
    if r.random() < 0.4:
        x2 = x2.mT.contiguous().mT
    columns = r.choice((1, N))
    call = dict(x1=x1, x2=x2, scale=floats(r, columns, dtype=torch.float32, scale=0.01))
    if out != INT8 or r.random() < 0.5:
        call["output_dtype"] = out
    packs = out == INT8 or (out == FP16 and not per_token)
    if packs and r.random() < 0.5:
        call["scale"] = packed(r, columns, offsets=out == INT8)
        if out == FP16:
            call["x1"] = x1 // 16
    elif out in (INT32, BF16) and r.random() < 0.5:
        call["scale"] = call["scale"].bfloat16()
    elif out == INT8 and r.random() < 0.5:
        call["offset"] = floats(r, r.choice((1, columns)), dtype=torch.float32, scale=150.0)
    if per_token:
        call["pertoken_scale"] = floats(r, M, dtype=torch.float32).abs()
    if (r.random() < 0.6) if bias is None else bias:
        dtypes = [torch.int32]
        if out == BF16 or per_token:
            dtypes += [torch.float32, torch.bfloat16 if out == BF16 else torch.float16]
        dtype = r.choice(dtypes)
        batch = torch.broadcast_shapes(lead1, lead2)
        shape = r.choice(((N,), (*batch, 1, N))) if len(batch) == 1 else (N,)
        call["bias"] = ints(r, -500, 500, *shape) if dtype == torch.int32 else floats(r, *shape, dtype=dtype)
    return call


def cut(value: float) -> float:
    """An fp32 as the matrix unit keeps it: 19 bits."""
    return struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFFE000))[0]


def naive_product(x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None):
    out = output_dtype or INT8
    sums = x1.double() @ x2.double()
    N = sums.shape[-1]
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    scales = scale.tolist() * (N // len(scale))
    if out == INT32:
        return sums.int()
    if out == INT8:
        offsets = [0.0] * N if offset is None else offset.tolist() * (N // len(offset))
        if scale.dtype == torch.int64:
            numbers = scales
        else:  # as packed() packs them
            numbers = [struct.unpack("<I", struct.pack("<f", cut(s)))[0] | (max(-256, min(255, round(o))) & 0x1FF) << 37
                       for s, o in zip(scales, offsets, strict=True)]
        flat = [[requantised(v, n) for v, n in zip(row, numbers, strict=True)] for row in sums.view(-1, N).tolist()]
        return torch.tensor(flat, dtype=torch.int8).view(sums.shape)
    if scale.dtype == torch.int64:
        scales = [unpacked(s)[0] for s in scales]
    elif out == FP16 and pertoken_scale is None:
        scales = [cut(s) for s in scales]
    y = sums * torch.tensor(scales, dtype=torch.float64)
    if pertoken_scale is not None:
        y = y * pertoken_scale[:, None]
    return y + bias if bias is not None and bias.dtype != torch.int32 else y


def smooth(r: Random) -> Call:
    return dict(input=floats(r, 4, 3), smooth_scales=floats(r, 3))


def experts(r: Random) -> Call:
    return dict(input=floats(r, 4, 3), smooth_scales=floats(r, 2, 3), group_index=torch.tensor([1, 4]).int())


def plain(out: int, per_token: bool = False):
    def make(r: Random) -> Call:
        call = dict(x1=ints(r, -9, 9, 4, 6, dtype=torch.int8), x2=ints(r, -9, 9, 6, 5, dtype=torch.int8),
                    scale=torch.ones(5), output_dtype=out)
        return call | {"pertoken_scale": torch.ones(4)} if per_token else call

    return make


CASES = {
    "npu_dynamic_quant": Case(dynamic, naive_dynamic, [
        Wrong("int4", lambda c: {"dst_type": 16}, "RELATION", "dst_type is 16\n.*not built yet"),
        Wrong("dst_type_max", lambda c: {"dst_type_max": 15.0}, "RELATION", "not built yet"),
        Wrong("an unknown mode", lambda c: {"quant_mode": "perToken"}, "RELATION", "'pertoken', 'pertensor' or"),
        Wrong("one scale on an A2", lambda c: {"quant_mode": "pertensor"}, "RELATION", "dynamic-quant-mode", smooth),
        Wrong("1 axis", lambda c: {"input": c["input"][0]}, "RELATION", "2 axes or more", smooth),
        Wrong("no columns", lambda c: {"input": c["input"][:, :0]}, "RELATION", "no empty axis",
              lambda r: dict(input=floats(r, 4, 3))),
        Wrong("fp32", lambda c: {"input": c["input"].float(), "smooth_scales": c["smooth_scales"].float()}, "DTYPE",
              "float16 or bfloat16", smooth),
        Wrong("a scale too few", lambda c: {"smooth_scales": c["smooth_scales"][1:]}, "RELATION", "or .E, H. beside",
              smooth),
        Wrong("another dtype", lambda c: {"smooth_scales": c["smooth_scales"].float()}, "DTYPE", "input's torch.bf",
              smooth),
        Wrong("no scales of experts", lambda c: {"smooth_scales": None}, "RELATION", "given beside group_index",
              experts),
        Wrong("an end too few", lambda c: {"group_index": c["group_index"][1:]}, "RELATION", "a row for each end",
              experts),
        Wrong("2 axes of ends", lambda c: {"group_index": c["group_index"][None]}, "RELATION", "1 axis", experts),
        Wrong("int64", lambda c: {"group_index": c["group_index"].long()}, "RELATION", "reads 4 bytes", experts),
        Wrong("counts", lambda c: {"group_index": torch.tensor([3, 1]).int()}, "RELATION", "are these counts", experts),
        Wrong("rows are left", lambda c: {"group_index": torch.tensor([1, 3]).int()}, "RELATION", "a last end of 4",
              experts),
        Wrong("1025 experts", lambda c: {"smooth_scales": floats(Random(0), 1025, 3),
                                         "group_index": torch.full((1025,), 4).int()},
              "SIZE", "1 to 1024", experts),
    ]),
    "npu_quant_matmul": Case(product, naive_product, [
        Wrong("fp4", lambda c: {"x1_dtype": 296}, "RELATION", "x1_dtype is 296\n.*not built yet"),
        Wrong("K differs", lambda c: {"x1": c["x1"][:, :3]}, "RELATION", "the K of x1", plain(BF16)),
        Wrong("1 axis", lambda c: {"x1": c["x1"][0]}, "RELATION", "2 to 6 axes", plain(BF16)),
        Wrong("leading axes", lambda c: {"x1": c["x1"].expand(2, 4, 6).contiguous(),
                                         "x2": c["x2"].expand(3, 6, 5).contiguous()},
              "RELATION", "that broadcast", plain(BF16)),
        Wrong("scale has 2 axes", lambda c: {"scale": c["scale"][:, None]}, "RELATION", "one for each column",
              plain(BF16)),
        Wrong("pertoken_scale has 2 axes", lambda c: {"pertoken_scale": torch.ones(4, 1)}, "RELATION", r"\[4\] .M.",
              plain(BF16)),
        Wrong("bias has a row too many", lambda c: {"bias": torch.zeros(2, 1, 5).int()}, "RELATION",
              "where the result has 3 axes", plain(BF16)),
        Wrong("fp32 result", lambda c: {"output_dtype": 6}, "RELATION", "5 .float16. or 15", plain(BF16)),
        Wrong("offset of bf16", lambda c: {"offset": torch.ones(5)}, "RELATION", "unless the result is int8",
              plain(BF16)),
        Wrong("offset is too short", lambda c: {"offset": torch.ones(4)}, "RELATION", r"\[1\], or \[5\]", plain(INT8)),
        Wrong("offset in fp16", lambda c: {"offset": torch.ones(5).half()}, "DTYPE", "float32", plain(INT8)),
        Wrong("two offsets", lambda c: {"scale": packed(Random(0), 5), "offset": torch.ones(5)}, "RELATION",
              "quant-matmul-two-offsets", plain(INT8)),
        Wrong("no rows", lambda c: {"x1": c["x1"][:0]}, "SIZE", "no empty tensor", plain(BF16)),
        Wrong("N is too long", lambda c: {"x2": torch.zeros(6, 65536, dtype=torch.int8), "scale": torch.ones(1)},
              "SIZE", "up to 65535", plain(BF16)),
        Wrong("every second row of x2", lambda c: {"x2": c["x2"].repeat(2, 1)[::2]}, "SIZE", "contiguous, but for",
              plain(BF16)),
        Wrong("x2 in int32", lambda c: {"x2": c["x2"].int()}, "DTYPE", "is not built", plain(BF16)),
        Wrong("every second row", lambda c: {"x1": c["x1"].repeat(2, 1)[::2]}, "SIZE", "contiguous, but for",
              plain(BF16)),
        Wrong("int4 in int32", lambda c: {"x1": c["x1"].int(), "x2": c["x2"].int()}, "DTYPE", "is not built",
              plain(BF16)),
        Wrong("output_dtype is left out", lambda c: {"output_dtype": None}, "RELATION", "the default is int8",
              plain(BF16, True)),
        Wrong("pertoken_scale of int32", lambda c: {"output_dtype": INT32}, "RELATION", "float16 or bfloat16",
              plain(BF16, True)),
        Wrong("pertoken_scale in bf16", lambda c: {"pertoken_scale": c["pertoken_scale"].bfloat16()}, "DTYPE",
              "float32", plain(BF16, True)),
        Wrong("bf16 scale of int8", lambda c: {"scale": c["scale"].bfloat16()}, "DTYPE", "the default of output_dtype",
              plain(INT8)),
        Wrong("bf16 scale of fp16", lambda c: {"scale": c["scale"].bfloat16()}, "DTYPE", "where the result is float16",
              plain(FP16)),
        Wrong("packed scale beside pertoken_scale", lambda c: {"scale": packed(Random(0), 5)}, "DTYPE",
              "beside pertoken_scale", plain(FP16, True)),
        Wrong("packed scale of bf16", lambda c: {"scale": packed(Random(0), 5)}, "DTYPE", "bfloat16 or int32",
              plain(BF16)),
        Wrong("float bias of int8", lambda c: {"bias": torch.ones(5)}, "DTYPE", "int32 where the result is int8",
              plain(INT8)),
        Wrong("float bias of fp16", lambda c: {"bias": torch.ones(5)}, "DTYPE", "float16 without pertoken_scale",
              plain(FP16)),
        Wrong("bf16 bias of fp16", lambda c: {"bias": torch.ones(5).bfloat16()}, "DTYPE", "int32, float16 or float32",
              plain(FP16, True)),
        Wrong("fp16 bias of bf16", lambda c: {"bias": torch.ones(5).half()}, "DTYPE", "int32, bfloat16 or float32",
              plain(BF16)),
    ]),
}

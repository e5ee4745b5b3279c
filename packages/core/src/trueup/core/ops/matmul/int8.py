"""Products of int8 matrices, and the scales that turn their int32 sums into something else.

Where the matrix unit itself applies a scale, it keeps 19 bits of the float and packs them into 64 bits together with
an offset.  npu_trans_quant_param makes such a scale.  Source: ops-nn: quant/trans_quant_param_v2/README.md.
"""
import torch

# The dtypes of results, by the ids that `int? output_dtype` takes.
DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}

EXACT_K = 1024  # so many products of int8 add up to at most 2**24, where fp32 stops counting by ones
KEPT = 0xFFFFE000  # sign, exponent and 10 bits of the mantissa
SIGNED = 1 << 46  # the result is int8, not uint8
PACKED = (torch.int64, torch.uint64)


def int8_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y, exact, as fp32 or fp64: PyTorch's own int8 product overflows."""
    wide = torch.float32 if x.shape[-1] <= EXACT_K else torch.float64
    return x.to(wide) @ y.to(wide)  # [..., M, N]


def pack(scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """What npu_trans_quant_param makes of fp32 scales and offsets: int64, cut off and not rounded."""
    bits = scale.float().contiguous().view(torch.int32).long() & KEPT | SIGNED  # [N]
    if offset is not None:
        bits = bits | (offset.round().clamp(-256, 255).long() & 0x1FF) << 37  # [N]
    return bits


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale in fp32 and offset (an integer from -256 to 255, in fp32) of a packed scale."""
    bits = packed.view(torch.int64)  # [N]
    return (bits & KEPT).int().view(torch.float32), (bits << 18 >> 55).float()  # [N], [N]


def requantise(sums: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """int8 from sums: times the scale, rounded to 9 bits, plus the offset, saturated.

    Source: ops-nn: matmul/quant_batch_matmul_v3/tests/assets/qbmmv3_kernel_golden.py.
    """
    scale, offset = unpack(packed)  # [N], [N]
    scaled = (sums.float() * scale).round_().clamp_(-256, 255)  # [..., M, N]
    return scaled.add_(offset).clamp_(-128, 127).to(torch.int8)  # [..., M, N]

"""Packed scales of int8 products, in plain Python."""
import math
import struct
from random import Random

import torch
from torch import Tensor

INT8, INT32, FP16, BF16 = 1, 3, 5, 15  # ids of output_dtype


def packed(r: Random, *shape: int, offsets: bool = True) -> Tensor:
    """Scales with offsets, as npu_trans_quant_param packs them: 19 bits of a float, 9 of an integer, and bit 46."""
    flat = []
    for _ in range(math.prod(shape)):
        bits = struct.unpack("<I", struct.pack("<f", r.uniform(0.01, 2)))[0] & ~0x1FFF
        flat.append(bits | (r.randint(-256, 255) & 0x1FF if offsets else 0) << 37 | 1 << 46)
    return torch.tensor(flat, dtype=torch.int64).view(shape)


def unpacked(number: int) -> tuple[float, int]:
    offset = number >> 37 & 0x1FF
    return struct.unpack("<f", struct.pack("<I", number & 0xFFFFE000))[0], offset - 512 if offset > 255 else offset


def requantised(value: float, number: int) -> int:
    scale, offset = unpacked(int(number))
    return max(-128, min(127, max(-256, min(255, round(value * scale))) + offset))

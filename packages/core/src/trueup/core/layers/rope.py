"""Rotary tables: cos and sin of a batch's positions, computed once a forward."""
import torch
from jaxtyping import Float, Int
from torch import Tensor

from trueup.core.layers.yarn import Yarn


def rope_cos_sin(
    positions: Int[Tensor, " Tp"], width: int, theta: float, dtype: torch.dtype, yarn: Yarn | None = None
) -> tuple[Float[Tensor, "Tp 1 1 Dr"], Float[Tensor, "Tp 1 1 Dr"]]:
    """Full-width tables as npu_interleave_rope takes them: each half repeats the width/2 frequencies.

    angle = position / theta^(2j / width), in fp32, whatever ``dtype`` the table is then rounded to.
    """
    # In transformers' order of operations: another last bit of a frequency is 5e-5 of an angle at position 1,000, which
    # is enough to change what an indexer chooses.
    half = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width  # [Dr/2]
    lengths = theta ** half  # [Dr/2], positions a radian
    frequencies = yarn.frequencies(lengths, theta) if yarn else 1 / lengths  # [Dr/2]
    angle = positions.float()[:, None] * frequencies  # [Tp, Dr/2]
    angle = torch.cat([angle, angle], -1)[:, None, None]  # [Tp, 1, 1, Dr]
    size = yarn.table_factor if yarn else 1.0
    return (size * angle.cos()).to(dtype), (size * angle.sin()).to(dtype)  # [Tp, 1, 1, Dr]

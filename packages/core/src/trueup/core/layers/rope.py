"""Rotary tables: cos and sin of a batch's positions, computed once a forward."""
import torch
from jaxtyping import Float, Int
from torch import Tensor


def rope_cos_sin(
    positions: Int[Tensor, " Tp"], width: int, theta: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "Tp 1 1 Dr"], Float[Tensor, "Tp 1 1 Dr"]]:
    """Full-width tables as npu_interleave_rope takes them: each half repeats the width/2 frequencies.

    angle = position * theta^(-2j / width), in fp32, whatever ``dtype`` the table is then rounded to.
    """
    half = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width  # [Dr/2]
    angle = positions.float()[:, None] * theta ** -half  # [Tp, Dr/2]
    angle = torch.cat([angle, angle], -1)[:, None, None]  # [Tp, 1, 1, Dr]
    return angle.cos().to(dtype), angle.sin().to(dtype)  # [Tp, 1, 1, Dr]

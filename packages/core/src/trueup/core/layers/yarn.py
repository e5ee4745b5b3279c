"""YaRN: rotary frequencies for more positions than a model was trained on."""
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """Rope stretched to ``factor`` times the positions of training.  Peng et al., 2023: YaRN.

    Pairs that turn at least ``beta_fast`` times within ``original_positions`` keep their frequency, those that turn at
    most ``beta_slow`` times are slowed by ``factor``, the rest lie between.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def attention_factor(self) -> float:
        """What the softmax scale is multiplied by, at every length."""
        return self._magnitude(self.mscale_all_dim) ** 2

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied by: 1 where both mscales are equal, as in DeepSeek-V3.2."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    def corrections(self, width: int, theta: float) -> tuple[int, int]:
        """The pairs between which frequencies change over: (10, 23) for DeepSeek-V3.2."""
        low, high = (width * math.log(self.original_positions / (2 * math.pi * turns)) / (2 * math.log(theta))
                     for turns in (self.beta_fast, self.beta_slow))
        return max(math.floor(low), 0), min(math.ceil(high), width - 1)

    def frequencies(self, lengths: Float[Tensor, " half"], theta: float) -> Float[Tensor, " half"]:
        """Radians a position, of pairs that take ``lengths`` positions a radian in the plain rope."""
        low, high = self.corrections(2 * len(lengths), theta)
        pair = torch.arange(len(lengths), dtype=torch.float32, device=lengths.device)  # [Dr/2]
        kept = 1 - ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)  # [Dr/2]
        return 1 / (self.factor * lengths) * (1 - kept) + 1 / lengths * kept  # [Dr/2]

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

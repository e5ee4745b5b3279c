"""From logits to a token."""
import random
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Args:
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        seed: makes a request's text repeatable, alone or in company; None draws one.
        ignore_eos: go on to max_tokens whatever is generated.

    Raises:
        ValueError: a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or a positive number")


class Sampler:
    """One request's sampling state: its own random stream, on the host, so that company cannot change it."""

    def __init__(self, params: SamplingParams) -> None:
        self.params, self._random = params, random.Random(params.seed)

    def sample(self, logits: Float[Tensor, " V"]) -> int:
        """A token id: the argmax, or the inverse of the cumulative distribution at a uniform number."""
        if self.params.temperature == 0:
            return int(logits.argmax())
        total = (logits.float() / self.params.temperature).softmax(-1).cumsum(-1)  # [V]
        # The sum may end a rounding short of 1; right=True never names a token of probability 0.
        return int(torch.searchsorted(total, self._random.random() * total[-1:], right=True).clamp(max=len(total) - 1))

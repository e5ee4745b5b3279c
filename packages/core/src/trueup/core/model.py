"""What the engine needs of a model."""
from typing import Protocol

from torch import Tensor

from trueup.core.cache import CacheSpec, Pools
from trueup.core.view import DeviceView


class Model(Protocol):
    """Weights and arithmetic; knows no request."""

    @property
    def cache_spec(self) -> CacheSpec: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def forward(self, tokens: Tensor, view: DeviceView, pools: Pools) -> Tensor:
        """Hidden rows [Tp, H] of token ids [Tp]; writes the cache."""
        ...

    def forward_tapped(self, tokens: Tensor, view: DeviceView, pools: Pools, taps: tuple[int, ...]
                       ) -> tuple[Tensor, Tensor]:
        """The same, and the residual streams entering the layers ``taps``, side by side: [Tp, len(taps) * H].

        ``taps`` go from low to high.  Called only for a drafter that asks for them.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] of hidden rows [B, H]."""
        ...

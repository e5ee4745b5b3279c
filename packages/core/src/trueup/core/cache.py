"""The paged MLA cache: what one token leaves behind in each layer, and nothing per head.

Latent and rope are separate pools because the operators take rope as an argument of its own.
"""
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trueup.core.pages import PagePool


@dataclass(frozen=True)
class CacheSpec:
    """What a model stores per token and layer: widths R and Dr, where, and in which layers an index key, Di wide."""

    layers: int
    latent: int  # R
    rope: int  # Dr
    dtype: torch.dtype
    device: torch.device
    index: int = 0  # Di
    index_layers: tuple[int, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return (self.layers * (self.latent + self.rope) + len(self.index_layers) * self.index) * self.dtype.itemsize


class Pools:
    """One latent and one rope tensor a layer, and index keys where there is an indexer: zeros at first.

    The shape is the PA_BNSD form of npu_kv_rmsnorm_rope_cache; ``paged`` gives the BnBsH view that the
    attention operator reads.  Both name the same memory.
    """

    def __init__(self, spec: CacheSpec, ids: PagePool) -> None:
        self.spec, self.page_size = spec, ids.page_size
        shape = (ids.num_pages, ids.page_size, 1)
        options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
        # Zeros, never uninitialised: a stray read is wrong but finite, and the same on every run.
        self.latent = [torch.zeros(*shape, spec.latent, **options) for _ in range(spec.layers)]  # [pages, P, 1, R]
        self.rope = [torch.zeros(*shape, spec.rope, **options) for _ in range(spec.layers)]  # [pages, P, 1, Dr]
        self.index = {i: torch.zeros(*shape, spec.index, **options) for i in spec.index_layers}  # [pages, P, 1, Di]

    def paged(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's pools as [pages, P, R] and [pages, P, Dr]."""
        return self.latent[layer].squeeze(2), self.rope[layer].squeeze(2)  # [pages, P, R], [pages, P, Dr]

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The rows at ``slots`` [S] (int64): [S, R] and [S, Dr]."""
        latent, rope = self.paged(layer)
        return latent.flatten(0, 1)[slots], rope.flatten(0, 1)[slots]  # [S, R], [S, Dr]

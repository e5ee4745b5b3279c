"""The paged cache of ordinary attention: a key and a value per key head.  A draft model beside an MLA target has one.

Its page ids are the target's: one block table serves both.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from trueup.core.pages import PagePool


@dataclass(frozen=True)
class KeyValueSpec:
    """What a layer with G key heads of width D stores per token, and where; key and value are equally wide."""

    layers: int
    heads: int  # G
    width: int  # D
    dtype: torch.dtype
    device: torch.device


class KeyValuePools:
    """One key and one value tensor a layer, [pages, P, G, D], zeros at first: npu_scatter_pa_kv_cache's form "Norm"."""

    def __init__(self, spec: KeyValueSpec, ids: PagePool) -> None:
        self.spec, self.page_size = spec, ids.page_size
        shape = (ids.num_pages, ids.page_size, spec.heads, spec.width)
        self.key, self.value = (
            [torch.zeros(*shape, dtype=spec.dtype, device=spec.device) for _ in range(spec.layers)] for _ in range(2)
        )  # [pages, P, G, D] each

    def paged(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's pools as the attention operator reads them, [pages, P, G*D]: the same memory."""
        return self.key[layer].flatten(2), self.value[layer].flatten(2)  # [pages, P, G*D], [pages, P, G*D]

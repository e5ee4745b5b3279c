"""Whose chosen positions a layer attends to: its own indexer's, an earlier layer's, or an earlier draft step's."""
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Int
from torch import Tensor

from trueup.core.rows import Rows


class DraftReuse(Enum):
    """What the draft steps of a round attend to, from the second on."""

    OWN = "own"  # every step chooses
    FROZEN = "frozen"  # what the last kept row chose, as sglang does: drafted positions are not among it
    GROWN = "grown"  # the same, and the positions drafted since


@dataclass(frozen=True)
class IndexReuse:
    """A model's policy.

    Args:
        source: by layer, the layer whose choice it attends to: itself, or one before it that has an indexer.
        drafts: what draft steps do.
    """

    source: tuple[int, ...]
    drafts: DraftReuse = DraftReuse.OWN

    def __post_init__(self) -> None:
        for layer, source in enumerate(self.source):
            if not 0 <= source <= layer or self.source[source] != source:
                raise ValueError(f"layer {layer} would take the choice of layer {source}; expected itself, or a layer "
                                 "before it that chooses for itself")


class Choices:
    """The positions [Tp, 1, K] that the layers of one forward attend to.

    Filled by layers that choose; ``given`` holds, by layer, what an earlier draft step chose.
    """

    def __init__(self, reuse: IndexReuse, given: Mapping[int, Rows] | None = None) -> None:
        self.reuse, self.by_layer = reuse, dict(given or {})

    def of(self, layer: int, choose: Callable[[], Rows]) -> Rows:
        """What ``layer`` attends to; ``choose`` runs its indexer, if it comes to that."""
        source = self.reuse.source[layer]
        if source == layer and layer not in self.by_layer:
            self.by_layer[layer] = choose()
        return self.by_layer[source]


def grown(chosen: Int[Tensor, "Tp 1 K"], positions: Int[Tensor, " Tp"]) -> Int[Tensor, "Tp 1 K"]:
    """Each row with its own position added, in front: of a full choice the last goes, which is the worst."""
    own = positions.to(chosen.dtype)[:, None, None]  # [Tp, 1, 1]
    more = torch.cat([own, chosen[..., :-1]], -1)  # [Tp, 1, K]
    return torch.where((chosen == own).any(-1, keepdim=True), chosen, more)  # [Tp, 1, K]


def padding_choice(K: int, like: Tensor) -> Int[Tensor, "1 K"]:
    """What a padded row chooses: its request's first position, then -1.  Valid entries first, as in any row."""
    row = like.new_full((1, K), -1)  # [1, K]
    row[0, 0] = 0
    return row

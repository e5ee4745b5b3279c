"""A chain of sparse attention that chooses positions once a round: its draft steps attend to what was chosen before.

What is shared is the choice of the last kept row, made when the draft model learned it.  It saves the indexer in every
draft step and costs acceptance, never an output: the target verifies with its own choice.

The choice is carried by request and unpadded.  A batch may shrink, grow or be reordered between two steps, and rows
are only put side by side by :func:`trueup.core.carry.for_layout` (SB-02, SB-19).
"""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from trueup.core.attention.choices import grown, padding_choice
from trueup.core.carry import for_layout
from trueup.core.layout import Mode
from trueup.core.rows import Rows
from trueup.core.speculation.chain import ChainDrafter, DraftModel
from trueup.core.speculation.drafter import Fed
from trueup.core.view import DeviceView


class ChoosingModel(DraftModel, Protocol):
    """A draft model of sparse attention that can be handed positions."""

    def forward_choosing(
        self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: Any,
        chosen: Rows | None,
    ) -> tuple[Float[Tensor, "Tp H"], Rows]:
        """One step that attends to ``chosen`` [Tp, 1, K], or to what it chooses itself; and what it attended to."""
        ...


class SharedChoiceDrafter(ChainDrafter):
    """A :class:`ChainDrafter` whose draft steps do not choose.

    Args:
        model: the draft model.
        draft_tokens: as there.
        grow: a draft step attends to the positions drafted in this round, too; without it to none of them, not even
            its own.
    """

    model: ChoosingModel

    def __init__(self, model: ChoosingModel, draft_tokens: int, grow: bool) -> None:
        super().__init__(model, draft_tokens)
        self.grow = grow
        self._chosen: dict[int, Tensor] = {}  # by request, what its rows attended to last: [rows, 1, K]

    def learn(self, fed: Sequence[Fed]) -> None:
        """As any chain does, and remember what the last kept row chose."""
        super().learn(fed)
        # A copy, since a slice would keep the rows of a whole prompt.
        self._chosen |= {f.request: self._chosen[f.request][f.kept - 1 : f.kept].clone() for f in fed}  # [1, 1, K]

    def forget(self, request: int) -> None:
        """Drop what is carried for a request."""
        super().forget(request)
        self._chosen.pop(request, None)

    def _forward(self, next_tokens: Tensor, hidden: Tensor, view: DeviceView) -> Tensor:
        chosen = None
        if view.layout.segments[0].mode is Mode.DRAFT:
            row = next(iter(self._chosen.values()))  # [1, 1, K]
            chosen = for_layout(self._chosen, view.layout, padding_choice(row.shape[-1], row))  # [Tp, 1, K]
            if self.grow:
                chosen = replace(chosen, tensor=grown(chosen.tensor, view.positions))  # [Tp, 1, K]
        out, attended = self.model.forward_choosing(next_tokens, hidden, view, self.pools, chosen)  # [Tp, H], _
        self._chosen |= attended.by_request()  # [rows, 1, K] each
        return out

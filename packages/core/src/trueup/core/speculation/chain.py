"""Drafting by a model, one token after the other: MTP and EAGLE heads alike.

The draft model's row at position p pairs the token at p + 1 with the hidden state of p, and predicts the token at
p + 2.  After the target has spoken (``learn``) the rows of kept positions are computed from the target's own features;
the last of them predicts the first draft.  Each further draft (``propose``) is one forward of one row a request, fed
with the draft model's own hidden state.  A row is always written before a later one reads it, whatever a rejected draft
left there (SB-21): key lengths count what is kept, and the row itself.
"""
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trueup.core.cache import Pools
from trueup.core.carry import for_layout
from trueup.core.layout import Layout, Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.rows import Kind, Rows
from trueup.core.speculation.drafter import Draft, Fed, Turn
from trueup.core.view import DeviceView, input_ids, materialise


class DraftModel(Protocol):
    """One layer with a cache of its own, run over the target's page ids."""

    taps: tuple[int, ...] | None

    def make_pools(self, target: Pools, pages: PagePool) -> Any:
        """The cache that it writes, in the shapes that it writes (SB-26); the target's, where it has a layer there."""
        ...

    def fuse(self, features: Float[Tensor, "Tp F"]) -> Float[Tensor, "Tp H"]:
        """The target's features as the layer takes them."""
        ...

    def forward(self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: Any
                ) -> Float[Tensor, "Tp H"]:
        """One step; what it returns is what the next step is fed with."""
        ...

    def logits(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B V"]:
        """Over the target's vocabulary; -inf for what the draft model cannot say."""
        ...


class ChainDrafter:
    """Up to ``draft_tokens`` drafts a round from one draft model, by as many forwards: one to learn, the rest to draft.

    Args:
        model: the draft model.
        draft_tokens: k, at least 1; how many the target can verify at once is the affair of its attention.

    Raises:
        ValueError: no draft tokens.
    """

    def __init__(self, model: DraftModel, draft_tokens: int) -> None:
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens is {draft_tokens}; expected at least 1")
        self.model, self.draft_tokens, self.taps = model, draft_tokens, model.taps
        self.layouts: list[Layout] = []
        self._hidden: dict[int, Tensor] = {}  # by request: the row [1, H] that predicts its first draft

    def bind(self, target: Pools, pages: PagePool, buckets: Sequence[int]) -> None:
        """Make the draft model's cache."""
        self.pages, self.buckets, self.pools = pages, buckets, self.model.make_pools(target, pages)

    def propose(self, turns: Sequence[Turn]) -> dict[int, Draft]:
        """Drafts by request, each continuing from what it learned last."""
        hidden = {t.request: self._hidden[t.request] for t in turns if t.request in self._hidden}
        drafted: dict[int, list[tuple[int, Tensor]]] = {r: [] for r in hidden}
        for step in range(1, self.draft_tokens + 1):
            drawing = [t for t in turns if t.request in hidden and t.most >= step]
            if not drawing:
                break
            logits = self.model.logits(torch.cat([hidden[t.request] for t in drawing]))  # [B, V]
            for turn, row in zip(drawing, logits, strict=True):
                drafted[turn.request].append(turn.sampler.draft(row))
            going_on = [t for t in drawing if t.most > step and step < self.draft_tokens]
            if going_on:
                # The pending token's position is len(tokens) - 1; its own row was learned, so the first draft's
                # hidden pairing stands at that position, the second's one further.
                work = [Work(t.request, Mode.DRAFT, len(t.tokens) - 2 + step, 1, t.pages) for t in going_on]
                tokens = {t.request: [drafted[t.request][-1][0]] for t in going_on}
                hidden |= self._run(work, tokens, hidden)  # [1, H] each
        return {r: Draft(tuple(x for x, _ in d), torch.stack([q for _, q in d])) for r, d in drafted.items() if d}

    def learn(self, fed: Sequence[Fed]) -> None:
        """Run the draft model over the target's rows, from the target's features, and remember the last kept row."""
        if not fed:
            return
        work = [Work(f.request, f.mode, f.start, len(f.next_tokens), f.pages) for f in fed]
        features = torch.cat([f.features for f in fed])  # [T, F]
        hidden = self.model.fuse(features).split([len(f.next_tokens) for f in fed])  # [rows, H] each
        rows = dict(zip((f.request for f in fed), hidden, strict=True))
        out = self._run(work, {f.request: f.next_tokens for f in fed}, rows)
        self._hidden |= {f.request: out[f.request][f.kept - 1 : f.kept] for f in fed}

    def forget(self, request: int) -> None:
        """Drop what is carried for a request."""
        self._hidden.pop(request, None)

    def _run(self, work: Sequence[Work], tokens: Mapping[int, Sequence[int]], hidden: Mapping[int, Tensor]
             ) -> dict[int, Tensor]:
        """One forward of the draft model; the hidden rows of each request, [rows, H]."""
        layout = plan(work, page_size=self.pages.page_size, buckets=self.buckets)
        self.layouts.append(layout)
        view = materialise(layout, self.pools)
        ids = input_ids(layout, tokens, self.pools.spec.device)  # [Tp]
        out = self._forward(ids.tensor, for_layout(hidden, layout).tensor, view)  # [Tp, H]
        return Rows(Kind.TOKEN, layout, out).by_request()

    def _forward(self, next_tokens: Tensor, hidden: Tensor, view: DeviceView) -> Tensor:
        """[Tp, H]; a drafter that carries more than hidden rows does it here."""
        return self.model.forward(next_tokens, hidden, view, self.pools)

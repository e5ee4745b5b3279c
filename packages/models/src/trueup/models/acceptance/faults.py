"""Faults that have been seen in drafters, to plant into a fresh one: each leaves the text right."""
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trueup.core.layout import Mode
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.speculation.shared_choice import SharedChoiceDrafter
from trueup.models.drafters import MtpDraft, SparseMtpDraft
from trueup.models.eagle3 import Eagle3Head


@dataclass(frozen=True)
class Fault:
    """``input`` is the check of inputs.py that finds it; ``plant`` changes one drafter object and nothing else."""

    name: str
    says: str
    input: str
    plant: Callable[[ChainDrafter], None]
    case: str | None = None
    only: type | None = None  # the kind of draft model that can have it

    def fits(self, drafter: ChainDrafter) -> bool:
        return self.only is None or isinstance(drafter.model, self.only)


def _teach(drafter: ChainDrafter, change: Callable[[Any], Any]) -> None:
    learn = drafter.learn
    drafter.learn = lambda fed: learn([change(f) for f in fed])  # type: ignore[method-assign]


def _run(drafter: ChainDrafter, around: Callable[..., Tensor]) -> None:
    """``around(forward, tokens, hidden, view)`` instead of the drafter's own forward."""
    forward = drafter._forward
    drafter._forward = lambda *args: around(forward, *args)  # type: ignore[method-assign]


def _drafting(view: Any) -> bool:
    return view.layout.segments[0].mode is Mode.DRAFT


def _unshifted(drafter: ChainDrafter) -> None:
    last: dict[int, int] = {}

    def change(f: Any) -> Any:
        tokens = [last.get(f.request, 0), *f.next_tokens[:-1]]
        last[f.request] = f.next_tokens[f.kept - 1]
        return replace(f, next_tokens=tokens)
    _teach(drafter, change)


def _stale_token(drafter: ChainDrafter) -> None:
    last: dict[int, int] = {}

    def change(f: Any) -> Any:
        tokens = list(f.next_tokens)
        last[f.request], tokens[f.kept - 1] = tokens[f.kept - 1], last.get(f.request, 0)
        return replace(f, next_tokens=tokens)
    _teach(drafter, change)


def _standing_position(drafter: ChainDrafter) -> None:
    known: dict[int, int] = {}

    def change(f: Any) -> Any:
        known[f.request] = f.start + f.kept - 1
        return f

    def around(forward: Callable, tokens: Tensor, hidden: Tensor, view: Any) -> Tensor:
        positions = view.positions.clone()
        if _drafting(view):
            for r, rows in view.layout.token_rows.items():
                positions[rows.start] = known[r]
        return forward(tokens, hidden, replace(view, positions=positions))
    _teach(drafter, change)
    _run(drafter, around)


def _lengths_with_rejected(drafter: ChainDrafter) -> None:
    rejected: dict[int, int] = {}

    def change(f: Any) -> Any:
        rejected[f.request] = len(f.next_tokens) - f.kept
        return f

    def around(forward: Callable, tokens: Tensor, hidden: Tensor, view: Any) -> Tensor:
        if not _drafting(view):
            return forward(tokens, hidden, view)
        (seg,) = view.segments
        room = seg.block_table.shape[1] * view.layout.page_size
        longer = [min(n + rejected.get(r, 0), room) for n, r in zip(seg.kv_lens, seg.segment.requests, strict=True)]
        on_device = seg.kv_lens_device.new_tensor(longer)  # [Bp]
        return forward(tokens, hidden, replace(
            view, segments=(replace(seg, kv_lens=longer, kv_lens_device=on_device),)))
    _teach(drafter, change)
    _run(drafter, around)


def _before_the_norm(drafter: ChainDrafter) -> None:
    drafter.taps = (drafter.model.target.config.num_hidden_layers,)  # type: ignore[attr-defined]


def _fed_after_the_norm(drafter: ChainDrafter) -> None:
    _run(drafter, lambda forward, tokens, hidden, view: forward(
        tokens, drafter.model.norm(hidden) if _drafting(view) else hidden, view))  # type: ignore[attr-defined]


def _not_fed_back(drafter: ChainDrafter) -> None:
    first: dict[int, Tensor] = {}

    def around(forward: Callable, tokens: Tensor, hidden: Tensor, view: Any) -> Tensor:
        if _drafting(view):
            hidden = hidden.clone()
            for r, rows in view.layout.token_rows.items():
                hidden[rows.start] = first[r]
        out = forward(tokens, hidden, view)
        if not _drafting(view):
            first.update({r: hidden[rows.stop - 1] for r, rows in view.layout.token_rows.items()})
        return out
    _run(drafter, around)


@contextmanager
def _swapped(weights: list[Tensor]) -> Iterator[None]:
    right = [w.data for w in weights]
    try:
        for w in weights:
            w.data = torch.cat(w.data.chunk(2, 1)[::-1], 1)
        yield
    finally:
        for w, data in zip(weights, right, strict=True):
            w.data = data


def _join_swapped(drafter: ChainDrafter) -> None:
    model: Any = drafter.model
    weights: list[Any] = [model.target.mtp[0].eh] if isinstance(model, MtpDraft) else [model.q, model.k, model.v]

    def around(forward: Callable, *args: Any) -> Tensor:
        with _swapped(weights):
            return forward(*args)
    _run(drafter, around)


def _stale_rows(drafter: ChainDrafter) -> None:
    def change(f: Any) -> Any:
        if f.mode is not Mode.DRAFT_EXTEND:
            return f
        last = f.kept - 1
        return replace(f, start=f.start + last, next_tokens=f.next_tokens[last : f.kept], kept=1,
                       features=f.features[last : f.kept])
    _teach(drafter, change)


def _row_of_a_rejected_draft(drafter: ChainDrafter) -> None:
    learn = drafter.learn

    def too_far(fed: Any) -> None:
        learn([replace(f, kept=len(f.next_tokens)) for f in fed])
        if isinstance(drafter, SharedChoiceDrafter):
            drafter._chosen |= {f.request: _within(f, drafter._chosen[f.request]) for f in fed}
    drafter.learn = too_far  # type: ignore[method-assign]


def _another_request(drafter: ChainDrafter) -> None:
    learn = drafter.learn

    def mixed(fed: Any) -> None:
        learn(fed)
        ids = list(drafter._hidden)
        rows = [drafter._hidden[r] for r in ids]
        drafter._hidden = dict(zip(ids, rows[1:] + rows[:1], strict=True))
    drafter.learn = mixed  # type: ignore[method-assign]


def _another_choice(drafter: Any) -> None:
    learn = drafter.learn

    def mixed(fed: Any) -> None:
        learn(fed)
        rows = [drafter._chosen[f.request] for f in fed]
        drafter._chosen |= {f.request: _within(f, row) for f, row in zip(fed, rows[1:] + rows[:1], strict=True)}
    drafter.learn = mixed


def _within(f: Any, choice: Tensor) -> Tensor:
    """[1, 1, K] without the positions that the request does not have: a device passes over them, a contract may not."""
    there = choice[(choice >= 0) & (choice < f.start + f.kept)]
    row = torch.full_like(choice, -1)
    row[..., : max(len(there), 1)] = there if len(there) else 0
    return row


def _other_layers(drafter: ChainDrafter) -> None:
    assert drafter.taps
    drafter.taps = tuple(i - 1 for i in drafter.taps)


def _draft_ids(drafter: ChainDrafter) -> None:
    head: Any = copy.copy(drafter.model)
    head._buffers = {"target_ids": torch.arange(len(head.target_ids), device=head.target_ids.device)}
    drafter.model = head


FAULTS = (
    Fault("tokens not shifted", "row p gets token p where it needs token p + 1", "tokens", _unshifted, "SB-17"),
    Fault("stale last token", "the last row gets the token of the round before, read before it was written", "tokens",
          _stale_token, "SB-38"),
    Fault("standing position", "draft steps keep the position of the last known row", "positions", _standing_position,
          "SB-10"),
    Fault("lengths with rejected tokens", "draft steps see the rows of drafts that were just rejected", "lengths",
          _lengths_with_rejected, "SB-21"),
    Fault("hidden before the norm", "the target's hidden state is taken before its final norm", "hidden",
          _before_the_norm, "SB-18", MtpDraft),
    Fault("fed back after the norm", "draft steps get the head's normed output", "feedback", _fed_after_the_norm, None,
          Eagle3Head),
    Fault("not fed back", "every draft step gets the target's hidden state again", "feedback", _not_fed_back),
    Fault("join swapped", "hidden half first where the embedding half comes first", "layer", _join_swapped,
          "SB-18"),
    Fault("stale rows", "after a round only the last kept row is computed from the target's features; the rows before "
          "it stay as drafted", "cache", _stale_rows),
    Fault("row of a rejected draft", "drafting goes on from the last row instead of the last kept one", "carried",
          _row_of_a_rejected_draft),
    Fault("another request's row", "what is carried between rounds is mixed up among requests", "carried",
          _another_request, "SB-19"),
    Fault("another request's choice", "the positions that draft steps attend to are mixed up among requests", "choice",
          _another_choice, "SB-19", SparseMtpDraft),
    Fault("layers one lower", "the head reads the streams entering the layers below the right ones", "hidden",
          _other_layers, None, Eagle3Head),
    Fault("draft ids as target ids", "d2t is ignored: draft id j is taken for target id j", "vocabulary", _draft_ids,
          None, Eagle3Head),
)

"""What a drafter was fed, against what it should have been fed: computed once more from the finished text.

The recorder stands around the drafter's forward, behind everything that might be wrong.  The reference is one
forward of the target over the whole text, and one of an untouched copy of the draft model: no cache reuse, no drafting.
"""
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trueup.core.cache import Pools
from trueup.core.engine import Engine
from trueup.core.layout import Layout, Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.speculation.shared_choice import SharedChoiceDrafter
from trueup.core.view import input_ids, materialise
from trueup.models.drafters import MtpDraft

NEAR = 1e-3  # of the scale: what two right computations in fp32 stay far below


@dataclass(frozen=True)
class Check:
    """One input: what it should be, how many of ``seen`` values were not, and what they look like instead."""

    input: str
    expected: str
    seen: int
    wrong: int
    instead: str = ""

    @property
    def ok(self) -> bool:
        return self.wrong == 0


@dataclass
class Forward:
    """One forward of the draft model, as it arrived at the layer."""

    layout: Layout
    tokens: Tensor  # [Tp]
    positions: Tensor  # [Tp]
    kv_lens: list[int]  # [Bp]
    hidden: Tensor  # [Tp, H]
    out: Tensor  # [Tp, H]
    again: Tensor  # [Tp, H], by the untouched copy
    carried: dict[int, Tensor]  # by request, the choice that came along, [rows, 1, K]; empty unless it is shared
    chosen: dict[int, Tensor]  # and the choice that goes on

    @property
    def drafting(self) -> bool:
        return self.layout.segments[0].mode is Mode.DRAFT


@dataclass
class Recorder:
    """Listens at a drafter's forward; made before a fault is planted."""

    drafter: ChainDrafter
    rounds: list[list[Forward]] = field(default_factory=list)
    features: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        model: Any = self.drafter.model
        self.pristine = pristine(model)
        self.ids = getattr(model, "target_ids", None)
        forward, fuse = self.drafter._forward, model.fuse

        def recorded(next_tokens: Tensor, hidden: Tensor, view: Any) -> Tensor:
            again, carried = self._untouched()(next_tokens, hidden, view), _choices(self.drafter)
            out = forward(next_tokens, hidden, view)
            lengths = [n for seg in view.segments for n in seg.kv_lens]
            self.rounds[-1].append(Forward(view.layout, next_tokens, view.positions, lengths, hidden, out, again,
                                           carried, _choices(self.drafter)))
            return out

        def fused(features: Tensor) -> Tensor:
            self.features[-1].append(features)
            return fuse(features)

        self.drafter._forward, model.fuse = recorded, fused  # type: ignore[method-assign]

    def _untouched(self) -> Callable[..., Tensor]:
        """The forward of a copy of the drafter as it stands now, whose weights, cache and memory are its own."""
        twin = copy.copy(self.drafter)
        twin.model, twin.pools = self.pristine, copy.deepcopy(twin.pools)
        if isinstance(twin, SharedChoiceDrafter):
            twin._chosen = _choices(twin)
        return functools.partial(type(twin)._forward, twin)

    def new_round(self) -> None:
        self.rounds.append([])
        self.features.append([])


def _choices(drafter: ChainDrafter) -> dict[int, Tensor]:
    return dict(drafter._chosen) if isinstance(drafter, SharedChoiceDrafter) else {}


def pristine(model: Any) -> Any:
    """A copy with weights of its own where a fault may change them; the rest of the target is shared."""
    if not isinstance(model, MtpDraft):
        return copy.deepcopy(model)
    shared = {id(p): p for name, p in model.target.named_parameters() if not name.startswith("mtp.")}
    return copy.deepcopy(model, shared)


@torch.inference_mode()
def check(engine: Engine, recorder: Recorder, done: list[Any], text: dict[int, list[int]],
          pages: dict[int, tuple[int, ...]]) -> list[Check]:
    """Every input of the drafter in a finished run.

    Args:
        engine: after the run; no page has been given to a second request.
        recorder: what it heard, a list of forwards for each round.
        done: the engine's rounds.
        text: prompt and generated ids by request.
        pages: page ids by request.
    """
    known = {r: _reference(engine, recorder.pristine, tokens, engine.drafter.model.taps)  # type: ignore[union-attr]
             for r, tokens in text.items()}
    says = {
        "tokens": "row p has token p + 1; draft steps have the last draft",
        "positions": "as planned, one further with each draft step",
        "lengths": "rows that are kept, and those of this forward",
        "hidden": "the target's own features of the same row",
        "feedback": "the hidden state that the last draft step returned",
        "carried": "the hidden state of the last kept row of the same request",
        "choice": "the positions that the same row attended to",
        "layer": "embedding half first, then the hidden half; the stored weights",
        "vocabulary": "draft ids translated by d2t",
    }
    counts = {name: [0, 0] for name in says}
    instead = ""

    def count(name: str, right: bool) -> None:
        counts[name][0] += 1
        counts[name][1] += not right

    for number, (forwards, features) in enumerate(zip(recorder.rounds, recorder.features, strict=True)):
        step = 0
        before: dict[int, tuple[Tensor, Tensor | None]] = {}  # by request: hidden state, and choice
        for f in forwards:
            step += f.drafting
            count("lengths", f.kv_lens == [n for s in f.layout.segments for n in s.kv_lens])
            for r, rows in f.layout.token_rows.items():
                count("positions", f.positions[rows.start : rows.stop].tolist() ==
                      [f.layout.positions[row] for row in rows])
                count("layer", _near(f.out[rows.start : rows.stop], f.again[rows.start : rows.stop]))
                if f.drafting:
                    count("tokens", int(f.tokens[rows.start]) == done[number].drafted[r][step - 1])
                    last = before.get(r) or _carried(recorder.rounds[:number], done, r)
                    if last:
                        count("feedback" if r in before else "carried", _near(f.hidden[rows.start], last[0]))
                    if last and last[1] is not None:
                        count("choice", torch.equal(f.carried[r][0], last[1]))
                    before[r] = f.out[rows.start], f.chosen[r][0] if r in f.chosen else None
                    continue
                start = f.layout.positions[rows.start]
                kept = len(done[number].written[r]) if r in done[number].written else len(rows)
                stop = min(start + kept, done[number].written[r].stop)
                tokens = f.tokens[rows.start : rows.start + stop - start].tolist()
                count("tokens", tokens == text[r][start + 1 : stop + 1])
        for batch in features:
            layout, row = next(f.layout for f in forwards if not f.drafting), 0
            for r, rows in layout.token_rows.items():
                start, kept = layout.positions[rows.start], len(done[number].written[r])
                right = known[r].features[start : start + min(kept, len(rows))]
                got = batch[row : row + len(right)]
                good = got.shape == right.shape and _near(got, right)
                count("hidden", good)
                if not good and not instead:
                    instead = _name(got, known[r], start)
                row += len(rows)
    if recorder.ids is not None:
        now = engine.drafter.model.target_ids  # type: ignore[union-attr]
        count("vocabulary", torch.equal(now, recorder.ids))
    found = [Check(n, says[n], seen, wrong, instead if n == "hidden" else "") for n, (seen, wrong) in counts.items()
             if seen]
    return [*found, _cache(engine, known, text, pages)]


@dataclass(frozen=True)
class _Known:
    """The target's features of a whole text, and the draft model's cache of it."""

    features: Tensor  # [T, F]
    streams: list[Tensor]  # entering each layer, and leaving the last: [T, H]
    after_norm: Tensor  # [T, H]
    pools: Any
    pages: tuple[int, ...]


def _reference(engine: Engine, draft: Any, text: list[int], taps: tuple[int, ...]) -> _Known:
    model: Any = engine.model
    T, size = len(text) - 1, engine.config.page_size
    ids = PagePool(2 + -(-T // size), size)
    pools = Pools(model.cache_spec, ids)
    pages = ids.allocate(-(-T // size))
    layout = plan([Work(0, Mode.PREFILL, 0, T, pages)], page_size=size)
    view, device = materialise(layout, pools), pools.spec.device
    tokens, following = (input_ids(layout, {0: text[s : s + T]}, device).tensor for s in (0, 1))
    layers = tuple(range(model.config.num_hidden_layers + 1))
    hidden, tapped = model.forward_tapped(tokens, view, pools, layers)
    streams = list(tapped.split(hidden.shape[1], 1))
    features = torch.cat([streams[i] for i in taps], 1) if taps else hidden
    mine = draft.make_pools(pools, ids)
    draft.forward(following, draft.fuse(features), view, mine)
    return _Known(features, streams, hidden, mine, pages)


def _carried(rounds: list[list[Forward]], done: list[Any], request: int) -> tuple[Tensor, Tensor | None] | None:
    """What the last lesson before a round left for a request: its last kept row's output, and what that row chose."""
    for number in range(len(rounds) - 1, -1, -1):
        for f in rounds[number]:
            rows = f.layout.token_rows.get(request)
            if rows is not None and not f.drafting:
                start = f.layout.positions[rows.start]
                row = done[number].written[request].stop - 1 - start
                if row >= len(rows):
                    return None
                return f.out[rows.start + row], f.chosen[request][row] if request in f.chosen else None
    return None


def _cache(engine: Engine, known: dict[int, _Known], text: dict[int, list[int]], pages: dict[int, tuple[int, ...]]
           ) -> Check:
    """Rows of the draft model's cache at positions that the text covers, against those of one pass."""
    seen = wrong = 0
    for r, tokens in text.items():
        # The last round of a request teaches nothing, so its rows may be old; those before it were taught.
        kept = len(tokens) - 1 - engine.drafter.draft_tokens - 1  # type: ignore[union-attr]
        for mine, right in zip(_layer(engine.drafter.pools), _layer(known[r].pools), strict=True):  # type: ignore[union-attr]
            rows = mine[list(pages[r])].flatten(0, 1)[:kept].flatten(1)
            expected = right[list(known[r].pages)].flatten(0, 1)[:kept].flatten(1)
            gap = (rows - expected).abs().amax(1) / expected.abs().max()
            seen, wrong = seen + kept, wrong + int((gap > NEAR).sum())
    return Check("cache", "rows of kept positions as one pass over the text leaves them", seen, wrong)


def _layer(pools: Any) -> list[Tensor]:
    if isinstance(pools, Pools):
        return [pools.latent[-1], pools.rope[-1], *list(pools.index.values())[-1:]]
    return [pools.key[0], pools.value[0]]


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= NEAR * b.abs().max().clamp(min=1e-9))


def _name(got: Tensor, known: _Known, start: int) -> str:
    """Which other features of the target these are."""
    rows = slice(start, start + len(got))
    for i, stream in enumerate(known.streams):
        if got.shape == stream[rows].shape and _near(got, stream[rows]):
            last = i == len(known.streams) - 1
            return "the hidden state before the final norm" if last else f"the residual stream entering layer {i}"
    width = known.after_norm.shape[1]
    if got.shape[1] % width == 0:
        parts = [next((str(i) for i, s in enumerate(known.streams) if _near(part, s[rows])), "?")
                 for part in got.split(width, 1)]
        if "?" not in parts:
            return f"the streams entering layers {', '.join(parts)}"
    return ""

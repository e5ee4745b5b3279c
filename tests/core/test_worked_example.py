"""One speculative round by hand: three requests with 130, 5 and 256 cached tokens, three drafts, every tensor.

Pages of 128: request 1 holds pages 1 and 2, request 2 page 3, request 3 pages 4 to 6.  Two, none and all three drafts
are kept.
"""
import pytest
import torch

from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedDraftModel, ScriptedModel
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.view import materialise

LENGTHS, PAGES = (130, 5, 256), ((1, 2), (3,), (4, 5, 6))


class Spoiled(ScriptedDraftModel):
    """Right, but for the first draft of request 2 and the third of request 1."""

    calls, on = 0, False

    def logits(self, hidden):
        if not self.on:
            return hidden
        self.calls += 1
        row = {1: 1, 3: 0}.get(self.calls)
        if row is None:
            return hidden
        return torch.cat([hidden[:row], hidden[row : row + 1].roll(1, -1), hidden[row + 1 :]])


@pytest.fixture(params=[(3,), (4,)], ids=["real", "padded"])
def example(request):
    """(model, engine, prompts, tokens after the prompts, what the drafter was taught, the round)."""
    model = ScriptedModel()
    draft = Spoiled(model)
    drafter, taught = ChainDrafter(draft, 3), []
    config = EngineConfig(num_pages=7, max_requests=3, prefill_tokens=1000, buckets=request.param)
    engine = Engine(model, config, drafter)
    prompts = [[(i + 7 * r) % 97 for i in range(n)] for r, n in enumerate(LENGTHS)]
    for p in prompts:
        engine.add(p, SamplingParams(max_tokens=20))
    first = engine.step().tokens
    learn = drafter.learn
    drafter.learn = lambda fed: (taught.extend(fed), learn(fed))
    draft.on = True
    return model, engine, prompts, first, taught, engine.step()


def column(layout, view):
    """(positions, slots, q lengths cumulative, kv lengths, block table) of a forward with one segment."""
    (seg,) = view.segments
    return list(layout.positions), seg.slots.tolist(), seg.q_cum, seg.kv_lens, seg.block_table.tolist()


def test_every_tensor_agrees(example):
    model, engine, prompts, first, taught, done = example
    padded = engine.config.buckets == (4,)
    x = [first[r][0] for r in (1, 2, 3)]
    right = [model.expected([*p, t], 4) for p, t in zip(prompts, x, strict=True)]
    t1 = [right[0][0], (right[1][0] + 1) % 97, right[2][0]]
    views = [materialise(layout, engine.pools) for layout in (*done.draft_layouts, done.layout)]
    step0, step1, extend, verify = (column(layout, view) for layout, view in
                                    zip((*done.draft_layouts, done.layout), views, strict=True))
    table = [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    # A padded request is an ordinary one that sees its own rows on the dummy page.
    one, four = ([0], [0, 1, 2, 3]) if padded else ([], [])
    table += [[0, 0, 0]] * padded

    # Draft step 0 takes the first draft, which came with the last lesson; step 1 takes the second.  The third is drawn
    # from step 1, so two forwards make three drafts.
    assert step0 == ([130, 5, 256, *one], [258, 389, 768, *one], [1, 2, 3, *[4] * padded], [131, 6, 257, *[1] * padded],
                     table)
    assert step1 == ([131, 6, 257, *one], [259, 390, 769, *one], [1, 2, 3, *[4] * padded], [132, 7, 258, *[1] * padded],
                     table)
    assert {r: d[0] for r, d in done.drafted.items()} == dict(zip((1, 2, 3), t1, strict=True))
    assert [len(d) for d in done.drafted.values()] == [3, 3, 3]

    # Verification: the pending token and three drafts of each request, at the next four positions.
    rows = ([130, 131, 132, 133, 5, 6, 7, 8, 256, 257, 258, 259, *four],
            [258, 259, 260, 261, 389, 390, 391, 392, 768, 769, 770, 771, *four],
            [4, 8, 12, *[16] * padded], [134, 9, 260, *[4] * padded], table)
    assert verify == rows
    assert done.layout.padded_tokens == 16 - 4 * (not padded)
    assert [s.mode for s in done.layout.segments] == [Mode.VERIFY]

    # Two, none and three drafts kept: accepted lengths 3, 1, 4 with the bonus token, cached lengths 133, 6, 260.
    assert done.accepted == {1: 2, 2: 0, 3: 3}
    assert [len(t) for t in done.tokens.values()] == [3, 1, 4]
    assert [list(t) for t in done.tokens.values()] == [right[0][:3], right[1][:1], right[2]]
    assert [engine.scheduler.requests[r].committed for r in (1, 2, 3)] == [133, 6, 260]
    assert done.written == {1: range(130, 133), 2: range(5, 6), 3: range(256, 260)}

    # The drafter is taught the same rows; row j with the target's features of row j and the token after it.
    assert extend == rows
    assert [f.mode for f in taught] == [Mode.DRAFT_EXTEND] * 3 and [f.start for f in taught] == [130, 5, 256]
    assert [list(f.next_tokens) for f in taught] == [[*right[0][:3], 0], [right[1][0], 0, 0, 0], right[2]]
    assert [f.kept for f in taught] == [3, 1, 4]  # rows 2, 4 and 11 of the twelve are where drafting goes on
    ends = [f.start + f.kept - 1 for f in taught]
    sums = [sum(t * (i + 1) for i, t in enumerate([*p, t0, *r][: end + 1])) % 97
            for p, t0, r, end in zip(prompts, x, right, ends, strict=True)]
    assert [int(f.features[f.kept - 1].argmax()) for f in taught] == sums
    # What it hands to its first draft of the next round: the token after the bonus token.
    following = [model.expected([*p, t0, *done.tokens[i + 1]], 1)[0]
                 for i, (p, t0) in enumerate(zip(prompts, x, strict=True))]
    assert [int(engine.drafter._hidden[r].argmax()) for r in (1, 2, 3)] == following

"""Speculation over scripted models: text, pages and acceptance, by random schedule and at every border."""
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import DUMMY_PAGE, Mode
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedDrafter, ScriptedDraftModel, ScriptedModel
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.speculation.drafter import Turn
from trueup.core.speculation.ngram import NgramDrafter
from trueup.core.view import materialise

V = 97


def scripted(model, k, script=(0, 1, 99)):
    return ScriptedDrafter(model.expected, [min(n, k) for n in script], k, V)


DRAFTERS = {
    "scripted": scripted,
    "chain": lambda model, k: ChainDrafter(ScriptedDraftModel(model), k),
    "ngram": lambda model, k: NgramDrafter(k, V, longest=2),
}


def finish(engine, prompts, most, params=None):
    """Run prompts to their end; (text by prompt, rounds).  Pages are counted after every round."""
    config, rounds = engine.config, []
    ids = [engine.add(p, SamplingParams(max_tokens=most, **(params or {}))) for p in prompts]
    text = {r: [] for r in ids}
    while engine.has_work:
        done = engine.step()
        rounds.append(done)
        for r, tokens in done.tokens.items():
            text[r] += tokens
        conserved(engine, config)
    return [text[r] for r in ids], rounds


def conserved(engine, config):
    running = engine.scheduler.requests.values()
    held = [page for request in running for page in request.pages]
    assert DUMMY_PAGE not in held and len(held) == len(set(held))  # nobody shares
    assert engine.pages.free + len(held) == config.num_pages - 1  # nothing is lost (SB-23)
    assert all(r.committed <= r.most_tokens - 1 < len(r.pages) * config.page_size
               for r in running if r.pages)  # else it waits


# Acceptance that is known in advance.


@pytest.mark.parametrize("k", range(1, 8))
def test_a_rigged_draft_model_is_always_right_so_all_its_inputs_are(k):
    """A wrong token, position, hidden row, slot or stale row anywhere would cost acceptance (SB-17, 18, 19, 21, 38)."""
    model = ScriptedModel()
    engine = Engine(model, EngineConfig(page_size=4, num_pages=60), DRAFTERS["chain"](model, k))
    prompts = [[3 + i] * n for i, n in enumerate((1, k, k + 1, 3, 4, 5))]
    text, rounds = finish(engine, prompts, 23)
    assert text == [model.expected(p, 23) for p in prompts]
    assert all(done.accepted[r] == len(drafts) for done in rounds for r, drafts in done.drafted.items())
    assert Acceptance.of(rounds).rate == 1.0


@pytest.mark.parametrize(("script", "rates"), [((0,), 0.0), ((3,), 1.0), ((0, 3), 0.5)])
def test_scripted_acceptance_is_reproduced_exactly(script, rates):
    model = ScriptedModel()
    engine = Engine(model, EngineConfig(page_size=4), ScriptedDrafter(model.expected, script, 3, V))
    text, rounds = finish(engine, [[1, 2], [7] * 9], 41)
    assert text == [model.expected([1, 2], 41), model.expected([7] * 9, 41)]
    for r in (1, 2):
        accepted = [done.accepted[r] for done in rounds if r in done.accepted]
        planned = [script[i % len(script)] for i in range(len(accepted))]
        assert accepted[:-1] == planned[:-1]  # the last may have had room for fewer
    full = Acceptance.of(done for done in rounds if all(len(d) == 3 for d in done.drafted.values()))
    assert full.by_depth == pytest.approx([rates] * 3, abs=0.05)


def test_counting_as_the_gallery_says():
    """SB-37: k = 3, rounds accepting 3, 0, 1, and a round of placeholders only."""
    a = Acceptance()
    for accepted in (3, 0, 1):
        a.add(_Round({1: (5, 6, 7)}, {1: accepted}))
    a.add(_Round({}, {}))
    assert a.rows == 3 and a.tokens_per_round == pytest.approx(7 / 3) and a.rate == pytest.approx(4 / 9)
    assert a.by_depth == pytest.approx([2 / 3, 1 / 3, 1 / 3]) and a.conditional == pytest.approx([2 / 3, 1 / 2, 1])


class _Round:
    def __init__(self, drafted, accepted):
        self.drafted, self.accepted = drafted, accepted


# The gallery's cases.


def test_sb10_each_draft_step_has_lengths_of_its_own():
    """Lengths 10 and 20, four drafts: the three draft steps see [11, 21], [12, 22], [13, 23], and keep them."""
    model = ScriptedModel()
    engine = Engine(model, EngineConfig(page_size=16, max_requests=2, buckets=(2,)), DRAFTERS["chain"](model, 4))
    for n in (10, 20):
        engine.add([1] * n, SamplingParams(max_tokens=9))
    engine.step()
    done = engine.step()
    views = [materialise(layout, engine.pools) for layout in done.draft_layouts[:3]]  # all built before any is read
    assert [view.segments[0].kv_lens for view in views] == [[11, 21], [12, 22], [13, 23]]
    assert [view.segments[0].kv_lens_device.tolist() for view in views] == [[11, 21], [12, 22], [13, 23]]
    assert [layout.positions for layout in done.draft_layouts[:3]] == [(10, 20), (11, 21), (12, 22)]


class Aliased(ScriptedDraftModel):
    """SB-10 put back: one buffer of lengths for all draft steps, in which the last step's values stand."""

    def forward(self, next_tokens, hidden, view, pools):
        if view.layout.segments[0].mode is Mode.DRAFT:
            (seg,) = view.segments
            ends = [min(n + 2, seg.block_table.shape[1] * pools.page_size) for n in seg.kv_lens]
            last = torch.tensor(ends) - 1
            view = replace(view, segments=(replace(seg, kv_lens=ends),), positions=last)
        return super().forward(next_tokens, hidden, view, pools)


def test_sb10_put_back_costs_acceptance_from_the_second_draft_on():
    model, by_depth = ScriptedModel(), []
    for kind in (ScriptedDraftModel, Aliased):
        engine = Engine(model, EngineConfig(page_size=16), ChainDrafter(kind(model), 3))
        (text,), rounds = finish(engine, [[1] * 10], 40)
        assert text == model.expected([1] * 10, 40)
        by_depth.append(Acceptance.of(rounds).by_depth)
    assert by_depth[0] == [1.0] * 3 and by_depth[1][0] > 0.9 and by_depth[1][1] < 0.3


def test_sb15_no_position_beyond_the_limit_is_looked_up():
    """Every draft accepted, to the last token: target and drafter stay below the positions that the tables cover."""
    model = ScriptedModel(max_positions=23)
    engine = Engine(model, EngineConfig(page_size=4), DRAFTERS["chain"](model, 1))
    _, rounds = finish(engine, [[2] * 10], 13)
    layouts = [layout for done in rounds for layout in (done.layout, *done.draft_layouts)]
    assert max(p for layout in layouts for p in layout.positions) == 21
    with pytest.raises(ValueError, match="need 24 positions; the model has 23"):
        engine.add([2] * 10, SamplingParams(max_tokens=14))


def test_sb16_drafts_do_not_run_past_the_context():
    """16 positions, pages of 4, 13 cached, three drafts asked for: the last position is written, none behind it."""
    model = ScriptedModel(max_positions=16)
    engine = Engine(model, EngineConfig(page_size=4, num_pages=9), DRAFTERS["chain"](model, 3))
    r = engine.add([3] * 13, SamplingParams(max_tokens=3))
    engine.step()
    (pages,) = [request.pages for request in engine.scheduler.requests.values()]
    before = engine.pools.latent[0][list(pages)].flatten()[:13].clone()
    done = engine.step()
    assert len(done.drafted[r]) == 1 and done.finished == {r: "length"}  # room for one draft, and the token behind it
    assert {p for layout in (done.layout, *done.draft_layouts) for p in layout.positions} == {13, 14}
    assert (engine.pools.latent[0][list(pages)].flatten()[:13] == before).all()


def test_sb16_put_back_is_refused_when_it_is_planned(monkeypatch):
    """Without the limit on drafts, positions run past what the request's pages hold."""
    from trueup.core.speculation import turn

    model = ScriptedModel(max_positions=16)
    engine = Engine(model, EngineConfig(page_size=4, num_pages=9), DRAFTERS["chain"](model, 3))
    engine.add([3] * 13, SamplingParams(max_tokens=3))
    engine.step()
    monkeypatch.setattr(turn, "Turn", lambda r, tokens, pages, most, sampler: Turn(r, tokens, pages, 99, sampler))
    with pytest.raises(ValueError, match="17 tokens do not fit its 4 pages of 4"):
        engine.step()


@pytest.mark.parametrize("end", ["stop", "length", "abort"])
def test_sb23_every_way_of_ending_gives_all_pages_back(end):
    plain = ScriptedModel()
    eos = plain.expected([5] * 6, 9)[7]
    model = ScriptedModel(eos_token_ids=(eos,) if end == "stop" else ())
    engine = Engine(model, EngineConfig(page_size=4), scripted(model, 3, (0, 3, 1, 2, 0)))
    r = engine.add([5] * 6, SamplingParams(max_tokens=20))
    for _ in range(3):
        done = engine.step()
        conserved(engine, engine.config)
    if end == "abort":
        engine.abort(r)
    while engine.has_work:
        done = engine.step()
        conserved(engine, engine.config)
    assert done.finished.get(r) == (None if end == "abort" else end)
    assert engine.pages.free == engine.config.num_pages - 1


class Stale(ScriptedDraftModel):
    """SB-38 put back: the token of the round before, read before this round's was written."""

    last = 0

    def forward(self, next_tokens, hidden, view, pools):
        if view.layout.segments[0].mode is Mode.DRAFT_EXTEND:
            row = next(iter(view.layout.token_rows.values()))[0]
            stale, self.last = self.last, int(next_tokens[row])
            next_tokens = next_tokens.clone()
            next_tokens[row] = stale
        return super().forward(next_tokens, hidden, view, pools)


def test_sb38_a_stale_token_leaves_the_text_right_and_is_seen_in_acceptance():
    for kind, accepted in ((ScriptedDraftModel, 2), (Stale, 0)):
        model = ScriptedModel()
        engine = Engine(model, EngineConfig(page_size=4), ChainDrafter(kind(model), 2))
        (text,), rounds = finish(engine, [[4, 9, 2]], 19)
        assert text == model.expected([4, 9, 2], 19)
        run = [n for done in rounds[2:] for n in done.accepted.values()]
        assert run[:4] == [accepted] * 4


# Where a run may end.


@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("most", range(1, 8))
def test_max_tokens_inside_an_accepted_run_end_it_there(right, most):
    model = ScriptedModel()
    engine = Engine(model, EngineConfig(page_size=4), ScriptedDrafter(model.expected, (right,), 4, V))
    (text,), rounds = finish(engine, [[5, 6, 7]], most)
    assert text == model.expected([5, 6, 7], most) and rounds[-1].finished == {1: "length"}


@pytest.mark.parametrize("place", range(7))
def test_an_end_of_text_token_inside_an_accepted_run_ends_it_there(place):
    prompt, plain = [5, 6, 7], ScriptedModel()
    expected = plain.expected(prompt, 12)
    eos = expected[place]
    first = expected.index(eos)
    model = ScriptedModel(eos_token_ids=(eos,))
    engine = Engine(model, EngineConfig(page_size=4), ScriptedDrafter(model.expected, (4,), 4, V))
    (text,), rounds = finish(engine, [prompt], 12)
    assert text == expected[: first + 1] and rounds[-1].finished == {1: "stop"}
    engine = Engine(model, EngineConfig(page_size=4), ScriptedDrafter(model.expected, (4,), 4, V))
    (text,), _ = finish(engine, [prompt], 12, {"ignore_eos": True})
    assert text == expected


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@pytest.mark.parametrize("k", range(1, 8))
def test_text_equals_plain_decoding_at_every_border(name, k):
    """Prompts of 1, k, k + 1, a page and its neighbours; the last position of the context, and of the pool."""
    page = 16
    model = ScriptedModel(max_positions=3 * page)
    lengths = [1, k, k + 1, page - 1, page, page + 1]
    prompts = [[(7 * i + j) % V for j in range(n)] for i, n in enumerate(lengths)]
    engine = Engine(model, EngineConfig(page_size=page, num_pages=19), DRAFTERS[name](model, k))
    text, _ = finish(engine, prompts, 3 * page - (page + 1))  # the longest ends at the last position
    assert text == [model.expected(p, 3 * page - (page + 1)) for p in prompts]
    tight = Engine(model, EngineConfig(page_size=page, num_pages=4), DRAFTERS[name](model, k))
    (whole,), rounds = finish(tight, [[3, 4]], 3 * page - 2)  # alone it takes every page, and the last slot but one
    assert whole == model.expected([3, 4], 3 * page - 2)
    assert max(s for done in rounds for s in done.layout.slots) == 4 * page - 2


def test_one_request_of_a_batch_may_go_without():
    model = ScriptedModel()
    engine = Engine(model, EngineConfig(page_size=4), DRAFTERS["chain"](model, 3))
    plain, fast = (engine.add([5, i], SamplingParams(max_tokens=12, speculate=i == 1)) for i in (0, 1))
    rounds = []
    while engine.has_work:
        rounds.append(engine.step())
    assert all(plain not in done.drafted and len(done.tokens.get(plain, ())) <= 1 for done in rounds)
    assert any(done.accepted.get(fast) == 3 for done in rounds)
    assert {s.mode for s in rounds[1].layout.segments} == {Mode.DECODE, Mode.VERIFY}


# Requests come, run, finish and are aborted; chunks of prompts run beside verification.

ADD = st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=14), st.integers(1, 12), st.booleans())
ACTION = st.one_of(ADD, st.just("step"), st.just("step"), st.integers(1, 12))  # a number aborts that request
CONFIGS = st.builds(
    EngineConfig, num_pages=st.integers(8, 20), page_size=st.sampled_from([4, 16]), max_requests=st.integers(1, 8),
    prefill_tokens=st.integers(1, 20), buckets=st.sampled_from([(8,), (1, 2, 4, 8), (3, 8)]),
)


def schedule(config, name, k, actions):
    model = ScriptedModel()
    engine, prompts, text, aborted = Engine(model, config, DRAFTERS[name](model, k)), {}, {}, set()

    def step():
        done = engine.step()
        for r, tokens in done.tokens.items():
            assert r not in aborted
            text[r] += tokens
        for r, drafts in done.drafted.items():
            assert prompts[r][2] and (name != "chain" or done.accepted[r] == len(drafts))
        conserved(engine, config)

    for action in actions:
        if action == "step":
            step()
        elif isinstance(action, int):
            engine.abort(action)
            aborted.update({action} & set(prompts))
        else:
            prompt, most, speculate = action
            r = engine.add(prompt, SamplingParams(max_tokens=most, speculate=speculate))
            prompts[r], text[r] = action, []
    while engine.has_work:
        step()
    for r, (prompt, most, _) in prompts.items():
        assert text[r] == model.expected(prompt, most)[: len(text[r])]
        assert len(text[r]) == most or r in aborted
    assert engine.pages.free == config.num_pages - 1
    assert not getattr(engine.drafter, "_hidden", None)  # nothing is remembered of requests that are gone


@pytest.mark.parametrize("name", sorted(DRAFTERS))
@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.integers(1, 7), st.lists(ACTION, max_size=30))
def test_random_schedules(name, config, k, actions):
    schedule(config, name, k, actions)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(DRAFTERS))
@settings(max_examples=4000, deadline=None)
@given(CONFIGS, st.integers(1, 7), st.lists(ACTION, max_size=80))
def test_thousands_of_random_schedules(name, config, k, actions):
    schedule(config, name, k, actions)

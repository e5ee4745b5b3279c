"""A choice that is carried over draft steps: whose it is, what it holds, and what is left of it, by random schedule."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.rows import Kind, Rows
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedDraftModel, ScriptedModel
from trueup.core.speculation.shared_choice import SharedChoiceDrafter


class Choosing(ScriptedDraftModel):
    """Its choice is a note to itself: [position of the row that chose, its request's first page, draft steps since].

    A step that is handed another row's note, or one of another time, says something wrong.
    """

    def __init__(self, target):
        super().__init__(target)
        self.notes = []  # what draft steps were handed, [Tp, 3] each

    def forward_choosing(self, next_tokens, hidden, view, pools, chosen):
        out = super().forward(next_tokens, hidden, view, pools)
        page = torch.zeros(len(next_tokens), dtype=torch.int64)  # [Tp]
        for seg in view.segments:
            lengths = torch.tensor(seg.segment.q_lens)  # [Bp]
            page[seg.rows] = seg.block_table[:, 0].long().repeat_interleave(lengths)  # [T]
        if chosen is None:
            assert view.layout.segments[0].mode is not Mode.DRAFT
            note = torch.stack([view.positions, page, torch.zeros_like(page)], 1)  # [Tp, 3]
        else:
            assert chosen.layout is view.layout and chosen.kind is Kind.TOKEN
            note = chosen.tensor[:, 0] + torch.tensor([0, 0, 1])  # [Tp, 3]
            right = (note[:, 0] + note[:, 2] == view.positions) & (note[:, 1] == page)  # [Tp]
            out = torch.where(right[:, None], out, out.roll(1, 1))  # [Tp, V]
            self.notes.append(chosen.tensor[:, 0])
        return out, Rows(Kind.TOKEN, view.layout, note[:, None])


ADD = st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=14), st.integers(1, 12))
ACTION = st.one_of(ADD, st.just("step"), st.just("step"), st.integers(1, 12))  # a number aborts that request
CONFIGS = st.builds(
    EngineConfig, num_pages=st.integers(8, 20), page_size=st.sampled_from([4, 16]), max_requests=st.integers(1, 4),
    prefill_tokens=st.integers(1, 20), buckets=st.sampled_from([(4,), (1, 2, 4), (2, 3, 4, 8)]),
)


def schedule(k, config, actions):
    """Every draft is right, so every step was handed its own request's latest choice; (drafter, drafts kept)."""
    model = ScriptedModel()
    drafter = SharedChoiceDrafter(Choosing(model), k, grow=False)
    engine, prompts, text, kept = Engine(model, config, drafter), {}, {}, 0

    def step():
        nonlocal kept
        done = engine.step()
        for r, tokens in done.tokens.items():
            text[r] += tokens
        for r, drafts in done.drafted.items():
            assert done.accepted[r] == len(drafts)
            kept += len(drafts)
        assert drafter._chosen.keys() == drafter._hidden.keys() <= engine.scheduler.requests.keys()

    for action in actions:
        if action == "step":
            step()
        elif isinstance(action, int):
            engine.abort(action)
            assert action not in drafter._chosen and action not in drafter._hidden
        elif len(action[0]) + action[1] <= (config.num_pages - 1) * config.page_size:
            r = engine.add(action[0], SamplingParams(max_tokens=action[1]))
            prompts[r], text[r] = action, []
    while engine.has_work:
        step()
    assert all(t == model.expected(*prompts[r])[: len(t)] for r, t in text.items())
    assert not drafter._chosen and not drafter._hidden  # whatever a request carried went with it
    return drafter, kept


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), CONFIGS, st.lists(ACTION, max_size=30))
def test_random_schedules(k, config, actions):
    schedule(k, config, actions)


@pytest.mark.long
@settings(max_examples=5000, deadline=None)
@given(st.integers(1, 7), CONFIGS, st.lists(ACTION, max_size=100))
def test_thousands_of_random_schedules(k, config, actions):
    schedule(k, config, actions)


BUSY = [([7], 40), ([5] * 6, 9), "step", "step", ([1, 2, 3], 30), *["step"] * 3, ([4] * 14, 12), "step", "step", 1,
        ([9], 7)]


def test_requests_that_join_and_leave_between_steps_keep_their_choices():
    drafter, kept = schedule(3, EngineConfig(page_size=4, num_pages=40, max_requests=4, buckets=(4,)), BUSY)
    sizes = {len(notes) for notes in drafter.model.notes}
    assert kept > 20 and sizes == {4}  # padded in every draft step
    real = [int((notes[:, 1] > 0).sum()) for notes in drafter.model.notes]  # the dummy page is 0
    assert len(set(real)) > 2  # batches of several sizes


def test_a_padded_row_is_handed_its_first_position_and_nothing_else():
    drafter, _ = schedule(3, EngineConfig(page_size=4, max_requests=1, buckets=(4,)), [([3, 4, 5], 9)])
    assert drafter.model.notes
    assert all(notes[1:].tolist() == [[0, -1, -1]] * 3 for notes in drafter.model.notes)


OF_ANOTHER = {
    "request": lambda rows: rows[1:] + rows[:1],
    "row": lambda rows: [row - torch.tensor([1, 0, 0]) for row in rows],
}


@pytest.mark.parametrize("swap", OF_ANOTHER.values(), ids=OF_ANOTHER)
def test_a_choice_of_another_costs_acceptance_and_no_text(swap):
    """SB-19 put back: the text stays right, and every draft behind the first is refused."""
    model = ScriptedModel()
    drafter = SharedChoiceDrafter(Choosing(model), 3, grow=False)
    learn = drafter.learn

    def mixed(fed):
        learn(fed)
        drafter._chosen = dict(zip(drafter._chosen, swap([*drafter._chosen.values()]), strict=True))

    drafter.learn = mixed
    engine = Engine(model, EngineConfig(page_size=4), drafter)
    prompts = [[3, 4], [5] * 7, [6]]
    ids = [engine.add(p, SamplingParams(max_tokens=12)) for p in prompts]
    text, second = {r: [] for r in ids}, []
    while engine.has_work:
        done = engine.step()
        for r, tokens in done.tokens.items():
            text[r] += tokens
        second += [done.accepted[r] for r, drafts in done.drafted.items() if len(drafts) > 1 and len(done.drafted) > 1]
    assert [text[r] for r in ids] == [model.expected(p, 12) for p in prompts]
    assert second and set(second) == {1}


class Watching(Choosing):
    """Chooses its own position alone, with room for two more, and notes what it is handed."""

    def forward_choosing(self, next_tokens, hidden, view, pools, chosen):
        out = ScriptedDraftModel.forward(self, next_tokens, hidden, view, pools)
        if chosen is None:
            rows = torch.full((len(next_tokens), 1, 3), -1, dtype=torch.int32)
            rows[:, 0, 0] = view.positions
            chosen = Rows(Kind.TOKEN, view.layout, rows)
        else:
            self.notes.append((view.positions.tolist(), chosen.tensor[0, 0].tolist()))
        return out, chosen


@pytest.mark.parametrize("grow", [False, True], ids=["frozen", "grown"])
def test_frozen_and_grown(grow):
    """Four drafts are three steps: frozen they see what position 2 chose, grown what was drafted since as well."""
    model = ScriptedModel()
    drafter = SharedChoiceDrafter(Watching(model), 4, grow)
    engine = Engine(model, EngineConfig(page_size=16, buckets=(1,), max_requests=1), drafter)
    engine.add([8, 8, 8], SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    handed = [sorted(p for p in chosen if p >= 0) for _, chosen in drafter.model.notes]
    assert [positions for positions, _ in drafter.model.notes] == [[3], [4], [5]]
    assert handed == ([[2, 3], [2, 3, 4], [3, 4, 5]] if grow else [[2]] * 3)

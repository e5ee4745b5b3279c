"""Random schedules: requests come, run, finish and are aborted; text and pages must not notice."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import DUMMY_PAGE
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedModel

ADD = st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=14), st.integers(1, 8))
ACTION = st.one_of(ADD, st.just("step"), st.just("step"), st.integers(1, 12))  # a number aborts that request
CONFIGS = st.builds(
    EngineConfig, num_pages=st.integers(7, 20), page_size=st.sampled_from([4, 16]), max_requests=st.integers(1, 4),
    prefill_tokens=st.integers(1, 20), buckets=st.sampled_from([(4,), (1, 2, 4), (2, 3, 4, 8)]),
)


def run(config, actions):
    engine, prompts, text, aborted = Engine(ScriptedModel(), config), {}, {}, set()

    def step():
        done = engine.step()
        for r, tokens in done.tokens.items():
            assert r not in aborted
            text[r] += tokens
        running = engine.scheduler.requests.values()
        held = [page for request in running for page in request.pages]
        assert DUMMY_PAGE not in held and len(held) == len(set(held))  # nobody shares
        assert engine.pages.free + len(held) == config.num_pages - 1  # nothing is lost
        assert all(r.committed <= len(r.pages) * config.page_size for r in running)

    for action in actions:
        if action == "step":
            step()
        elif isinstance(action, int):
            engine.abort(action)
            aborted.update({action} & set(prompts))
        else:
            prompt, count = action
            r = engine.add(prompt, SamplingParams(max_tokens=count))
            prompts[r], text[r] = (prompt, count), []
    while engine.has_work:
        step()
    for r, (prompt, count) in prompts.items():
        assert text[r] == engine.model.expected(prompt, count)[: len(text[r])]
        assert len(text[r]) == count or r in aborted
    assert engine.pages.free == config.num_pages - 1


@settings(max_examples=120, deadline=None)
@given(CONFIGS, st.lists(ACTION, max_size=40))
def test_random_schedules(config, actions):
    run(config, actions)


@pytest.mark.long
@settings(max_examples=20000, deadline=None)
@given(CONFIGS, st.lists(ACTION, max_size=120))
def test_thousands_of_random_schedules(config, actions):
    run(config, actions)

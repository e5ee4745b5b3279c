"""The engine with a model whose text is arithmetic on what the cache says."""
import pytest

from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedModel

SMALL = EngineConfig(num_pages=33, page_size=4, max_requests=4, prefill_tokens=6, buckets=(1, 2, 4))


def run(engine, prompts, **params):
    ids = [engine.add(p, SamplingParams(**params)) for p in prompts]
    text, reasons, rounds = {i: [] for i in ids}, {}, []
    while engine.has_work:
        rounds.append(engine.step())
        for i, tokens in rounds[-1].tokens.items():
            text[i] += tokens
        reasons |= rounds[-1].finished
    return [text[i] for i in ids], [reasons[i] for i in ids], rounds


@pytest.mark.parametrize("prefill_tokens", [1, 3, 4, 6, 100])
def test_text_is_the_formula_whatever_the_company_and_the_chunks(prefill_tokens):
    config = EngineConfig(num_pages=33, page_size=4, max_requests=4, prefill_tokens=prefill_tokens, buckets=(1, 2, 4))
    prompts = [[5], [1, 2, 3], list(range(20)), [9] * 4, [7] * 5, [3, 1] * 8]  # lengths at and around a page
    engine = Engine(ScriptedModel(), config)
    texts, reasons, rounds = run(engine, prompts, max_tokens=9)
    assert texts == [engine.model.expected(p, 9) for p in prompts] and set(reasons) == {"length"}
    assert engine.pages.free == 32
    modes = [{s.mode for s in r.layout.segments} for r in rounds]
    assert prefill_tokens == 100 or any({Mode.DECODE, Mode.PREFILL} <= m for m in modes)
    assert any(Mode.EXTEND in m for m in modes) == (prefill_tokens < 20)


def test_a_round_says_what_it_planned_wrote_and_decided():
    engine = Engine(ScriptedModel(), SMALL)
    a = engine.add([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=2))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert first.written == {a: range(0, 6)} and first.tokens == {}
    assert second.written == {a: range(6, 8)} and len(second.tokens[a]) == 1
    assert third.written == {a: range(8, 9)} and third.finished == {a: "length"}
    assert (first.number, third.number) == (1, 3) and third.layout.segments[0].mode is Mode.DECODE
    idle = engine.step()
    assert idle.layout.segments[0].mode is Mode.IDLE and not idle.tokens and not engine.has_work


def test_three_decoding_requests_are_padded_to_the_bucket_of_four():
    engine = Engine(ScriptedModel(), SMALL)
    for prompt in ([1], [2], [3]):
        engine.add(prompt, SamplingParams(max_tokens=5))
    engine.step()
    layout = engine.step().layout
    assert (layout.real_requests, layout.segments[0].padded_requests, layout.padded_tokens) == (3, 4, 4)


def test_end_of_text_stops_a_request_and_ignore_eos_does_not():
    model = ScriptedModel()
    stop_at = model.expected([1, 2], 3)[2]
    model.eos_token_ids = (stop_at,)
    for ignore, reason in ((False, "stop"), (True, "length")):
        texts, reasons, _ = run(Engine(model, SMALL), [[1, 2]], max_tokens=6, ignore_eos=ignore)
        assert reasons == [reason] and len(texts[0]) == (6 if ignore else 3)


def test_a_full_pool_makes_requests_wait_in_order_and_abort_frees_pages():
    engine = Engine(ScriptedModel(), EngineConfig(num_pages=5, page_size=4, max_requests=4, buckets=(4,)))
    big = engine.add([1] * 8, SamplingParams(max_tokens=8))  # the whole pool
    waiting = engine.add([2], SamplingParams(max_tokens=1))
    assert waiting not in engine.step().written and engine.pages.free == 0
    engine.abort(big)
    engine.abort(big)  # a second time is no error
    assert engine.pages.free == 4 and engine.step().finished == {waiting: "length"}
    engine.abort(engine.add([2], SamplingParams(max_tokens=3)))  # while it waits
    assert not engine.has_work and engine.pages.free == 4


def test_what_can_never_run_is_refused_at_once():
    engine = Engine(ScriptedModel(max_positions=50), SMALL)
    for prompt, params, message in [
        ([], {}, "the prompt is empty"),
        ([97], {}, "token id 97 is outside the vocabulary of 97"),
        ([1] * 40, {"max_tokens": 11}, "need 51 positions; the model has 50"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, SamplingParams(**params))
    tight = Engine(ScriptedModel(), EngineConfig(num_pages=3, page_size=4))
    with pytest.raises(ValueError, match="need 3 pages of 4; the pool has 2"):
        tight.add([1] * 8, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="temperature is -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match="do not reach max_requests=8"):
        EngineConfig(max_requests=8, buckets=(1, 4))


def test_sampling_follows_the_temperature_and_repeats_with_the_seed():
    import torch

    from trueup.core.sampling import Sampler

    logits = torch.tensor([1.0, 2.0, 0.0])
    probs = (logits / 0.5).softmax(-1)

    def sample(sampler):
        return sampler.verify(logits[None], logits[None][:0], ())[1]

    sampler = Sampler(SamplingParams(temperature=0.5, seed=1))
    counts = torch.bincount(torch.tensor([sample(sampler) for _ in range(4000)]), minlength=3) / 4000
    assert torch.allclose(counts, probs, atol=0.025)
    again = [sample(Sampler(SamplingParams(temperature=1.0, seed=3))) for _ in range(3)]
    assert len(set(again)) == 1

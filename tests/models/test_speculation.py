"""Speculation with the trained models: the text of plain decoding, pinned acceptance, drafts as computed naively."""
import argparse
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from trueup.core import ledger
from trueup.core.cache import Pools
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.view import materialise
from trueup.models import load_model, zoo
from trueup.models.config import ModelConfig
from trueup.models.drafters import make_drafter
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.tokenizer import Tokenizer
from trueup.models.training import eagle_twin, twin

NAME = "glm-4.7-flash-nano"
SPECS = ("mtp", "eagle3", "ngram")
NEAR = 1e-5  # of the logit scale: between two tokens that near, rounding decides


@pytest.fixture(scope="module")
def model():
    return load_model(NAME, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def source():
    """Token ids of a file that the model has seen the like of."""
    tokenizer = Tokenizer.from_folder(zoo.path(NAME), ModelConfig.from_folder(zoo.path(NAME)))
    return tokenizer.encode(inspect.getsource(argparse)[8000:30000])


def run(engine, prompts, most, **params):
    """(text by prompt, rounds)."""
    ids = [engine.add(p, SamplingParams(max_tokens=most, ignore_eos=True, **params)) for p in prompts]
    text, rounds = {r: [] for r in ids}, []
    while engine.has_work:
        rounds.append(engine.step())
        for r, tokens in rounds[-1].tokens.items():
            text[r] += tokens
    assert engine.pages.free == engine.config.num_pages - 1
    return [text[r] for r in ids], rounds


def same_text(model, prompt, plain, fast, stops):
    """Equal, or different from a token on where the two best logits are NEAR; such stops are counted."""
    if plain == fast:
        return
    at = next(i for i, (a, b) in enumerate(zip(plain, fast, strict=True)) if a != b)
    params = {n: v.float() for n, v in load_file(zoo.path(NAME) / "model.safetensors").items()}
    ids = torch.tensor([[*prompt, *plain[:at]]])
    logits = twin.head(params, twin.forward(params, model.config, ids))[0, -1]
    best = logits.topk(2)
    assert {plain[at], fast[at]} == set(best.indices.tolist())
    assert best.values[0] - best.values[1] <= NEAR * logits.abs().max()
    stops.append(at)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("k", range(1, 8))
def test_greedy_text_is_that_of_plain_decoding(model, source, spec, k):
    """Ragged batches, padded to buckets; prompts of 1, k, k + 1, a page and its neighbours, chunks beside decoding."""
    page, most = 16, 24
    prompts = [source[97 * i : 97 * i + n] for i, n in enumerate((1, k, k + 1, page - 1, page, page + 1, 61, 40))]
    config = EngineConfig(num_pages=60, page_size=page, prefill_tokens=32, buckets=(8,))
    plain, _ = run(Engine(model, config), prompts, most)
    fast, rounds = run(Engine(model, config, make_drafter(spec, model, k)), prompts, most)
    stops: list[int] = []
    for p, a, b in zip(prompts, plain, fast, strict=True):
        same_text(model, p, a, b, stops)
    assert len(stops) <= 1e-3 * most * len(prompts)
    assert Acceptance.of(rounds).rows  # something was drafted at all


@pytest.mark.parametrize("spec", SPECS)
def test_up_to_the_last_position_of_the_context_and_of_the_pool(model, source, spec):
    prompt = source[:100]
    config = EngineConfig(num_pages=1 + 8, page_size=16, max_requests=1, buckets=(1,))
    (plain,), _ = run(Engine(model, config), [prompt], 28)
    (fast,), rounds = run(Engine(model, config, make_drafter(spec, model, 7)), [prompt], 28)
    assert plain == fast and max(p for done in rounds for p in done.layout.positions) == 126
    limit = model.max_positions
    engine = Engine(model, EngineConfig(num_pages=1 + limit // 128), make_drafter(spec, model, 7))
    (end,), rounds = run(engine, [(source * 9)[: limit - 12]], 12)
    assert len(end) == 12 and max(p for done in rounds for p in done.layout.positions) == limit - 2


@pytest.fixture(scope="module")
def alone(model, source):
    """Plain greedy text of a prompt that begins at a place of the source, alone; each computed once."""
    known: dict[tuple[int, int], list[int]] = {}

    def text(at, length):
        if (at, length) not in known:
            (known[at, length],), _ = run(Engine(model, EngineConfig(num_pages=17, page_size=16)),
                                          [source[at : at + length]], 16)
        return known[at, length]
    return text


ADD = st.tuples(st.sampled_from((0, 333, 777)), st.sampled_from((1, 5, 16, 33)), st.integers(1, 16))
ACTION = st.one_of(ADD, st.just("step"), st.just("step"), st.integers(1, 6))  # a number aborts that request
CONFIGS = st.builds(EngineConfig, num_pages=st.integers(8, 20), page_size=st.just(16), max_requests=st.integers(1, 5),
                    prefill_tokens=st.sampled_from([7, 20, 64]), buckets=st.sampled_from([(8,), (1, 2, 5)]))


def schedule(model, source, alone, spec, k, config, actions):
    """Requests come, run, finish and are aborted; each one's text is that of plain decoding alone."""
    engine = Engine(model, config, make_drafter(spec, model, k))
    text, plain = {}, {}

    def step():
        for r, tokens in engine.step().tokens.items():
            text[r] += tokens
        held = [page for request in engine.scheduler.requests.values() for page in request.pages]
        assert len(held) == len(set(held)) and engine.pages.free + len(held) == config.num_pages - 1

    for action in actions:
        if action == "step":
            step()
        elif isinstance(action, int):
            engine.abort(action)
        else:
            at, length, most = action
            r = engine.add(source[at : at + length], SamplingParams(max_tokens=most, ignore_eos=True))
            text[r], plain[r] = [], alone(at, length)
    while engine.has_work:
        step()
    assert all(t == plain[r][: len(t)] for r, t in text.items())


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 7), CONFIGS, st.lists(ACTION, max_size=14))
def test_random_schedules(model, source, alone, spec, k, config, actions):
    schedule(model, source, alone, spec, k, config, actions)


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=250, deadline=None)
@given(st.integers(1, 7), CONFIGS, st.lists(ACTION, max_size=30))
def test_many_random_schedules(model, source, alone, spec, k, config, actions):
    schedule(model, source, alone, spec, k, config, actions)


# Accepted drafts by round of three requests: any change of what a draft is made from moves them (SB-38).
PINNED = {
    "mtp": {1: "013233033333", 2: "233333300313", 3: "3333333332"},
    "eagle3": {1: "01321321323301", 2: "0130331332331", 3: "23330333332"},
    "ngram": {1: "103133323331", 2: "00000333331033", 3: "1000331033333"},
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("buckets", [(3,), (8,)], ids=["eager", "padded"])
def test_accepted_lengths_are_pinned(model, source, spec, buckets):
    prompts = [source[a : a + n] for a, n in ((0, 150), (500, 33), (1500, 64))]
    config = EngineConfig(num_pages=60, page_size=32, max_requests=3, prefill_tokens=100, buckets=buckets)
    _, rounds = run(Engine(model, config, make_drafter(spec, model, 3)), prompts, 40)
    accepted = {r: "".join(str(done.accepted[r]) for done in rounds if r in done.accepted) for r in (1, 2, 3)}
    assert accepted == PINNED[spec]


def drafted_logits(engine):
    """Wrap the draft model's head: per forward of it, the logits of the requests in the batch."""
    seen, logits = [], engine.drafter.model.logits
    engine.drafter.model.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    return seen


def naive_mtp(params, config, tokens, T, depth):
    """Draft logits [V] of the last of T rows at ``depth``, by the training twin: whole sequence, no cache."""
    h = twin.forward(params, config, tokens[:, :T])
    return twin.head(params, twin.mtp_steps(params, config, h, tokens[:, : T + depth], depth)[-1][0, -1])


def naive_eagle3(params, config, tokens, T, depth):
    e, head = Eagle3Config.from_folder(zoo.eagle3(), config), eagle_twin.load_head(zoo.eagle3())
    features, _ = eagle_twin.target_features(params, config, e, tokens[:, :T])
    embed = params["model.embed_tokens.weight"]
    *_, last = eagle_twin.unroll(head, e, embed, features, tokens[:, : T + depth], depth)
    full = torch.full((config.vocab_size,), float("-inf"))
    full[eagle_twin.target_ids(head)] = last[0, -1]
    return full


@pytest.mark.parametrize("prefill", [1000, 37], ids=["one shot", "chunks"])
@pytest.mark.parametrize(("spec", "naive_logits"), [("mtp", naive_mtp), ("eagle3", naive_eagle3)])
def test_drafts_equal_a_full_sequence_without_cache(model, source, spec, naive_logits, prefill):
    """Cached, padded, batched: draft logits at depths 1 to 3 over several rounds, against the training twins."""
    params = {n: v.float() for n, v in load_file(zoo.path(NAME) / "model.safetensors").items()}
    prompts = [source[a : a + n] for a, n in ((0, 150), (500, 33), (900, 64))]
    config = EngineConfig(num_pages=60, page_size=32, max_requests=3, prefill_tokens=prefill, buckets=(4,))
    engine = Engine(model, config, make_drafter(spec, model, 3))
    seen = drafted_logits(engine)
    ids = [engine.add(p, SamplingParams(max_tokens=30, ignore_eos=True)) for p in prompts]
    text, compared = {r: list(p) for r, p in zip(ids, prompts, strict=True)}, 0
    while engine.has_work:
        seen.clear()
        done = engine.step()
        for depth, logits in enumerate(seen, 1):
            drawing = [r for r, drafts in done.drafted.items() if len(drafts) >= depth]
            for r, row in zip(drawing, logits, strict=True):
                tokens = torch.tensor([[*text[r], *done.drafted[r], 0]])  # up to the pending token, then drafts
                T = len(text[r]) - 1
                with torch.no_grad():
                    naive = naive_logits(params, model.config, tokens, T, depth)
                said = naive.isfinite()  # a head may have fewer tokens than the target
                assert torch.equal(said, row.isfinite())
                assert (row - naive)[said].abs().max() <= 1e-5 * naive[said].abs().max()
                compared += 1
        for r, tokens in done.tokens.items():
            text[r] += tokens
    assert compared > 40


@torch.inference_mode()
def mtp_logits(model, ids, following):
    """[T, V] of one prompt in one forward; ``following`` are the MTP layer's tokens."""
    pool = PagePool(3, 128)
    pools = Pools(model.cache_spec, pool)
    layout = plan([Work(0, Mode.PREFILL, 0, len(ids), pool.allocate(1))], page_size=128)
    view = materialise(layout, pools)
    hidden = model.forward(torch.tensor(ids), view, pools)
    return model.logits(model.forward_mtp(torch.tensor(following), hidden, view, pools))


def test_sb17_position_0_has_a_token_too(model, source):
    """Rows (h0, t1), (h1, t2), (h2, t3), (h3, new): the first is not masked; a zero embedding there is another row."""
    ids, new = source[:4], source[4]
    params = {n: v.float() for n, v in load_file(zoo.path(NAME) / "model.safetensors").items()}
    h = twin.forward(params, model.config, torch.tensor([ids]))
    naive = twin.head(params, twin.mtp_steps(params, model.config, h, torch.tensor([[*ids, new]]), 1)[0])[0]
    right = mtp_logits(model, ids, [*ids[1:], new])
    assert (right - naive).abs().max() <= 1e-5 * naive.abs().max()
    embed = model.embed
    try:  # put back: a row of zeros behind the vocabulary stands for "no token here"
        model.embed = torch.nn.Parameter(torch.cat([embed, torch.zeros_like(embed[:1])]), requires_grad=False)
        masked = mtp_logits(model, ids, [len(embed), *ids[2:], new])
    finally:
        model.embed = embed
    assert (masked[0] - naive[0]).abs().max() > 0.05 * naive.abs().max()


@pytest.mark.parametrize(("spec", "owner", "pool"), [("mtp", "mtp.0.decoder.attention", "pools.latent[3]"),
                                                     ("eagle3", "drafter", "drafter.pools.key[0]")])
def test_the_ledger_knows_a_drafters_calls(model, source, spec, owner, pool):
    engine = Engine(model, EngineConfig(num_pages=5, buckets=(8,)), make_drafter(spec, model, 3))
    engine.add(source[:20], SamplingParams(max_tokens=9))
    engine.step()
    with ledger.record(engine) as led:
        engine.step()
    calls = [c for c in led.calls if c.operator.startswith("npu_fused") and c.layout is not None
             and c.layout.segments[0].mode is Mode.DRAFT]
    assert len(calls) == 2 and all(c.owner == owner and not c.disagreements for c in calls)
    assert any(o.source == pool for o in calls[0].operands)
    query = calls[0].operands[0]
    assert query.axes[0].name == "T" and (query.axes[0].size, query.axes[0].real) == (8, 1)

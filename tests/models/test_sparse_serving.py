"""Sparse attention in the engine: one text, however a batch is padded, cut, mixed or drafted, and what sharing saves.

Prompts are shorter and longer than the top-k of 64, contexts up to 400.
"""
import argparse
import inspect
import json
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from benchmarks import index_reuse
from trueup.core import planning
from trueup.core.attention.choices import DraftReuse, IndexReuse
from trueup.core.cli import main
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Form, Mode
from trueup.core.ops.capture import capture
from trueup.core.ops.contract import profile
from trueup.core.rows import Kind, Rows
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.speculation.shared_choice import SharedChoiceDrafter
from trueup.models import load_model, zoo
from trueup.models.acceptance import measure
from trueup.models.acceptance.faults import FAULTS
from trueup.models.config import ModelConfig
from trueup.models.drafters import make_drafter
from trueup.models.tokenizer import Tokenizer

NAME = "glm-5-nano"
NEAR = 1e-5  # of the logit scale: two tokens that near are a matter of rounding, two ways stay nearer
LENGTHS = (1, 200, 63, 64, 380, 65, 30)
INDEXER = "npu_lightning_indexer"


@pytest.fixture(scope="module")
def model():
    return load_model(NAME, dtype="float32", progress=False)


@pytest.fixture(autouse=True)
def own_policy(model):
    before = model.reuse
    yield
    model.reuse = before


@pytest.fixture(scope="module")
def source():
    """Token ids of a file that the model has seen the like of."""
    tokenizer = Tokenizer.from_folder(zoo.path(NAME), ModelConfig.from_folder(zoo.path(NAME)))
    return tokenizer.encode(inspect.getsource(argparse))


def some_prompts(source, count):
    return [source[211 * i : 211 * i + LENGTHS[i % len(LENGTHS)]] for i in range(count)]


# Ways to run the same requests.  As many as fit run at once, so they join and leave; pages go from one to the next.
EXACT = EngineConfig(num_pages=100, page_size=16, max_requests=5, buckets=tuple(range(1, 9)), prefill_tokens=600)
WAYS = {
    "padded to buckets": replace(EXACT, buckets=(1, 2, 4, 8)),
    "padded to one bucket": replace(EXACT, buckets=(8,)),
    "with rows agreed": EXACT,
    "alone": replace(EXACT, max_requests=1, buckets=(1,)),
    "in chunks": replace(EXACT, prefill_tokens=37, buckets=(1, 2, 4, 8)),
}


@pytest.fixture
def way(request, monkeypatch):
    """(config of an engine); agreed rows are some more than a batch has."""
    if request.param == "with rows agreed":
        def agreed(work, **options):
            rows = planning.plan(work, **options).padded_tokens + 5
            return planning.plan(work, rows=rows, **options)

        monkeypatch.setattr("trueup.core.engine.plan", agreed)
        monkeypatch.setattr("trueup.core.speculation.chain.plan", agreed)
    return WAYS[request.param]


class Said(NamedTuple):
    """What a request said: token ids, and the logits that each was taken from, [V] of each."""

    tokens: list[int]
    logits: list[torch.Tensor]


def run(model, config, prompts, most, drafter=None):
    """(what was said, by prompt; rounds).  Every other request is shorter by half."""
    engine, head, heard = Engine(model, config, drafter), model.logits, []
    ids = [engine.add(p, SamplingParams(max_tokens=most // (1 + i % 2), ignore_eos=True))
           for i, p in enumerate(prompts)]
    said, rounds = {r: Said([], []) for r in ids}, []
    model.logits = lambda hidden: heard.append(head(hidden)) or heard[-1]
    try:
        while engine.has_work:
            done = engine.step()
            logits = Rows(Kind.SCORED, done.layout, heard[-1]).by_request()  # drafts came before
            heard.clear()
            rounds.append(done)
            for r, tokens in done.tokens.items():
                said[r].tokens.extend(tokens)
                said[r].logits.extend(logits[r][: len(tokens)])
    finally:
        del model.logits
    assert engine.pages.free == config.num_pages - 1
    return [said[r] for r in ids], rounds


def compare(plain, other):
    """Equal, or different from a token on where the two best logits are NEAR; such stops are counted."""
    stops = 0
    for a, b in zip(plain, other, strict=True):
        for x, y, p, q in zip(a.tokens, b.tokens, a.logits, b.logits, strict=True):
            scale = p.abs().max()
            assert (p - q).abs().max() <= NEAR * scale
            if x != y:
                best = p.topk(2)
                assert best.values[0] - best.values[1] <= NEAR * scale and set(best.indices.tolist()) == {x, y}
                stops += 1
                break
    assert stops <= 1e-3 * sum(len(said.tokens) for said in plain)


@pytest.fixture(scope="module")
def plain(model, source):
    prompts = some_prompts(source, len(LENGTHS))
    said, rounds = run(model, EXACT, prompts, 16)
    assert all(s.padded_requests == s.real_requests for done in rounds for s in done.layout.segments)
    assert any(len({s.form for s in done.layout.segments}) > 1 for done in rounds)  # prompts beside decoding
    mixed = [s.kv_lens for done in rounds for s in done.layout.segments if s.form is Form.EXPANDED]
    assert any(min(lengths) <= 64 < max(lengths) for lengths in mixed)
    return prompts, said


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_one_text_however_it_is_batched(model, plain, way):
    prompts, said = plain
    other, _ = run(model, way, prompts, 16)
    compare(said, other)


@pytest.mark.parametrize(("way", "drafts"), [
    *(("padded to buckets", drafts) for drafts in DraftReuse), ("with rows agreed", DraftReuse.GROWN),
], indirect=["way"])
def test_drafting_leaves_the_text(model, plain, drafts, way):
    prompts, said = plain
    model.reuse = replace(model.reuse, drafts=drafts)
    other, rounds = run(model, way, prompts, 16, make_drafter("mtp", model, 3))
    compare(said, other)
    assert Acceptance.of(rounds).tokens_per_round > 1.5
    assert any(s.mode is Mode.VERIFY and s.real_requests > 1 for done in rounds for s in done.layout.segments)


@pytest.fixture(scope="module")
def many(model, source):
    """Sixty-three prompts, 48 or 24 tokens each: two stops at most."""
    prompts = some_prompts(source, 9 * len(LENGTHS))
    return prompts, run(model, EXACT, prompts, 48)[0]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("drafts", [None, *DraftReuse])
def test_many_prompts_in_every_way(model, many, drafts, way):
    prompts, said = many
    drafter = None
    if drafts:
        model.reuse = replace(model.reuse, drafts=drafts)
        drafter = make_drafter("mtp", model, 3)
    other, _ = run(model, way, prompts, 48, drafter)
    compare(said, other)


# Who chooses.


@pytest.mark.parametrize(("drafts", "kind", "grow"), [
    (DraftReuse.OWN, ChainDrafter, None), (DraftReuse.FROZEN, SharedChoiceDrafter, False),
    (DraftReuse.GROWN, SharedChoiceDrafter, True),
])
def test_the_policy_picks_the_drafter(model, drafts, kind, grow):
    model.reuse = replace(model.reuse, drafts=drafts)
    drafter = make_drafter("mtp", model)
    assert type(drafter) is kind and getattr(drafter, "grow", None) == grow


@pytest.mark.parametrize(("flag", "drafts"), [(True, DraftReuse.GROWN), (False, DraftReuse.OWN)])
def test_a_published_config_says_whether_drafts_share_a_choice(flag, drafts):
    raw = json.loads((zoo.path(NAME) / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_hf(raw | {"index_share_for_mtp_iteration": flag})
    assert config.indexer.reuse == IndexReuse((0, 1, 2, 3), drafts)


@pytest.mark.parametrize(("policy", "asked"), [
    (IndexReuse((0, 1, 2, 3)), 3 + 2 + 1), (IndexReuse((0, 1, 2, 3), DraftReuse.FROZEN), 3 + 1),
    (IndexReuse((0, 1, 2, 3), DraftReuse.GROWN), 3 + 1), (IndexReuse((0, 1, 1, 3)), 2 + 2 + 1),
    (IndexReuse((0, 0, 0, 3), DraftReuse.GROWN), 1 + 1),
])
def test_how_often_a_round_asks_an_indexer(model, source, policy, asked):
    """In the target's layers, in two draft steps, in the lesson.  And whatever the policy, drafts change no text."""
    model.reuse = policy
    prompts = [source[:90], source[400:420]]
    said, _ = run(model, EXACT, prompts, 12)
    drafted, _ = run(model, EXACT, prompts, 12, make_drafter("mtp", model, 3))
    compare(said, drafted)

    engine = Engine(model, EXACT, make_drafter("mtp", model, 3))
    engine.add(prompts[0], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.step()
    with capture() as calls:
        done = engine.step()
    counts = Counter(call["operator"] for call in calls.calls)
    assert len(done.draft_layouts) == 3 and counts[INDEXER] == asked
    assert counts["npu_scatter_nd_update_"] == 3 + 3  # keys are written in any case


# The tools around it.


def explored(model, source, fault=None):
    prompts = [source[300 * i : 300 * i + n] for i, n in enumerate((90, 70, 30))]
    return measure.run(model, "mtp", 3, prompts, 12, fault, record=True)


def wrong(run):
    return {check.input for check in run.checks if not check.ok}


def faults(model, drafts):
    model.reuse = replace(model.reuse, drafts=drafts)
    return [f for f in FAULTS if f.fits(make_drafter("mtp", model))]


@pytest.mark.parametrize("drafts", DraftReuse)
def test_the_doctor_finds_nothing_wrong_and_the_choice_of_another_request(model, source, drafts):
    model.reuse = replace(model.reuse, drafts=drafts)
    right = explored(model, source)
    seen = {check.input for check in right.checks if check.seen}
    assert not wrong(right) and seen >= {"tokens", "positions", "lengths", "hidden", "carried", "layer", "cache"}
    assert ("choice" in seen) == (drafts is not DraftReuse.OWN)
    planted = [f for f in faults(model, drafts) if f.input == "choice"]
    assert len(planted) == (drafts is not DraftReuse.OWN)
    for fault in planted:
        mixed = explored(model, source, fault)
        assert wrong(mixed) == {"choice"} and mixed.text == right.text  # verification repairs it


@pytest.mark.long
@pytest.mark.parametrize("drafts", DraftReuse)
def test_the_doctor_finds_every_planted_fault(model, source, drafts):
    right = explored(model, source)
    for fault in faults(model, drafts):
        planted = explored(model, source, fault)
        assert fault.input in wrong(planted) and planted.text == right.text, fault.name


def test_generate_takes_its_name(capsys):
    assert main(["generate", "import os\n", "--model", NAME, "--spec", "mtp", "--max-tokens", "9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == NAME and report["acceptance"]["rounds"] and len(report["token_ids"]) <= 9


@pytest.mark.parametrize("name", ["drafts grown", "layers 0 1 1 3"])
def test_the_benchmark_counts_what_a_policy_saves(model, source, name):
    prompts = some_prompts(source, 2)[1:] * 2
    model.reuse = index_reuse.POLICIES[name]
    drafted = index_reuse.drafted(model, prompts, index_reuse.plain(model, prompts))
    assert drafted.other == 0 and drafted.calls == {"drafts grown": 4, "layers 0 1 1 3": 5}[name]
    assert 1 < drafted.tokens_per_round <= 4 and 0 < drafted.error < 1


@pytest.mark.parametrize("drafts", DraftReuse)
def test_a_device_would_take_every_call(source, drafts):
    """In bf16, with every rule of the contracts on: prompts on either side of top-k, chunks, drafting, verification."""
    small = load_model(NAME, dtype="bfloat16", progress=False)
    small.reuse = replace(small.reuse, drafts=drafts)
    engine, modes = Engine(small, EngineConfig(num_pages=9, prefill_tokens=60), make_drafter("mtp", small, 3)), set()
    with profile("device"):
        for prompt in some_prompts(source, 3):
            engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        while engine.has_work:
            done = engine.step()
            modes |= {s.mode for layout in (done.layout, *done.draft_layouts) for s in layout.segments}
    assert modes >= {Mode.PREFILL, Mode.EXTEND, Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND}

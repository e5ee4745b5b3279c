"""The EAGLE-3 head that is trained: its chain against plain loops, its loss, its files."""
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from trueup.models import zoo
from trueup.models.config import ModelConfig
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.training import eagle, eagle_report, eagle_twin, export, report, train, twin

NANO = "glm-4.7-flash-nano"
TARGET = dataclasses.replace(
    ModelConfig.from_folder(zoo.path(NANO)), vocab_size=96, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, moe_layers=(False, True, True),
)
HEAD = Eagle3Config(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_theta=1e4,
    rms_norm_eps=1e-5, vocab_size=96, draft_vocab_size=64, taps=(0, 1, 2),
)


def filled(params: twin.Params, seed: int) -> twin.Params:
    """Parameters without zeros and ones, so that every one of them matters."""
    generator = torch.Generator().manual_seed(seed)

    def value(v):
        return v + 0.3 * torch.randn(v.shape, generator=generator) / v.shape[-1] ** (0.5 * (v.ndim > 1))

    return {n: value(v) if v.is_floating_point() else v for n, v in params.items()}


@pytest.fixture(scope="module")
def target():
    return filled(twin.init_params(TARGET, 0), 1)


@pytest.fixture(scope="module")
def head(target):
    # Every third id is rare, so target ids and draft ids differ from the start.
    often = torch.arange(96)[torch.arange(96) % 3 != 0]
    return filled(eagle_twin.init_params(HEAD, target, eagle_twin.draft_vocabulary(often, HEAD), 2), 3)


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def naive_chain(p, embed, features, tokens, slot, steps, fault=""):
    """Draft logits of one chain, one row and one head at a time in float64, from the published description.

    The chain is one plain causal sequence: slots 0..slot with target features and the text, then a row for
    every draft, with the a of the row before.  ``fault`` plants a mistake.
    """
    p = {n: v.double() if v.is_floating_point() else v for n, v in p.items()}
    width, group = HEAD.head_dim, HEAD.num_attention_heads // HEAD.num_key_value_heads

    def norm(x, name):
        return x / torch.sqrt((x * x).mean() + HEAD.rms_norm_eps) * p[name]

    def turned(x, position):
        """Half-split rope as a product of complex numbers."""
        pair = torch.complex(x[: width // 2], x[width // 2 :])
        angle = torch.tensor([position / HEAD.rope_theta ** (2 * j / width) for j in range(width // 2)]).double()
        pair = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag])

    def projected(u, name):
        return (p[f"midlayer.self_attn.{name}_proj.weight"] @ u).view(-1, width)

    keys, values, found = [], [], []
    hiddens = [p["fc.weight"] @ f for f in features.double()]
    fed = [int(tokens[i + 1]) for i in range(slot + 1)]
    for row in range(slot + steps):
        a, e = hiddens[row], embed.double()[fed[row]]
        halves = [norm(e, "midlayer.input_layernorm.weight"), norm(a, "midlayer.hidden_norm.weight")]
        u = torch.cat(halves[::-1] if fault == "hidden half first" else halves)
        position = min(row, slot) if fault == "position stands still" else row
        keys.append([turned(k, position) for k in projected(u, "k")])
        values.append(projected(u, "v"))
        o = []
        for n, q in enumerate(projected(u, "q")):
            shared = n % HEAD.num_key_value_heads if fault == "groups interleaved" else n // group
            scores = torch.stack([turned(q, position) @ k[shared] for k in keys]) / math.sqrt(width)
            o.append(sum(w * v[shared] for w, v in zip(scores.softmax(0), values, strict=True)))
        a = a + p["midlayer.self_attn.o_proj.weight"] @ torch.cat(o)
        x = norm(a, "midlayer.post_attention_layernorm.weight")
        gate, up = p["midlayer.mlp.gate_proj.weight"] @ x, p["midlayer.mlp.up_proj.weight"] @ x
        a = a + p["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        logits = p["lm_head.weight"] @ norm(a, "norm.weight")
        if row >= slot:
            best = int(logits.argmax())
            fed.append(best if fault == "draft id as target id" else best + int(p["d2t"][best]))
            hiddens = [*hiddens[: row + 1], norm(a, "norm.weight") if fault == "normed feedback" else a]
            found.append(logits)
    return found


@torch.no_grad()
def chain(head, target, tokens, steps):
    features, _ = eagle_twin.target_features(target, TARGET, HEAD, tokens[:, :-1])
    embed = target["model.embed_tokens.weight"]
    return features, eagle_twin.draft_chain(head, HEAD, embed, features, tokens, steps)


@pytest.mark.parametrize("slot", [0, 5, 11])
def test_the_chain_equals_plain_loops(head, target, slot):
    tokens = text(2, 13)
    features, found = chain(head, target, tokens, 4)
    for row in range(2):
        expected = naive_chain(head, target["model.embed_tokens.weight"], features[row], tokens[row], slot, 4)
        for step, (ids, logits) in enumerate(found):
            assert (logits[row, slot] - expected[step]).abs().max() < 1e-4 * expected[step].abs().max()
            assert ids[row, slot] == eagle_twin.target_ids(head)[expected[step].argmax()]


@pytest.mark.parametrize("fault, first", [
    ("hidden half first", 0), ("groups interleaved", 0), ("position stands still", 1), ("normed feedback", 1),
    ("draft id as target id", 1),
])
def test_a_planted_fault_changes_the_logits(head, target, fault, first):
    """...from the step on in which it can first be seen, so the comparison above would find it."""
    tokens = text(1, 13)
    features, found = chain(head, target, tokens, 3)
    wrong = naive_chain(head, target["model.embed_tokens.weight"], features[0], tokens[0], 8, 3, fault)
    away = [(logits[0, 8] - w).abs().max() / w.abs().max() for (_, logits), w in zip(found, wrong, strict=True)]
    assert all(d < 1e-4 for d in away[:first]) and away[first] > 1e-2


def test_features_are_the_streams_entering_the_layers_from_low_to_high(head, target):
    tokens = text(1, 9)
    states: dict[int, torch.Tensor] = {}
    normed = twin.forward(target, TARGET, tokens, states=states)
    assert torch.equal(states[0], target["model.embed_tokens.weight"][tokens])
    for layer in (0, 1):
        after, _ = twin.decoder_layer(target, TARGET, layer, states[layer], torch.arange(9))
        assert torch.equal(after, states[layer + 1])
    assert torch.equal(twin.rms_norm(states[2], target["model.norm.weight"], TARGET.rms_norm_eps), normed)
    features, _ = eagle_twin.target_features(target, TARGET, HEAD, tokens)
    assert torch.equal(features, torch.cat([states[0], states[1], states[2]], -1))


def test_training_steps_fed_the_drafts_are_the_chain(head, target):
    """Training-time test is given as text what the chain drafted; every step must then be the chain's."""
    tokens = text(1, 10)
    features, found = chain(head, target, tokens, eagle.STEPS)
    embed = target["model.embed_tokens.weight"]
    for slot in (0, 4, 8):
        drafts = torch.stack([ids[0, slot] for ids, _ in found])
        fed = torch.cat([tokens[0, : slot + 2], drafts])[None]
        steps = eagle_twin.unroll(head, HEAD, embed, features[:, : slot + 1], fed, eagle.STEPS)
        for logits, (_, expected) in zip(steps, found, strict=True):
            assert torch.allclose(logits[0, slot], expected[0, slot], atol=1e-5)


def test_the_loss_is_the_restricted_cross_entropy_of_the_slots_that_count(head, target):
    tokens, T, steps = text(2, 9), 6, 3
    found = eagle.losses(head, HEAD, target, TARGET, tokens, T, steps)
    features, logits = eagle_twin.target_features(target, TARGET, HEAD, tokens)
    embed = target["model.embed_tokens.weight"]
    drafts = list(eagle_twin.unroll(head, HEAD, embed, features[:, :T], tokens, steps))
    allowed, skipped = eagle_twin.target_ids(head).tolist(), 0
    for s in range(steps):
        each = []
        for b in range(2):
            for slot in range(T):
                want = logits[b, slot + s + 1]
                if int(want.argmax()) not in allowed:
                    skipped += 1
                    continue
                p = want[allowed].double().softmax(-1)
                each.append(-(p * drafts[s][b, slot].double().log_softmax(-1)).sum())
        assert found[s].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)
    assert skipped  # or the test says nothing about them


def test_a_gradient_reaches_every_parameter(head, target):
    p = {n: v.clone().requires_grad_(v.is_floating_point()) for n, v in head.items()}
    sum(eagle.losses(p, HEAD, target, TARGET, text(2, 15), 8, eagle.STEPS)).backward()
    assert all(v.grad.abs().max() > 0 for v in p.values() if v.is_floating_point())


def test_the_draft_vocabulary_is_the_most_frequent_ids(target):
    stream = torch.tensor([90, 90, 90, 7, 7, 50, *range(64), 95, 95])
    ids = eagle_twin.draft_vocabulary(stream, HEAD)
    assert {90, 7, 50, 95} < set(ids.tolist()) and 62 not in ids  # equally rare: the higher id gives way
    p = eagle_twin.init_params(HEAD, target, ids, 0)
    assert p["t2d"].sum() == 64 and p["t2d"][eagle_twin.target_ids(p)].all()
    assert (eagle_twin.target_ids(p).diff() > 0).all() and torch.equal(eagle_twin.target_ids(p), ids)


def test_a_file_gives_back_what_was_trained(head, tmp_path):
    export.export(head, tmp_path)
    read = eagle_twin.load_head(tmp_path)
    assert read.keys() == head.keys()
    for name, value in head.items():
        kept = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(read[name], kept) and read[name].dtype == kept.dtype


def test_training_teaches_the_head_and_leaves_the_target_alone(target):
    """The ids repeat, so the target repeats itself, and the head learns what it says."""
    before = {n: v.clone() for n, v in target.items()}
    stream = torch.arange(96).repeat(40)
    p = eagle_twin.init_params(HEAD, target, eagle_twin.draft_vocabulary(stream, HEAD), 0)
    trainer = eagle.Trainer(p, HEAD, target, TARGET, torch.float32)
    tokens = stream[torch.arange(4)[:, None] * 24 + torch.arange(128 + eagle.STEPS)]
    losses = [trainer.step(tokens, 128, 0.2 + 0.02 * i) for i in range(30)]  # three steps of the chain, then seven
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(target[n], v) for n, v in before.items())


def test_a_run_resumes_where_it_stopped(target, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "BATCH_TOKENS", 1024)
    stream, results = torch.arange(96, dtype=torch.int32).repeat(100), []
    for _ in range(2):
        p = eagle_twin.init_params(HEAD, target, eagle_twin.draft_vocabulary(stream, HEAD), 0)
        spent = results[-1].seconds / 60 if results else 0.0
        results.append(eagle.train_head(p, HEAD, target, TARGET, stream, stream[:600], tmp_path, minutes=spent + 0.005,
                                        seed=1, dtype=torch.float32))
    first, second = results
    assert second.steps > first.steps and second.log[: len(first.log)] == first.log
    kept, state = export.load_state(tmp_path / "state.pt")
    assert state["tokens"] == second.tokens and torch.equal(kept["fc.weight"], p["fc.weight"])
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def shipped():
    """(target, its config, head, its config), the target in fp32."""
    folder = zoo.path(NANO)
    config = ModelConfig.from_folder(folder)
    target = {n: v.float() for n, v in load_file(folder / "model.safetensors").items()}
    return target, config, eagle_twin.load_head(zoo.eagle3()), Eagle3Config.from_folder(zoo.eagle3(), config)


@pytest.fixture(scope="module")
def source():
    """The first 2100 tokens of this file: Python that the target never saw."""
    ids = Tokenizer.from_file(str(zoo.path(NANO) / "tokenizer.json")).encode(Path(__file__).read_text()).ids
    return torch.tensor(ids[:2100])


def test_the_shipped_head_has_the_published_form(shipped):
    _, config, head, sizes = shipped
    H, kv = config.hidden_size, sizes.num_key_value_heads * sizes.head_dim
    assert sizes.taps == (1, 2, 3) and sizes.head_dim == 128
    assert len(head) == 15 and head.keys() == eagle_twin.init_params(
        HEAD, {"lm_head.weight": torch.zeros(96, 32)}, torch.arange(64), 0).keys()
    assert head["fc.weight"].shape == (H, 3 * H) and head["midlayer.self_attn.k_proj.weight"].shape == (kv, 2 * H)
    assert head["t2d"].sum() == sizes.draft_vocab_size < config.vocab_size == len(head["t2d"])
    assert torch.equal(head["t2d"].nonzero()[:, 0], eagle_twin.target_ids(head))
    stored = load_file(zoo.eagle3() / "model.safetensors")
    assert {n for n, v in stored.items() if v.dtype != torch.bfloat16} == {"d2t", "t2d"}
    assert stored["t2d"].dtype == torch.bool and stored["d2t"].dtype == torch.int64
    assert (zoo.eagle3() / "model.safetensors").stat().st_size <= 6_000_000
    assert (zoo.eagle3() / "loss.png").stat().st_size < 100_000


@torch.no_grad()
def test_rounds_of_the_shipped_head_are_counted_as_a_loop_would(shipped, source):
    """The card's arithmetic on known text, against drafting, comparing and going on, round after round."""
    target, config, head, sizes = shipped
    ids = report.greedy_text(target, config, source.view(3, 700)[:, :24], report.NEW_TOKENS + report.DRAFTS + 2)
    counted = report.count_rounds(eagle_report.drafts_on(head, sizes, target, config, ids), ids, 24)
    embed = target["model.embed_tokens.weight"]
    for row, result in zip(ids, counted, strict=True):
        at, rounds = 23, []
        while at < 23 + report.NEW_TOKENS:
            features, _ = eagle_twin.target_features(target, config, sizes, row[None, : at + 1])
            chain = eagle_twin.draft_chain(head, sizes, embed, features, row[None, : at + 2], report.DRAFTS)
            accepted = 0
            while accepted < report.DRAFTS and chain[accepted][0][0, at] == row[at + 2 + accepted]:
                accepted += 1
            rounds.append(accepted + 1)
            at += accepted + 1
        assert rounds == result.rounds
    assert report.pooled(counted) > 1.5


def test_what_the_shipped_head_reads_matters(shipped, source):
    """Streams joined from high to low, or one layer too early, cost acceptance; nothing else would show it."""
    target, config, head, sizes = shipped
    upside_down = head | {"fc.weight": torch.cat(head["fc.weight"].chunk(3, -1)[::-1], -1)}
    early = dataclasses.replace(sizes, taps=(0, 1, 2))
    cases = ((head, sizes), (upside_down, sizes), (head, early))
    right, *wrong = (eagle.evaluate(p, e, target, config, source)[0] for p, e in cases)
    assert right > 0.5 and max(wrong) < right - 0.1

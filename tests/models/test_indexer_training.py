"""The indexer that is trained: its scores against plain loops, its losses, its files, and the model that is served."""
import dataclasses
import math
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models import load_model, zoo
from trueup.models.config import ModelConfig
from trueup.models.delta import all_tensors
from trueup.models.stored import read
from trueup.models.tokenizer import Tokenizer
from trueup.models.training import export, indexer, indexer_report, indexer_twin, train, twin

DENSE, SPARSE = "glm-4.7-flash-nano", "glm-5-nano"
SHIPPED = ModelConfig.from_folder(zoo.path(SPARSE))
SMALL = dataclasses.replace(
    SHIPPED, vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, intermediate_size=32, moe_intermediate_size=16,
    n_routed_experts=4, moe_layers=(False, True, True),
    indexer=dataclasses.replace(SHIPPED.indexer, heads=3, head_dim=12, topk=4, full=(True,) * 3),
)


def text(B: int, T: int, vocab: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def params():
    """Parameters without zeros and ones, so that every one of them matters."""
    generator = torch.Generator().manual_seed(1)
    return {n: v + 0.3 * torch.randn(v.shape, generator=generator) / v.shape[-1] ** (0.5 * (v.ndim > 1))
            for n, v in twin.init_params(SMALL, 0).items()}


def inputs(T: int) -> torch.Tensor:
    return torch.randn(2, T, 32, generator=torch.Generator().manual_seed(3))


def naive_scores(p: dict, x: torch.Tensor) -> torch.Tensor:
    """One sequence x [T, H], in float64, entry by entry."""
    i, at = SMALL.indexer, "model.layers.1.self_attn."
    p = {n: v.double() for n, v in p.items()}
    x = x.double()

    def turned(row, position):
        out = row.clone()
        for j in range(SMALL.qk_rope_head_dim // 2):
            angle = position * SMALL.rope_theta ** (-2 * j / SMALL.qk_rope_head_dim)
            a, b = row[2 * j], row[2 * j + 1]
            out[2 * j] = a * math.cos(angle) - b * math.sin(angle)
            out[2 * j + 1] = b * math.cos(angle) + a * math.sin(angle)
        return out

    rank = x @ p[at + "q_a_proj.weight"].T
    rank = rank / (rank.square().mean(-1, keepdim=True) + SMALL.lora_norm_eps).sqrt() * p[at + "q_a_layernorm.weight"]
    at += "indexer."
    key = x @ p[at + "wk.weight"].T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    key = key * p[at + "k_norm.weight"] + p[at + "k_norm.bias"]
    scores = torch.full((len(x), len(x)), -math.inf, dtype=torch.float64)
    for s in range(len(x)):
        query, weights = (rank[s] @ p[at + "wq_b.weight"].T).view(i.heads, -1), x[s] @ p[at + "weights_proj.weight"].T
        for t in range(s + 1):
            dots = [max(0.0, float(turned(query[h], s) @ turned(key[t], t))) for h in range(i.heads)]
            scores[s, t] = sum(w * d for w, d in zip(weights.tolist(), dots, strict=True)) / math.sqrt(
                i.heads * i.head_dim)
    return scores


def test_scores_are_those_of_plain_loops(params):
    x = inputs(7)
    found = indexer_twin.index_scores(params, SMALL, 1, x)
    for row, expected in zip(found, (naive_scores(params, x[0]), naive_scores(params, x[1])), strict=True):
        finite = expected > -math.inf
        assert torch.equal(row > -math.inf, finite)
        assert (row[finite] - expected[finite]).abs().max() <= 1e-5 * expected[finite].abs().max()


def test_the_choice_is_the_best_of_what_is_visible():
    scores = torch.tensor([[[5.0, -math.inf, -math.inf], [1.0, 2.0, -math.inf], [3.0, 1.0, 2.0]]])
    assert indexer_twin.chosen(scores, 2).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    assert indexer_twin.chosen(scores, 9).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


@pytest.mark.parametrize("sparse", [False, True])
def test_the_divergence_is_that_of_the_two_distributions_and_only_it_reaches_the_indexer(params, sparse):
    p = {n: v.clone().requires_grad_() for n, v in params.items()}
    attend = indexer_twin.SparseAttention(p, SMALL, dense=not sparse, learn=True)
    x, positions = inputs(9), torch.arange(9)
    q, k, v = twin.queries_keys_values(p, SMALL, 1, x, positions)
    out = attend(1, x, q, k, v)

    scores = indexer_twin.index_scores(params, SMALL, 1, x)
    seen = indexer_twin.chosen(scores, SMALL.indexer.topk) if sparse else scores > -math.inf
    each = []
    for b in range(2):
        for s in range(9):
            at = seen[b, s].nonzero()[:, 0]
            dots = torch.einsum("nd,nsd->ns", q[b, :, s], k[b][:, at])
            weights = (dots * SMALL.softmax_scale).double().softmax(-1)
            wanted, guess = weights.mean(0).detach(), scores[b, s, at].double().softmax(-1)
            each.append((wanted * (wanted / guess).log()).sum())
            assert torch.allclose(out[b, :, s].double(), torch.einsum("ns,nsv->nv", weights, v[b][:, at].double()),
                                  atol=1e-5)
    assert attend.divergence[1].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)

    attend.divergence[1].backward()
    reached = {n for n, value in p.items() if value.grad is not None and value.grad.abs().max() > 0}
    assert reached == {f"model.layers.1.self_attn.indexer.{n}"
                       for n in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")}


@pytest.mark.parametrize("sparse", [False, True])
def test_each_stage_moves_what_it_should(params, sparse):
    learned = {n: v.clone() for n, v in params.items() if n in chain(*indexer.learned(params))}
    before, trainer = {n: v.clone() for n, v in learned.items()}, indexer.Trainer(learned, params, SMALL, torch.float32)
    for step in range(3):
        trainer.step(text(2, 18), 16, 0.7 + 0.01 * step if sparse else 0.1)
    moved = {n for n, v in learned.items() if not torch.equal(v, before[n])}
    ours, tuned = indexer.learned(params)
    assert moved == set(ours) | (set(tuned) if sparse else set())
    assert not any("kv_b_proj" in n or "experts" in n or "embed" in n for n in tuned)


def test_warm_up_brings_the_indexers_to_the_attention(params):
    learned = {n: v.clone() for n, v in params.items() if n in chain(*indexer.learned(params))}
    trainer = indexer.Trainer(learned, params, SMALL, torch.float32)
    stream = text(1, 2000)[0]

    def recall():
        found = indexer.evaluate(trainer.rounded(), SMALL, stream, T=24)
        return [found[f"recall{layer}"] for layer in range(3)]

    tokens, before = text(16, 26, seed=5), recall()
    found = [trainer.step(tokens, 24, 0.2) for _ in range(60)]
    assert found[-1] < 0.5 * found[0]
    after = recall()
    assert all(b > a for a, b in zip(before, after, strict=True)) and sum(after) > sum(before) + 0.1, (before, after)


def test_with_room_for_all_sparse_is_dense(params):
    roomy = dataclasses.replace(SMALL, indexer=dataclasses.replace(SMALL.indexer, topk=16))
    tokens = text(2, 16)
    attend = indexer_twin.SparseAttention(params, roomy)
    sparse, dense = twin.forward(params, roomy, tokens, attend=attend), twin.forward(params, roomy, tokens)
    assert torch.allclose(sparse, dense, atol=1e-5)
    few = twin.forward(params, SMALL, tokens, attend=indexer_twin.SparseAttention(params, SMALL))
    assert torch.allclose(few[:, :4], dense[:, :4], atol=1e-5) and not torch.allclose(few, dense, atol=1e-2)


def test_a_run_resumes_where_it_stopped(params, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "BATCH_TOKENS", 1024)
    monkeypatch.setattr(indexer, "WINDOW", 256)
    stream, results = text(1, 9000)[0].int(), []
    for _ in range(2):
        learned = indexer.init_params(SMALL, params, 0)
        spent = results[-1].seconds / 60 if results else 0.0
        results.append(indexer.train_indexer(learned, params, SMALL, stream, stream[:600], tmp_path,
                                             minutes=spent + 0.005, seed=1, dtype=torch.float32))
    first, second = results
    assert second.steps > first.steps and second.log[: len(first.log)] == first.log
    kept, state = export.load_state(tmp_path / "state.pt")
    assert state["tokens"] == second.tokens and kept.keys() == learned.keys()
    assert (tmp_path / "loss.png").stat().st_size > 1000


# The model that was trained with it.

@pytest.fixture(scope="module")
def shipped():
    return {n: v.float() for n, v in read(all_tensors(zoo.path(SPARSE)))}


@pytest.fixture(scope="module")
def source():
    """The first 1100 tokens of this file and another: Python that neither model ever saw."""
    written = Path(__file__).read_text() + Path(__file__).with_name("test_twin.py").read_text()
    return torch.tensor(Tokenizer.from_folder(zoo.path(DENSE), SHIPPED).encode(written)[:1100])


def test_the_delta_is_small_and_holds_what_was_learned(shipped):
    file = zoo.path(SPARSE) / "model.safetensors"
    held, ours = load_file(file), [*chain(*indexer.learned(shipped))]
    assert file.stat().st_size <= 6_000_000 and set(held) <= set(ours)
    assert set(indexer.learned(shipped)[0]) <= set(held) and {v.dtype for v in held.values()} == {torch.bfloat16}
    dense = load_file(zoo.path(DENSE) / "model.safetensors")
    assert all(torch.equal(shipped[n], v.float()) for n, v in dense.items() if n not in held)


@torch.inference_mode()
def test_what_is_served_is_what_was_trained(shipped, source):
    """300 tokens, several times top-k, in chunks through operators and cache: logits of model and MTP layer."""
    model, ids = load_model(SPARSE, dtype="float32", progress=False), source[None, :301]
    attend = indexer_twin.SparseAttention(shipped, SHIPPED)
    h = twin.forward(shipped, SHIPPED, ids[:, :300], attend=attend)
    drafted = twin.head(shipped, twin.mtp_steps(shipped, SHIPPED, h, ids, 1, attend=attend)[0])[0]
    pages = PagePool(8, 128)
    pools, held, at = Pools(model.cache_spec, pages), pages.allocate(3), 0
    for length, mode in ((60, Mode.PREFILL), (140, Mode.PREFILL), (4, Mode.VERIFY), (96, Mode.PREFILL)):
        layout = plan([Work(0, mode, at, length, held)], page_size=128, buckets=(2,))
        view = materialise(layout, pools)
        now, following = (input_ids(layout, {0: row[at : at + length].tolist()}, pools.spec.device).tensor
                          for row in (ids[0], ids[0, 1:]))
        hidden = model.forward(now, view, pools)
        for found, expected in ((model.logits(hidden), twin.head(shipped, h)[0]),
                                (model.logits(model.forward_mtp(following, hidden, view, pools)), drafted)):
            expected = expected[at : at + length]
            assert (found[:length] - expected).abs().max() <= 3e-5 * expected.abs().max()
        at += length


def test_the_shipped_indexers_find_the_attention(shipped, source):
    """Loss within 2 % of dense attention, and far more of the attention than the newest positions hold."""
    sparse = indexer.evaluate(shipped, SHIPPED, source)
    dense = indexer.evaluate(shipped, SHIPPED, source, dense=True)
    assert abs(sparse["loss"] / dense["loss"] - 1) < 0.02
    assert min(sparse[f"recall{layer}"] for layer in range(4)) > 0.8
    curves = indexer_report.recall_curves(shipped, SHIPPED, source, windows=2)
    at = indexer_report.COUNTS.index(64)
    assert curves["0"]["indexer"][at] > curves["0"]["newest"][at] + 0.02  # the other layers look at what is near
    for orders in curves.values():
        assert orders["newest"][at] < orders["indexer"][at] < orders["best"][at]
        assert all(a < b for a, b in zip(orders["indexer"], orders["indexer"][1:], strict=False))


def test_fresh_indexers_do_not(shipped, source):
    """What the figures above would be without the training."""
    fresh = shipped | {n: v for n, v in twin.init_params(SHIPPED, 1).items() if ".indexer." in n}
    found = indexer.evaluate(fresh, SHIPPED, source)
    dense = indexer.evaluate(shipped, SHIPPED, source, dense=True)
    assert found["loss"] > 1.05 * dense["loss"] and min(found[f"recall{layer}"] for layer in range(3)) < 0.6

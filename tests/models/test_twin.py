"""The differentiable twin that was trained, and the model that is served: one mathematics."""
import dataclasses

import pytest
import torch

from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models import load_model, zoo
from trueup.models.config import ModelConfig
from trueup.models.training import report, train, twin
from trueup.models.training.export import load_state
from trueup.models.training.optim import orthogonalise

NAME = "glm-4.7-flash-nano"


@pytest.fixture(scope="module")
def params():
    from safetensors.torch import load_file

    return {n: v.float() for n, v in load_file(zoo.path(NAME) / "model.safetensors").items()}


@pytest.fixture(scope="module")
def served():
    return load_model(NAME, dtype="float32", progress=False)


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, 2048, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def serve(model, ids: list[int], next_ids: list[int]):
    """(logits, MTP logits) of one prompt in two chunks, through operators and cache."""
    pages = PagePool(8, 128)
    pools, held = Pools(model.cache_spec, pages), pages.allocate(3)
    logits, drafted, at = [], [], 0
    for length in (100, len(ids) - 100):
        layout = plan([Work(0, Mode.PREFILL, at, length, held)], page_size=128)
        view = materialise(layout, pools)
        rows = [{0: seq[at : at + length]} for seq in (ids, next_ids)]
        tokens, following = (input_ids(layout, r, torch.device("cpu")).tensor for r in rows)
        hidden = model.forward(tokens, view, pools)
        logits.append(model.logits(hidden))
        drafted.append(model.logits(model.forward_mtp(following, hidden, view, pools)))
        at += length
    return torch.cat(logits), torch.cat(drafted)


def test_twin_and_served_model_have_equal_logits(params, served):
    ids = text(201)
    h = twin.forward(params, served.config, ids[:, :200])
    expected, drafted = twin.head(params, h)[0], twin.mtp_steps(params, served.config, h, ids, 1)[0]
    logits, mtp = serve(served, ids[0, :200].tolist(), ids[0, 1:].tolist())
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    drafted = twin.head(params, drafted)[0]
    assert (mtp - drafted).abs().max() <= 1e-5 * drafted.abs().max()


def test_later_mtp_steps_are_the_layer_run_again_on_its_own_output(params, served):
    """Steps 2 and 3 of one chain start, against the layer fed by hand: slots <= p from step 1, then its own keys."""
    config, ids, p = served.config, text(30, 1), 20
    h = twin.forward(params, config, ids[:, :26])
    fast = twin.mtp_steps(params, config, h, ids, 3)
    embed = params["model.embed_tokens.weight"]
    hiddens, tokens = h[:, : p + 1], ids[:, 1 : p + 2]
    for step in range(3):
        # The chain as one plain sequence: hiddens of the slots so far, each paired with the next token.
        rows = [params[f"model.layers.3.{n}.weight"] for n in ("enorm", "hnorm", "eh_proj")]
        e = twin.rms_norm(embed[tokens], rows[0], config.rms_norm_eps)
        g = twin.rms_norm(hiddens, rows[1], config.rms_norm_eps)
        z, _ = twin.decoder_layer(params, config, 3, torch.cat([e, g], -1) @ rows[2].T, torch.arange(p + 1 + step))
        f = twin.rms_norm(z, params["model.layers.3.shared_head.norm.weight"], config.rms_norm_eps)[:, -1]
        assert torch.allclose(f, fast[step][:, p], atol=1e-4)
        hiddens, tokens = torch.cat([hiddens, f[:, None]], 1), ids[:, 1 : p + 3 + step]


def test_a_short_training_run_learns_and_resumes(tmp_path, monkeypatch):
    """Seconds of training on repetitive ids; then the same folder goes on where it stopped."""
    monkeypatch.setattr(train, "BATCH_TOKENS", 2048)
    small = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "moe_layers": (False, True, True)}
    config = dataclasses.replace(ModelConfig.from_folder(zoo.path(NAME)), **small)
    stream = torch.arange(16, 80, dtype=torch.int32).repeat(400)
    results = []
    for minutes in (0.05, 0.15):
        p = twin.init_params(config, 0)
        results.append(train.train(p, config, stream, stream[:2000], tmp_path, minutes=minutes, seed=1,
                                   dtype=torch.float32))
    first, second = results
    assert second.steps > first.steps and second.seconds > first.seconds and second.log[: len(first.log)] == first.log
    assert second.log[-1]["loss"] < 1  # 64 ids in a fixed order; ln 128 = 4.9 before
    kept, state = load_state(tmp_path / "state.pt")
    assert state["tokens"] == second.tokens and torch.equal(kept["lm_head.weight"], p["lm_head.weight"])
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_orthogonalise_brings_singular_values_near_one():
    m = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(m))
    assert values.min() > 0.6 and values.max() < 1.3


def test_rounds_of_a_chain_are_counted_as_a_loop_would(params, served):
    """chain_rounds' arithmetic against drafting token by token with the same layer."""
    config = served.config
    ids = report.greedy_text(params, config, text(24, 3), report.NEW_TOKENS + report.DRAFTS + 2)
    (result,) = report.chain_rounds(params, config, ids, 24)
    at, rounds, embed = 23, [], params["model.embed_tokens.weight"]
    h = twin.forward(params, config, ids)
    while at < 23 + report.NEW_TOKENS:
        drafted = [ids[0, at + 1]]
        for step in range(1, report.DRAFTS + 1):
            fed = torch.cat([ids[0, : at + 1], torch.stack(drafted)])[None]
            fed = torch.nn.functional.pad(fed, (0, 8))
            f = twin.mtp_steps(params, config, h[:, : at + 1], fed, step)[-1][:, at]
            drafted.append(twin.head(params, f).argmax(-1)[0])
        accepted = 0
        while accepted < report.DRAFTS and drafted[accepted + 1] == ids[0, at + 2 + accepted]:
            accepted += 1
        rounds.append(accepted + 1)
        at += accepted + 1
    assert rounds == result.rounds and embed.shape[0] == config.vocab_size

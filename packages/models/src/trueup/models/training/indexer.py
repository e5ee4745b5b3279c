"""Train a lightning indexer for the dense nano model: resumable, scheduled by elapsed time, as train.py is.

Two stages, as in DeepSeek-V3.2 (section 2.1.1).  Warm-up: attention is dense and all else is frozen; each layer's
indexer learns the distribution of that layer's attention, averaged over heads.  Sparse: each row attends to its
indexer's choice; the indexer learns the distribution over the chosen positions, from inputs without gradient, and the
attention's projections learn the language model's own loss.
"""
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.training import twin
from trueup.models.training.indexer_twin import SparseAttention
from trueup.models.training.optim import Muon
from trueup.models.training.train import MTP_WEIGHT, State, held_out_windows, run

WARM_UP = 0.6  # of the time
# In runs of two minutes the divergence fell to 0.80 at Muon 0.02, to 0.57 at 0.08.  The tuned weights come from a
# finished training: at 0.0005 they lost 2 % of it within three minutes.
LR = {"muon": 0.08, "rest": 0.002, "tuned": 0.00003}
WINDOW = 512
# What the sparse stage may change beside the indexer; kv_b_proj, experts and embeddings stay, so that the difference
# to the dense checkpoint is a small file.
TUNED = ("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight", "layernorm.weight")


def learned(names) -> tuple[list[str], list[str]]:
    """Names of the indexers' tensors, and of the others that the sparse stage changes."""
    indexer = [n for n in names if ".indexer." in n]
    return indexer, [n for n in names if n.endswith(TUNED) and n not in indexer]


def init_params(c: ModelConfig, base: twin.Params, seed: int) -> twin.Params:
    """What is learned: fresh indexers, and copies of the dense model's tensors that the sparse stage changes."""
    fresh = twin.init_params(c, seed)
    indexer, tuned = learned(fresh)
    return {n: fresh[n] for n in indexer} | {n: base[n].clone() for n in tuned}


def rate(progress: float) -> float:
    """Learning rate factor of a stage: 5 % rise, flat to 40 %, then linear to 0.05."""
    return min(progress / 0.05, 1.0, 0.05 + 0.95 * (1 - progress) / 0.6)


def losses(p: twin.Params, c: ModelConfig, tokens: Tensor, sparse: bool) -> dict[str, Tensor]:
    """``main`` and ``mtp`` (nats a token), and ``divergence``, summed over layers; tokens is [B, T + 2]."""
    T = tokens.shape[1] - 2
    attend = SparseAttention(p, c, dense=not sparse, learn=True)
    with torch.set_grad_enabled(sparse):
        h = twin.forward(p, c, tokens[:, :T], attend=attend)  # [B, T, H]
        logits = twin.head(p, h).float()  # [B, T, V]
        main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : T + 1].flatten())
        drafted = twin.head(p, twin.mtp_steps(p, c, h, tokens, 1, attend=attend)[0]).float()  # [B, T, V]
        target = logits[:, 1:].detach().softmax(-1).flatten(0, 1)  # [B*(T-1), V]
        mtp = F.cross_entropy(drafted[:, :-1].flatten(0, 1), target)
    return {"main": main, "mtp": mtp, "divergence": torch.stack([*attend.divergence.values()]).sum()}


@torch.no_grad()
def evaluate(p: twin.Params, c: ModelConfig, stream: Tensor, T: int = WINDOW, limit: int | None = None,
             dense: bool = False) -> dict:
    """Held-out ``loss`` (nats a token) and top-1 of sparse attention, and by layer the ``recall``.

    That is the share of dense attention, averaged over heads, that the chosen positions hold: over rows that see more
    than ``topk`` positions; others choose all.  ``dense`` attends to everything instead.
    """
    assert c.indexer is not None
    total: dict[str, float] = {"loss": 0.0, "top1": 0.0, "agree1": 0.0}
    recall: dict[int, float] = {}
    for tokens, share in held_out_windows(stream, T, extra=2, limit=limit, rows=8):  # [B, T + 2]
        attend = SparseAttention(p, c, dense=dense, measure=True)
        h = twin.forward(p, c, tokens[:, :T], attend=attend)  # [B, T, H]
        logits = twin.head(p, h).float()  # [B, T, V]
        best = logits.argmax(-1)  # [B, T]
        total["loss"] += share * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : T + 1].flatten()).item()
        total["top1"] += share * (best == tokens[:, 1 : T + 1]).float().mean().item()
        drafts = twin.head(p, twin.mtp_steps(p, c, h, tokens, 1, attend=attend)[0]).argmax(-1)  # [B, T]
        total["agree1"] += share * (drafts[:, :-1] == best[:, 1:]).float().mean().item()
        for layer, held in attend.recall.items():
            far = held[:, c.indexer.topk :].mean().item() if c.indexer.topk < T else 1.0
            recall[layer] = recall.get(layer, 0.0) + share * far
    return total | {f"recall{layer}": value for layer, value in recall.items()}


class Trainer:
    """The learned parameters, their two optimisers, and one step."""

    def __init__(self, p: twin.Params, base: twin.Params, c: ModelConfig, dtype: torch.dtype) -> None:
        self.p, self.c, self.dtype = p, c, dtype
        self.base = {n: v if n.endswith("e_score_correction_bias") else v.to(dtype) for n, v in base.items()
                     if n not in p}
        for v in p.values():
            v.requires_grad_()
        self.sparse = False  # the stage of the last step
        indexer, tuned = learned(p)
        self.muon = Muon({n: p[n] for n in indexer if p[n].ndim == 2}, heads=1, decay=0.0, dtype=dtype)
        self.adamw = torch.optim.AdamW(
            [{"params": [p[n] for n in indexer if p[n].ndim == 1], "base": LR["rest"]},
             {"params": [p[n] for n in tuned], "base": LR["tuned"]}],
            betas=(0.9, 0.95), weight_decay=0.0, fused=True,
        )

    def step(self, tokens: Tensor, T: int, progress: float) -> float:
        """One update on tokens [B, T + 2]; returns the divergence, summed over layers."""
        sparse = self.sparse = progress >= WARM_UP
        factor = rate((progress - WARM_UP) / (1 - WARM_UP) if sparse else progress / WARM_UP)
        found = losses(self.rounded(), self.c, tokens, sparse)
        (found["divergence"] + (found["main"] + MTP_WEIGHT * found["mtp"] if sparse else 0.0)).backward()
        for group in self.adamw.param_groups:
            group["lr"] = group["base"] * factor
        self.adamw.step()  # what has no gradient, in the warm-up, stays
        self.muon.step(LR["muon"] * factor * (0.3 if sparse else 1.0))
        for v in self.p.values():
            v.grad = None
        return found["divergence"].item()

    def rounded(self) -> twin.Params:
        """All parameters in the compute dtype; gradients flow back to the fp32 masters."""
        return self.base | {n: v.to(self.dtype) for n, v in self.p.items()}


def train_indexer(p: twin.Params, base: twin.Params, c: ModelConfig, stream: Tensor, held_out: Tensor, out: Path, *,
                  minutes: float, seed: int, dtype: torch.dtype, save_every: float = 120) -> State:
    """Train ``p`` in place, beside the rest of ``base``; :func:`train.run` says when it ends and how it resumes."""
    trainer = Trainer(p, base, c, dtype)

    def measure() -> dict[str, float]:
        return evaluate(trainer.rounded(), c, held_out, limit=48) | {"sparse": float(trainer.sparse)}

    return run(trainer, stream, out, measure, extra=2, minutes=minutes, seed=seed, save_every=save_every,
               window=lambda _: WINDOW, plot=plot_log)


def plot_log(log: list[dict], path: Path) -> None:
    """Held-out loss and recall over tokens seen; the upright line parts the stages."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    million = [row["tokens"] / 1e6 for row in log]
    losses = [row["loss"] for row in log]
    left.plot(million, losses, label="held-out loss, sparse", color="tab:blue")
    left.set(xlabel="million tokens seen", ylabel="nats per token", ylim=(0.98 * min(losses), 1.03 * max(losses)))
    if 0 < (sparse := sum(row["sparse"] > 0 for row in log)) < len(log):
        left.axvline((million[-sparse - 1] + million[-sparse]) / 2, color="tab:gray", linewidth=0.8)
    right = left.twinx()
    layers = sorted(key for key in log[0] if key.startswith("recall"))
    for key, style in zip(layers, ("-", "--", ":", "-.") * len(layers), strict=False):
        right.plot(million, [row[key] for row in log], style, color="tab:orange",
                   label=f"attention held, layer {key.removeprefix('recall')}")
    right.set(ylabel="share of dense attention", ylim=(0.0, 1.0))
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""Train the nano model: one function from token arrays to parameters, resumable at any minute.

The schedule runs by elapsed training time, not by steps, so that a slow or busy machine still
finishes the decay.  Every choice is one of the recipe in the model card.
"""
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from trueup.models.config import ModelConfig
from trueup.models.training import twin
from trueup.models.training.optim import Muon

BATCH_TOKENS = 4096
LR = {"muon": 0.006, "embed": 0.003, "rest": 0.0015}
MTP_WEIGHT, LATER_STEPS = 0.3, (0.5 * 0.8, 0.5 * 0.64)


def schedule(progress: float) -> float:
    """Learning rate factor: 5 % warm-up, flat to 40 %, then linear to zero."""
    return min(progress / 0.05, 1.0, (1 - progress) / 0.6)


def window(progress: float) -> int:
    """Tokens of a training window; long ones only late, where they pay."""
    return 256 if progress < 0.5 else 512 if progress < 0.8 else 1024


@dataclass
class State:
    """All that a resumed run needs besides the optimisers' own state."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    cursor: int = 0
    epoch: int = 0
    log: list[dict] = field(default_factory=list)


class Batches:
    """Windows of the token stream in shuffled order, each once an epoch, offset anew every epoch."""

    def __init__(self, stream: Tensor, seed: int, state: State) -> None:
        self.stream, self.seed, self.state = stream, seed, state

    def next(self, T: int, extra: int) -> Tensor:
        """[B, T + extra] with B * T = BATCH_TOKENS."""
        s, blocks = self.state, len(self.stream) // BATCH_TOKENS - 1
        generator = torch.Generator().manual_seed(self.seed * 1000 + s.epoch)
        shift = int(torch.randint(BATCH_TOKENS, (1,), generator=generator))
        # 1024-token pieces, so that a batch mixes four places whatever the window is.
        pieces = torch.randperm(blocks * BATCH_TOKENS // 1024, generator=generator)
        mine = pieces[s.cursor : s.cursor + BATCH_TOKENS // 1024] * 1024 + shift
        s.cursor += BATCH_TOKENS // 1024
        if s.cursor + BATCH_TOKENS // 1024 > len(pieces):
            s.cursor, s.epoch = 0, s.epoch + 1
        starts = (mine[:, None] + torch.arange(0, 1024, T)).flatten()  # [B]
        return self.stream[starts[:, None] + torch.arange(T + extra)].long()  # [B, T + extra]


def losses(p: twin.Params, c: ModelConfig, tokens: Tensor, T: int, steps: int, soft: bool, loads: dict):
    """Main loss (nats a token) and the weighted MTP loss; tokens is [B, T + 4].

    Steps 2 and 3 run on half of the sequences.  With ``soft`` the MTP layer learns the main model's
    own distribution at the position that it drafts, which is what acceptance measures.
    """
    h = twin.forward(p, c, tokens[:, :T], loads)  # [B, T, H]
    logits = twin.head(p, h).float()  # [B, T, V]
    main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : T + 1].flatten())
    half, mtp = len(tokens) // 2, torch.zeros(())
    for part, unroll in ((slice(0, half), 1), (slice(half, None), steps)):
        hiddens = twin.mtp_steps(p, c, h[part], tokens[part], unroll, loads)  # steps x [B, T, H]
        for s, f in enumerate(hiddens, 1):
            drafted = twin.head(p, f).float()  # [B, T, V]
            if soft:
                target = logits[part, s:].detach().softmax(-1).flatten(0, 1)  # [B*(T-s), V]
                loss = F.cross_entropy(drafted[:, : T - s].flatten(0, 1), target)
            else:
                loss = F.cross_entropy(drafted.flatten(0, 1), tokens[part, s + 1 : T + s + 1].flatten())
            mtp = mtp + MTP_WEIGHT * (0.5 if s == 1 else LATER_STEPS[s - 2]) * loss
    return main, mtp


def held_out_windows(stream: Tensor, T: int, extra: int, limit: int | None, rows: int = 16
                     ) -> Iterator[tuple[Tensor, float]]:
    """Windows [B, T + extra] of ``stream``, side by side, up to ``rows`` at a time, and what share of all they are.

    ``limit`` takes so many, evenly spaced.
    """
    starts = torch.arange((len(stream) - extra) // T) * T
    if limit and len(starts) > limit:
        starts = starts[torch.linspace(0, len(starts) - 1, limit).long()]
    for at in starts.split(rows):
        yield stream[at[:, None] + torch.arange(T + extra)].long(), len(at) / len(starts)  # [B, T + extra]


@torch.no_grad()
def evaluate(p: twin.Params, c: ModelConfig, stream: Tensor, T: int = 256, limit: int | None = None) -> dict:
    """Held-out loss (nats a token), top-1 accuracy, and MTP agreement with the main model at depths 1-3."""
    total = {"loss": 0.0, "top1": 0.0, "agree1": 0.0, "agree2": 0.0, "agree3": 0.0}
    for tokens, share in held_out_windows(stream, T, extra=4, limit=limit):  # [B, T + 4]
        h = twin.forward(p, c, tokens[:, :T])  # [B, T, H]
        logits = twin.head(p, h).float()  # [B, T, V]
        total["loss"] += share * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : T + 1].flatten()).item()
        best = logits.argmax(-1)  # [B, T]
        total["top1"] += share * (best == tokens[:, 1 : T + 1]).float().mean().item()
        for s, f in enumerate(twin.mtp_steps(p, c, h, tokens, 3), 1):
            drafted = twin.head(p, f).argmax(-1)  # [B, T]
            total[f"agree{s}"] += share * (drafted[:, : T - s] == best[:, s:]).float().mean().item()
    return total


def bigram_start(p: twin.Params, stream: Tensor, c: ModelConfig, steps: int = 60) -> None:
    """Fit embedding and head to the bigram table before any layer takes part: seconds, and 3 nats."""
    V = c.vocab_size
    pair = stream[:-1].long() * V + stream[1:].long()
    counts = pair.bincount(minlength=V * V).view(V, V).float()  # [V, V]
    seen = counts.sum(1)  # [V]
    embed = p["model.embed_tokens.weight"].detach().clone().requires_grad_()  # [V, H]
    out = p["lm_head.weight"].detach().clone().requires_grad_()  # [V, H]
    adam = torch.optim.Adam([{"params": [embed], "lr": 0.03}, {"params": [out], "lr": 0.02}])
    for step in range(steps):
        for group, lr in zip(adam.param_groups, (0.03, 0.02), strict=True):
            group["lr"] = lr * (1 - step / steps)
        logits = F.rms_norm(embed, (c.hidden_size,)) @ out.T  # [V, V]
        loss = (seen * logits.logsumexp(1) - (counts * logits).sum(1)).sum() / seen.sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        p["model.embed_tokens.weight"].copy_(0.5 * F.rms_norm(embed, (c.hidden_size,)))
        p["lm_head.weight"].copy_(out)
        for name, value in p.items():
            if name.endswith("eh_proj.weight"):
                value[:, : c.hidden_size] = torch.eye(c.hidden_size)
                value[:, c.hidden_size :] *= 0.1


class Trainer:
    """Parameters, their two optimisers, and one step."""

    def __init__(self, p: twin.Params, c: ModelConfig, dtype: torch.dtype) -> None:
        self.p, self.c, self.dtype = p, c, dtype
        self.biases = {n: v for n, v in p.items() if n.endswith("e_score_correction_bias")}
        learned = {n: v.requires_grad_() for n, v in p.items() if n not in self.biases}
        plain = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
        matrices = {n: v for n, v in learned.items() if v.ndim == 2 and not n.endswith(plain)}
        self.muon = Muon(matrices, c.num_attention_heads, dtype=dtype)
        embed = [v for n, v in learned.items() if n.endswith("embed_tokens.weight")]
        rest = [v for n, v in learned.items() if n not in matrices and not n.endswith("embed_tokens.weight")]
        self.adamw = torch.optim.AdamW(
            [{"params": embed, "base": LR["embed"]}, {"params": rest, "base": LR["rest"]}],
            betas=(0.9, 0.95), weight_decay=0.0, fused=True,
        )

    def step(self, tokens: Tensor, T: int, progress: float) -> float:
        """One update on tokens [B, T + 4]; returns the main loss."""
        factor = schedule(progress)
        loads: dict[int, Tensor] = {}
        steps, soft = (3 if progress >= 0.7 else 1), progress >= 0.5
        main, mtp = losses(self.rounded(), self.c, tokens, T, steps, soft, loads)
        (main + mtp).backward()
        for group in self.adamw.param_groups:
            group["lr"] = group["base"] * factor
        self.adamw.step()
        self.muon.step(LR["muon"] * factor)
        for v in self.p.values():
            v.grad = None
        rate = 0.01 * min(1.0, 2 * factor) if progress > 0.5 else 0.01
        for layer, load in loads.items():  # auxiliary-loss-free balancing: nudge the choice, not the loss
            self.biases[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] += rate * torch.sign(
                load.float().mean() - load
            )
        return main.item()

    def rounded(self) -> twin.Params:
        """The parameters in the compute dtype; gradients flow back to the fp32 masters."""
        keep = set(self.biases)
        return {n: v if n in keep else v.to(self.dtype) for n, v in self.p.items()}


def train(p: twin.Params, c: ModelConfig, stream: Tensor, held_out: Tensor, out: Path, *, minutes: float,
          seed: int, dtype: torch.dtype, save_every: float = 300, fresh: bool = True) -> State:
    """Train every parameter of ``p`` in place; :func:`run` says when it ends and how it resumes."""
    trainer = Trainer(p, c, dtype)
    if fresh and not (out / "state.pt").exists():
        bigram_start(p, stream, c)
    return run(trainer, stream, out, lambda: evaluate(trainer.rounded(), c, held_out, limit=64), extra=4,
               minutes=minutes, seed=seed, save_every=save_every)


class Learner(Protocol):
    """What :func:`run` needs of a trainer."""

    p: twin.Params
    muon: Muon
    adamw: torch.optim.AdamW

    def step(self, tokens: Tensor, T: int, progress: float) -> float: ...


def run(trainer: Learner, stream: Tensor, out: Path, measure: Callable[[], dict], *, extra: int, minutes: float,
        seed: int, save_every: float, window: Callable[[float], int] = window,
        plot: Callable[[list[dict], Path], None] | None = None) -> State:
    """Steps on windows [B, T + extra] until ``minutes`` of training time are spent, resuming from ``out/state.pt``.

    Every ``save_every`` seconds the state is saved, ``measure()`` goes into its log, and ``plot`` draws that.
    ``window`` says how long the windows are at a share of the time.
    """
    state, saved = State(), out / "state.pt"
    if saved.exists():
        kept = torch.load(saved, weights_only=True)
        with torch.no_grad():
            for name, value in kept["params"].items():
                trainer.p[name].copy_(value)
        trainer.muon.load_state_dict(kept["muon"])
        trainer.adamw.load_state_dict(kept["adamw"])
        state = State(**kept["state"])
    batches, budget = Batches(stream, seed, state), minutes * 60
    bar = tqdm(total=round(minutes, 1), initial=round(state.seconds / 60, 1), unit="min",
               bar_format="{l_bar}{bar}| {n:.1f}/{total} min {postfix}")
    smooth, last_save = None, state.seconds
    while state.seconds < budget:
        begin, progress = time.monotonic(), state.seconds / budget
        T = window(progress)
        loss = trainer.step(batches.next(T, extra), T, progress)
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        state.steps, state.tokens = state.steps + 1, state.tokens + BATCH_TOKENS
        state.seconds += time.monotonic() - begin
        bar.n = min(state.seconds / 60, bar.total)
        speed = state.tokens / state.seconds
        bar.set_postfix_str(f"loss {smooth:.3f}, {state.tokens / 1e6:.2f} M tokens, {speed:.0f}/s")
        if state.seconds - last_save > save_every or state.seconds >= budget:
            last_save = state.seconds
            entry = measure() | {"minutes": state.seconds / 60, "tokens": state.tokens, "train": smooth}
            state.log.append({k: round(v, 4) for k, v in entry.items()})
            tqdm.write(json.dumps(state.log[-1]))
            save(saved, trainer, state)
            (plot or plot_losses)(state.log, out / "loss.png")
    return state


def save(path: Path, trainer: Learner, state: State) -> None:
    """Written beside and renamed, so that a run stopped in the middle leaves the previous state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    params = {n: v.detach() for n, v in trainer.p.items()}
    kept = {"params": params, "muon": trainer.muon.state_dict(), "adamw": trainer.adamw.state_dict(),
            "state": vars(state)}
    torch.save(kept, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def plot_losses(log: list[dict], path: Path) -> None:
    """Losses and draft agreement over tokens seen; a drafter's log has no held-out loss."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    million = [row["tokens"] / 1e6 for row in log]
    left.plot(million, [row["train"] for row in log], label="training loss", color="tab:gray")
    if "loss" in log[0]:
        left.plot(million, [row["loss"] for row in log], label="held-out loss", color="tab:blue")
    left.set(xlabel="million tokens seen", ylabel="nats per token")
    right = left.twinx()
    for depth, style in ((1, "-"), (2, "--"), (3, ":")):
        right.plot(million, [row[f"agree{depth}"] for row in log], style, color="tab:orange",
                   label=f"draft agreement, depth {depth}")
    right.set(ylabel="share of equal top tokens", ylim=(0.2, 0.9))
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)

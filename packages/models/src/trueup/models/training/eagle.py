"""Train an EAGLE-3 head on the frozen nano model: resumable, scheduled by elapsed time, as train.py is.

Training-time test: the chain is unrolled seven steps, each fed the text and the head's own last ``a``, so
that the head learns on the states that it will meet when it drafts.
"""
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.training import eagle_twin, twin
from trueup.models.training.optim import Muon
from trueup.models.training.train import State, held_out_windows, run, schedule

STEPS, STEP_WEIGHT = 7, 0.8
# In runs of 2.5 minutes agreement at depth 1 rose from 0.39 at Muon 0.012 to 0.44 at 0.025 and 0.46 at 0.05; 0.1
# gained nothing.  A longer run wants less.
LR = {"muon": 0.03, "rest": 0.003}


def unrolled(progress: float) -> int:
    """Steps of the chain; three cost half of seven, and most of what they teach serves the later ones."""
    return 3 if progress < 0.6 else STEPS


def losses(p: twin.Params, e: Eagle3Config, target: twin.Params, c: ModelConfig, tokens: Tensor, T: int,
           steps: int) -> list[Tensor]:
    """Cross-entropy (nats a slot) of steps 1, 2, ..., each against the target's own distribution.

    The distribution is restricted to the draft vocabulary; slots where the target would choose a token
    outside it do not count.  ``tokens`` is [B, T + steps].
    """
    with torch.no_grad():
        features, logits = eagle_twin.target_features(target, c, e, tokens)  # [B, T+steps, 3H], [B, T+steps, V]
        wanted = logits[..., p["t2d"]].float().softmax(-1)  # [B, T+steps, Vd]
        counts = p["t2d"][logits.argmax(-1)].float()  # [B, T+steps]
    embed, found = target["model.embed_tokens.weight"], []
    for s, drafts in enumerate(eagle_twin.unroll(p, e, embed, features[:, :T], tokens, steps), 1):
        loss = F.cross_entropy(drafts.float().flatten(0, 1), wanted[:, s : s + T].flatten(0, 1), reduction="none")
        mask = counts[:, s : s + T].flatten()  # [B*T]
        found.append((loss * mask).sum() / mask.sum().clamp_min(1))
    return found


@torch.no_grad()
def evaluate(p: twin.Params, e: Eagle3Config, target: twin.Params, c: ModelConfig, stream: Tensor, T: int = 256,
             limit: int | None = None, depth: int = 3) -> list[float]:
    """Agreement with the target's best token at depths 1, 2, ..., on the text.

    A token that the head cannot draft is a miss.
    """
    total = [0.0] * depth
    for tokens, share in held_out_windows(stream, T, extra=depth, limit=limit):  # [B, T + depth]
        features, logits = eagle_twin.target_features(target, c, e, tokens)  # [B, T+depth, 3H], [B, T+depth, V]
        best, embed = logits.argmax(-1), target["model.embed_tokens.weight"]  # [B, T+depth]
        for s, drafts in enumerate(eagle_twin.unroll(p, e, embed, features[:, :T], tokens, depth), 1):
            right = eagle_twin.drafted(p, drafts) == best[:, s : s + T]  # [B, T]
            total[s - 1] += share * right.float().mean().item()
    return total


class Trainer:
    """The head's parameters, their two optimisers, and one step."""

    def __init__(self, p: twin.Params, e: Eagle3Config, target: twin.Params, c: ModelConfig,
                 dtype: torch.dtype) -> None:
        self.p, self.e, self.c, self.dtype = p, e, c, dtype
        self.target = {n: v if n.endswith("e_score_correction_bias") else v.to(dtype) for n, v in target.items()}
        learned = {n: v.requires_grad_() for n, v in p.items() if v.is_floating_point()}
        matrices = {n: v for n, v in learned.items() if v.ndim == 2 and n != "lm_head.weight"}
        self.muon = Muon(matrices, heads=1, dtype=dtype)
        rest = [v for n, v in learned.items() if n not in matrices]
        self.adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, tokens: Tensor, T: int, progress: float) -> float:
        """One update on tokens [B, T + 7]; returns the loss of step 1."""
        steps = unrolled(progress)
        found = losses(self.rounded(), self.e, self.target, self.c, tokens[:, : T + steps], T, steps)
        torch.stack([STEP_WEIGHT**s * loss for s, loss in enumerate(found)]).sum().backward()
        for group in self.adamw.param_groups:
            group["lr"] = LR["rest"] * schedule(progress)
        self.adamw.step()
        self.muon.step(LR["muon"] * schedule(progress))
        for v in self.p.values():
            v.grad = None
        return found[0].item()

    def rounded(self) -> twin.Params:
        """The parameters in the compute dtype; gradients flow back to the fp32 masters."""
        return {n: v.to(self.dtype) if v.is_floating_point() else v for n, v in self.p.items()}


def train_head(p: twin.Params, e: Eagle3Config, target: twin.Params, c: ModelConfig, stream: Tensor, held_out: Tensor,
               out: Path, *, minutes: float, seed: int, dtype: torch.dtype, save_every: float = 240) -> State:
    """Train the parameters of a head in place; :func:`train.run` says when it ends and how it resumes."""
    trainer = Trainer(p, e, target, c, dtype)

    def measure() -> dict[str, float]:
        agree = evaluate(trainer.rounded(), e, trainer.target, c, held_out, limit=64)
        return {f"agree{depth}": share for depth, share in enumerate(agree, 1)}

    return run(trainer, stream, out, measure, extra=STEPS, minutes=minutes, seed=seed, save_every=save_every)

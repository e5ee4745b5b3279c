"""Sparse attention as plain differentiable PyTorch: the lightning indexer, its choice, and how both are measured.

    score[s, t] = sum over heads of  w[s, h] * relu(q[s, h] . k[t])

Each row attends to the ``topk`` visible positions of highest score.  Parameters stand in the one dictionary of
twin.py under the published names (``model.layers.{i}.self_attn.indexer.*``).

Axis letters: as in twin.py; Ni index heads, Di their width, K chosen positions.  Source: DeepSeek-V3.2, section 2;
transformers 5.24: models/glm_moe_dsa.
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.training import twin
from trueup.models.training.twin import Params

KEY_NORM_EPS = 1e-6


def index_scores(p: Params, c: ModelConfig, layer: int, x: Tensor, *, relu: bool = True) -> Tensor:
    """[B, T, T] of the layer's normed input x [B, T, H]; -inf where the key comes after the query.

    ``relu`` is there to be switched off in an experiment: no model leaves it out.
    """
    i, at = c.indexer, f"model.layers.{layer}.self_attn."
    assert i is not None and i.rope_interleave, "the twin rotates pairs as GLM-5 does"
    B, T, _ = x.shape
    positions = torch.arange(T)  # [T]
    q_rank = twin.rms_norm(x @ p[at + "q_a_proj.weight"].T, p[at + "q_a_layernorm.weight"], c.lora_norm_eps)
    at += "indexer."
    q = (q_rank.detach() @ p[at + "wq_b.weight"].T).view(B, T, i.heads, i.head_dim)  # [B, T, Ni, Di]
    k = F.layer_norm(x @ p[at + "wk.weight"].T, (i.head_dim,), p[at + "k_norm.weight"], p[at + "k_norm.bias"],
                     KEY_NORM_EPS)[:, :, None]  # [B, T, 1, Di]
    q, k = (_rope_first(part, positions, c) for part in (q, k))  # [B, T, Ni, Di], [B, T, 1, Di]
    w = (x @ p[at + "weights_proj.weight"].T) * (i.heads * i.head_dim) ** -0.5  # [B, T, Ni]
    dots = (q.flatten(1, 2) @ k[:, :, 0].mT).view(B, T, i.heads, T)  # [B, T, Ni, T]
    scores = ((dots.relu_() if relu else dots) * w[..., None]).sum(2).float()  # [B, T, T]
    return scores + twin.causal_mask(T, scores.dtype)


def _rope_first(x: Tensor, positions: Tensor, c: ModelConfig) -> Tensor:
    """The indexer rotates its first widths, MLA its last ones."""
    Dr = c.qk_rope_head_dim
    return torch.cat([twin.rope(x[..., :Dr], positions, c.rope_theta), x[..., Dr:]], -1)  # [B, T, *, Di]


def chosen(scores: Tensor, topk: int) -> Tensor:
    """[B, T, T] True at the K highest scores of each row, among those not -inf."""
    if topk >= scores.shape[-1]:
        return scores > -math.inf
    best = scores.topk(topk, -1).indices  # [B, T, K]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores > -math.inf)


def divergence(wanted: Tensor, scores: Tensor) -> Tensor:
    """KL(wanted || softmax of scores), the mean over rows.

    wanted [..., T] sums to one over the positions that take part; of the others it is 0 and scores [..., T] is -inf.
    """
    guess = scores.log_softmax(-1)  # [..., T]
    cross = -(wanted * guess.masked_fill(wanted == 0, 0.0)).sum(-1)  # [...]
    entropy = -torch.xlogy(wanted, wanted).sum(-1)  # [...]
    return (cross - entropy).mean()


class SparseAttention:
    """Attention by an indexer, in place of twin.causal_attention; keeps what it saw of each layer.

    Args:
        dense: attend to everything, and let the indexer look on: the warm-up.
        learn: the indexer's divergence is wanted, with its gradient, as ``divergence``.
        measure: what share of the dense attention the choice holds is wanted, as ``recall`` by row.
    """

    def __init__(self, p: Params, c: ModelConfig, *, dense: bool = False, learn: bool = False,
                 measure: bool = False) -> None:
        self.p, self.c, self.dense, self.learn, self.measure = p, c, dense, learn, measure
        self.divergence: dict[int, Tensor] = {}
        self.recall: dict[int, Tensor] = {}

    def __call__(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.c.indexer is not None
        with torch.set_grad_enabled(self.learn):
            scores = index_scores(self.p, self.c, layer, x.detach())  # [B, T, T]
        attention = (q * self.c.softmax_scale) @ k.mT  # [B, N, T, T]
        T = x.shape[1]
        causal = twin.causal_mask(T, q.dtype)  # [T, T]
        mask = causal  # [T, T]
        if self.measure or not self.dense:
            best = chosen(scores.detach(), self.c.indexer.topk)  # [B, T, T]
        if not self.dense:
            mask = torch.where(best[:, None], 0.0, -math.inf).to(q.dtype)  # [B, 1, T, T]
        weights = (attention + mask).softmax(-1)  # [B, N, T, T]
        if self.learn:
            # Under the sparse mask the softmax runs over the chosen positions on both sides.
            with torch.enable_grad():
                wanted = weights.detach().float().mean(1)  # [B, T, T]
                self.divergence[layer] = divergence(wanted, scores + mask.view(-1, T, T).float())
        if self.measure:
            full = (attention + causal).float().softmax(-1).mean(1)  # [B, T, T]
            self.recall[layer] = (full * best).sum(-1)  # [B, T]
        return weights @ v  # [B, N, T, Dv]

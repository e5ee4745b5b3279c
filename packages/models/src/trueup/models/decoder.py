"""One decoder layer of every model here: MLA, then a dense MLP or experts.  Reads like the architecture.

Axis letters: Tp token rows (padded), H hidden, N heads, Dn/Dr nope and rope widths, Dv value width, R latent rank, Rq
query rank, K chosen positions.
"""
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trueup.core.attention.choices import Choices
from trueup.core.attention.mla import UpProjection, mla_attention
from trueup.core.cache import Pools
from trueup.core.layers.mlp import MLP, MoE, Routing
from trueup.core.layers.norm import RMSNorm
from trueup.core.rows import Rows
from trueup.core.view import DeviceView
from trueup.models.config import ModelConfig


class Context(NamedTuple):
    """What every layer of one forward shares."""

    view: DeviceView
    pools: Pools
    cos: Tensor  # [Tp, 1, 1, Dr]
    sin: Tensor  # [Tp, 1, 1, Dr]
    choices: Choices | None  # of sparse attention


class Attention(nn.Module):
    """Multi-head latent attention: low-rank queries, one latent and one rotary key a token for all heads."""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.c, self.layer = c, layer
        H, N, R, Rq = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank
        Dn, Dr, Dv = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.q_a = nn.Parameter(torch.empty(Rq, H))
        self.q_norm = RMSNorm(Rq, c.lora_norm_eps)
        self.q_b = nn.Parameter(torch.empty(N * (Dn + Dr), Rq))
        self.kv_a = nn.Parameter(torch.empty(R + Dr, H))
        self.kv_norm = RMSNorm(R, c.lora_norm_eps)
        # kv_b_proj, split once at load time: the absorbed form multiplies by each half alone.
        self.w_uk = nn.Parameter(torch.empty(N, Dn, R))
        self.w_uv = nn.Parameter(torch.empty(N, R, Dv))
        self.o = nn.Parameter(torch.empty(H, N * Dv))

    def forward(self, x: Float[Tensor, "Tp H"], ctx: Context) -> Float[Tensor, "Tp H"]:
        c = self.c
        q_rank = self.q_norm(x @ self.q_a.T)  # [Tp, Rq]
        q = (q_rank @ self.q_b.T).view(len(x), c.num_attention_heads, -1)  # [Tp, N, Dn+Dr]
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)  # [Tp, N, Dn], [Tp, N, Dr]
        kv = x @ self.kv_a.T  # [Tp, R+Dr]
        o = mla_attention(
            q_nope, q_rope, kv, self.kv_norm, UpProjection(self.w_uk, self.w_uv), ctx.cos, ctx.sin, c.softmax_scale,
            ctx.view, ctx.pools, self.layer, self.choose(x, q_rank, ctx),
        )  # [Tp, N, Dv]
        return o.flatten(1) @ self.o.T  # [Tp, H]

    def choose(self, x: Float[Tensor, "Tp H"], q_rank: Float[Tensor, "Tp Rq"], ctx: Context) -> Rows | None:
        """The positions that rows attend to, [Tp, 1, K]; None: all.  Sparse models override it (glm_moe_dsa.py)."""
        return None


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP.  The residual is added inside the next norm, in one kernel."""

    def __init__(self, c: ModelConfig, layer: int, attention: type[Attention]) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = attention(c, layer)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        shared = c.moe_intermediate_size * c.n_shared_experts
        routing = Routing(c.n_routed_experts, c.num_experts_per_tok, c.n_group, c.topk_group, c.routed_scaling_factor)
        self.mlp = (
            MoE(c.hidden_size, c.moe_intermediate_size, shared, routing)
            if c.moe_layers[layer]
            else MLP(c.hidden_size, c.intermediate_size)
        )

    def forward(
        self, x: Float[Tensor, "Tp H"], residual: Float[Tensor, "Tp H"] | None, ctx: Context
    ) -> tuple[Float[Tensor, "Tp H"], Float[Tensor, "Tp H"]]:
        """(MLP output, residual): their sum is the layer's output."""
        x, residual = (self.input_norm(x), x) if residual is None else self.input_norm.add(x, residual)  # [Tp, H] x 2
        x, residual = self.post_norm.add(self.attention(x, ctx), residual)  # [Tp, H], [Tp, H]
        return self.mlp(x), residual

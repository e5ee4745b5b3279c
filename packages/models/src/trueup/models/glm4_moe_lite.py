"""GLM-4.7-Flash as it is served: MLA, a dense first layer, experts, one MTP layer.

Reads like the architecture.  Every kernel call is ``torch.ops.npu.*``, in here or in the layers it is built of;
the rest are plain matrix products.  Source: transformers 5.24, models/glm4_moe_lite; MTP: DeepSeek-V3, section 2.2.

Axis letters: Tp token rows (padded), H hidden, N heads, Dn/Dr nope and rope widths, Dv value width, R latent
rank, Rq query rank, V vocabulary, B requests.
"""
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trueup.core.attention.mla import UpProjection, mla_attention
from trueup.core.cache import CacheSpec, Pools
from trueup.core.layers.mlp import MLP, MoE, Routing
from trueup.core.layers.norm import RMSNorm
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.view import DeviceView
from trueup.models.axes import PARAMETER_AXES
from trueup.models.config import ModelConfig


class Context(NamedTuple):
    """What every layer of one forward shares."""

    view: DeviceView
    pools: Pools
    cos: Tensor  # [Tp, 1, 1, Dr]
    sin: Tensor  # [Tp, 1, 1, Dr]


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
        q = self.q_norm(x @ self.q_a.T) @ self.q_b.T  # [Tp, N*(Dn+Dr)]
        q = q.view(len(x), c.num_attention_heads, -1)  # [Tp, N, Dn+Dr]
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)  # [Tp, N, Dn], [Tp, N, Dr]
        kv = x @ self.kv_a.T  # [Tp, R+Dr]
        o = mla_attention(
            q_nope, q_rope, kv, self.kv_norm, UpProjection(self.w_uk, self.w_uv), ctx.cos, ctx.sin, c.softmax_scale,
            ctx.view, ctx.pools, self.layer,
        )  # [Tp, N, Dv]
        return o.flatten(1) @ self.o.T  # [Tp, H]


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP.  The residual is added inside the next norm, in one kernel."""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(c, layer)
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


class MtpLayer(nn.Module):
    """The next-token-prediction layer: a decoder layer over (embedding of the next token, hidden of this one).

    Built from the config alone, so that a draft model never needs the target's constructor (SB-30).
    """

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.e_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.h_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh = nn.Parameter(torch.empty(c.hidden_size, 2 * c.hidden_size))
        self.decoder = DecoderLayer(c, layer)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, embedded: Float[Tensor, "Tp H"], hidden: Float[Tensor, "Tp H"], ctx: Context
    ) -> Float[Tensor, "Tp H"]:
        """``embedded`` is the embedding of token p + 1, ``hidden`` the normed hidden state of p (SB-18)."""
        z = torch.cat([self.e_norm(embedded), self.h_norm(hidden)], -1) @ self.eh.T  # [Tp, H]
        z, residual = self.decoder(z, None, ctx)  # [Tp, H], [Tp, H]
        return self.norm.add(z, residual)[0]  # [Tp, H]


class Glm4MoeLite(nn.Module):
    """The whole model.  Parameters are uninitialised until :func:`trueup.models.loader.load_weights`."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config, self.parameter_axes = c, PARAMETER_AXES
        self.embed = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.mtp = nn.ModuleList(MtpLayer(c, c.num_hidden_layers + i) for i in range(c.num_nextn_predict_layers))
        self.max_positions, self.vocab_size = c.max_position_embeddings, c.vocab_size
        self.eos_token_ids = c.eos_token_ids

    @property
    def cache_spec(self) -> CacheSpec:
        """MTP layers have a row of the cache too: slot p of theirs belongs to the same page."""
        c = self.config
        layers = c.num_hidden_layers + c.num_nextn_predict_layers
        return CacheSpec(layers, c.kv_lora_rank, c.qk_rope_head_dim, self.embed.dtype, self.embed.device)

    def forward(self, tokens: Int[Tensor, " Tp"], view: DeviceView, pools: Pools) -> Float[Tensor, "Tp H"]:
        """Hidden rows after the final norm: what the head and the MTP layer read."""
        return self.forward_tapped(tokens, view, pools, ())[0]  # [Tp, H]

    def forward_tapped(
        self, tokens: Int[Tensor, " Tp"], view: DeviceView, pools: Pools, taps: tuple[int, ...]
    ) -> tuple[Float[Tensor, "Tp H"], Float[Tensor, "Tp tapped"]]:
        """The same, and the residual streams entering the layers ``taps``, from low to high, side by side (EAGLE-3)."""
        ctx, x, residual, tapped = self._context(view, pools), self.embed[tokens], None, []  # [Tp, H]
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped.append(x if residual is None else x + residual)  # [Tp, H]
            x, residual = layer(x, residual, ctx)  # [Tp, H], [Tp, H]
        assert residual is not None, "a model has at least one layer"
        hidden, last = self.norm.add(x, residual)  # [Tp, H], [Tp, H]
        tapped += [last] if len(self.layers) in taps else []
        return hidden, torch.cat([x[:, :0], *tapped], -1)  # [Tp, H], [Tp, taps*H]

    def forward_mtp(
        self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: Pools
    ) -> Float[Tensor, "Tp H"]:
        """One MTP step: row p pairs token p + 1 with the hidden of p, and predicts token p + 2."""
        return self.mtp[0](self.embed[next_tokens], hidden, self._context(view, pools))  # [Tp, H]

    def logits(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B V"]:
        return hidden @ self.lm_head.T  # [B, V]

    def _context(self, view: DeviceView, pools: Pools) -> Context:
        c = self.config
        return Context(view, pools, *rope_cos_sin(view.positions, c.qk_rope_head_dim, c.rope_theta, self.embed.dtype))

"""GLM-4.7-Flash as it is served: a dense first layer, layers of experts, one MTP layer; operators and matrix products.

Source: transformers 5.24, models/glm4_moe_lite.

Axis letters: Tp token rows (padded), H hidden, V vocabulary, B requests.
"""
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trueup.core.attention.choices import Choices
from trueup.core.cache import CacheSpec, Pools
from trueup.core.layers.norm import RMSNorm
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.view import DeviceView
from trueup.models.axes import PARAMETER_AXES
from trueup.models.config import ModelConfig
from trueup.models.decoder import Attention, Context, DecoderLayer
from trueup.models.mtp import MtpLayer


class Glm4MoeLite(nn.Module):
    """The whole model.  Parameters are uninitialised until :func:`trueup.models.loader.load_weights`."""

    attention: type[Attention] = Attention

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config, self.parameter_axes = c, PARAMETER_AXES
        self.embed = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(c, i, self.attention) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        mtp = range(c.num_hidden_layers, len(c.moe_layers))
        self.mtp = nn.ModuleList(MtpLayer(c, i, self.attention) for i in mtp)
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
        self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: Pools,
        choices: Choices | None = None,
    ) -> Float[Tensor, "Tp H"]:
        """One MTP step: row p pairs token p + 1 with the hidden of p, and predicts token p + 2."""
        return self.mtp[0](self.embed[next_tokens], hidden, self._context(view, pools, choices))  # [Tp, H]

    def logits(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B V"]:
        return hidden @ self.lm_head.T  # [B, V]

    def _context(self, view: DeviceView, pools: Pools, choices: Choices | None = None) -> Context:
        c = self.config
        tables = rope_cos_sin(view.positions, c.qk_rope_head_dim, c.rope_theta, self.embed.dtype, c.yarn)
        return Context(view, pools, *tables, choices)

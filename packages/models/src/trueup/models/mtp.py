"""The MTP layer: drafts from what the model hands it.  Source: DeepSeek-V3, section 2.2.

Axis letters: Tp token rows (padded), H hidden.
"""
import torch
from jaxtyping import Float
from torch import Tensor, nn

from trueup.core.layers.norm import RMSNorm
from trueup.models.config import ModelConfig
from trueup.models.decoder import Attention, Context, DecoderLayer


class MtpLayer(nn.Module):
    """The next-token-prediction layer: a decoder layer over (embedding of the next token, hidden of this one).

    Built from the config alone, so that a draft model never needs the target's constructor (SB-30).
    """

    def __init__(self, c: ModelConfig, layer: int, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.e_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.h_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh = nn.Parameter(torch.empty(c.hidden_size, 2 * c.hidden_size))
        self.decoder = DecoderLayer(c, layer, attention)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, embedded: Float[Tensor, "Tp H"], hidden: Float[Tensor, "Tp H"], ctx: Context
    ) -> Float[Tensor, "Tp H"]:
        """``embedded`` is the embedding of token p + 1, ``hidden`` the normed hidden state of p (SB-18)."""
        z = torch.cat([self.e_norm(embedded), self.h_norm(hidden)], -1) @ self.eh.T  # [Tp, H]
        z, residual = self.decoder(z, None, ctx)  # [Tp, H], [Tp, H]
        return self.norm.add(z, residual)[0]  # [Tp, H]

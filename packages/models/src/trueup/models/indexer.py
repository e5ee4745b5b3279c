"""The lightning indexer: small queries and keys of its own, whose scores say which positions are worth attending to.

    q = wq_b(normed low-rank query)      k = LayerNorm(wk x)      w = weights_proj x
    score[s, t] = sum over heads of  w[s, h] * relu(q[s, h] . k[t])

Rope turns the first Dr widths of query and key (MLA turns the last), in pairs as the config says.
Source: DeepSeek-V3.2, section 2.1; transformers 5.24: models/glm_moe_dsa and models/deepseek_v32.

Axis letters: Tp token rows, H hidden, Rq query rank, Ni index heads, Di their width, Dr rope width, K chosen positions.
"""
import torch
from jaxtyping import Float
from torch import Tensor, nn

from trueup.core.attention.sparse import choose, write_index_keys
from trueup.core.cache import Pools
from trueup.core.layers.layer_norm import LayerNorm
from trueup.core.rows import Rows
from trueup.core.view import DeviceView
from trueup.models.config import IndexerConfig

KEY_NORM_EPS = 1e-6  # whatever rms_norm_eps says


class Indexer(nn.Module):
    """One layer's indexer."""

    def __init__(self, i: IndexerConfig, hidden: int, query_rank: int, layer: int) -> None:
        super().__init__()
        self.i, self.layer = i, layer
        self.q_b = nn.Parameter(torch.empty(i.heads * i.head_dim, query_rank))  # [Ni*Di, Rq]
        self.k = nn.Parameter(torch.empty(i.head_dim, hidden))  # [Di, H]
        self.k_norm = LayerNorm(i.head_dim, KEY_NORM_EPS)
        self.weights = nn.Parameter(torch.empty(i.heads, hidden))  # [Ni, H]

    def write(self, x: Float[Tensor, "Tp H"], cos: Tensor, sin: Tensor, view: DeviceView, pools: Pools) -> None:
        """The keys of this forward's tokens go into the cache; cos and sin are [Tp, 1, 1, Dr]."""
        key = self.k_norm(x @ self.k.T)[:, None]  # [Tp, 1, Di]
        write_index_keys(self._rotate(key, cos, sin)[:, 0], view, pools, self.layer)

    def choose(self, x: Float[Tensor, "Tp H"], q_rank: Float[Tensor, "Tp Rq"], cos: Tensor, sin: Tensor,
               view: DeviceView, pools: Pools) -> Rows:
        """The positions that each row attends to, [Tp, 1, K] int32; reads the keys that :meth:`write` has written."""
        query = (q_rank @ self.q_b.T).view(len(x), self.i.heads, -1)  # [Tp, Ni, Di]
        # A positive factor moves no choice; it keeps the scores those of the published formula.
        weights = x @ self.weights.T * (self.i.heads * self.i.head_dim) ** -0.5  # [Tp, Ni]
        return choose(self._rotate(query, cos, sin), weights, self.i.topk, view, pools, self.layer)

    def _rotate(self, x: Float[Tensor, "Tp N Di"], cos: Float[Tensor, "Tp 1 1 Dr"], sin: Float[Tensor, "Tp 1 1 Dr"]
                ) -> Float[Tensor, "Tp N Di"]:
        turned, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)  # [Tp, N, Dr], [Tp, N, Di-Dr]
        if self.i.rope_interleave:
            turned = torch.ops.npu.npu_interleave_rope(turned.unsqueeze(2), cos, sin).squeeze(2)  # [Tp, N, Dr]
        else:
            # Tokens stand on the sequence axis: in half mode the batch axis ends at 1,000.
            tables = (table.permute(1, 0, 2, 3) for table in (cos, sin))  # [1, Tp, 1, Dr] each
            turned = torch.ops.npu.npu_rotary_mul(turned[None], *tables, rotary_mode="half")[0]  # [Tp, N, Dr]
        return torch.cat([turned, still], -1)  # [Tp, N, Di]

"""GLM-5, GLM-5.2 and DeepSeek-V3.2: the model of glm4_moe_lite.py with sparse attention.

All that is the same is there.  What sets the three apart are config values: which layers have an indexer (21 of 78 in
GLM-5.2, the rest attend to what the nearest one before them chose), in which pairs its rope turns, expert groups, and
yarn.  Source: transformers 5.24, models/glm_moe_dsa and models/deepseek_v32.

Axis letters: Tp token rows, H hidden, Rq query rank, K chosen positions.
"""
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from trueup.core.attention.choices import Choices, IndexReuse
from trueup.core.cache import CacheSpec, Pools
from trueup.core.rows import Rows
from trueup.core.view import DeviceView
from trueup.models.config import ModelConfig
from trueup.models.decoder import Attention, Context
from trueup.models.glm4_moe_lite import Glm4MoeLite
from trueup.models.indexer import Indexer


class SparseAttention(Attention):
    """MLA over chosen positions.  ``indexer`` is None in a layer that has none."""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__(c, layer)
        assert c.indexer, "a sparse model has an indexer"
        self.indexer = Indexer(c.indexer, c.hidden_size, c.q_lora_rank, layer) if c.indexer.full[layer] else None

    def choose(self, x: Float[Tensor, "Tp H"], q_rank: Float[Tensor, "Tp Rq"], ctx: Context) -> Rows | None:
        """[Tp, 1, K]; a layer with an indexer writes its keys even when it takes what another has chosen."""
        assert ctx.choices, "a sparse model's forward has choices"
        if (indexer := self.indexer) is None:
            return ctx.choices.by_layer[ctx.choices.reuse.source[self.layer]]  # [Tp, 1, K]
        indexer.write(x, ctx.cos, ctx.sin, ctx.view, ctx.pools)
        return ctx.choices.of(
            self.layer, lambda: indexer.choose(x, q_rank, ctx.cos, ctx.sin, ctx.view, ctx.pools))  # [Tp, 1, K]


class GlmMoeDsa(Glm4MoeLite):
    """The whole model."""

    attention = SparseAttention

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        assert c.indexer, "a sparse model has an indexer"
        self.index, self.reuse = c.indexer, c.indexer.reuse

    @property
    def reuse(self) -> IndexReuse:
        """Whose choices the layers attend to: the config's policy, until another is put in its place.

        Raises:
            ValueError: a policy for another number of layers, one that lets a layer choose that has no indexer, or an
                MTP layer share: its rows are not those of the layers before it.
        """
        return self._reuse

    @reuse.setter
    def reuse(self, policy: IndexReuse) -> None:
        full, main = self.index.full, self.config.num_hidden_layers
        if len(policy.source) != len(full):
            raise ValueError(f"the policy names {len(policy.source)} layers; expected {len(full)}, MTP layers included")
        if mute := [layer for layer in policy.source if not full[layer]]:
            raise ValueError(f"layer {mute[0]} has no indexer, but the policy lets it choose for itself; name a layer "
                             "before it in IndexReuse.source")
        if policy.source[main:] != tuple(range(main, len(full))):
            raise ValueError(f"the policy gives MTP layers the choices of layers {policy.source[main:]}; expected "
                             "their own: their rows are those of another forward")
        self._reuse = policy

    @property
    def cache_spec(self) -> CacheSpec:
        """Beside latent and rope, an index key in each layer that has an indexer."""
        layers = tuple(layer for layer, full in enumerate(self.index.full) if full)
        return replace(super().cache_spec, index=self.index.head_dim, index_layers=layers)

    def _context(self, view: DeviceView, pools: Pools, choices: Choices | None = None) -> Context:
        return super()._context(view, pools, choices or Choices(self.reuse))

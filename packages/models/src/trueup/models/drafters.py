"""From a word to a drafter: ``mtp``, ``eagle3``, ``ngram``, or the folder of an EAGLE-3 head."""
from pathlib import Path

from jaxtyping import Float, Int
from torch import Tensor

from trueup.core.attention.choices import Choices, DraftReuse
from trueup.core.cache import Pools
from trueup.core.ops.attention.fused_infer_attention.contract_widths import MOST_ROWS
from trueup.core.pages import PagePool
from trueup.core.rows import Rows
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.speculation.drafter import Drafter
from trueup.core.speculation.ngram import NgramDrafter
from trueup.core.speculation.shared_choice import SharedChoiceDrafter
from trueup.core.view import DeviceView
from trueup.models import zoo
from trueup.models.eagle3 import load_eagle3
from trueup.models.glm4_moe_lite import Glm4MoeLite
from trueup.models.glm_moe_dsa import GlmMoeDsa

DRAFT_TOKENS = 3
SPECS = ("mtp", "eagle3", "ngram")


class MtpDraft:
    """The MTP layer as a draft model: one trained layer used for every depth, fed with its own normed hidden state.

    Its rows of the cache are the last layer of the target's own pools.
    Source: DeepSeek-V3, section 2.2; several steps of one layer as in sglang: srt/speculative/eagle_worker.py.
    """

    taps: tuple[int, ...] | None = ()

    def __init__(self, target: Glm4MoeLite) -> None:
        if not target.mtp:
            raise ValueError("this checkpoint has no MTP layer (num_nextn_predict_layers is 0); use --spec ngram, "
                             "or an EAGLE-3 head")
        self.target = target

    def make_pools(self, target: Pools, pages: PagePool) -> Pools:
        """The target's: they hold the MTP layer's rows already."""
        return target

    def fuse(self, features: Float[Tensor, "Tp H"]) -> Float[Tensor, "Tp H"]:
        """The target's hidden rows after its final norm, as they are."""
        return features

    def forward(self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: Pools
                ) -> Float[Tensor, "Tp H"]:
        """See :meth:`trueup.models.glm4_moe_lite.Glm4MoeLite.forward_mtp`."""
        return self.target.forward_mtp(next_tokens, hidden, view, pools)

    def logits(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B V"]:
        """By the target's head."""
        return self.target.logits(hidden)


class SparseMtpDraft(MtpDraft):
    """The same for a sparse target, whose MTP layer can be handed the positions to attend to."""

    target: GlmMoeDsa

    def forward_choosing(
        self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: Pools,
        chosen: Rows | None,
    ) -> tuple[Float[Tensor, "Tp H"], Rows]:
        """See :class:`trueup.core.speculation.shared_choice.ChoosingModel`."""
        layer = self.target.config.num_hidden_layers
        choices = Choices(self.target.reuse, {layer: chosen} if chosen is not None else None)
        out = self.target.forward_mtp(next_tokens, hidden, view, pools, choices)  # [Tp, H]
        return out, choices.by_layer[layer]


def mtp_drafter(target: Glm4MoeLite, draft_tokens: int) -> Drafter:
    """By the target's MTP layer; of a sparse target under the policy that it has now, ``target.reuse.drafts``."""
    drafts = target.reuse.drafts if isinstance(target, GlmMoeDsa) else DraftReuse.OWN
    if drafts is DraftReuse.OWN:
        return ChainDrafter(MtpDraft(target), draft_tokens)
    return SharedChoiceDrafter(SparseMtpDraft(target), draft_tokens, grow=drafts is DraftReuse.GROWN)


def make_drafter(spec: str | Path, target: Glm4MoeLite, draft_tokens: int = DRAFT_TOKENS) -> Drafter:
    """A drafter for ``target``.

    Args:
        spec: "mtp", "eagle3" (the zoo's head, for the nano model), "ngram", or the folder of an EAGLE-3 head.
        target: the model that verifies.
        draft_tokens: most tokens proposed a round.

    Raises:
        ValueError: an unknown word, a target without MTP layer, or draft_tokens out of range.
    """
    if not 1 <= draft_tokens < MOST_ROWS:  # a verification has one row more
        raise ValueError(f"draft_tokens is {draft_tokens}; expected 1 to {MOST_ROWS - 1}")
    if spec == "mtp":
        return mtp_drafter(target, draft_tokens)
    if spec == "ngram":
        return NgramDrafter(draft_tokens, target.vocab_size)
    if spec == "eagle3" or Path(spec).is_dir():
        return ChainDrafter(load_eagle3(zoo.eagle3() if spec == "eagle3" else spec, target), draft_tokens)
    raise ValueError(f"spec {str(spec)!r} is unknown; expected one of {', '.join(SPECS)}, or the folder of an EAGLE-3 "
                     "head")

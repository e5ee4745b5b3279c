"""One frozen description of a model, shared by target and draft: GLM-4.7-Flash, GLM-5, DeepSeek-V3.2.

A published ``config.json`` has grown through several generations of key names and leaves some
values to class defaults of the library that loads it.  Here it is normalised once, before any
module exists (SB-30 in the bug gallery): what the constructors of other engines fill in later
(``scoring_func``, ``moe_layer_freq``) is settled in :func:`ModelConfig.from_hf`, and nothing writes
to it afterwards.
"""
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.core.attention.choices import DraftReuse, IndexReuse
from trueup.core.layers.yarn import Yarn
from trueup.models.config_keys import Keys

log = logging.getLogger(__name__)

# What config.json may say beside the sizes below without changing the model.
_IGNORED = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "ep_size", "head_dim",
    "initializer_range", "layer_types", "num_key_value_heads", "output_router_logits", "pretraining_tp", "qk_head_dim",
    "tokenizer_class", "transformers_version", "use_cache",
}


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer of sparse attention: its sizes, and which layers have one.

    Args:
        heads: of its queries; it has one key a token.
        head_dim: width of a query head and of the key.
        topk: positions that a query row attends to.
        rope_interleave: pairs of its rope are (2j, 2j + 1), as in GLM-5; else (j, j + Dr/2), as in DeepSeek-V3.2.
            The rope of MLA is interleaved in both (SB-28).
        full: by layer, the MTP layers included: has an indexer of its own.
        share_between_drafts: the MTP layer may choose once a round, for all its drafts.
    """

    heads: int
    head_dim: int
    topk: int
    rope_interleave: bool
    full: tuple[bool, ...]
    share_between_drafts: bool

    @property
    def reuse(self) -> IndexReuse:
        """Each layer attends to its own choice, or to that of the nearest layer before it that has an indexer."""
        source = tuple(max(i for i in range(layer + 1) if self.full[i]) for layer in range(len(self.full)))
        return IndexReuse(source, DraftReuse.GROWN if self.share_between_drafts else DraftReuse.OWN)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model, all of them settled.

    Names are those of the published files.  Widths count elements; ``moe_layers[i]`` says whether
    decoder layer ``i`` has experts, the MTP layers (index ``num_hidden_layers`` and on) included.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    # MLA
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    yarn: Yarn | None
    indexer: IndexerConfig | None  # None: dense attention
    # MLP and experts
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    moe_layers: tuple[bool, ...]
    # norms, tokens, storage
    rms_norm_eps: float
    lora_norm_eps: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    fp8_block: tuple[int, int] | None  # rows and columns of a block that shares a scale; None: no fp8 in the files

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(nope + rope): the head width before absorption, in both forms of MLA; yarn raises it."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale * self.yarn.attention_factor if self.yarn else scale

    @classmethod
    def from_hf(cls, raw: dict[str, Any], *, lora_norm_eps: float = 1e-6,
                source: str = "config.json") -> "ModelConfig":
        """Normalise a published config, which is only read.

        ``lora_norm_eps`` is the epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``: 1e-6 in the
        transformers implementation whatever ``rms_norm_eps`` says (transformers 5.24:
        models/glm4_moe_lite), ``rms_norm_eps`` itself in sglang and vLLM.  ``source`` names the
        config in errors.

        Raises:
            ValueError: a key is missing or of the wrong type, contradicts another, or asks for what is not built.
        """
        keys = Keys(raw, source)
        keys.refuse_unbuilt()
        layers, mtp = keys.size("num_hidden_layers"), keys.size("num_nextn_predict_layers", least=0)
        config = cls(
            model_type=keys.need("model_type"),
            vocab_size=keys.size("vocab_size"),
            hidden_size=keys.size("hidden_size"),
            num_hidden_layers=layers,
            num_nextn_predict_layers=mtp,
            max_position_embeddings=keys.size("max_position_embeddings"),
            num_attention_heads=keys.size("num_attention_heads"),
            q_lora_rank=keys.size("q_lora_rank"),
            kv_lora_rank=keys.size("kv_lora_rank"),
            qk_nope_head_dim=keys.size("qk_nope_head_dim"),
            qk_rope_head_dim=keys.size("qk_rope_head_dim"),
            v_head_dim=keys.size("v_head_dim"),
            rope_theta=keys.rope_theta(),
            yarn=keys.yarn(),
            indexer=_indexer(keys, layers, mtp),
            intermediate_size=keys.size("intermediate_size"),
            moe_intermediate_size=keys.size("moe_intermediate_size"),
            n_routed_experts=keys.size("n_routed_experts"),
            n_shared_experts=keys.size("n_shared_experts", default=1),
            num_experts_per_tok=keys.size("num_experts_per_tok"),
            n_group=keys.size("n_group"),
            topk_group=keys.size("topk_group"),
            norm_topk_prob=keys.flag("norm_topk_prob"),
            routed_scaling_factor=keys.number("routed_scaling_factor"),
            scoring_func="sigmoid",
            moe_layers=keys.moe_layers(layers, mtp),
            rms_norm_eps=keys.number("rms_norm_eps"),
            lora_norm_eps=lora_norm_eps,
            eos_token_ids=keys.token_ids("eos_token_id"),
            pad_token_id=None if keys.get("pad_token_id") is None else keys.size("pad_token_id", least=0),
            dtype=keys.dtype(),
            fp8_block=keys.fp8_block(),
        )
        _refuse_contradictions(keys, config)
        if unknown := sorted(set(raw) - keys.seen - _IGNORED):
            log.info("%s: keys without meaning here, ignored: %s", source, ", ".join(unknown))
        return config

    @classmethod
    def from_folder(cls, folder: str | Path, *, lora_norm_eps: float = 1e-6) -> "ModelConfig":
        """Read ``config.json`` of a checkpoint folder.

        Raises:
            ValueError: no such file, not a JSON object, or see :meth:`from_hf`; the message names the file.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no config.json there; expected a Hugging Face checkpoint folder")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not valid JSON ({error}); copy the file again") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
        return cls.from_hf(raw, lora_norm_eps=lora_norm_eps, source=str(path))


def _indexer(keys: Keys, layers: int, mtp: int) -> IndexerConfig | None:
    if (kind := keys.need("model_type")) == "glm4_moe_lite":
        return None
    return IndexerConfig(
        heads=keys.size("index_n_heads"),
        head_dim=keys.size("index_head_dim"),
        topk=keys.size("index_topk"),
        # What transformers does in each class, whether or not the file says it.
        rope_interleave=keys.flag("indexer_rope_interleave", default=kind == "glm_moe_dsa"),
        full=keys.indexer_layers(layers, mtp),
        share_between_drafts=keys.flag("index_share_for_mtp_iteration", default=False),
    )


def _refuse_contradictions(keys: Keys, c: ModelConfig) -> None:
    if c.qk_rope_head_dim % 2:
        raise keys.error(f"qk_rope_head_dim is {c.qk_rope_head_dim}; rope rotates pairs, expected an even number")
    if c.n_routed_experts % c.n_group or c.topk_group > c.n_group:
        raise keys.error(
            f"n_routed_experts={c.n_routed_experts}, n_group={c.n_group}, topk_group={c.topk_group}; "
            "expected groups of equal size, and topk_group of at most n_group"
        )
    reachable = c.n_routed_experts // c.n_group * c.topk_group
    if c.num_experts_per_tok > reachable:
        raise keys.error(
            f"num_experts_per_tok is {c.num_experts_per_tok}; expected at most {reachable}, "
            f"the experts in topk_group={c.topk_group} of n_group={c.n_group} groups"
        )
    if c.indexer and c.indexer.head_dim < c.qk_rope_head_dim:
        raise keys.error(f"index_head_dim is {c.indexer.head_dim}; expected at least qk_rope_head_dim="
                         f"{c.qk_rope_head_dim}, which the indexer rotates")

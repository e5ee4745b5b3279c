"""One frozen description of a GLM-4.7-Flash-shaped model, shared by target and draft.

A published ``config.json`` has grown through several generations of key names and leaves some
values to class defaults of the library that loads it.  Here it is normalised once, before any
module exists (SB-30 in the bug gallery): what the constructors of other engines fill in later
(``scoring_func``, ``moe_layer_freq``) is settled in :func:`ModelConfig.from_hf`, and nothing writes
to it afterwards.
"""
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# What config.json may say beside the sizes below without changing the model.
_IGNORED = {
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "ep_size", "head_dim",
    "initializer_range", "num_key_value_heads", "output_router_logits", "pretraining_tp", "qk_head_dim",
    "tokenizer_class", "transformers_version", "use_cache",
}
# Switches that GLM-4.7-Flash has in one position only; absent means that position.
_BUILT = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "rope_interleave": True,
    # npu_moe_gating_top_k always normalises sigmoid weights, so False could not be expressed.
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


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

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(nope + rope): the head width before absorption, in both forms of MLA."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

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
        keys = _Keys(raw, source)
        keys.refuse_unbuilt()
        layers, mtp = keys.size("num_hidden_layers"), keys.size("num_nextn_predict_layers", least=0)
        config = cls(
            model_type="glm4_moe_lite",
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
        )
        keys.refuse_contradictions(config)
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


class _Keys:
    """Reads a raw config, remembers which keys were asked for, and words what is wrong with them."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.raw, self.source = raw, source
        self.seen: set[str] = set()

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.source}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null counts as absent, as it does for every publisher."""
        self.seen.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            # A library's class default would load, and compute another model.
            hint = "; write 0 if the files hold no MTP layer" if key == "num_nextn_predict_layers" else ""
            raise self.error(f"{key} is missing, and has no default here{hint}")
        return value

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.need(key) if default is None else self.get(key, default)
        if not _is_int(value, least):
            raise self.error(f"{key} is {value!r}; expected an integer of at least {least}")
        return value

    def number(self, key: str) -> float:
        return self.positive(key, self.need(key))

    def positive(self, key: str, value: Any) -> float:
        # json reads NaN and Infinity, too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} is {value!r}; expected a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.need(key)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; expected true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.need(key)
        ids = tuple(value) if isinstance(value, list) else (value,)
        if not ids or not all(_is_int(i, 0) for i in ids):
            raise self.error(f"{key} is {value!r}; expected a token id or a list of them")
        return ids

    def dtype(self) -> str:
        """Both names of the key, the newer one first; the published files are bf16."""
        value = self.get("dtype", self.get("torch_dtype", "bfloat16"))
        if value not in _DTYPES:
            raise self.error(f"dtype is {value!r}; expected one of {', '.join(_DTYPES)}")
        return value

    def rope(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(f"{key} is {value!r}; expected an object or null")
        return {inner: setting for inner, setting in value.items() if setting is not None}

    def rope_theta(self) -> float:
        """The nested keys of transformers 5 win over the older top-level ones."""
        new, old = self.rope("rope_parameters"), self.rope("rope_scaling")
        kinds = [rope[key] for rope in (new, old) for key in ("rope_type", "type") if key in rope]
        if kinds and kinds[0] != "default":
            raise self.error(f"rope type is {kinds[0]!r}; only 'default' is built")
        share = new.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if share != 1.0:
            raise self.error(f"partial_rotary_factor is {share!r}; only 1.0 (all of qk_rope_head_dim) is built")
        theta = new.get("rope_theta", self.get("rope_theta"))
        if theta is None:
            raise self.error("rope_theta is missing, at the top level and in rope_parameters")
        return self.positive("rope_theta", theta)

    def moe_layers(self, layers: int, mtp: int) -> tuple[bool, ...]:
        """Which layers have experts.  An MTP layer always has, whoever builds it (SB-30)."""
        kinds, first = self.get("mlp_layer_types"), self.get("first_k_dense_replace")
        if kinds is None and first is None:
            raise self.error("neither first_k_dense_replace nor mlp_layer_types is given")
        by_count = None
        if first is not None:
            first = self.size("first_k_dense_replace", least=0)
            by_count = ["dense" if i < first else "sparse" for i in range(layers)]
        if kinds is None:
            kinds = by_count
        if not isinstance(kinds, list) or len(kinds) != layers or any(k not in ("dense", "sparse") for k in kinds):
            raise self.error(f"mlp_layer_types is {kinds!r}; expected a list of {layers} 'dense' or 'sparse'")
        if by_count is not None and kinds != by_count:
            raise self.error(f"mlp_layer_types {kinds} contradicts first_k_dense_replace={first}; correct one of them")
        return tuple(kind == "sparse" for kind in kinds) + (True,) * mtp

    def refuse_unbuilt(self) -> None:
        if (kind := self.need("model_type")) != "glm4_moe_lite":
            raise self.error(f"model_type is {kind!r}; this release reads 'glm4_moe_lite' (GLM-4.7-Flash)")
        for key, only in _BUILT.items():
            if (value := self.get(key, only)) != only:
                raise self.error(f"{key} is {value!r}; only {only!r}, as in GLM-4.7-Flash, is built")
        if self.get("quantization_config") is not None:
            raise self.error("quantization_config is given; quantised checkpoints are not read, use the bf16 files")

    def refuse_contradictions(self, c: ModelConfig) -> None:
        if c.qk_rope_head_dim % 2:
            raise self.error(f"qk_rope_head_dim is {c.qk_rope_head_dim}; rope rotates pairs, expected an even number")
        if c.n_routed_experts % c.n_group or c.topk_group > c.n_group:
            raise self.error(
                f"n_routed_experts={c.n_routed_experts}, n_group={c.n_group}, topk_group={c.topk_group}; "
                "expected groups of equal size, and topk_group of at most n_group"
            )
        reachable = c.n_routed_experts // c.n_group * c.topk_group
        if c.num_experts_per_tok > reachable:
            raise self.error(
                f"num_experts_per_tok is {c.num_experts_per_tok}; expected at most {reachable}, "
                f"the experts in topk_group={c.topk_group} of n_group={c.n_group} groups"
            )


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

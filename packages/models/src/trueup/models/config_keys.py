"""Reading a published config.json: one key at a time, with an error that names the key and says what to change."""
import math
from typing import Any

from trueup.core.layers.yarn import Yarn

MODEL_TYPES = ("glm4_moe_lite", "glm_moe_dsa", "deepseek_v32")
# Switches that these models have in one position only; absent means that position.
_BUILT = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "rope_interleave": True,
    # npu_moe_gating_top_k always normalises sigmoid weights, so False could not be expressed.
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "mlp_bias": False,
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


class Keys:
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

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.need(key) if default is None else self.get(key, default)
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
        new = self.rope("rope_parameters")
        share = new.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if share != 1.0:
            raise self.error(f"partial_rotary_factor is {share!r}; only 1.0 (all of qk_rope_head_dim) is built")
        theta = new.get("rope_theta", self.get("rope_theta"))
        if theta is None:
            raise self.error("rope_theta is missing, at the top level and in rope_parameters")
        return self.positive("rope_theta", theta)

    def yarn(self) -> Yarn | None:
        """The stretched rope of long contexts, from either generation of keys; None: the plain one."""
        both = self.rope("rope_parameters"), self.rope("rope_scaling")
        rope = next((rope for rope in both if "rope_type" in rope or "type" in rope), {"type": "default"})
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "default":
            return None
        if kind != "yarn":
            raise self.error(f"rope type is {kind!r}; only 'default' and 'yarn' are built")
        for key, only in (("attention_factor", None), ("truncate", True)):
            if rope.get(key, only) != only:
                raise self.error(f"{key} is {rope[key]!r} beside rope type 'yarn'; that is not built")

        def part(key: str) -> float:
            if key not in rope:
                raise self.error(f"rope type is 'yarn', but {key} is missing beside it, and has no default here")
            return self.positive(key, rope[key])

        return Yarn(part("factor"), int(part("original_max_position_embeddings")), part("beta_fast"),
                    part("beta_slow"), part("mscale"), part("mscale_all_dim"))

    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, if the checkpoint is one of fp8 blocks."""
        quantised = self.get("quantization_config")
        if quantised is None:
            return None
        if isinstance(quantised, dict) and all(quantised.get(key, only) == only for key, only in _FP8.items()):
            block = quantised.get("weight_block_size")
            if isinstance(block, list) and len(block) == 2 and all(_is_int(size, 1) for size in block):
                return block[0], block[1]
        raise self.error(f"quantization_config is {quantised!r}; only fp8 e4m3 in blocks, as in DeepSeek-V3.2, is read "
                         "(weight_block_size [128, 128]): use those files, or the bf16 ones")

    def indexer_layers(self, layers: int, mtp: int) -> tuple[bool, ...]:
        """Which layers choose positions themselves; the others take what the nearest such layer before them chose.

        MTP layers choose for themselves.
        """
        key, kinds = self._indexer_kinds(layers)
        if not isinstance(kinds, list) or len(kinds) != layers or any(k not in ("full", "shared") for k in kinds):
            raise self.error(f"{key} is {self.raw[key]!r}; expected 'full' or 'shared' (in a pattern: F or S) for each "
                             f"of {layers} layers")
        if kinds[0] != "full":
            raise self.error(f"by {key} layer 0 is 'shared'; expected 'full', for no layer before it has chosen")
        return tuple(kind == "full" for kind in kinds) + (True,) * mtp

    def _indexer_kinds(self, layers: int) -> tuple[str, Any]:
        """A list wins over a pattern, a pattern over the rule (transformers 5.24: models/glm_moe_dsa)."""
        kinds, pattern = self.get("indexer_types"), self.get("index_topk_pattern")
        every = max(self.size("index_topk_freq", 1, least=0), 1)
        offset = self.size("index_skip_topk_offset", 2, least=0)
        if kinds is not None:
            return "indexer_types", kinds
        if isinstance(pattern, str):
            return "index_topk_pattern", [{"F": "full", "S": "shared"}.get(letter) for letter in pattern]
        if pattern is not None:
            return "index_topk_pattern", pattern
        by_rule = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
        return f"index_topk_freq={every} and index_skip_topk_offset={offset}", by_rule

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
        if (kind := self.need("model_type")) not in MODEL_TYPES:
            raise self.error(f"model_type is {kind!r}; this release reads {', '.join(map(repr, MODEL_TYPES))}")
        for key, only in _BUILT.items():
            if (value := self.get(key, only)) != only:
                raise self.error(f"{key} is {value!r}; only {only!r} is built")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

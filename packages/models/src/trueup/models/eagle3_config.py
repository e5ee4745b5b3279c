"""Sizes of an EAGLE-3 head, from its published ``config.json``; settled once, as the target's are."""
import json
from dataclasses import dataclass
from pathlib import Path

from trueup.models.config import ModelConfig


@dataclass(frozen=True)
class Eagle3Config:
    """Names are those of the published files.  ``taps`` are layers: the head reads the residual streams entering them.

    ``draft_vocab_size`` equals ``vocab_size`` where the head speaks the whole vocabulary.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path, target: ModelConfig) -> "Eagle3Config":
        """Read a head's config and compare it with the target that it is for.

        Raises:
            ValueError: no such file, not an EAGLE-3 head, a size missing, or a head for another target.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no config.json there; expected the folder of an EAGLE-3 head")
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = raw.get("architectures", ["none"])[0]
        if not kind.endswith("Eagle3"):
            raise ValueError(f"{path}: architecture {kind}; expected a head such as LlamaForCausalLMEagle3")
        if raw.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"{path}: num_hidden_layers is {raw['num_hidden_layers']}; expected 1: heads of several "
                             "layers are not built")
        head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        try:
            sizes = {n: raw[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads",
                                         "num_key_value_heads", "vocab_size", "rms_norm_eps")}
        except KeyError as error:
            raise ValueError(f"{path}: {error} is missing, and has no default") from None
        config = cls(**sizes, head_dim=head_dim, rope_theta=float(raw.get("rope_theta", 10000.0)),
                     draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
                     taps=_taps(raw.get("eagle_config") or {}, target.num_hidden_layers))
        if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ValueError(f"{path}: hidden {config.hidden_size} and vocabulary {config.vocab_size}; the target has "
                             f"{target.hidden_size} and {target.vocab_size}: this head was made for another model")
        if not all(0 <= i <= target.num_hidden_layers for i in config.taps):
            raise ValueError(f"{path}: reads the inputs of layers {config.taps}; the target has "
                             f"{target.num_hidden_layers} layers")
        return config


def _taps(eagle: dict, layers: int) -> tuple[int, ...]:
    """From low to high, whatever the order in the file: engines capture while they walk up the layers.

    Without a list: the inputs of layers 2, L // 2 and L - 3.  A list names inputs, except that one beginning with 1
    names outputs, one layer more each (sglang's rule for targets of the DeepSeek and GLM-4.7-Flash kind).
    """
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
    return tuple(sorted(i + (ids[0] == 1) for i in ids))

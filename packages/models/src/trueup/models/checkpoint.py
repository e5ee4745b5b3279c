"""Names and shapes of every tensor in a published checkpoint, derived from the config alone.

Two spellings of the experts: one tensor per expert and projection, as published, and the fused pair that
transformers 5 holds in memory.

Used three ways: the loader compares files with it, the training starts from it, and a test counts it
against the published totals (GLM-4.7-Flash: 9,703 tensors, 31,221,488,576 elements).
"""
import math
from typing import NamedTuple

from trueup.models.config import ModelConfig


class Expected(NamedTuple):
    """One tensor of a checkpoint: its shape, and whether the loader can do without it."""

    shape: tuple[int, ...]
    optional: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def expected_tensors(c: ModelConfig) -> dict[str, Expected]:
    """Every tensor by name, per-expert, MTP layers included.  Shapes are [out, in] for matrices."""
    tensors = {
        "model.embed_tokens.weight": Expected((c.vocab_size, c.hidden_size)),
        "model.norm.weight": Expected((c.hidden_size,)),
        "lm_head.weight": Expected((c.vocab_size, c.hidden_size)),
    }
    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        at = f"model.layers.{layer}."
        tensors |= {at + name: tensor for name, tensor in _decoder_layer(c, layer).items()}
        if layer >= c.num_hidden_layers:
            tensors |= {at + name: tensor for name, tensor in _mtp_extras(c).items()}
    return tensors


class Fused(NamedTuple):
    """One tensor that holds those of all experts of a layer: cut into ``len(parts)`` along its rows, it is they."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def fused_tensors(c: ModelConfig) -> dict[str, Fused]:
    """The fused spelling of every MoE layer, by name (transformers 5.24: models/glm4_moe_lite).

    ``gate_up_proj`` is [E, 2I, H], the I gate rows of an expert before its I up rows; ``down_proj`` is [E, H, I].
    """
    E, inner, H = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    fused = {}
    for layer, moe in enumerate(c.moe_layers):
        at = f"model.layers.{layer}.mlp.experts."
        if moe:
            gate_up = tuple(f"{at}{e}.{which}_proj.weight" for e in range(E) for which in ("gate", "up"))
            down = tuple(f"{at}{e}.down_proj.weight" for e in range(E))
            fused[at + "gate_up_proj"] = Fused((E, 2 * inner, H), gate_up)
            fused[at + "down_proj"] = Fused((E, H, inner), down)
    return fused


def _decoder_layer(c: ModelConfig, layer: int) -> dict[str, Expected]:
    H, N, R, Rq = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank
    Dn, Dr, Dv = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    tensors = {
        "input_layernorm.weight": Expected((H,)),
        "post_attention_layernorm.weight": Expected((H,)),
        "self_attn.q_a_proj.weight": Expected((Rq, H)),
        "self_attn.q_a_layernorm.weight": Expected((Rq,)),
        "self_attn.q_b_proj.weight": Expected((N * (Dn + Dr), Rq)),
        "self_attn.kv_a_proj_with_mqa.weight": Expected((R + Dr, H)),
        "self_attn.kv_a_layernorm.weight": Expected((R,)),
        "self_attn.kv_b_proj.weight": Expected((N * (Dn + Dv), R)),
        "self_attn.o_proj.weight": Expected((H, N * Dv)),
    }
    if c.indexer and c.indexer.full[layer]:
        Ni, Di = c.indexer.heads, c.indexer.head_dim
        tensors |= {
            "self_attn.indexer.wq_b.weight": Expected((Ni * Di, Rq)),
            "self_attn.indexer.wk.weight": Expected((Di, H)),
            "self_attn.indexer.k_norm.weight": Expected((Di,)),
            "self_attn.indexer.k_norm.bias": Expected((Di,)),
            "self_attn.indexer.weights_proj.weight": Expected((Ni, H)),
        }
    if not c.moe_layers[layer]:
        return tensors | _mlp("mlp.", H, c.intermediate_size)
    tensors["mlp.gate.weight"] = Expected((c.n_routed_experts, H))
    tensors["mlp.gate.e_score_correction_bias"] = Expected((c.n_routed_experts,))
    for e in range(c.n_routed_experts):
        tensors |= _mlp(f"mlp.experts.{e}.", H, c.moe_intermediate_size)
    return tensors | _mlp("mlp.shared_experts.", H, c.moe_intermediate_size * c.n_shared_experts)


def _mlp(at: str, H: int, inner: int) -> dict[str, Expected]:
    return {
        at + "gate_proj.weight": Expected((inner, H)),
        at + "up_proj.weight": Expected((inner, H)),
        at + "down_proj.weight": Expected((H, inner)),
    }


def _mtp_extras(c: ModelConfig) -> dict[str, Expected]:
    """The last two are copies of the main model's tensors; some releases leave them out."""
    return {
        "eh_proj.weight": Expected((c.hidden_size, 2 * c.hidden_size)),
        "enorm.weight": Expected((c.hidden_size,)),
        "hnorm.weight": Expected((c.hidden_size,)),
        "shared_head.norm.weight": Expected((c.hidden_size,)),
        "shared_head.head.weight": Expected((c.vocab_size, c.hidden_size), optional=True),
        "embed_tokens.weight": Expected((c.vocab_size, c.hidden_size), optional=True),
    }

"""For each tensor name of a published checkpoint, what copies it into the served model.

The model keeps gate and up as one matrix, experts transposed and stacked, and kv_b_proj split in two; this file
is the only place that knows both sides.
"""
from collections.abc import Callable, Iterable
from typing import cast

from torch import Tensor

from trueup.core.layers.mlp import MLP
from trueup.models.decoder import Attention, DecoderLayer
from trueup.models.glm4_moe_lite import Glm4MoeLite
from trueup.models.glm_moe_dsa import SparseAttention
from trueup.models.indexer import Indexer
from trueup.models.mtp import MtpLayer

Receivers = dict[str, Callable[[Tensor], object]]


def receivers(model: Glm4MoeLite) -> Receivers:
    """Every name the model needs, its MTP layers' included; the two duplicates of the main tensors are not."""
    out: Receivers = {
        "model.embed_tokens.weight": model.embed.data.copy_,
        "model.norm.weight": model.norm.weight.data.copy_,
        "lm_head.weight": model.lm_head.data.copy_,
    }
    for i, layer in enumerate(cast(Iterable[DecoderLayer], model.layers)):
        out |= _decoder_layer(f"model.layers.{i}.", layer)
    for i, mtp in enumerate(cast(Iterable[MtpLayer], model.mtp), len(model.layers)):
        at = f"model.layers.{i}."
        out |= _decoder_layer(at, mtp.decoder)
        out |= {
            at + "eh_proj.weight": mtp.eh.data.copy_,
            at + "enorm.weight": mtp.e_norm.weight.data.copy_,
            at + "hnorm.weight": mtp.h_norm.weight.data.copy_,
            at + "shared_head.norm.weight": mtp.norm.weight.data.copy_,
        }
    return out


def _decoder_layer(at: str, layer: DecoderLayer) -> Receivers:
    a, mlp = layer.attention, layer.mlp
    out: Receivers = {
        at + "input_layernorm.weight": layer.input_norm.weight.data.copy_,
        at + "post_attention_layernorm.weight": layer.post_norm.weight.data.copy_,
        at + "self_attn.q_a_proj.weight": a.q_a.data.copy_,
        at + "self_attn.q_a_layernorm.weight": a.q_norm.weight.data.copy_,
        at + "self_attn.q_b_proj.weight": a.q_b.data.copy_,
        at + "self_attn.kv_a_proj_with_mqa.weight": a.kv_a.data.copy_,
        at + "self_attn.kv_a_layernorm.weight": a.kv_norm.weight.data.copy_,
        at + "self_attn.kv_b_proj.weight": lambda weight: _kv_b(a, weight),
        at + "self_attn.o_proj.weight": a.o.data.copy_,
    }
    if isinstance(a, SparseAttention) and a.indexer:
        out |= _indexer(at + "self_attn.indexer.", a.indexer)
    if isinstance(mlp, MLP):
        return out | _mlp(at + "mlp.", mlp.gate_up.data, mlp.down.data)
    out[at + "mlp.gate.weight"] = mlp.gate.data.copy_
    out[at + "mlp.gate.e_score_correction_bias"] = mlp.bias.data.copy_
    for e in range(mlp.routing.experts):
        out |= _mlp(f"{at}mlp.experts.{e}.", mlp.gate_up.data[e].T, mlp.down.data[e].T)
    return out | _mlp(at + "mlp.shared_experts.", mlp.shared.gate_up.data, mlp.shared.down.data)


def _indexer(at: str, indexer: Indexer) -> Receivers:
    return {
        at + "wq_b.weight": indexer.q_b.data.copy_,
        at + "wk.weight": indexer.k.data.copy_,
        at + "k_norm.weight": indexer.k_norm.weight.data.copy_,
        at + "k_norm.bias": indexer.k_norm.bias.data.copy_,
        at + "weights_proj.weight": indexer.weights.data.copy_,
    }


def _kv_b(a: Attention, weight: Tensor) -> None:
    """kv_b_proj [N*(Dn+Dv), R]: the rows of one head are its nope rows, then its value rows."""
    N, Dn, R = a.w_uk.shape
    per_head = weight.view(N, -1, R)  # [N, Dn+Dv, R]
    a.w_uk.data.copy_(per_head[:, :Dn])
    a.w_uv.data.copy_(per_head[:, Dn:].mT)


def _mlp(at: str, gate_up: Tensor, down: Tensor) -> Receivers:
    """``gate_up`` [2I, H] and ``down`` [H, I] are the model's own memory, transposed for experts."""
    gate, up = gate_up.chunk(2)  # [I, H], [I, H]
    return {at + "gate_proj.weight": gate.copy_, at + "up_proj.weight": up.copy_, at + "down_proj.weight": down.copy_}

"""The differentiable twin: GLM-4.7-Flash with one MTP layer as plain PyTorch, for training only.

The NPU operators have no backward, so the served model cannot be trained.  This file says the same
mathematics with ordinary autograd operators; a test holds the logits of both equal.  Parameters are
one dictionary under the names of the published checkpoint files, so what is trained is what is saved.

Axis letters: B sequences, T tokens of a sequence, N heads, D head width (nope + rope), R latent rank,
H hidden, E experts, V vocabulary, S tokens x chosen experts.
"""
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.models.config import ModelConfig

Params = dict[str, Tensor]
# (layer, its normed input [B, T, H], q, k [B, N, T, D], v [B, N, T, Dv]) to the attention's output [B, N, T, Dv]
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


def init_params(config: ModelConfig, seed: int) -> Params:
    """Fresh fp32 parameters by checkpoint name; output projections start at zero."""
    from trueup.models.checkpoint import expected_tensors

    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, tensor in expected_tensors(config).items():
        if tensor.optional:
            continue
        if name.endswith("norm.bias"):
            value = torch.zeros(tensor.shape)
        elif "norm" in name:
            value = torch.ones(tensor.shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "e_score_correction_bias")):
            value = torch.zeros(tensor.shape)
        else:
            std = 0.02 if name.endswith("mlp.gate.weight") else tensor.shape[-1] ** -0.5
            value = torch.randn(tensor.shape, generator=generator) * std
        params[name] = value
    return params


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 inside, rounded to the dtype of x before the weight, as transformers does."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate interleaved pairs; the result keeps (all firsts | all seconds), as npu_interleave_rope does.

    x is [B, T, N, 64], positions [T].
    """
    half = x.shape[-1] // 2
    frequency = 1 / theta ** (torch.arange(half, dtype=torch.float32) / half)  # [D/2]
    angle = positions[:, None].float() * frequency  # [T, D/2]
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]  # [T, 1, D/2]
    first, second = x[..., 0::2], x[..., 1::2]  # [B, T, N, D/2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)  # [B, T, N, D]


def queries_keys_values(p: Params, c: ModelConfig, layer: int, x: Tensor, positions: Tensor):
    """MLA, expanded: q and k [B, N, T, D], v [B, N, T, Dv]."""
    at = f"model.layers.{layer}.self_attn."
    B, T, _ = x.shape
    N, Dn, Dr, Dv, R = (
        c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank,
    )
    q_rank = rms_norm(x @ p[at + "q_a_proj.weight"].T, p[at + "q_a_layernorm.weight"], c.lora_norm_eps)  # [B, T, Rq]
    q = (q_rank @ p[at + "q_b_proj.weight"].T).view(B, T, N, Dn + Dr)  # [B, T, N, D]
    q = torch.cat([q[..., :Dn], rope(q[..., Dn:], positions, c.rope_theta)], -1)  # [B, T, N, D]

    # The latent is linear in x up to one scalar a token, so kv_b and the first R rows of kv_a are
    # multiplied once a step instead of once a token: the same numbers for 40 % less arithmetic.
    w_a, w_rope = p[at + "kv_a_proj_with_mqa.weight"].split([R, Dr])  # [R, H], [Dr, H]
    expand = (p[at + "kv_b_proj.weight"] * p[at + "kv_a_layernorm.weight"]) @ w_a  # [N*(Dn+Dv), H]
    gram = w_a.float().T @ w_a.float()  # [H, H]
    square = ((x.float() @ gram) * x.float()).sum(-1, keepdim=True) / R  # [B, T, 1] mean square of the latent
    inverse_rms = torch.rsqrt(square.clamp_min(0) + c.lora_norm_eps).to(x.dtype)  # [B, T, 1]
    kv = ((x @ expand.T) * inverse_rms).view(B, T, N, Dn + Dv)  # [B, T, N, Dn+Dv]
    k_rope = rope((x @ w_rope.T)[:, :, None], positions, c.rope_theta).expand(B, T, N, Dr)  # [B, T, N, Dr]
    k = torch.cat([kv[..., :Dn], k_rope], -1)  # [B, T, N, D]
    v = kv[..., Dn:]  # [B, T, N, Dv]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def route(p: Params, c: ModelConfig, layer: int, x: Tensor):
    """Chosen experts [T, K] and their weights [T, K]; the bias takes part in the choice only."""
    at = f"model.layers.{layer}.mlp.gate."
    score = (x.float() @ p[at + "weight"].float().T).sigmoid()  # [T, E]
    chosen = (score + p[at + "e_score_correction_bias"]).topk(c.num_experts_per_tok, -1).indices  # [T, K]
    weight = score.gather(1, chosen)  # [T, K]
    if c.norm_topk_prob:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)  # [T, K]
    return chosen, weight * c.routed_scaling_factor


def swiglu_mlp(p: Params, at: str, x: Tensor) -> Tensor:
    gate, up = x @ p[at + "gate_proj.weight"].T, x @ p[at + "up_proj.weight"].T  # [T, I]
    return (F.silu(gate) * up) @ p[at + "down_proj.weight"].T  # [T, H]


def mlp(p: Params, c: ModelConfig, layer: int, x: Tensor, loads: dict[int, Tensor] | None) -> Tensor:
    """The dense MLP, or shared plus routed experts; x is [T, H].  ``loads`` collects tokens per expert."""
    at = f"model.layers.{layer}.mlp."
    if not c.moe_layers[layer]:
        return swiglu_mlp(p, at, x)
    chosen, weight = route(p, c, layer, x)  # [T, K]
    order = chosen.flatten().argsort(stable=True)  # [S]
    count = chosen.flatten().bincount(minlength=c.n_routed_experts)  # [E]
    if loads is not None:
        loads[layer] = loads.get(layer, 0) + count
    token = order // c.num_experts_per_tok  # [S]
    parts = x[token].split(count.tolist())  # E tensors [*, H]
    out = torch.cat([swiglu_mlp(p, f"{at}experts.{e}.", part) for e, part in enumerate(parts)])  # [S, H]
    out = out * weight.flatten()[order, None].to(x.dtype)  # [S, H]
    return swiglu_mlp(p, at + "shared_experts.", x).index_add(0, token, out)  # [T, H]


def decoder_layer(p: Params, c: ModelConfig, layer: int, h: Tensor, positions: Tensor, loads=None, chain=(),
                  attend: Attend | None = None):
    """One pre-norm layer on h [B, T, H]; returns the new h and this call's (k, v).

    With ``chain`` = ((k, v) of MTP step 1, then of every later step) row p attends to step-1 keys of
    slots <= p, and to one key a later step: its own chain's.  ``attend`` takes the place of causal attention.
    """
    at, (B, T, H) = f"model.layers.{layer}.", h.shape
    x = rms_norm(h, p[at + "input_layernorm.weight"], c.rms_norm_eps)  # [B, T, H]
    q, k, v = queries_keys_values(p, c, layer, x, positions)  # [B, N, T, D]
    steps = (*chain, (k, v))
    if chain:
        o = chain_attention(q, steps, c.softmax_scale)  # [B, N, T, Dv]
    elif attend:
        o = attend(layer, x, q, k, v)  # [B, N, T, Dv]
    else:
        o = causal_attention(q, k, v, c.softmax_scale)  # [B, N, T, Dv]
    h = h + o.transpose(1, 2).reshape(B, T, -1) @ p[at + "self_attn.o_proj.weight"].T  # [B, T, H]
    x = rms_norm(h, p[at + "post_attention_layernorm.weight"], c.rms_norm_eps)  # [B, T, H]
    return h + mlp(p, c, layer, x.view(B * T, H), loads).view(B, T, H), (k, v)


def causal_mask(T: int, dtype: torch.dtype) -> Tensor:
    return torch.full((T, T), -math.inf, dtype=dtype).triu(1)  # [T, T]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Written out: on a CPU in bf16 its backward is two to three times as fast as SDPA's."""
    scores = (q * scale) @ k.transpose(-1, -2) + causal_mask(q.shape[2], q.dtype)  # [B, N, T, T]
    return scores.softmax(-1) @ v  # [B, N, T, Dv]


def chain_attention(q: Tensor, chain, scale: float) -> Tensor:
    """Attention of one unrolled MTP step over step 1 (causal) and the later steps (own row only)."""
    (k1, v1), later = chain[0], chain[1:]
    T = q.shape[2]
    q = q * scale  # [B, N, T, D]
    scores = q @ k1.transpose(-1, -2) + causal_mask(T, q.dtype)  # [B, N, T, T]
    own = torch.stack([(q * k).sum(-1) for k, _ in later], -1)  # [B, N, T, steps-1]
    probs = torch.cat([scores, own], -1).softmax(-1)  # [B, N, T, T+steps-1]
    o = probs[..., :T] @ v1  # [B, N, T, Dv]
    for i, (_, v) in enumerate(later):
        o = o + probs[..., T + i, None] * v  # [B, N, T, Dv]
    return o


def forward(p: Params, c: ModelConfig, tokens: Tensor, loads=None, states: dict[int, Tensor] | None = None,
            attend: Attend | None = None) -> Tensor:
    """Hidden states after ``model.norm``, [B, T, H], of tokens [B, T].

    ``states``, if given, receives the residual stream [B, T, H] that enters layer i under i; under
    ``num_hidden_layers`` what leaves the last layer, before ``model.norm``.
    """
    positions = torch.arange(tokens.shape[1])  # [T]
    h = p["model.embed_tokens.weight"][tokens]  # [B, T, H]
    for layer in range(c.num_hidden_layers):
        if states is not None:
            states[layer] = h
        h, _ = decoder_layer(p, c, layer, h, positions, loads, attend=attend)
    if states is not None:
        states[c.num_hidden_layers] = h
    return rms_norm(h, p["model.norm.weight"], c.rms_norm_eps)  # [B, T, H]


def head(p: Params, h: Tensor) -> Tensor:
    return h @ p["lm_head.weight"].T  # [.., V]


def mtp_steps(p: Params, c: ModelConfig, h: Tensor, tokens: Tensor, steps: int, loads=None,
              attend: Attend | None = None) -> list[Tensor]:
    """Unroll the MTP layer: for step s = 1..steps the hidden f of every chain start, [B, T, H].

    ``tokens`` is [B, T + steps]: step s pairs the previous hidden (h, then f) at slot p with token
    p + s, sits at position p + s - 1 and predicts token p + s + 1.  ``attend`` serves step 1.
    """
    layer, T = c.num_hidden_layers, h.shape[1]
    at, hiddens = f"model.layers.{layer}.", []
    chain: tuple[tuple[Tensor, Tensor], ...] = ()
    for step in range(1, steps + 1):
        e = p["model.embed_tokens.weight"][tokens[:, step : step + T]]  # [B, T, H]
        e = rms_norm(e, p[at + "enorm.weight"], c.rms_norm_eps)  # [B, T, H]
        g = rms_norm(h, p[at + "hnorm.weight"], c.rms_norm_eps)  # [B, T, H]
        z = torch.cat([e, g], -1) @ p[at + "eh_proj.weight"].T  # [B, T, H]
        positions = torch.arange(T) + step - 1  # [T]
        z, kv = decoder_layer(p, c, layer, z, positions, loads if step == 1 else None, chain, attend)
        chain += (kv,)
        h = rms_norm(z, p[at + "shared_head.norm.weight"], c.rms_norm_eps)  # [B, T, H]
        hiddens.append(h)
    return hiddens

"""The EAGLE-3 head as plain differentiable PyTorch, for training and as a naive implementation in tests.

The head drafts from three residual streams of the target instead of its last hidden state.  At slot p:

    a = fc(low_p | mid_p | high_p)                     the target's features of p, un-normed
    u = input_layernorm(embed(t_{p+1})) | hidden_norm(a)    embedding first
    a = a + o_proj(attention(u));  a = a + mlp(post_attention_layernorm(a))
    draft logits = lm_head(norm(a))                    over the draft vocabulary; guesses t_{p+2}

Step s = 2, 3, ... runs the same layer at position p + s - 1 on the draft of step s - 1 and on ``a`` of
that step, before ``norm`` (MTP feeds the normed vector back; this head does not).

Parameters are one dictionary under the published names (``fc.weight``, ``midlayer.*``, ``norm.weight``,
``lm_head.weight``, ``t2d``, ``d2t``).  The embedding is the target's own.

Axis letters: B sequences, T slots, N query heads, D head width, H hidden, V target vocabulary, Vd draft
vocabulary.  Source: Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via
training-time test" (2025), and the files published for it.
"""
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.training import twin
from trueup.models.training.twin import Params

LAYER = "midlayer."


def init_params(e: Eagle3Config, target: Params, draft_ids: Tensor, seed: int) -> Params:
    """Fresh fp32 parameters; ``draft_ids`` [Vd] are the target ids that can be drafted, ascending.

    The output projections start at zero, fc at the highest captured state, lm_head at the target's rows.  The
    first query head of every group starts equal to its key head, so it looks at its own slot: the next token
    reaches the head through attention alone, and uniform attention would dilute it among all slots.
    """
    H, D, Vd = e.hidden_size, e.head_dim, e.draft_vocab_size
    shapes = {
        "fc.weight": (H, len(e.taps) * H),
        LAYER + "self_attn.q_proj.weight": (e.num_attention_heads * D, 2 * H),
        LAYER + "self_attn.k_proj.weight": (e.num_key_value_heads * D, 2 * H),
        LAYER + "self_attn.v_proj.weight": (e.num_key_value_heads * D, 2 * H),
        LAYER + "mlp.gate_proj.weight": (e.intermediate_size, H),
        LAYER + "mlp.up_proj.weight": (e.intermediate_size, H),
    }
    generator = torch.Generator().manual_seed(seed)
    p = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    p[LAYER + "self_attn.o_proj.weight"] = torch.zeros(H, e.num_attention_heads * D)
    p[LAYER + "mlp.down_proj.weight"] = torch.zeros(H, e.intermediate_size)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        p[f"{LAYER}{name}.weight"] = torch.ones(H)
    p["norm.weight"] = torch.ones(H)
    p["lm_head.weight"] = target["lm_head.weight"].float()[draft_ids].clone()
    q = p[LAYER + "self_attn.q_proj.weight"].view(e.num_key_value_heads, -1, D, 2 * H)  # [Nkv, group, D, 2H]
    q[:, 0] = p[LAYER + "self_attn.k_proj.weight"].view(-1, D, 2 * H)
    p["fc.weight"] *= 0.1
    p["fc.weight"][:, -H:] += torch.eye(H)
    t2d = torch.zeros(e.vocab_size, dtype=torch.bool)
    t2d[draft_ids] = True
    return p | {"t2d": t2d, "d2t": draft_ids - torch.arange(Vd)}


def load_head(folder: str | Path) -> Params:
    """The parameters of a finished head, in fp32."""
    stored = load_file(Path(folder) / "model.safetensors")
    return {n: v.float() if v.is_floating_point() else v for n, v in stored.items()}


def draft_vocabulary(stream: Tensor, e: Eagle3Config) -> Tensor:
    """[Vd] the ids that occur most often in ``stream``, ascending; of equally frequent ones the lower."""
    often = stream.long().bincount(minlength=e.vocab_size).argsort(descending=True, stable=True)  # [V]
    return often[: e.draft_vocab_size].sort().values


def target_ids(p: Params) -> Tensor:
    """[Vd] the target id of every draft id; d2t stores differences."""
    return p["d2t"] + torch.arange(len(p["d2t"]))


def target_features(target: Params, c: ModelConfig, e: Eagle3Config, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The target's features [B, T, 3H] and logits [B, T, V] of tokens [B, T]."""
    states: dict[int, Tensor] = {}
    h = twin.forward(target, c, tokens, states=states)  # [B, T, H]
    return torch.cat([states[i] for i in e.taps], -1), twin.head(target, h)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Llama's rope: element j turns with element j + D/2.  x is [B, T, N, D], positions [T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)  # [D/2]
    angle = positions[:, None].float() * frequency  # [T, D/2]
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]  # [T, 1, D/2]
    first, second = x.chunk(2, -1)  # [B, T, N, D/2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)  # [B, T, N, D]


def queries_keys_values(p: Params, e: Eagle3Config, u: Tensor, positions: Tensor):
    """q, k and v [B, N, T, D] of u [B, T, 2H]; a group of query heads shares one key and value head."""
    B, T, _ = u.shape
    at = LAYER + "self_attn."
    q, k, v = ((u @ p[f"{at}{n}_proj.weight"].T).view(B, T, -1, e.head_dim) for n in "qkv")  # [B, T, *, D]
    q, k = rope(q, positions, e.rope_theta), rope(k, positions, e.rope_theta)  # [B, T, *, D]
    group = e.num_attention_heads // e.num_key_value_heads
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)  # [B, T, N, D]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def head_layer(p: Params, e: Eagle3Config, a: Tensor, embedded: Tensor, positions: Tensor, chain=()):
    """The one layer on a [B, T, H] and the embedded next tokens [B, T, H]; the new a and this step's (k, v).

    With ``chain`` = ((k, v) of step 1, then of every later step) slot p attends to step-1 keys of slots
    <= p, and to one key a later step: its own chain's.
    """
    x = twin.rms_norm(embedded, p[LAYER + "input_layernorm.weight"], e.rms_norm_eps)  # [B, T, H]
    g = twin.rms_norm(a, p[LAYER + "hidden_norm.weight"], e.rms_norm_eps)  # [B, T, H]
    q, k, v = queries_keys_values(p, e, torch.cat([x, g], -1), positions)  # [B, N, T, D]
    steps, scale = (*chain, (k, v)), e.head_dim**-0.5
    o = twin.chain_attention(q, steps, scale) if chain else twin.causal_attention(q, k, v, scale)  # [B, N, T, D]
    a = a + o.transpose(1, 2).flatten(2) @ p[LAYER + "self_attn.o_proj.weight"].T  # [B, T, H]
    x = twin.rms_norm(a, p[LAYER + "post_attention_layernorm.weight"], e.rms_norm_eps)  # [B, T, H]
    return a + twin.swiglu_mlp(p, LAYER + "mlp.", x), (k, v)  # [B, T, H]


def draft_logits(p: Params, e: Eagle3Config, a: Tensor) -> Tensor:
    """[B, T, Vd] of a [B, T, H]."""
    return twin.rms_norm(a, p["norm.weight"], e.rms_norm_eps) @ p["lm_head.weight"].T


def unroll(p: Params, e: Eagle3Config, embed: Tensor, features: Tensor, tokens: Tensor, steps: int,
           own_drafts: bool = False) -> Iterator[Tensor]:
    """Draft logits [B, T, Vd] of steps 1, 2, ... of the chain that starts at every slot.

    ``features`` is [B, T, 3H], ``embed`` the target's embedding [V, H].  The chain is fed the text
    (training-time test; ``tokens`` [B, T + steps]) or, after token p + 1, its own drafts (``tokens`` [B, T + 1]).
    """
    T = features.shape[1]
    a, fed = features @ p["fc.weight"].T, tokens[:, 1 : T + 1]  # [B, T, H], [B, T]
    chain: tuple[tuple[Tensor, Tensor], ...] = ()
    for step in range(1, steps + 1):
        a, kv = head_layer(p, e, a, embed[fed], torch.arange(T) + step - 1, chain)  # [B, T, H]
        chain += (kv,)
        logits = draft_logits(p, e, a)  # [B, T, Vd]
        yield logits
        fed = drafted(p, logits) if own_drafts else tokens[:, step + 1 : step + 1 + T]  # [B, T]


def drafted(p: Params, logits: Tensor) -> Tensor:
    """[..] the target ids of the best draft logits [.., Vd]."""
    return target_ids(p)[logits.argmax(-1)]


def draft_chain(p: Params, e: Eagle3Config, embed: Tensor, features: Tensor, tokens: Tensor,
                steps: int) -> list[tuple[Tensor, Tensor]]:
    """A greedy chain from every slot: ``steps`` pairs of drafted target ids [B, T] and draft logits [B, T, Vd].

    Slot p has the features of tokens [0, p], is fed token p + 1, and drafts tokens p + 2 .. p + 1 + steps;
    ``tokens`` is [B, T + 1].  A served head, slot by slot through a cache, must give the same.
    """
    return [(drafted(p, logits), logits) for logits in unroll(p, e, embed, features, tokens, steps, own_drafts=True)]

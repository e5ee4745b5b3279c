"""An EAGLE-3 head: one layer that drafts from three residual streams of its target.

Where an MTP layer reads the target's last hidden state, this head reads low, middle and high layers, has ordinary
grouped-query attention with a cache of its own, may speak a smaller vocabulary, and hands its own un-normed output on.

Axis letters: Tp token rows, H hidden, N query heads, G key heads, D head width, V target vocabulary, Vd draft
vocabulary, F = taps * H.  Source: Li et al. 2025, "EAGLE-3"; the files published for it.
"""
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor, nn

from trueup.core.attention.gqa import gqa_attention
from trueup.core.cache import Pools
from trueup.core.key_value import KeyValuePools, KeyValueSpec
from trueup.core.layers.mlp import MLP
from trueup.core.layers.norm import RMSNorm
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.pages import PagePool
from trueup.core.view import DeviceView
from trueup.models.axes import PARAMETER_AXES
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.glm4_moe_lite import Glm4MoeLite
from trueup.models.stored import listed, stored_tensors


class Eagle3Head(nn.Module):
    """The draft model; parameters are uninitialised until :func:`load_eagle3`.  The embedding is the target's."""

    taps: tuple[int, ...] | None
    target_ids: Tensor

    def __init__(self, c: Eagle3Config, embed: Tensor) -> None:
        super().__init__()
        H, N, G, D = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.c, self.embed, self.taps, self.parameter_axes = c, embed, c.taps, PARAMETER_AXES
        self.fc = nn.Parameter(torch.empty(H, len(c.taps) * H))
        self.input_norm, self.hidden_norm = RMSNorm(H, c.rms_norm_eps), RMSNorm(H, c.rms_norm_eps)
        self.q = nn.Parameter(torch.empty(N * D, 2 * H))
        self.k = nn.Parameter(torch.empty(G * D, 2 * H))
        self.v = nn.Parameter(torch.empty(G * D, 2 * H))
        self.o = nn.Parameter(torch.empty(H, N * D))
        self.post_norm = RMSNorm(H, c.rms_norm_eps)
        self.mlp = MLP(H, c.intermediate_size)
        self.norm = RMSNorm(H, c.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.empty(c.draft_vocab_size, H))
        self.register_buffer("target_ids", torch.arange(c.draft_vocab_size))  # [Vd]

    def make_pools(self, target: Pools, pages: PagePool) -> KeyValuePools:
        """Keys and values in this layer's own widths, whatever the target stores (SB-26)."""
        c = self.c
        spec = KeyValueSpec(1, c.num_key_value_heads, c.head_dim, self.fc.dtype, self.fc.device)
        return KeyValuePools(spec, pages)

    def fuse(self, features: Float[Tensor, "Tp F"]) -> Float[Tensor, "Tp H"]:
        """The three streams as one; only the target's features pass here, the head's own output does not."""
        return features @ self.fc.T  # [Tp, H]

    def forward(
        self, next_tokens: Int[Tensor, " Tp"], hidden: Float[Tensor, "Tp H"], view: DeviceView, pools: KeyValuePools
    ) -> Float[Tensor, "Tp H"]:
        """Row p pairs token p + 1 with what is known of p; returned un-normed, as the next step takes it."""
        c = self.c
        x = torch.cat([self.input_norm(self.embed[next_tokens]), self.hidden_norm(hidden)], -1)  # [Tp, 2H]
        q = (x @ self.q.T).unflatten(1, (-1, c.head_dim))  # [Tp, N, D]
        k = (x @ self.k.T).unflatten(1, (-1, c.head_dim))  # [Tp, G, D]
        v = (x @ self.v.T).unflatten(1, (-1, c.head_dim))  # [Tp, G, D]
        cos, sin = (t.squeeze(1) for t in rope_cos_sin(view.positions, c.head_dim, c.rope_theta, x.dtype))  # [Tp, 1, D]
        q, k = (torch.ops.npu.npu_rotary_mul(t, cos, sin) for t in (q, k))  # [Tp, N, D], [Tp, G, D]
        o = gqa_attention(q, k, v, c.head_dim**-0.5, view, pools, 0)  # [Tp, N, D]
        hidden = hidden + o.flatten(1) @ self.o.T  # [Tp, H]
        return hidden + self.mlp(self.post_norm(hidden))  # [Tp, H]

    def logits(self, hidden: Float[Tensor, "B H"]) -> Float[Tensor, "B V"]:
        """Over the target's vocabulary; -inf for tokens outside the draft vocabulary."""
        logits = hidden.new_full((len(hidden), self.c.vocab_size), float("-inf"))  # [B, V]
        logits[:, self.target_ids] = self.norm(hidden) @ self.lm_head.T  # [B, Vd]
        return logits


def load_eagle3(folder: str | Path, target: Glm4MoeLite) -> Eagle3Head:
    """A head with its weights, on the target's device and in its dtype.

    Takes the published names, under ``midlayer.`` or ``layers.0.``.

    Raises:
        ValueError: a folder that does not hold an EAGLE-3 head for this target.
    """
    config = Eagle3Config.from_folder(folder, target.config)
    head = Eagle3Head(config, target.embed.detach())
    head.to(target.embed.device, target.embed.dtype).requires_grad_(False).eval()
    places = _places(head)
    stored = stored_tensors(folder)
    names = {name: name.replace("layers.0.", "midlayer.") for name in stored}
    ids = {"d2t", "t2d"} if config.draft_vocab_size < config.vocab_size else set()
    if wrong := set(names.values()) ^ (places.keys() | ids):
        raise ValueError(f"{folder}: {listed(sorted(wrong))} missing or unknown; expected the {len(places) + len(ids)} "
                         "tensors of an EAGLE-3 head without an embedding of its own")
    with safe_open(next(iter(stored.values())).file, "pt") as file, torch.no_grad():
        for name, published in names.items():
            if published in places:
                into, tensor = places[published], file.get_tensor(name)
                if into.shape != tensor.shape:
                    raise ValueError(f"{folder}: {name} is {list(tensor.shape)}; its config says {list(into.shape)}")
                into.copy_(tensor)
        if ids:
            head.target_ids.copy_(_target_ids(folder, file.get_tensor("d2t"), file.get_tensor("t2d")))
    return head


def _places(head: Eagle3Head) -> dict[str, Tensor]:
    """Where each published tensor goes."""
    gate, up = head.mlp.gate_up.chunk(2)
    at = "midlayer."
    return {
        "fc.weight": head.fc, "norm.weight": head.norm.weight, "lm_head.weight": head.lm_head,
        at + "input_layernorm.weight": head.input_norm.weight, at + "hidden_norm.weight": head.hidden_norm.weight,
        at + "post_attention_layernorm.weight": head.post_norm.weight,
        at + "self_attn.q_proj.weight": head.q, at + "self_attn.k_proj.weight": head.k,
        at + "self_attn.v_proj.weight": head.v, at + "self_attn.o_proj.weight": head.o,
        at + "mlp.gate_proj.weight": gate, at + "mlp.up_proj.weight": up, at + "mlp.down_proj.weight": head.mlp.down,
    }


def _target_ids(folder: str | Path, d2t: Tensor, t2d: Tensor) -> Tensor:
    """[Vd]: draft id to target id.  The file stores differences, d2t[j] = target id - j."""
    ids = torch.arange(len(d2t)) + d2t  # [Vd]
    if not bool((ids[1:] > ids[:-1]).all()) or not torch.equal(t2d.nonzero().flatten(), ids):
        raise ValueError(f"{folder}: d2t and t2d name different tokens; the file is damaged")
    return ids

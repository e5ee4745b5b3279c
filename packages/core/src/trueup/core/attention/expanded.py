"""MLA expanded: per-head keys and values are rebuilt from latents, then ordinary attention on packed tokens.

Prompts use this form.  A chunk behind a cached prefix is two calls, chunk against itself (causal) and chunk
against prefix (every key visible), merged by their log-sum-exp.

Which operator form is legal depends on the head widths (torch_npu docs: npu_fused_infer_attention_score_v2):

=====================  ====  ====  ===  =========================================================
model                  nope  rope  v    form
=====================  ====  ====  ===  =========================================================
DeepSeek-V3.2           128    64  128  TND with query_rope/key_rope, which demand nope = v = 128
trueup's nano            64    64  128  TND, nope and rope concatenated: D = 128 = v
GLM-4.7-Flash           192    64  256  BSND, one call a request: TND refuses head width 256
=====================  ====  ====  ===  =========================================================

sglang makes the same choice for 256 (sglang: srt/hardware_backend/npu/attention/ascend_backend.py).
"""
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from trueup.core.view import SegmentView

Pair = tuple[Tensor, Tensor]


class ExpandedForm(Enum):
    """How queries and keys of the expanded form are handed to the operator."""

    TND_ROPE = "TND, rope as an argument of its own"
    TND_CONCAT = "TND, nope and rope concatenated"
    BSND_CONCAT = "BSND, a call per request, nope and rope concatenated"


def expanded_form(nope: int, rope: int, v: int) -> ExpandedForm:
    """The table above."""
    if nope == v == 128:
        return ExpandedForm.TND_ROPE
    if nope + rope == v and v > 192:
        return ExpandedForm.BSND_CONCAT
    return ExpandedForm.TND_CONCAT


def expanded(
    q_nope: Float[Tensor, "T N Dn"],
    q_rope: Float[Tensor, "T N Dr"],
    w_uk: Float[Tensor, "N Dn R"],
    w_uv: Float[Tensor, "N R Dv"],
    scale: float,
    seg: SegmentView,
    new: Pair,
    prefix: Pair,
) -> Float[Tensor, "T N Dv"]:
    """``new`` and ``prefix`` are latents and rotated keys: [T, R], [T, Dr] and [S, R], [S, Dr]."""
    N, Dv = q_nope.shape[1], w_uv.shape[2]
    form = expanded_form(q_nope.shape[2], q_rope.shape[2], Dv)
    q = (q_nope, q_rope)  # [T, N, Dn], [T, N, Dr]
    k, v = _expand(*new, w_uk, w_uv)  # ([T, N, Dn], [T, N, Dr]), [T, N, Dv]
    out, lse = _attend(form, q, k, v, seg.q_cum, seg.q_cum, scale, seg.mask)  # [T, N, Dv], [T, N]
    if not seg.prefix_cum[-1]:
        return out
    # EXTEND requests all have a prefix (plan() sees to it), so no request has an empty key list here.
    k, v = _expand(*prefix, w_uk, w_uv)  # ([S, N, Dn], [S, N, Dr]), [S, N, Dv]
    out2, lse2 = _attend(form, q, k, v, seg.q_cum, seg.prefix_cum, scale, None)  # [T, N, Dv], [T, N]
    merged, _ = torch.ops.npu.npu_attention_update(
        [lse.flatten(), lse2.flatten()], [out.reshape(-1, Dv), out2.reshape(-1, Dv)], 0
    )  # [T*N, Dv]
    return merged.view(-1, N, Dv)  # [T, N, Dv]


def _expand(latent: Float[Tensor, "S R"], rope: Float[Tensor, "S Dr"], w_uk: Tensor, w_uv: Tensor
            ) -> tuple[Pair, Tensor]:
    """Keys (nope [S, N, Dn], rope [S, N, Dr]) and values [S, N, Dv]; the rope key is one head, shared."""
    k_nope = torch.einsum("sr,ndr->snd", latent, w_uk)  # [S, N, Dn]
    v = torch.einsum("sr,nrv->snv", latent, w_uv).contiguous()  # [S, N, Dv]
    return (k_nope, rope[:, None].expand(-1, w_uk.shape[0], -1)), v


def _attend(form: ExpandedForm, q: Pair, k: Pair, v: Tensor, q_cum: list[int], kv_cum: list[int], scale: float,
            mask: Tensor | None) -> Pair:
    """Output [T, N, Dv] and log-sum-exp [T, N] (fp32, natural log)."""
    N = v.shape[1]
    options = {
        "num_query_heads": N, "num_key_value_heads": N, "softmax_scale": scale, "return_softmax_lse": True,
        "atten_mask": mask, "sparse_mode": 0 if mask is None else 3,
    }
    fia = torch.ops.npu.npu_fused_infer_attention_score_v2
    if form is ExpandedForm.TND_ROPE:
        out, lse = fia(
            q[0].contiguous(), k[0], v, query_rope=q[1].contiguous(), key_rope=k[1].contiguous(),
            actual_seq_qlen=q_cum, actual_seq_kvlen=kv_cum, input_layout="TND", **options,
        )  # [T, N, Dv], [T, N, 1]
        return out, lse.squeeze(2)
    query, key = torch.cat(q, -1), torch.cat(k, -1)  # [T, N, D], [S, N, D]
    if form is ExpandedForm.TND_CONCAT:
        out, lse = fia(
            query, key, v, actual_seq_qlen=q_cum, actual_seq_kvlen=kv_cum, input_layout="TND", **options
        )  # [T, N, Dv], [T, N, 1]
        return out, lse.squeeze(2)
    parts, a, b = [], 0, 0
    for a_end, b_end in zip(q_cum, kv_cum, strict=True):
        parts.append(fia(
            query[None, a:a_end], key[None, b:b_end], v[None, b:b_end], input_layout="BSND", **options
        ))  # [1, q, N, Dv], [1, N, q, 1]
        a, b = a_end, b_end
    out = torch.cat([o[0] for o, _ in parts])  # [T, N, Dv]
    return out, torch.cat([lse[0, :, :, 0].T for _, lse in parts])  # [T, N]

"""Grouped-query attention over a paged cache: what an EAGLE-3 head has, beside a target with MLA.

One form for prompts, drafts and verified rows alike: write the new keys and values, then read pages.

Axis letters: T token rows that attention sees, Tp all rows, N query heads, G key heads, D head width, P page size.
"""
import torch
from jaxtyping import Float
from torch import Tensor

from trueup.core.key_value import KeyValuePools
from trueup.core.view import DeviceView, SegmentView


def gqa_attention(
    q: Float[Tensor, "Tp N D"],
    k: Float[Tensor, "Tp G D"],
    v: Float[Tensor, "Tp G D"],
    scale: float,
    view: DeviceView,
    pools: KeyValuePools,
    layer: int,
) -> Float[Tensor, "Tp N D"]:
    """Attention output per head, causal within a request; rows that belong to no request (TRIM) are zero."""
    out = torch.zeros_like(q)  # [Tp, N, D]
    for seg in view.segments:
        rows = seg.rows
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k[rows].contiguous(), v[rows].contiguous(), pools.key[layer], pools.value[layer], seg.slots,
            cache_mode="Norm",  # the default would be PA_NZ
        )
        out[rows] = _attend(q[rows].contiguous(), *pools.paged(layer), scale, seg)  # [T, N, D]
    return out


def _attend(
    q: Float[Tensor, "T N D"], key: Float[Tensor, "pages P GD"], value: Float[Tensor, "pages P GD"], scale: float,
    seg: SegmentView,
) -> Float[Tensor, "T N D"]:
    return torch.ops.npu.npu_fused_infer_attention_score_v2(
        q, key, value, atten_mask=seg.mask, sparse_mode=0 if seg.mask is None else 3,
        actual_seq_qlen=seg.q_cum, actual_seq_kvlen=seg.kv_lens, block_table=seg.block_table, block_size=key.shape[1],
        num_query_heads=q.shape[1], num_key_value_heads=key.shape[2] // q.shape[2], softmax_scale=scale,
        input_layout="TND",
    )[0]  # [T, N, D]

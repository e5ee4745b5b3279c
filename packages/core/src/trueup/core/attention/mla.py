"""MLA over one layer of a batch: rope, cache write, then each segment in its form.

Axis letters: T token rows that attention sees, Tp all rows, N heads, Dn/Dr nope and rope widths, Dv value
width, R latent rank, S key rows.
"""
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from trueup.core.attention.absorbed import absorbed
from trueup.core.attention.expanded import expanded
from trueup.core.attention.sparse import sees_all, sparse
from trueup.core.cache import Pools
from trueup.core.layers.norm import RMSNorm
from trueup.core.layout import Form
from trueup.core.rows import Rows
from trueup.core.view import DeviceView, SegmentView


class UpProjection(NamedTuple):
    """kv_b_proj, split per head: rows of a head alternate nope and value, so two halves would be wrong."""

    w_uk: Tensor  # [N, Dn, R]
    w_uv: Tensor  # [N, R, Dv]


def mla_attention(
    q_nope: Float[Tensor, "Tp N Dn"],
    q_rope: Float[Tensor, "Tp N Dr"],
    kv: Float[Tensor, "Tp R_Dr"],
    norm: RMSNorm,
    up: UpProjection,
    cos: Float[Tensor, "Tp 1 1 Dr"],
    sin: Float[Tensor, "Tp 1 1 Dr"],
    scale: float,
    view: DeviceView,
    pools: Pools,
    layer: int,
    chosen: Rows | None = None,
) -> Float[Tensor, "Tp N Dv"]:
    """Per head, over all before a row or the positions ``chosen`` [Tp, 1, K]; rows of no request (TRIM) are zero."""
    q_rope = torch.ops.npu.npu_interleave_rope(q_rope.unsqueeze(2), cos, sin).squeeze(2)  # [Tp, N, Dr]
    out = q_nope.new_zeros(*q_nope.shape[:2], up.w_uv.shape[2])  # [Tp, N, Dv]
    for seg in view.segments:
        rows = seg.rows
        new = write_cache(kv[rows], norm, cos[rows], sin[rows], seg, pools, layer)  # [T, R], [T, Dr]
        q = (q_nope[rows], q_rope[rows])  # [T, N, Dn], [T, N, Dr]
        if chosen is not None and not sees_all(seg, chosen):
            out[rows] = sparse(*q, *up, scale, view, seg, chosen, pools.latent[layer], pools.rope[layer])  # [T, N, Dv]
        elif seg.segment.form is Form.ABSORBED:
            out[rows] = absorbed(*q, *up, scale, seg, *pools.paged(layer))  # [T, N, Dv]
        else:
            prefix = pools.gather(layer, seg.prefix_slots)  # [S, R], [S, Dr]
            out[rows] = expanded(*q, *up, scale, seg, new, prefix)  # [T, N, Dv]
    return out


def write_cache(
    kv: Float[Tensor, "T R_Dr"], norm: RMSNorm, cos: Tensor, sin: Tensor, seg: SegmentView, pools: Pools, layer: int
) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T Dr"]]:
    """Norm the latent, rotate the key, write both; one fused kernel.  torch_npu docs: npu_kv_rmsnorm_rope_cache.

    Trap: the rope cache comes before the latent cache.  The rows are returned for the expanded form; the absorbed
    one reads the cache.
    """
    _, _, rope, latent = torch.ops.npu.npu_kv_rmsnorm_rope_cache(
        kv[:, None, None], norm.weight, cos, sin, seg.slots, pools.rope[layer], pools.latent[layer],
        epsilon=norm.eps, cache_mode="PA", is_output_kv=seg.segment.form is Form.EXPANDED,
    )  # _, _, [T, 1, 1, Dr], [T, 1, 1, R]
    return latent[:, 0, 0], rope[:, 0, 0]  # [T, R], [T, Dr]

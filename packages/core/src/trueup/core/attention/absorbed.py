"""MLA absorbed: the query goes into latent space and attends to the cache as it lies there.

Every mode but prompts uses this form, in one operator shape: TND queries packed without padding, output
TND_NTD (heads first, as the value up-projection wants it), paged keys that are their own values.

Legal for GLM-4.7-Flash (20 heads, nope 192, rope 64, v 256) and DeepSeek (128 heads, 128/64/128) alike:
absorbed, both have D = R = 512 with rope 64, whatever their nope and v widths were (torch_npu docs:
npu_fused_infer_attention_score_v2, MLA).  Only the head count is restricted, hence the padding.
"""
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from trueup.core.view import SegmentView


def padded_heads(heads: int) -> int:
    """The next power of two: 20 to 32, 10 to 16, 5 to 8 (SB-06)."""
    return 1 << (heads - 1).bit_length()


def pad_heads(x: Float[Tensor, "T N D"]) -> Float[Tensor, "T Np D"]:
    """Zero heads behind the real ones.  Zeros, not uninitialised memory: their softmax is uniform and finite."""
    return F.pad(x, (0, 0, 0, padded_heads(x.shape[1]) - x.shape[1]))  # [T, Np, D]


def absorbed(
    q_nope: Float[Tensor, "T N Dn"],
    q_rope: Float[Tensor, "T N Dr"],
    w_uk: Float[Tensor, "N Dn R"],
    w_uv: Float[Tensor, "N R Dv"],
    scale: float,
    seg: SegmentView,
    latent_pool: Float[Tensor, "pages P R"],
    rope_pool: Float[Tensor, "pages P Dr"],
) -> Float[Tensor, "T N Dv"]:
    """score = scale * (q_nope W_UK . c + q_rope . k_rope);  out = (softmax(score) c) W_UV."""
    N = q_nope.shape[1]
    q_latent = torch.ops.npu.npu_transpose_batchmatmul(
        q_nope.contiguous(), w_uk, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )  # [T, N, R]
    out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        pad_heads(q_latent), latent_pool, latent_pool,
        query_rope=pad_heads(q_rope), key_rope=rope_pool,
        atten_mask=seg.mask, sparse_mode=0 if seg.mask is None else 3,
        actual_seq_qlen=seg.q_cum, actual_seq_kvlen=seg.kv_lens,
        block_table=seg.block_table, block_size=latent_pool.shape[1],
        num_query_heads=padded_heads(N), num_key_value_heads=1, softmax_scale=scale, input_layout="TND_NTD",
    )  # [Np, T, R]
    return torch.ops.npu.npu_transpose_batchmatmul(
        out[:N], w_uv, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )  # [T, N, Dv]

"""DeepSeek sparse attention (DSA): each query row attends to the positions that an indexer chose for it.

Choosing and attending are two operators, called in every mode with the lengths of one segment.  What goes from one to
the other is ``Rows`` of token rows: positions in the request, best first, -1 behind the last.

Axis letters: T token rows that attention sees, Tp all rows, N heads, Ni index heads, Di their width, Dn/Dr nope and
rope widths, Dv value width, R latent rank, K chosen positions, P page size.
"""
import torch
from jaxtyping import Float, Int
from torch import Tensor

from trueup.core.attention.absorbed import pad_heads
from trueup.core.cache import Pools
from trueup.core.layout import Form
from trueup.core.ops.matmul.transpose_batchmatmul import MAX_AXIS
from trueup.core.rows import Kind, Rows
from trueup.core.view import DeviceView, SegmentView


def write_index_keys(key: Float[Tensor, "Tp Di"], view: DeviceView, pools: Pools, layer: int) -> None:
    """Every forward of a layer with an indexer writes its keys, whether or not it goes on to choose."""
    for seg in view.segments:
        torch.ops.npu.npu_scatter_nd_update_(pools.index[layer].squeeze(2), seg.places, key[seg.rows])


def choose(
    query: Float[Tensor, "Tp Ni Di"],
    weights: Float[Tensor, "Tp Ni"],
    K: int,
    view: DeviceView,
    pools: Pools,
    layer: int,
) -> Rows:
    """The K positions of highest score for each row, [Tp, 1, K] int32; rows of no request (TRIM) choose none.

    score[s, t] = sum over index heads of  weights[s, h] * relu(query[s, h] . key[t]).
    torch_npu docs: npu_lightning_indexer.
    """
    positions = torch.full((len(query), 1, K), -1, dtype=torch.int32, device=query.device)  # [Tp, 1, K]
    chosen = Rows(Kind.TOKEN, view.layout, positions)
    for seg in view.segments:
        if sees_all(seg, chosen):
            positions[seg.rows] = everything(view.positions[seg.rows], K)  # [T, 1, K]
        else:
            positions[seg.rows], _ = torch.ops.npu.npu_lightning_indexer(
                query[seg.rows], pools.index[layer], weights[seg.rows],
                actual_seq_lengths_query=seg.q_cum_device, actual_seq_lengths_key=seg.kv_lens_device,
                block_table=seg.block_table, layout_query="TND", layout_key="PA_BSND", sparse_count=K, sparse_mode=3,
            )  # [T, 1, K], _
    return chosen


def sees_all(seg: SegmentView, chosen: Rows) -> bool:
    """Prompts no longer than K: a row would choose all that it sees, so dense attention does, and costs less.

    sglang makes the same short cut on GPUs, for prompts alone (sglang: srt/layers/attention/nsa_backend.py).
    """
    return seg.segment.form is Form.EXPANDED and max(seg.kv_lens) <= chosen.tensor.shape[-1]


def everything(positions: Int[Tensor, " T"], K: int) -> Int[Tensor, "T 1 K"]:
    """What rows at ``positions`` choose where K is enough: all up to their own, the newest first, then -1."""
    back = torch.arange(K, device=positions.device)  # [K]
    return (positions[:, None, None] - back).clamp(min=-1).int()  # [T, 1, K]


def sparse(
    q_nope: Float[Tensor, "T N Dn"],
    q_rope: Float[Tensor, "T N Dr"],
    w_uk: Float[Tensor, "N Dn R"],
    w_uv: Float[Tensor, "N R Dv"],
    scale: float,
    view: DeviceView,
    seg: SegmentView,
    chosen: Rows,
    latent_pool: Float[Tensor, "pages P 1 R"],
    rope_pool: Float[Tensor, "pages P 1 Dr"],
) -> Float[Tensor, "T N Dv"]:
    """Absorbed MLA over the chosen positions.  torch_npu docs: npu_sparse_flash_attention.

    Raises:
        ValueError: ``chosen`` belongs to another forward: equal counts do not make its rows these rows (SB-02).
    """
    if chosen.layout is not view.layout or chosen.kind is not Kind.TOKEN:
        raise ValueError(f"the positions are {chosen.kind.value} rows of another forward; expected token rows of this "
                         "one: choose in it, or carry them over by request with trueup.core.carry.for_layout")
    N = q_nope.shape[1]
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        pad_heads(per_head(q_nope, w_uk)), latent_pool, latent_pool, chosen.tensor[seg.rows], scale,
        query_rope=pad_heads(q_rope), key_rope=rope_pool,
        actual_seq_lengths_query=seg.q_cum_device, actual_seq_lengths_kv=seg.kv_lens_device,
        block_table=seg.block_table, sparse_block_size=1, layout_query="TND", layout_kv="PA_BSND", sparse_mode=3,
        attention_mode=2,  # absorbed MLA; the default is refused
    )  # [T, Np, R], _, _
    return per_head(out[:, :N], w_uv)  # [T, N, Dv]


def per_head(x: Float[Tensor, "T N Din"], weight: Float[Tensor, "N Din Dout"]) -> Float[Tensor, "T N Dout"]:
    """Each head's rows times its own matrix.  torch_npu docs: npu_transpose_batchmatmul.

    It wants heads times Din below 65,536, and 128 heads of rank 512, as in DeepSeek-V3.2, are just that: they go in
    two halves.
    """
    N, Din, _ = weight.shape
    heads = N if N * Din < MAX_AXIS else N // 2
    parts = [
        torch.ops.npu.npu_transpose_batchmatmul(rows.contiguous(), part, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2],
                                                perm_y=[1, 0, 2])  # [T, heads, Dout]
        for rows, part in zip(x.split(heads, 1), weight.split(heads), strict=True)
    ]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]  # [T, N, Dout]

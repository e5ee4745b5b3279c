"""The arithmetic: attention of a block, and of a call, block after block."""
from collections.abc import Iterator

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import Call
from trueup.core.ops.attention.fused_infer_attention.blocks import Block, Queries, contiguous, paged
from trueup.core.ops.attention.fused_infer_attention.layouts import LAYOUTS, Layout, from_rows, to_rows, value_width
from trueup.core.ops.attention.fused_infer_attention.lengths import key_lengths, query_lengths, spans
from trueup.core.ops.attention.fused_infer_attention.masks import band_of, mask_of
from trueup.core.ops.attention.fused_infer_attention.points import NO_KEYS
from trueup.core.ops.contract import assumed
from trueup.core.ops.registry import poison


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse in their layouts.  What a device leaves unwritten holds NaN."""
    layout, want_lse = LAYOUTS[call.input_layout], call.return_softmax_lse
    N, width = call.num_query_heads, value_width(layout, call.value, call.key_heads, call.block_table is not None)
    B, S = layout.requests(call.query), layout.rows(call.query)
    out = poison((B * S, N, width), call.query.dtype, call.query.device)  # [T, N, Dv]
    lse = poison((B * S, N, 1) if want_lse else (0,), torch.float32, call.query.device)  # [T, N, 1]
    _fill(call, layout, out, lse if want_lse else None)
    out = from_rows(out, layout.out, B, S)
    return out, lse if layout.packed or not want_lse else from_rows(lse, "BNSD", B, S)


def attention_into(call: Call, out: Tensor, lse: Tensor) -> None:
    """The same, into memory of the caller.  What a device leaves unwritten keeps its content."""
    layout, N = LAYOUTS[call.input_layout], call.num_query_heads
    B, S = layout.requests(call.query), layout.rows(call.query)
    out_rows = to_rows(out, layout.out, N)  # [T, N, Dv]
    lse_axes = "TND" if layout.packed else "BNSD"
    lse_rows = to_rows(lse, lse_axes, N) if call.return_softmax_lse else None  # [T, N, 1]
    _fill(call, layout, out_rows, lse_rows)
    for memory, rows, axes in ((out, out_rows, layout.out), (lse, lse_rows, lse_axes)):
        if rows is not None and rows.data_ptr() != memory.data_ptr():  # the layout has no view with rows first
            memory.copy_(from_rows(rows, axes, B, S))


def _fill(call: Call, layout: Layout, out: Tensor, lse: Tensor | None) -> None:
    """Write to rows: out [T, N, Dv], lse [T, N, 1]."""
    for block in _blocks(call, layout):
        out_rows, lse_rows = attend(block, call.softmax_scale, call.learnable_sink, lse is not None)
        _put(block, out_rows, out)
        if lse is not None and lse_rows is not None:
            _put(block, lse_rows, lse)


def _put(block: Block, rows: Tensor, memory: Tensor) -> None:
    """The rows of a block that are not padding, to where they stand in the call."""
    rows = rows if block.real is None else rows[block.real]
    memory[block.rows] = rows if isinstance(block.rows, slice) else rows.to(memory.dtype)


def _blocks(call: Call, layout: Layout) -> Iterator[Block]:
    N, G, reads = call.num_query_heads, call.key_heads, layout.query
    q_lens = query_lengths(call, layout)
    kv_lens = key_lengths(call, layout, len(q_lens))
    query = to_rows(call.query, reads, N)  # [T, N, D]
    query_rope = None if call.query_rope is None else to_rows(call.query_rope, reads, N)  # [T, N, Dr]
    queries = Queries(query, query_rope, spans(q_lens, None if layout.packed else layout.rows(call.query)),
                      band_of(call, layout), mask_of(call, layout, q_lens), call.pse_shift)
    # Keys that are empty as a whole are documented: zeros.
    no_keys = assumed(NO_KEYS) or call.key.numel() == 0
    if call.block_table is not None:
        return paged(queries, call.key, call.value, call.key_rope, kv_lens, call.block_table, G, no_keys)
    key, value = to_rows(call.key, reads, G), to_rows(call.value, reads, G)  # [Tkv, G, D], [Tkv, G, Dv]
    key_rope = None if call.key_rope is None else to_rows(call.key_rope, reads, G)  # [Tkv, G, Dr]
    kv_spans = spans(kv_lens, None if layout.packed else layout.rows(call.key))
    return contiguous(queries, key, value, key_rope, kv_spans, no_keys)


def attend(block: Block, scale: float, sink: Tensor | None, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of one block, in fp32 (fp64 for fp64 input): out [B * W, N, Dv], and lse [B * W, N, 1] if wanted.

    Args:
        sink: [N], a score beside those of the keys, which takes weight and gives no value.  The lse is without it.
    """
    B, W, N, _ = block.query.shape
    S, G = block.key.shape[1:3]
    grouped = (B, G, W, N // G)

    def queries(rows: Tensor) -> Tensor:
        """The N / G query heads of each key head, next to each other."""
        rows = rows.to(block.key.dtype)  # [B, W, N, D]
        if G > 1:
            rows = rows.unflatten(2, (G, N // G)).transpose(1, 2)  # [B, G, W, N/G, D]
        return rows.reshape(B * G, W * (N // G), rows.shape[-1])  # [B*G, W*N/G, D]

    def keys(rows: Tensor) -> Tensor:
        return rows[:, :, 0] if G == 1 else rows.transpose(1, 2).flatten(0, 1)  # [B*G, S, D]

    def by_row(x: Tensor) -> Tensor:
        """The opposite of ``queries``."""
        return (x if G == 1 else x.view(*grouped, -1).transpose(1, 2)).reshape(B * W, N, x.shape[-1])  # [B*W, N, D]

    scores = torch.bmm(queries(block.query), keys(block.key).mT)  # [B*G, W*N/G, S]
    if block.query_rope is not None and block.key_rope is not None:
        scores.baddbmm_(queries(block.query_rope), keys(block.key_rope).mT)  # [B*G, W*N/G, S]
    scores.mul_(scale)
    if block.bias is not None:
        scores.view(*grouped, S).add_(block.bias.unflatten(1, (G, N // G)).transpose(2, 3))  # [B, G, W, N/G, S]
    all_seen = block.starts is None is block.hidden and min(block.ends) >= max(S, 1)
    blind = None if all_seen else _hide(scores.view(*grouped, S), block)  # [B*W, 1, 1]

    if sink is None:
        weights = torch.softmax(scores, dim=-1)  # [B*G, W*N/G, S]
    else:
        column = sink.to(scores.dtype).view(1, G, 1, N // G, 1).expand(*grouped, 1)  # [B, G, W, N/G, 1]
        column = column.reshape(*scores.shape[:2], 1)  # [B*G, W*N/G, 1]
        weights = torch.softmax(torch.cat([scores, column], -1), dim=-1)[..., :S]  # [B*G, W*N/G, S]
    out = by_row(torch.bmm(weights, keys(block.value)))  # [B*W, N, Dv]
    lse = by_row(torch.logsumexp(scores, dim=-1, keepdim=True)) if want_lse else None  # [B*W, N, 1]
    if blind is not None:
        out.masked_fill_(blind, 0.0)
        if lse is not None:
            lse.masked_fill_(blind, float("inf"))
    return out, lse


def _hide(scores: Tensor, block: Block) -> Tensor | None:
    """Give keys that a row does not see the score -inf: whatever they hold, it cannot reach a visible one.

    Args:
        scores: [B, G, W, N/G, S], written to.

    Returns:
        Rows that see no key, bool [B*W, 1, 1]; None where there is none.
    """
    B, _, W, _, S = scores.shape
    ends = torch.tensor(block.ends, device=scores.device).view(B, 1, W, 1, 1)  # [B, 1, W, 1, 1]
    if block.starts is None and block.hidden is None:
        seen_by_all = min(block.ends)
        hidden = torch.arange(seen_by_all, S, device=scores.device) >= ends  # [B, 1, W, 1, S - seen_by_all]
        scores[..., seen_by_all:].masked_fill_(hidden, float("-inf"))
        return (ends == 0).view(B * W, 1, 1) if seen_by_all == 0 else None
    position = torch.arange(S, device=scores.device)  # [S]
    hidden = position >= ends  # [B, 1, W, 1, S]
    if block.starts is not None:
        hidden = hidden | (position < torch.tensor(block.starts, device=scores.device).view(B, 1, W, 1, 1))
    if block.hidden is not None:
        hidden = hidden | block.hidden[:, None, :, None]  # [B, 1, W, 1, S]
    scores.masked_fill_(hidden, float("-inf"))
    return hidden.all(-1).view(B * W, 1, 1)

"""Cuts a call into blocks: some requests' query rows, padded to one width, next to the keys they may see.

The arithmetic (kernel.py) knows nothing but blocks; a new way to store keys needs a function here that makes them.
"""
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.lengths import Spans
from trueup.core.ops.attention.fused_infer_attention.masks import Band, Mask, limits
from trueup.core.ops.attention.fused_infer_attention.pages import gather
from trueup.core.ops.registry import accumulator

ROWS_PER_BLOCK = 128  # of a long prompt: bounds the scores to [N, 128, S]
GATHERED_ELEMENTS = 1 << 21  # of paged keys copied for one block: 8 MiB in fp32, which a cache still holds


class Block(NamedTuple):
    """Query rows of B requests, padded to W rows each, beside S keys of their request.

    Keys and values come in the dtype of the computation, fp32 or fp64; query rows in their own.
    """

    query: Tensor  # [B, W, N, D]
    query_rope: Tensor | None  # [B, W, N, Dr]
    key: Tensor  # [B, S, G, D], G key heads
    key_rope: Tensor | None  # [B, S, G, Dr]
    value: Tensor  # [B, S, G, Dv]
    ends: list[int]  # for each of the B * W rows, the key behind the last one it sees
    starts: list[int] | None  # and the first one; None: key 0
    hidden: Tensor | None  # [B, W, S] bool, keys inside these limits that a row does not see
    bias: Tensor | None  # [B, N, W, S], added to the scaled scores
    real: list[int] | None  # which of the B * W rows are not padding; None: all
    rows: slice | list[int]  # where the real rows stand in the packed query and output


class Queries(NamedTuple):
    """The query side of a call, rows packed, and what each row sees."""

    query: Tensor  # [T, N, D]
    rope: Tensor | None  # [T, N, Dr]
    spans: Spans  # of each request's rows
    band: Band | None
    mask: Mask | None
    bias: Tensor | None  # [B or 1, N, S, Skv]

    def bias_of(self, request: int, rows: slice, keys: slice) -> Tensor:
        assert self.bias is not None
        return self.bias[request if len(self.bias) > 1 else 0, :, rows, keys]  # [N, rows, keys]


def contiguous(q: Queries, key: Tensor, value: Tensor, key_rope: Tensor | None, kv_spans: Spans, no_keys: bool
               ) -> Iterator[Block]:
    """One block for each request, several for a long one; key and value rows are packed: [Tkv, G, D].

    ``no_keys``: whether requests without keys get a block, too.
    """
    exact = accumulator(q.query.dtype)
    for b, ((q_start, q_len), (kv_start, kv_len)) in enumerate(zip(q.spans, kv_spans, strict=True)):
        if not q_len or not (kv_len or no_keys):
            continue
        span = slice(kv_start, kv_start + kv_len)
        k, v = key[None, span].to(exact), value[None, span].to(exact)  # [1, S, G, D], [1, S, G, Dv]
        k_rope = None if key_rope is None else key_rope[None, span].to(exact)  # [1, S, G, Dr]
        starts, ends = limits(q.band, q_len, kv_len)
        for first in range(0, q_len, ROWS_PER_BLOCK):
            own = slice(first, min(first + ROWS_PER_BLOCK, q_len))
            end = ends[own]
            start = None if starts is None else starts[own]
            low, high = start[0] if start else 0, end[-1]
            seen, rows = slice(low, max(low, high)), slice(q_start + first, q_start + first + len(end))
            if low:
                end, start = [max(e - low, 0) for e in end], [s - low for s in start or ()]
            yield Block(
                q.query[None, rows], None if q.rope is None else q.rope[None, rows], k[:, seen],
                None if k_rope is None else k_rope[:, seen], v[:, seen], end, start,
                None if q.mask is None else q.mask.hides(b, own, kv_len)[None, :, seen],  # [1, W, S]
                None if q.bias is None else q.bias_of(b, own, seen)[None],  # [1, N, W, S]
                None, rows)


def paged(q: Queries, key: Tensor, value: Tensor, key_rope: Tensor | None, kv_lens: Sequence[int], block_table: Tensor,
          heads: int, no_keys: bool) -> Iterator[Block]:
    """Blocks of whole requests over a copy of their pages; a decode batch is one block."""
    one_latent = value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
    # A device does not read table entries past a request's length: any page may stand in for what they hold.
    table = block_table.clamp(0, len(key) - 1)  # [B, columns]
    P, exact = key.shape[1 if key.dim() == 3 else -2], accumulator(q.query.dtype)
    width = heads * (q.query.shape[2] + (0 if q.rope is None else q.rope.shape[2]))
    for batch in _batches(q.spans, kv_lens, width, no_keys):
        spans, lengths = [q.spans[b] for b in batch], [kv_lens[b] for b in batch]
        W, S = max(count for _, count in spans), max(lengths)
        ids = table[batch, :-(-S // P)]  # [B, columns read]
        k = gather(key, ids, S, heads).to(exact)  # [B, S, G, D]
        k_rope = None if key_rope is None else gather(key_rope, ids, S, heads).to(exact)  # [B, S, G, Dr]
        v = k if one_latent else gather(value, ids, S, heads).to(exact)  # [B, S, G, Dv]
        starts: list[int] | None = None
        ends: list[int] = []
        for row, ((_, count), length) in enumerate(zip(spans, lengths, strict=True)):
            # Hidden values have weight 0, but 0 * NaN is NaN.
            if length < S:
                v[row, length:] = 0
            own_starts, own_ends = limits(q.band, count, length)
            if own_starts is not None:
                v[row, :own_starts[0]] = 0
                starts = [0] * len(ends) if starts is None else starts
            if starts is not None:
                starts += [*(own_starts or [0] * count), *[0] * (W - count)]
            ends += [*own_ends, *[length] * (W - count)]

        first_row, behind, total = spans[0][0], sum(spans[-1]), sum(count for _, count in spans)
        rows: slice | list[int] = slice(first_row, behind)
        if behind - first_row > total:  # batched queries shorter than their tensor
            rows = [start + i for start, count in spans for i in range(count)]
        source, real = rows, None
        if total < len(batch) * W:
            real = [row * W + i for row, (_, count) in enumerate(spans) for i in range(count)]
            source = [start + min(i, count - 1) for start, count in spans for i in range(W)]  # repeats last rows
        query, rope = q.query[source], None if q.rope is None else q.rope[source]  # [B * W, N, D], [B * W, N, Dr]
        plain = q.mask is None and q.bias is None
        hidden, bias = (None, None) if plain else _of_batch(q, batch, spans, lengths, W, S)
        yield Block(query.unflatten(0, (-1, W)), None if rope is None else rope.unflatten(0, (-1, W)), k, k_rope, v,
                    ends, starts, hidden, bias, real, rows)


def _of_batch(q: Queries, batch: list[int], spans: Spans, lengths: list[int], W: int, S: int
              ) -> tuple[Tensor | None, Tensor | None]:
    """Masks [B, W, S] and biases [B, N, W, S] of several requests; padding sees its request's keys, without bias."""
    hidden = None if q.mask is None else torch.zeros(len(batch), W, S, dtype=torch.bool, device=q.query.device)
    bias = None if q.bias is None else q.bias.new_zeros(len(batch), q.bias.shape[1], W, S)
    for row, (b, (_, count), length) in enumerate(zip(batch, spans, lengths, strict=True)):
        if q.mask is not None and hidden is not None:
            hidden[row, :count, :length] = q.mask.hides(b, slice(count), length)  # [count, length]
        if bias is not None:
            bias[row, :, :count, :length] = q.bias_of(b, slice(count), slice(length))  # [N, count, length]
    return hidden, bias


def _batches(q_spans: Spans, kv_lens: Sequence[int], key_width: int, no_keys: bool) -> Iterator[list[int]]:
    """Requests that get a block, in order, cut where one in between gets none, or their keys would grow too large."""
    batch: list[int] = []
    longest = 0
    for b, (_, q_len) in enumerate(q_spans):
        left_out = q_len > 0 and not (kv_lens[b] or no_keys)
        if q_len == 0:
            continue
        longest = max(longest, kv_lens[b])
        if batch and (left_out or (len(batch) + 1) * longest * key_width > GATHERED_ELEMENTS):
            yield batch
            batch, longest = [], kv_lens[b]
        if not left_out:
            batch.append(b)
    if batch:
        yield batch

"""Dense attention over packed, batched or paged keys: ``npu_fused_infer_attention_score_v2`` (FIA).

trueup calls version 2 for everything: one operator covers dense prefill, absorbed MLA decoding and, later, the
tree mask of speculation (sparse_mode 9), and its keyword names (``actual_seq_qlen``, ``actual_seq_kvlen``) are
the ones that graph updates use on newer CANN.  An update that names an argument of the other version is ignored
without a word, and stale lengths are used.

Every form becomes *blocks* (:class:`Block`): some requests' query rows, padded to one width, next to the keys
they may see.  :func:`attend` knows nothing else.  A new layout needs a function that makes blocks, and a paragraph
in the contract.

Source: op-plugin: docs/.../torch_npu-npu_fused_infer_attention_score_v2.md.
"""
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.fused_infer_attention_contract import fused_infer_attention_contract
from trueup.core.ops.registry import accumulator, poison, reference

ROWS_PER_BLOCK = 128  # of a long prompt: bounds the scores to [N, 128, S]
GATHERED_ELEMENTS = 1 << 21  # of paged keys copied for one block: 8 MiB in fp32, which a cache still holds


class Block(NamedTuple):
    """Query rows of B requests, padded to W rows each; each row sees a first part of its request's S keys.

    Keys and values come in the dtype of the computation, fp32 or fp64; query rows in their own.
    """

    query: Tensor  # [B, W, N, D]
    query_rope: Tensor | None  # [B, W, N, Dr]
    key: Tensor  # [B, S, G, D], G key heads
    key_rope: Tensor | None  # [B, S, G, Dr]
    value: Tensor  # [B, S, G, Dv]
    visible: list[int]  # how many keys each of the B * W rows sees
    real: list[int] | None  # which of the B * W rows are not padding; None: all
    rows: slice  # where the real rows stand in the packed query and output


@reference("npu_fused_infer_attention_score_v2", fused_infer_attention_contract)
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, *,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None, softmax_scale: float = 1.0, input_layout: str = "BSH", sparse_mode: int = 0,
    return_softmax_lse: bool = False, **rest: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * (Q K^T + Q_rope K_rope^T)) V per request and head, and the natural log of its denominator.

    Shapes, by ``input_layout`` (T and Tkv count the rows of all requests, one after the other; C pages):

    =======  ============  ============================  =============================  ============  ============
    layout   query         key and value                 lengths                        out           lse
    =======  ============  ============================  =============================  ============  ============
    TND      [T, N, D]     [Tkv, G, D], [Tkv, G, Dv]     both cumulative                [T, N, Dv]    [T, N, 1]
    TND      [T, N, D]     [C, P, D] or [C, 1, P, D]     q cumulative, kv per request   [T, N, D]     [T, N, 1]
    TND_NTD  [T, N, D]     [C, P, D] or [C, 1, P, D]     q cumulative, kv per request   [N, T, D]     refused
    BSND     [B, S, N, D]  [B, Skv, G, D]                both per request, or None      [B, S, N, D]  [B, N, S, 1]
    =======  ============  ============================  =============================  ============  ============

    ``query_rope`` and ``key_rope`` have the shapes of query and key but for their width.  ``softmax_scale`` is not
    derived from a width.  ``sparse_mode`` 0 sees every key; 3 is right-aligned causal: row i of a request's q rows
    sees its first ``kv - q + i + 1`` keys.  The lse is fp32, and of shape (0,) unless asked for.

    A request without keys gets zeros, and an lse of +inf.  BSND rows past a request's length are left unwritten by
    a device; here they hold NaN.

    Raises:
        ContractError: the call breaks a rule of fused_infer_attention_contract.py.
    """
    causal = sparse_mode == 3
    batch = query.shape[:-2]  # (T,) or (B, S)
    query = query.flatten(0, -3)  # [T, N, D]
    query_rope = None if query_rope is None else query_rope.flatten(0, -3)  # [T, N, Dr]
    if block_table is not None:
        assert query_rope is not None and key_rope is not None and actual_seq_qlen and actual_seq_kvlen
        q_spans = _cumulative_spans(actual_seq_qlen)
        blocks = _paged(query, query_rope, key, value, key_rope, q_spans, actual_seq_kvlen, block_table, causal)
    elif input_layout == "BSND":
        q_spans, kv_spans = _spans(batch, actual_seq_qlen), _spans(key.shape[:2], actual_seq_kvlen)
        blocks = _contiguous(query, None, key.flatten(0, 1), value.flatten(0, 1), None, q_spans, kv_spans, causal)
    else:
        assert actual_seq_qlen and actual_seq_kvlen
        q_spans, kv_spans = _cumulative_spans(actual_seq_qlen), _cumulative_spans(actual_seq_kvlen)
        blocks = _contiguous(query, query_rope, key, value, key_rope, q_spans, kv_spans, causal)

    T, N, _ = query.shape
    out = poison((T, N, value.shape[-1]), query.dtype, query.device)  # [T, N, Dv]
    lse = poison((T, N, 1) if return_softmax_lse else (0,), torch.float32, query.device)  # [T, N, 1]
    for block in blocks:
        block_out, block_lse = attend(block, softmax_scale, return_softmax_lse)
        out[block.rows] = block_out if block.real is None else block_out[block.real]
        if block_lse is not None:
            lse[block.rows] = block_lse if block.real is None else block_lse[block.real]

    if input_layout == "TND_NTD":
        out = out.transpose(0, 1).contiguous()  # [N, T, Dv]
    elif input_layout == "BSND":
        out = out.unflatten(0, batch)  # [B, S, N, Dv]
        if return_softmax_lse:
            lse = lse.unflatten(0, batch).transpose(1, 2).contiguous()  # [B, N, S, 1]
    return out, lse


def attend(block: Block, scale: float, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of one block, in fp32 (fp64 for fp64 input): out [B * W, N, Dv], and lse [B * W, N, 1] if wanted."""
    B, W, N, _ = block.query.shape
    S, G = block.key.shape[1:3]

    def queries(rows: Tensor) -> Tensor:
        """The N / G query heads of each key head, next to each other."""
        rows = rows.to(block.key.dtype).unflatten(2, (G, N // G)).transpose(1, 2)  # [B, G, W, N/G, D]
        return rows.reshape(B * G, W * (N // G), -1)  # [B*G, W*N/G, D]

    def keys(rows: Tensor) -> Tensor:
        return rows.transpose(1, 2).flatten(0, 1)  # [B*G, S, D]

    scores = torch.bmm(queries(block.query), keys(block.key).mT)  # [B*G, W*N/G, S]
    if block.query_rope is not None and block.key_rope is not None:
        scores.baddbmm_(queries(block.query_rope), keys(block.key_rope).mT)  # [B*G, W*N/G, S]
    scores.mul_(scale)

    # Hidden keys are replaced before the softmax, so whatever they hold cannot reach a visible one.
    limit, seen_by_all = None, min(block.visible)
    if seen_by_all < max(S, 1):
        limit = torch.tensor(block.visible, device=scores.device).view(B, 1, W, 1, 1)  # [B, 1, W, 1, 1]
        hidden = torch.arange(seen_by_all, S, device=scores.device) >= limit  # [B, 1, W, 1, S - seen_by_all]
        scores.view(B, G, W, N // G, S)[..., seen_by_all:].masked_fill_(hidden, float("-inf"))

    weights = torch.softmax(scores, dim=-1)  # [B*G, W*N/G, S]
    out = torch.bmm(weights, keys(block.value)).view(B, G, W, N // G, -1)  # [B, G, W, N/G, Dv]
    lse = torch.logsumexp(scores, dim=-1).view(B, G, W, N // G, 1) if want_lse else None  # [B, G, W, N/G, 1]
    if limit is not None and seen_by_all == 0:
        out.masked_fill_(limit == 0, 0.0)
        if lse is not None:
            lse.masked_fill_(limit == 0, float("inf"))
    out = out.transpose(1, 2).reshape(B * W, N, -1)  # [B*W, N, Dv]
    return out, None if lse is None else lse.transpose(1, 2).reshape(B * W, N, 1)  # [B*W, N, 1]


def _contiguous(query: Tensor, query_rope: Tensor | None, key: Tensor, value: Tensor, key_rope: Tensor | None,
                q_spans: list[tuple[int, int]], kv_spans: list[tuple[int, int]], causal: bool) -> Iterator[Block]:
    """One block per request, several for a long one: (start, length) spans of packed queries and keys."""
    exact = accumulator(query.dtype)
    for (q_start, q_len), (kv_start, kv_len) in zip(q_spans, kv_spans, strict=True):
        span = slice(kv_start, kv_start + kv_len)
        k, v = key[None, span].to(exact), value[None, span].to(exact)  # [1, S, G, D], [1, S, G, Dv]
        k_rope = None if key_rope is None else key_rope[None, span].to(exact)  # [1, S, G, Dr]
        visible = _visible(q_len, kv_len, causal)
        for first in range(0, q_len, ROWS_PER_BLOCK):
            sees = visible[first:first + ROWS_PER_BLOCK]
            rows, most = slice(q_start + first, q_start + first + len(sees)), sees[-1]
            yield Block(query[None, rows], None if query_rope is None else query_rope[None, rows], k[:, :most],
                        None if k_rope is None else k_rope[:, :most], v[:, :most], sees, None, rows)


def _paged(query: Tensor, query_rope: Tensor, key: Tensor, value: Tensor, key_rope: Tensor,
           q_spans: list[tuple[int, int]], kv_lens: Sequence[int], block_table: Tensor, causal: bool
           ) -> Iterator[Block]:
    """Blocks of whole requests over a copy of their pages; a decode batch is one block."""
    one_latent = value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
    # A device does not read table entries past a request's length: any page may stand in for what they hold.
    table = block_table.clamp(0, len(key) - 1)  # [B, columns]
    P, exact = key.shape[-2], accumulator(query.dtype)
    for batch in _batches(q_spans, kv_lens, key.shape[-1] + key_rope.shape[-1]):
        spans, lengths = [q_spans[b] for b in batch], [kv_lens[b] for b in batch]
        W, S = max(count for _, count in spans), max(lengths)
        ids = table[batch, :-(-S // P)]  # [B, columns read]
        k, k_rope = _gather(key, ids, S).to(exact), _gather(key_rope, ids, S).to(exact)  # [B, S, 1, D], [B, S, 1, Dr]
        v = k if one_latent else _gather(value, ids, S).to(exact)  # [B, S, 1, D]
        for row, length in enumerate(lengths):
            if length < S:
                v[row, length:] = 0  # hidden values have weight 0, but 0 * NaN is NaN

        rows, real = slice(spans[0][0], sum(spans[-1])), None
        q, q_rope = query[rows], query_rope[rows]  # [T', N, D], [T', N, Dr]
        if len(q) < len(batch) * W:
            real = [row * W + i for row, (_, count) in enumerate(spans) for i in range(count)]
            source = [start + min(i, count - 1) for start, count in spans for i in range(W)]  # repeats last rows
            q, q_rope = query[source], query_rope[source]  # [B * W, N, D], [B * W, N, Dr]
        visible = [n for (_, count), length in zip(spans, lengths, strict=True)
                   for n in _visible(count, length, causal) + [length] * (W - count)]
        yield Block(q.unflatten(0, (-1, W)), q_rope.unflatten(0, (-1, W)), k, k_rope, v, visible, real, rows)


def _gather(pool: Tensor, ids: Tensor, S: int) -> Tensor:
    """The first S rows of each request's pages, copied.

    With one key head, pages [C, P, D] and [C, 1, P, D] are the same memory.  A page is chosen by its id on an axis
    of its own, so no offset into the pool is ever computed in 32 bits (SB-25 in the bug gallery).
    """
    pages = pool.flatten(0, -3)  # [C, P, D]
    _, P, D = pages.shape
    B, columns = ids.shape
    return pages.index_select(0, ids.flatten()).view(B, columns * P, 1, D)[:, :S]  # [B, S, 1, D]


def _batches(q_spans: Sequence[tuple[int, int]], kv_lens: Sequence[int], key_width: int) -> Iterator[list[int]]:
    """Requests that have query rows, in order, cut where the padded copy of their keys would grow too large."""
    batch: list[int] = []
    longest = 0
    for b, (_, q_len) in enumerate(q_spans):
        if q_len == 0:
            continue
        longest = max(longest, kv_lens[b])
        if batch and (len(batch) + 1) * longest * key_width > GATHERED_ELEMENTS:
            yield batch
            batch, longest = [], kv_lens[b]
        batch.append(b)
    if batch:
        yield batch


def _visible(q_len: int, kv_len: int, causal: bool) -> list[int]:
    """How many keys each query row of one request sees."""
    if not causal:
        return [kv_len] * q_len
    return [max(0, kv_len - q_len + i + 1) for i in range(q_len)]


def _cumulative_spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of each request from the end offsets of a packed tensor."""
    return [(start, end - start) for start, end in zip((0, *ends), ends, strict=False)]


def _spans(batch: Sequence[int], lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """(start, length) of each request in a [B, S, ...] tensor whose first two axes were joined."""
    B, S = batch
    if lengths is None:
        lengths = [S]
    return [(b * S, lengths[0] if len(lengths) == 1 else lengths[b]) for b in range(B)]

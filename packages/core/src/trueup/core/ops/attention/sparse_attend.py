"""The arithmetic of sparse attention: each query row against the keys it chose.

There are two ways to the same answer.  Where rows choose few of their request's keys, each row's keys are gathered.
Where the rows of a request together choose most of them, all rows are multiplied with all keys, and what a row did not
choose is masked.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.attention.sparse_indices import selected
from trueup.core.ops.attention.sparse_requests import (
    Requests,
    all_places,
    blocks,
    groups,
    key_rows,
    poison_past_the_end,
)
from trueup.core.ops.registry import accumulator

ELEMENTS = 1 << 21  # of scores or gathered keys at a time: 8 MiB in fp32, which a cache still holds
GATHER = 32  # what it costs to gather a number, in multiplications; measured


class Keys(NamedTuple):
    """Where an operator's keys are, and how it reads them."""

    tensor: Tensor  # [B, S, 1, D], [S, 1, D] or [pages, P, 1, D]
    block_table: Tensor | None  # [B, columns]
    load: Callable[[Tensor], tuple[Tensor, Tensor]]  # row numbers [G, S] to latent [G, S, R] and rope [G, S, Dr]


def attend(query: Tensor, query_rope: Tensor, sparse_indices: Tensor, keys: Keys, requests: Requests, scale: float,
           sparse_block_size: int, layout_query: str) -> tuple[Tensor, Tensor, Tensor]:
    """out [T, N, R], and of its softmax the largest scores and the sums [T, N], in fp32 (fp64 for fp64 input)."""
    query, query_rope = query.flatten(0, -3), query_rope.flatten(0, -3)  # [T, N, R], [T, N, Dr]
    (T, N, R), K, device = query.shape, sparse_indices.shape[-1], query.device
    exact, width = accumulator(query.dtype), R + query_rope.shape[-1]
    sparse_indices = sparse_indices.reshape(T, K)  # [T, K]
    out = torch.zeros(T, N, R, dtype=query.dtype, device=device)  # [T, N, R]
    top, total = (torch.zeros(T, N, dtype=torch.float32, device=device) for _ in range(2))  # [T, N]

    for group in groups(requests, width, N, ELEMENTS):
        G, W = len(group), requests.q[group[0]][1]
        S = max(requests.kv[b][1] for b in group)
        read = min(K * sparse_block_size, S)
        shared = None
        if W * read * (GATHER + N) > S * (GATHER + W * N):
            shared = keys.load(key_rows(requests, group, all_places(requests, group, device), keys.tensor,
                                        keys.block_table))  # [G, S, R], [G, S, Dr]
            # A key that a row does not choose must not reach it, and 0 * NaN is NaN.
            shared = shared if all(bool(x.sum().isfinite()) for x in shared) else None
        size = max(1, ELEMENTS // (G * (N * S if shared else read * width)))
        for block in blocks(requests, group, size, device):
            rows = block.rows.flatten()  # [G*W]
            places, counts = selected(sparse_indices[rows], block.thresholds.flatten(), block.most, sparse_block_size)
            if shared:
                latent, rope = (x[:, :block.most] for x in shared)  # [G, S, R], [G, S, Dr]
                bias = torch.full((len(rows), block.most + 1), float("-inf"), dtype=exact, device=device)
                bias.scatter_(1, torch.where(counts, places, block.most), 0.0)  # [G*W, most + 1]
                bias, shape = bias[:, :-1], block.rows.shape  # [G*W, S]
            else:
                numbers = key_rows(requests, group, places.view(G, -1), keys.tensor, keys.block_table)  # [G, W*S]
                latent, rope = keys.load(numbers.view(places.shape))  # [G*W, S, R], [G*W, S, Dr]
                bias = torch.where(counts, 0.0, float("-inf")).to(exact)  # [G*W, S]
                shape = torch.Size((len(rows), 1))
            q, q_rope = (x[rows].to(exact).unflatten(0, shape) for x in (query, query_rope))  # [G, W, N, R]
            answers = _softmax_sum(q, q_rope, latent, rope, bias.unflatten(0, shape), scale)
            nothing = ~counts.any(1)  # [G*W]
            for x, answer in zip((out, top, total), answers, strict=True):
                answer = answer.flatten(0, 1).to(x.dtype)  # [G*W, N, R], [G*W, N]
                x[rows] = answer.masked_fill_(nothing.view(-1, *[1] * (x.dim() - 1)), 0.0)
    for x in (out, top, total):
        poison_past_the_end(x, requests, layout_query)
    return out, top, total


def _softmax_sum(query: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, bias: Tensor, scale: float
                 ) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of W rows to the same S keys, G times: out [G, W, N, R], largest scores and sums [G, W, N].

    ``bias`` [G, W, S] is 0 for the keys that a row chose, -inf for others: an addition costs far less than a mask.
    """
    G, W, N, R = query.shape
    scores = torch.bmm(query.reshape(G, W * N, R), latent.mT)  # [G, W*N, S]
    scores.baddbmm_(query_rope.reshape(G, W * N, -1), rope.mT).mul_(scale)
    scores = scores.view(G, W, N, -1).add_(bias[:, :, None])  # [G, W, N, S]
    weights = torch.softmax(scores, dim=-1)  # [G, W, N, S]
    out = torch.bmm(weights.view(G, W * N, -1), latent).view(G, W, N, R)  # [G, W, N, R]
    # The largest weight is exp(0) over the sum.
    return out, scores.amax(-1), weights.amax(-1).reciprocal()

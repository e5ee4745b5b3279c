"""The keys that each query row should attend to: ``npu_lightning_indexer`` (LI).

The indexer has small queries and keys of its own.  A row's score for a key is the weighted sum, over the indexer's
heads, of the positive parts of their dot products; the keys with the highest scores are chosen.
"""
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.attention.sparse_requests import (
    ALL_TOKENS,
    Requests,
    all_places,
    blocks,
    check_requests,
    groups,
    key_rows,
    poison_past_the_end,
    requests_of,
)
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_lightning_indexer.md"
TILING = "ops-transformer: attention/lightning_indexer/op_host/lightning_indexer_tiling.cpp"

TIES = open_point(
    "li-tie-order", "Do keys with the same score come in the order of their places?",
    "yes, as in the operator's published test; a comparison with a device must take any choice among equal scores")

ELEMENTS = 1 << 21  # of scores at a time: 8 MiB in fp32, which a cache still holds


class IndexKeys(NamedTuple):
    """Where an indexer's keys are, and how it reads them."""

    tensor: Tensor  # [B, S, 1, D], [S, 1, D] or [pages, P, 1, D]
    block_table: Tensor | None  # [B, columns]
    load: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # row numbers [G, S] to keys [G, S, D] and scales [G, S]


def _lightning_indexer_contract(
    check: Check, query: Tensor, key: Tensor, weights: Tensor, *, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None, block_table: Tensor | None = None, layout_query: str = "BSND",
    layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3, pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS, return_value: bool = False,
) -> None:
    check_requests(check, query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query,
                   layout_key, sparse_mode, pre_tokens, next_tokens, "key")
    check_indexer(check, query, key, weights, sparse_count)
    if sparse_count > 2048 and (sparse_count > 8192 or sparse_count % 1024):
        check.fail(SIZE, "sparse_count", sparse_count, "1 to 2048, or a multiple of 1024 up to 8192", PAGE)
    if query.dtype not in float_dtypes(check):
        check.fail(DTYPE, "query", describe(query), "float16 or bfloat16", PAGE)
    if key.dtype != query.dtype:
        check.fail(DTYPE, "key", describe(key), f"query's {query.dtype}", PAGE)
    if weights.dtype not in (query.dtype, torch.float32):
        check.fail(DTYPE, "weights", describe(weights), f"query's {query.dtype}, or float32", PAGE)
    if return_value and layout_key == "PA_BSND":
        check.fail(SIZE, "return_value", True, "False where layout_key is 'PA_BSND'", TILING)


def check_indexer(check: Check, query: Tensor, key: Tensor, weights: Tensor, sparse_count: int) -> None:
    """The rules that both indexers share, once their requests are known."""
    if weights.shape != query.shape[:-1]:
        check.fail(RELATION, "weights", describe(weights), f"{list(query.shape[:-1])}, a number for each row and head "
                   "of query", PAGE)
    if key.shape[-1] != query.shape[-1]:
        check.fail(RELATION, "key", describe(key), f"last axis {query.shape[-1]}, as query", PAGE)
    if sparse_count < 1:
        check.fail(RELATION, "sparse_count", sparse_count, "at least 1", PAGE)
    if query.shape[-1] != 128:
        check.fail(SIZE, "query", describe(query), "last axis 128", PAGE)
    if query.shape[-2] > 64:
        check.fail(SIZE, "query", f"{query.shape[-2]} heads, {describe(query)}", "at most 64 heads", PAGE)
    if not weights.is_contiguous():
        check.fail(SIZE, "weights", f"not contiguous: {describe(weights)}", "a contiguous tensor: call .contiguous()",
                   PAGE)


def indexer_axes(call: Mapping[str, Any], more: str = "") -> str:
    rows = "B q" if call["layout_query"] == "BSND" else "T"
    keys = {"BSND": "B S 1", "TND": "S 1", "PA_BSND": "pages P 1"}[call["layout_key"]]
    more = more.format(rows=rows, keys=keys)
    return (f"query [{rows} Ni Di], key [{keys} Di], weights [{rows} Ni], {more}actual_seq_lengths_query [B], "
            f"actual_seq_lengths_key [B], block_table [B max_pages] -> sparse_indices [{rows} 1 K]")


def _lightning_indexer_axes(call: Mapping[str, Any]) -> str:
    rows = "B q" if call["layout_query"] == "BSND" else "T"
    values = f"sparse_values [{rows} 1 K]" if call["return_value"] else "sparse_values~ [0]"
    return f"{indexer_axes(call)}, {values}"


def indexer_layouts(**more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"layout_query": q, "layout_key": k, **more}
                 for q, k in (("TND", "PA_BSND"), ("BSND", "PA_BSND"), ("TND", "TND"), ("BSND", "BSND")))


@reference("npu_lightning_indexer", _lightning_indexer_contract, _lightning_indexer_axes,
           indexer_layouts(return_value=False) + indexer_layouts(return_value=True)[2:], points=(TIES,))
def npu_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None, block_table: Tensor | None = None, layout_query: str = "BSND",
    layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3, return_value: bool = False, **rest: Any,
) -> tuple[Tensor, Tensor]:
    """The ``sparse_count`` keys with the highest score sum_h w_h * relu(q_h . k) for each query row.

    The best comes first; of equal scores, the earlier key.  A row that may see fewer keys has all of them, and -1
    behind them; a row that may see none is all -1.  In layout BSND so are rows past a request's length.  In layout TND
    a device leaves rows past the last cumulative length unwritten, so they are undefined; here they hold the largest
    int32 (NaN in values).

    No scale is applied: put it into the weights, where it changes values, never the choice.  Layouts and lengths are
    in sparse_requests.py.

    Args:
        query: (B, q, N, 128) or (T, N, 128), fp16 or bf16, at most 64 heads.
        key: (B, S, 1, 128), (S, 1, 128) or (pages, P, 1, 128); P a multiple of 16, at most 1024.
        weights: (B, q, N) or (T, N), in query's dtype or fp32.
        sparse_count: 1 to 2048, or 3072, 4096, ... 8192; the results are always that wide.
        sparse_mode: 0 shows each row all keys; 3 shows row i of a request's q rows its first kv - q + i + 1.
        return_value: not with paged keys.

    Returns:
        (sparse_indices, sparse_values): places in the request, (B, q, 1, K) or (T, 1, K) int32; their scores in
        query's dtype, -inf beside -1, or of shape (0,) unless asked for.

    Raises:
        ContractError: the call breaks a rule of the contract.

    Source: torch_npu docs: npu_lightning_indexer; -1 and -inf, from its kernel
    (ops-transformer: attention/lightning_indexer/op_kernel/arch22/lightning_indexer_service_vector_arch22.h).
    """
    exact, keys = accumulator(query.dtype), key.flatten(0, -3).squeeze(-2)  # [keys, D]

    def load(rows: Tensor) -> tuple[Tensor, None]:
        return keys[rows].to(exact), None  # [G, S, D]

    requests = requests_of(query, key, actual_seq_lengths_query, actual_seq_lengths_key, layout_query, layout_key,
                           sparse_mode)
    indices, values = choose(query, weights, None, IndexKeys(key, block_table, load), requests, sparse_count, exact,
                             layout_query)  # [T, K], [T, K]
    shape = (*query.shape[:-2], 1, sparse_count)
    values = values.to(query.dtype).view(shape) if return_value else query.new_empty(0)  # [T, 1, K] or [0]
    return indices.view(shape), values  # [T, 1, K] or [B, q, 1, K]


def choose(query: Tensor, weights: Tensor, query_scale: Tensor | None, keys: IndexKeys, requests: Requests, K: int,
           exact: torch.dtype, layout_query: str) -> tuple[Tensor, Tensor]:
    """Places of the K best keys of each row, [T, K], and their scores, [T, K] in the dtype ``exact``."""
    query, weights = query.flatten(0, -3), weights.flatten(0, -2)  # [T, N, D], [T, N]
    query_scale = None if query_scale is None else query_scale.flatten(0, -2)  # [T, N]
    (T, N, D), device = query.shape, query.device
    indices = torch.full((T, K), -1, dtype=torch.int32, device=device)  # [T, K]
    values = torch.full((T, K), float("-inf"), dtype=exact, device=device)  # [T, K]
    for group in groups(requests, D, N, ELEMENTS):
        places = all_places(requests, group, device)  # [G, S]
        ours, scales = keys.load(key_rows(requests, group, places, keys.tensor, keys.block_table))  # [G, S, D], [G, S]
        for block in blocks(requests, group, max(1, ELEMENTS // (places.numel() * N)), device):
            rows, most = block.rows, block.most
            dots = _dots(query[rows].to(exact), ours[:, :most])  # [G, W, N, S]
            if query_scale is not None and scales is not None:
                dots.mul_(query_scale[rows].to(exact)[..., None]).mul_(scales[:, None, None, :most])
            scores = _weighted(weights[rows].to(exact), dots.relu_())  # [G, W, S]
            hidden = torch.arange(most, device=device) >= block.thresholds[..., None]  # [G, W, S]
            scores.masked_fill_(hidden, float("-inf"))
            n = min(K, most)
            best = _best(scores, n)  # [G, W, n]
            values[rows, :n] = scores.gather(-1, best)
            indices[rows, :n] = best.int().masked_fill_(hidden[..., :n], -1)  # hidden keys come last
    poison_past_the_end(indices, requests, layout_query)
    poison_past_the_end(values, requests, layout_query)
    return indices, values


def _best(scores: Tensor, n: int) -> Tensor:
    """Places of the n highest scores, [G, W, n] of [G, W, S]: best first, and of equal ones the earlier."""
    if scores.dtype != torch.float32:
        return scores.argsort(dim=-1, descending=True, stable=True)[..., :n]
    # Several times faster than a stable sort: one whole number for each key, its score in the upper half and its
    # place, counted downwards, in the lower.  Bits of a float are in the order of its values, backwards if negative.
    bits = (scores + 0.0).view(torch.int32)  # [G, W, S], -0.0 made 0.0
    bits = bits ^ (bits >> 31 & 2**31 - 1)  # [G, W, S]
    places = 2**31 - 1 - torch.arange(scores.shape[-1], device=scores.device)  # [S]
    return 2**31 - 1 - ((bits.long() << 32 | places).topk(n).values & 2**32 - 1)  # [G, W, n]


def _dots(query: Tensor, keys: Tensor) -> Tensor:
    G, W, N, D = query.shape
    return torch.bmm(query.reshape(G, W * N, D), keys.mT).view(G, W, N, -1)  # [G, W, N, S]


def _weighted(weights: Tensor, dots: Tensor) -> Tensor:
    """Sums over the heads, as products of a row of weights and its matrix of dots."""
    return torch.matmul(weights[:, :, None], dots).squeeze(2)  # [G, W, S]

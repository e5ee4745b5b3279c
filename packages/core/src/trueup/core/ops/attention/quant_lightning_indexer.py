"""The indexer over quantised queries and keys: ``npu_quant_lightning_indexer``."""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.attention.lightning_indexer import (
    TIES,
    IndexKeys,
    check_indexer,
    choose,
    indexer_axes,
    indexer_layouts,
)
from trueup.core.ops.attention.sparse_requests import ALL_TOKENS, check_requests, requests_of
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, reference, refuse_unbuilt

PAGE = "op-plugin: docs/.../torch_npu-npu_quant_lightning_indexer.md"
TILING = "ops-transformer: attention/quant_lightning_indexer/op_host/quant_lightning_indexer_tiling.cpp"


def _quant_contract(
    check: Check, query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor, key_dequant_scale: Tensor,
    query_quant_mode: int, key_quant_mode: int, *, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None, block_table: Tensor | None = None, layout_query: str = "BSND",
    layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3, pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS, **rest: Any,
) -> None:
    refuse_unbuilt(check, rest)  # query_dtype, key_dtype: float8 and hifloat8 of Ascend 950
    check_requests(check, query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query,
                   layout_key, sparse_mode, pre_tokens, next_tokens, "key")
    check_indexer(check, query, key, weights, sparse_count)
    if sparse_count > 2048:
        check.fail(SIZE, "sparse_count", sparse_count, "1 to 2048", PAGE)
    for name, mode in (("query_quant_mode", query_quant_mode), ("key_quant_mode", key_quant_mode)):
        if mode != 0:
            check.fail(RELATION, name, mode, "0: a scale for each token and head", PAGE)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dtype != torch.int8:
            check.fail(RELATION, name, describe(tensor), "int8; float8 and hifloat8 of Ascend 950 are not built", PAGE)
    if query_dequant_scale.shape != query.shape[:-1]:
        check.fail(RELATION, "query_dequant_scale", describe(query_dequant_scale), f"{list(query.shape[:-1])}, a scale "
                   "for each row and head of query", PAGE)
    if key_dequant_scale.shape != key.shape[:-1]:
        check.fail(RELATION, "key_dequant_scale", describe(key_dequant_scale), f"{list(key.shape[:-1])}, a scale for "
                   "each key", PAGE)
    if weights.dtype == torch.bfloat16 or weights.dtype not in float_dtypes(check):
        check.fail(DTYPE, "weights", describe(weights), "float16", TILING)
    for name, scale in (("query_dequant_scale", query_dequant_scale), ("key_dequant_scale", key_dequant_scale)):
        if scale.dtype != weights.dtype:
            check.fail(DTYPE, name, describe(scale), f"weights' {weights.dtype}", TILING)
        if not scale.is_contiguous():
            check.fail(SIZE, name, f"not contiguous: {describe(scale)}", "a contiguous tensor", PAGE)
    if torch.linalg.vector_norm(weights * query_dequant_scale, float("inf")).item() == float("inf"):
        check.fail(SIZE, "weights", "so large that weights * query_dequant_scale is infinite", "products that float16 "
                   "can hold: a device computes them in it", PAGE)


def _quant_axes(call: Mapping[str, Any]) -> str:
    return indexer_axes(call, "query_dequant_scale [{rows} Ni], key_dequant_scale [{keys}], ")


@reference("npu_quant_lightning_indexer", _quant_contract, _quant_axes, indexer_layouts(), points=(TIES,))
def npu_quant_lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor, key_dequant_scale: Tensor,
    query_quant_mode: int, key_quant_mode: int, *, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None, block_table: Tensor | None = None, layout_query: str = "BSND",
    layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3, **rest: Any,
) -> Tensor:
    """npu_lightning_indexer's choice, by the scores sum_h w_h * relu(scale_q,h * scale_k * (q_h . k)).

    The dot products are sums of whole numbers, so they are exact here; a device rounds what follows to fp16 in places,
    so where two scores are close it may choose otherwise.

    Args:
        query: (B, q, N, 128) or (T, N, 128) int8, at most 64 heads.
        key: (B, S, 1, 128), (S, 1, 128) or (pages, P, 1, 128) int8.
        weights: (B, q, N) or (T, N) fp16.
        query_dequant_scale: as weights, fp16; its products with them must fit into fp16.
        key_dequant_scale: (B, S, 1), (S, 1) or (pages, P, 1) fp16.
        query_quant_mode, key_quant_mode: must be 0.
        sparse_count: 1 to 2048.
        sparse_mode, lengths, layouts: as in npu_lightning_indexer.

    Returns:
        (B, q, 1, K) or (T, 1, K) int32, as npu_lightning_indexer's sparse_indices; there are no values.

    Raises:
        ContractError: the call breaks a rule of the contract.  float8 and hifloat8, of Ascend 950 only, are not built.

    Source: torch_npu docs: npu_quant_lightning_indexer.
    """
    exact = accumulator(weights.dtype)
    keys, scales = key.flatten(0, -3).squeeze(-2), key_dequant_scale.flatten()  # [keys, D], [keys]

    def load(rows: Tensor) -> tuple[Tensor, Tensor]:
        return keys[rows].to(exact), scales[rows].to(exact)  # [G, S, D], [G, S]

    requests = requests_of(query, key, actual_seq_lengths_query, actual_seq_lengths_key, layout_query, layout_key,
                           sparse_mode)
    indices, _ = choose(query, weights, query_dequant_scale, IndexKeys(key, block_table, load), requests, sparse_count,
                        exact, layout_query)  # [T, K]
    return indices.view(*query.shape[:-2], 1, sparse_count)  # [T, 1, K] or [B, q, 1, K]

"""Sparse attention over quantised keys: ``npu_kv_quant_sparse_flash_attention``."""
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.attention.sparse_attend import Keys, attend
from trueup.core.ops.attention.sparse_flash_attention import (
    EMPTY_ROW,
    axes,
    check_block_size,
    check_heads,
    check_value,
    layouts,
)
from trueup.core.ops.attention.sparse_indices import check_indices
from trueup.core.ops.attention.sparse_requests import ALL_TOKENS, check_requests, requests_of
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import accumulator, float_dtypes, reference, refuse_unbuilt

PAGE = "op-plugin: docs/.../torch_npu-npu_kv_quant_sparse_flash_attention.md"


def _kv_quant_contract(
    check: Check, query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float,
    key_quant_mode: int, value_quant_mode: int, *, key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None, block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None, actual_seq_lengths_kv: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS, next_tokens: int = ALL_TOKENS, attention_mode: int = 0,
    quant_scale_repo_mode: int = 1, tile_size: int = 128, rope_head_dim: int = 64, **rest: Any,
) -> None:
    refuse_unbuilt(check, rest)  # key_dtype, value_dtype: hifloat8 of Ascend 950
    requests = check_requests(check, query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table,
                              layout_query, layout_kv, sparse_mode, pre_tokens, next_tokens, "kv")
    if attention_mode != 2:
        check.fail(RELATION, "attention_mode", attention_mode, "2, absorbed MLA; the default 0 is refused", PAGE)
    for name, mode in (("key_quant_mode", key_quant_mode), ("value_quant_mode", value_quant_mode)):
        if mode != 2:
            check.fail(RELATION, name, mode, "2: one scale for each tile", PAGE)
    if quant_scale_repo_mode != 1:
        check.fail(RELATION, "quant_scale_repo_mode", quant_scale_repo_mode, "1: the scales are in the records",
                   PAGE)
    for name, scales in (("key_dequant_scale", key_dequant_scale), ("value_dequant_scale", value_dequant_scale)):
        if scales is not None:
            check.fail(RELATION, name, describe(scales), "None: the scales are in the records", PAGE)
    if key.dtype != torch.int8:
        check.fail(RELATION, "key", describe(key), "int8; float8 and hifloat8 of Ascend 950 are not built", PAGE)
    if query.dtype not in float_dtypes(check):
        check.fail(DTYPE, "query", describe(query), "float16 or bfloat16", PAGE)
    R = query.shape[-1] - rope_head_dim
    if rope_head_dim < 1 or tile_size < 1 or R < 1 or R % tile_size:
        check.fail(RELATION, "query", f"{describe(query)} with rope_head_dim {rope_head_dim}, tile_size {tile_size}",
                   "a last axis of R + rope_head_dim, where tile_size divides R", PAGE)
    elif key.shape[-1] != R + rope_head_dim * query.itemsize + R // tile_size * 4:
        check.fail(RELATION, "key", describe(key), f"records of {R} int8, {rope_head_dim} numbers of query's dtype and "
                   f"{R // tile_size} of float32, which is {R + rope_head_dim * query.itemsize + R // tile_size * 4} "
                   "bytes", PAGE)
    if (R, rope_head_dim, tile_size) != (512, 64, 128):
        check.fail(SIZE, "query", f"{describe(query)} with rope_head_dim {rope_head_dim}, tile_size {tile_size}",
                   "last axis 512 + 64, rope_head_dim 64 and tile_size 128", PAGE)
    check_value(check, key, value)
    check_heads(check, query)
    check_block_size(check, sparse_block_size, 16, key, layout_kv)
    check_indices(check, query, sparse_indices, sparse_block_size, requests())


@reference("npu_kv_quant_sparse_flash_attention", _kv_quant_contract,
           lambda call: axes(call, "R+Dr", "record", ropes=False), layouts(), points=(EMPTY_ROW,))
def npu_kv_quant_sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, key_quant_mode: int,
    value_quant_mode: int, *, block_table: Tensor | None = None, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, sparse_block_size: int = 1, layout_query: str = "BSND",
    layout_kv: str = "BSND", sparse_mode: int = 3, tile_size: int = 128, rope_head_dim: int = 64, **rest: Any,
) -> Tensor:
    """npu_sparse_flash_attention over int8 keys, which are made query's dtype before anything else.

    A key is a record of 656 bytes: its latent as 512 int8, its rope part as 64 numbers of query's dtype, and 4 fp32
    scales; scale i is the factor of the i-th 128 numbers of the latent.  Rope parts are not quantised.

    Args:
        query: (B, q, N, 512 + 64) or (T, N, 512 + 64), latent before rope, fp16 or bf16; N a power of two up to 128.
        key: (B, S, 1, 656), (S, 1, 656) or (pages, P, 1, 656) int8.
        value: key once more.
        key_quant_mode, value_quant_mode: must be 2.
        attention_mode: must be 2.
        sparse_block_size: a power of two up to 16.
        sparse_indices, scale_value, sparse_mode, lengths, layouts: as in npu_sparse_flash_attention.

    Returns:
        (B, q, N, 512) or (T, N, 512) in query's dtype.  (The page says "like query"; its example prints 512.)

    Raises:
        ContractError: the call breaks a rule of the contract.  float8, hifloat8 and 48 heads, of Ascend 950 only, are
            not built.

    Source: torch_npu docs: npu_kv_quant_sparse_flash_attention; rounding to query's dtype, from its published test.
    """
    exact, tiles = accumulator(query.dtype), (query.shape[-1] - rope_head_dim) // tile_size
    latent_end = tiles * tile_size
    rope_end = latent_end + rope_head_dim * query.itemsize
    records = key.flatten(0, -3).squeeze(-2)  # [keys, record]

    def load(rows: Tensor) -> tuple[Tensor, Tensor]:
        some = records[rows]  # [G, S, record]
        scales = some[..., rope_end:].contiguous().view(torch.float32)  # [G, S, tiles]
        latent = some[..., :latent_end].float().unflatten(-1, (tiles, tile_size)) * scales[..., None]
        rope = some[..., latent_end:rope_end].contiguous().view(query.dtype)  # [G, S, Dr]
        return latent.flatten(-2).to(query.dtype).to(exact), rope.to(exact)  # [G, S, R], [G, S, Dr]

    requests = requests_of(query, key, actual_seq_lengths_query, actual_seq_lengths_kv, layout_query, layout_kv,
                           sparse_mode)
    out, _, _ = attend(query[..., :latent_end], query[..., latent_end:], sparse_indices, Keys(key, block_table, load),
                       requests, scale_value, sparse_block_size, layout_query)  # [T, N, R]
    return out.view(*query.shape[:-1], latent_end)  # [T, N, R] or [B, q, N, R]

"""Attention of each query row to the keys that an indexer chose for it: ``npu_sparse_flash_attention`` (SFA).

Absorbed MLA: all heads share one latent, which is key and value at once, and a rope part.
"""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.attention.sparse_attend import Keys, attend
from trueup.core.ops.attention.sparse_indices import check_indices
from trueup.core.ops.attention.sparse_requests import ALL_TOKENS, check_requests, requests_of
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_sparse_flash_attention.md"
TILING = "ops-transformer: attention/sparse_flash_attention/op_host/sparse_flash_attention_tiling.cpp"

EMPTY_ROW = open_point(
    "sfa-empty-row", "Does a row get zeros whose indices are all -1, although there are keys it may see?",
    "zeros, as in the operator's published test; trueup itself never makes such a row")

HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def _sparse_flash_attention_contract(
    check: Check, query: Tensor, key: Tensor, value: Tensor | None, sparse_indices: Tensor, scale_value: float, *,
    block_table: Tensor | None = None, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3,
    pre_tokens: int = ALL_TOKENS, next_tokens: int = ALL_TOKENS, attention_mode: int = 0,
    return_softmax_lse: bool = False, sinks: Tensor | None = None,
) -> None:
    requests = check_requests(check, query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table,
                              layout_query, layout_kv, sparse_mode, pre_tokens, next_tokens, "kv")
    R = query.shape[-1]
    if attention_mode != 2:
        check.fail(RELATION, "attention_mode", attention_mode, "2, absorbed MLA; the default 0 is refused", PAGE)
    if sinks is not None:
        check.fail(RELATION, "sinks", describe(sinks), "None: only Ascend 950 has sinks; not built", TILING)
    if query_rope is None or key_rope is None:
        check.fail(RELATION, "query_rope" if query_rope is None else "key_rope", None, "the rope parts of query and "
                   "key, both", TILING)
        return
    if query_rope.shape[:-1] != query.shape[:-1]:
        check.fail(RELATION, "query_rope", describe(query_rope), f"{list(query.shape[:-1])} and a width, as query",
                   PAGE)
    if key_rope.shape != (*key.shape[:-1], query_rope.shape[-1]):
        check.fail(RELATION, "key_rope", describe(key_rope), f"{list(key.shape[:-1])}, as key, and the width of "
                   f"query_rope, {query_rope.shape[-1]}", PAGE)
    if key.shape[-1] != R:
        check.fail(RELATION, "key", describe(key), f"last axis {R}, as query", PAGE)
    if (R, query_rope.shape[-1]) != (512, 64):
        check.fail(SIZE, "query", f"{describe(query)} with query_rope {list(query_rope.shape)}", "last axes 512 and 64",
                   PAGE)
    if query.dtype not in float_dtypes(check):
        check.fail(DTYPE, "query", describe(query), "float16 or bfloat16", PAGE)
    for name, tensor in (("key", key), ("query_rope", query_rope), ("key_rope", key_rope)):
        if tensor.dtype != query.dtype:
            check.fail(DTYPE, name, describe(tensor), f"query's {query.dtype}", PAGE)
        if not tensor.is_contiguous():
            check.fail(SIZE, name, f"not contiguous: {describe(tensor)} with strides {tensor.stride()}",
                       "a contiguous tensor: call .contiguous() on what a split or transpose made", PAGE)
    if value is None:
        check.fail(SIZE, "value", None, "key once more: only CANN 9.2.0 and later take None",
                   "torch_npu 2.13.0: op_plugin/meta/_meta_registrations.py")
    else:
        check_value(check, key, value)
    check_heads(check, query)
    check_block_size(check, sparse_block_size, 128, key, layout_kv)
    if return_softmax_lse and layout_kv == "PA_BSND":
        check.fail(SIZE, "return_softmax_lse", True, "False where layout_kv is 'PA_BSND': torch_npu makes the outputs "
                   "in a wrong shape", PAGE)
    check_indices(check, query, sparse_indices, sparse_block_size, requests())


def check_value(check: Check, key: Tensor, value: Tensor) -> None:
    if value.shape != key.shape:
        check.fail(RELATION, "value", describe(value), f"the shape of key, {list(key.shape)}", PAGE)
    if value.dtype != key.dtype:
        check.fail(DTYPE, "value", describe(value), f"key's {key.dtype}", PAGE)
    if (value.data_ptr(), value.stride()) != (key.data_ptr(), key.stride()) and not _same_bytes(key, value):
        check.fail(RELATION, "value", "other numbers than key", "key once more: attention_mode 2 has one latent for "
                   "both, and a device reads only one of them", PAGE)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    # Bytes, because a cache may hold NaN where nobody has written yet.
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_heads(check: Check, query: Tensor) -> None:
    if query.shape[-2] not in HEADS:
        check.fail(SIZE, "query", f"{query.shape[-2]} heads, {describe(query)}", "1, 2, 4, 8, 16, 32, 64 or 128 heads: "
                   "pad them with zeros and slice the result", PAGE, "SB-06")


def check_block_size(check: Check, sparse_block_size: int, most: int, key: Tensor, layout_kv: str) -> None:
    if sparse_block_size < 1:
        check.fail(RELATION, "sparse_block_size", sparse_block_size, "how many keys an entry stands for", PAGE)
    if not 1 <= sparse_block_size <= most or sparse_block_size & (sparse_block_size - 1):
        check.fail(SIZE, "sparse_block_size", sparse_block_size, f"a power of two from 1 to {most}", TILING)
    if layout_kv == "PA_BSND" and key.shape[1] % sparse_block_size:
        check.fail(SIZE, "sparse_block_size", sparse_block_size, f"a divisor of the {key.shape[1]} keys of a page",
                   PAGE)


def axes(call: Mapping[str, Any], query: str, key: str, ropes: bool) -> str:
    rows = "B q" if call["layout_query"] == "BSND" else "T"
    keys = {"BSND": "B S 1", "TND": "S 1", "PA_BSND": "pages P 1"}[call["layout_kv"]]
    rope = f"query_rope [{rows} N Dr], key_rope [{keys} Dr], " if ropes else ""
    return (f"query [{rows} N {query}], key [{keys} {key}], value [{keys} {key}], sparse_indices [{rows} 1 K], {rope}"
            f"actual_seq_lengths_query [B], actual_seq_lengths_kv [B], block_table [B max_pages] -> out [{rows} N R]")


def _sparse_flash_attention_axes(call: Mapping[str, Any]) -> str:
    rows = "B 1 q" if call["layout_query"] == "BSND" else "1 T"
    softmax = (f"softmax_max [{rows} N], softmax_sum [{rows} N]" if call["return_softmax_lse"]
               else "softmax_max~ [0], softmax_sum~ [0]")
    return f"{axes(call, 'R', 'R', ropes=True)}, {softmax}"


def layouts(**more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"layout_query": q, "layout_kv": kv, **more}
                 for q, kv in (("TND", "PA_BSND"), ("BSND", "PA_BSND"), ("TND", "TND"), ("BSND", "BSND")))


@reference("npu_sparse_flash_attention", _sparse_flash_attention_contract, _sparse_flash_attention_axes,
           layouts(return_softmax_lse=False) + layouts(return_softmax_lse=True)[2:], points=(EMPTY_ROW,))
def npu_sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor | None, sparse_indices: Tensor, scale_value: float, *,
    block_table: Tensor | None = None, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3,
    return_softmax_lse: bool = False, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale * (q k^T + q_rope k_rope^T)) k over the keys that each query row chose.

    What a row of ``sparse_indices`` means is in sparse_indices.py; layouts and lengths are in
    sparse_requests.py.  Keys are read through ``block_table`` where they lie in pages.

    A row that chooses nothing, or may see nothing, gives zeros: in all three outputs.  In layout BSND so do rows
    past a request's length.  In layout TND a device leaves rows past the last cumulative length unwritten, so they are
    undefined; here they hold NaN.

    Args:
        query: (B, q, N, 512) or (T, N, 512), fp16 or bf16; N a power of two up to 128.
        key: (B, S, 1, 512), (S, 1, 512) or (pages, P, 1, 512); P a multiple of 16, at most 1024.
        value: key once more.  With CANN 9.2.0 and later, None says the same.
        sparse_indices: (B, q, 1, K) or (T, 1, K) int32, a row for each query row: choices in front, -1 behind.
        scale_value: factor of the scores; derived from no width.
        query_rope, key_rope: as query and key, 64 wide.
        sparse_block_size: keys that one entry of ``sparse_indices`` stands for; a power of two up to 128.
        sparse_mode: 0 shows each row all keys; 3 shows row i of a request's q rows its first kv - q + i + 1.
        attention_mode: must be 2.
        return_softmax_lse: not in graph mode, and not with paged keys.

    Returns:
        (out, softmax_max, softmax_sum): out like query.  The others in fp32, (B, 1, q, N) or (1, T, N), or of shape
        (0,) unless asked for; their lse is max + log(sum).

    Raises:
        ContractError: the call breaks a rule of the contract.

    Source: torch_npu docs: npu_sparse_flash_attention; which entries are read, from its published test
    (ops-transformer: attention/sparse_flash_attention/tests/pytest/sparse_flash_attention_golden.py).
    """
    assert query_rope is not None and key_rope is not None
    exact = accumulator(query.dtype)
    latents, ropes = key.flatten(0, -3).squeeze(-2), key_rope.flatten(0, -3).squeeze(-2)  # [keys, R], [keys, Dr]

    def load(rows: Tensor) -> tuple[Tensor, Tensor]:
        return latents[rows].to(exact), ropes[rows].to(exact)  # [G, S, R], [G, S, Dr]

    requests = requests_of(query, key, actual_seq_lengths_query, actual_seq_lengths_kv, layout_query, layout_kv,
                           sparse_mode)
    out, top, total = attend(query, query_rope, sparse_indices, Keys(key, block_table, load), requests, scale_value,
                             sparse_block_size, layout_query)  # [T, N, R], [T, N], [T, N]
    if not return_softmax_lse:
        empty = torch.empty(0, dtype=torch.float32, device=query.device)  # [0]
        return out.view(query.shape), empty, empty.clone()  # [T, N, R], [0], [0]
    axis = 1 if layout_query == "BSND" else 0
    top, total = (x.view(query.shape[:-1]).unsqueeze(axis) for x in (top, total))  # [B, 1, q, N] or [1, T, N]
    return out.view(query.shape), top, total

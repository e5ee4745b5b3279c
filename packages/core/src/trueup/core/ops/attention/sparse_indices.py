"""The rows of ``sparse_indices``: which keys each query row attends to, and what is wrong with such a row.

An entry ``e`` stands for the keys e*s to e*s + s - 1 of its request, s = ``sparse_block_size``: places in the request,
not slots of the cache.  A row that may see n keys is read from its first entry to its first -1, ceil(n / s) entries at
most; entries that start at n or behind it are passed over.  So choices stand in front, and -1 behind them.
"""
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trueup.core.ops.attention.sparse_requests import Requests
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe

PAGE = "op-plugin: docs/.../torch_npu-npu_sparse_flash_attention.md"
GOLDEN = "ops-transformer: attention/sparse_flash_attention/tests/pytest/sparse_flash_attention_golden.py"
TILING = "ops-transformer: attention/sparse_flash_attention/op_host/sparse_flash_attention_tiling.cpp"
UNWRITTEN = torch.iinfo(torch.int32).max  # what registry.poison leaves in int32
FEW = 128  # entries: so many are looked at one by one sooner than with tensor operations


def selected(indices: Tensor, thresholds: Tensor, most: int, sparse_block_size: int) -> tuple[Tensor, Tensor]:
    """The keys that rows choose: places [T, S] in their requests, and which of these count [T, S].

    Places that do not count repeat one that does, or are 0: whatever stands elsewhere is never touched.

    Args:
        indices: (T, K); without holes, as its contract demands.
        thresholds: (T,), how many keys each row may see; at most ``most``, which is 1 or more.
    """
    s = sparse_block_size
    read = min(indices.shape[1], -(-most // s))
    indices = indices[:, :read].long()  # [T, n]
    inside = torch.arange(s, device=indices.device)  # [s]
    places = (indices[..., None] * s + inside).flatten(1)  # [T, n*s]
    slots = torch.arange(read, device=indices.device) * s  # [n]
    readable = (indices >= 0) & (slots < thresholds[:, None])  # [T, n]
    counts = readable.repeat_interleave(s, 1) & (places < thresholds[:, None])  # [T, n*s]
    first = counts.long().argmax(1, keepdim=True)  # [T, 1]
    spare = places.gather(1, first) * counts.gather(1, first)  # [T, 1]
    return torch.where(counts, places, spare), counts  # [T, n*s], [T, n*s]


def check_indices(check: Check, query: Tensor, sparse_indices: Tensor, sparse_block_size: int,
                  requests: Requests) -> None:
    """One row of choices for each query row; in the rows that are read, choices first, each once, then -1."""
    lead = (*query.shape[:-2], 1)
    if sparse_indices.shape[:-1] != lead:
        check.fail(RELATION, "sparse_indices", f"{_rows(sparse_indices)} rows, {describe(sparse_indices)}",
                   f"{_rows(query)} rows, as query has, {[*lead, 'K']}: trueup.core.pad_topk adds rows of -1; rows "
                   "that are too many belong to another batch", TILING, "SB-02")
    K = sparse_indices.shape[-1]
    if K == 0:
        check.fail(RELATION, "sparse_indices", describe(sparse_indices), "at least one entry in each row", PAGE)
    if sparse_indices.dtype != torch.int32:
        check.fail(DTYPE, "sparse_indices", describe(sparse_indices), "int32", PAGE)
    if not sparse_indices.is_contiguous():
        check.fail(SIZE, "sparse_indices", f"not contiguous: {describe(sparse_indices)}", "a contiguous tensor", PAGE)

    rows = sparse_indices.reshape(-1, K)  # [T, K]
    visible = requests.thresholds(len(rows))
    for t, row in _suspects(rows, visible, sparse_block_size):
        if visible[t] > 0:
            _check_row(check, t, row, visible[t], sparse_block_size)


def _check_row(check: Check, t: int, row: list[int], visible: int, sparse_block_size: int) -> None:
    low, high = min(row), max(row)
    if low < -1:
        check.fail(RELATION, f"sparse_indices[{t}]", low, "places of keys, or -1 behind them", PAGE)
    if high == UNWRITTEN:
        check.fail(RELATION, f"sparse_indices[{t}]", f"{UNWRITTEN}, which no indexer writes", "a row that the indexer "
                   "has written: its lengths ended before this row", PAGE, "SB-02")
    chosen = row.index(-1) if low < 0 else len(row)
    if chosen < len(row) and max(row[chosen:]) >= 0:
        check.fail(RELATION, f"sparse_indices[{t}]", f"-1 in entry {chosen} and choices behind it", "all choices in "
                   "front, all -1 behind: one kernel stops at the first -1, another passes over it", PAGE, "SB-29")
    read = min(chosen, -(-visible // sparse_block_size))
    if len(set(row[:read])) < read:
        twice = next(entry for entry in row if row[:read].count(entry) > 1)
        check.fail(RELATION, f"sparse_indices[{t}]", f"{twice} more than once", "each choice once: a key that is "
                   "chosen twice has twice the weight", GOLDEN)
    for entry in row[read:chosen]:
        if entry * sparse_block_size < visible:
            check.fail(RELATION, f"sparse_indices[{t}]", f"{entry} behind the first {read} entries", "what the row "
                       f"may see in its first {read} entries: they have room for all {visible} keys that it may see, "
                       "and a device reads no more", GOLDEN)


def _suspects(rows: Tensor, visible: Sequence[int], sparse_block_size: int) -> Iterator[tuple[int, list[int]]]:
    """(t, row) of each row that may break a rule: all of them, where there are few.

    The others hold places below what they may see, no place twice, and -1 only behind them; so they are not too many.
    """
    if rows.numel() <= FEW:
        yield from enumerate(rows.tolist())
        return
    entries = rows.cpu().numpy()  # [T, K]
    ordered = np.sort(entries, axis=1)  # [T, K], sooner than PyTorch sorts, or marks in a table
    limits = -(-np.array(visible) // sparse_block_size)  # [T]
    odd = (ordered[:, 0] < -1) | (ordered[:, -1] >= limits)  # [T]
    unused = entries < 0  # [T, K]
    if (unused[:, :-1] > unused[:, 1:]).any():
        odd |= (unused[:, :-1] > unused[:, 1:]).any(axis=1)
    flat = ordered.ravel()  # [T * K], in which equal neighbours are found sooner, those of two rows among them
    if ((flat[1:] == flat[:-1]) & (flat[1:] >= 0)).any():
        odd |= ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    for t in np.flatnonzero(odd & (limits > 0)).tolist():
        yield t, rows[t].tolist()


def _rows(tensor: Tensor) -> int:
    """Of a tensor (rows, heads, width) or (requests, rows, heads, width)."""
    return tensor.shape[:-2].numel()

"""Rows of -1 behind the rows of an indexer, for queries that were padded after it ran."""
import torch
from torch import Tensor


def pad_topk(topk: Tensor, rows: int) -> Tensor:
    """``topk`` with rows of -1 behind its own, so that it has as many as the queries of the next call.

    A row of only -1 chooses no key.  What belongs to it is a query row of no request, behind the last cumulative
    length, or one whose output is thrown away.

    Args:
        topk: (T, ...) of a signed dtype, one row for each query row, as an indexer returns them.  Not written to.
        rows: how many rows the result has.

    Returns:
        (rows, ...) in ``topk``'s dtype and on its device, in memory of its own.

    Raises:
        ValueError: ``topk`` has more rows than asked for, or a dtype that has no -1.

    Source: SB-02 in the bug gallery (sglang: pull request 32791).
    """
    if topk.dim() == 0 or not topk.dtype.is_signed:
        raise ValueError(f"topk is {list(topk.shape)} {topk.dtype}; expected an axis of rows and a signed dtype")
    if len(topk) > rows:
        raise ValueError(f"topk has {len(topk)} rows, more than the {rows} asked for: rows are never cut, since they "
                         "would be those of another batch; pad the queries to as many rows, or choose the rows first")
    tail = topk.new_full((rows - len(topk), *topk.shape[1:]), -1)  # [rows - T, ...]
    return torch.cat([topk, tail])  # [rows, ...]

"""Which keys a query row sees: a band that sparse_mode draws, and what ``atten_mask`` takes away.

The band of a request is known from its lengths alone: the 2048 x 2048 tensor of modes 2, 3 and 4 adds nothing.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import FOREVER, Call
from trueup.core.ops.attention.fused_infer_attention.layouts import Layout


class Band(NamedTuple):
    """Row i sees the keys from i + shift - before to i + shift + after.

    ``right``: the last row stands beside the last key (shift = kv - q); else the first beside the first (0).
    """

    right: bool
    before: int
    after: int


def lone(call: Call, layout: Layout) -> bool:
    """Whether each request has one row, and no rope: there sparse_mode, pre_tokens and next_tokens have no effect."""
    return not layout.packed and call.query_rope is None and layout.rows(call.query) == 1


def band_of(call: Call, layout: Layout) -> Band | None:
    """The band of a call; None: every row sees every key."""
    mode = call.sparse_mode
    if mode == 3:
        return Band(True, FOREVER, 0)
    if mode in (1, 9) or (mode == 0 and call.atten_mask is None) or lone(call, layout):
        return None
    return Band(False, FOREVER, 0) if mode == 2 else Band(mode == 4, call.pre_tokens, call.next_tokens)


def limits(band: Band | None, q_len: int, kv_len: int) -> tuple[list[int] | None, list[int]]:
    """The first key that each row of a request sees (None: key 0), and the one behind its last; neither decreases."""
    if band is None:
        return None, [kv_len] * q_len
    shift = kv_len - q_len if band.right else 0
    end, start = shift + band.after + 1, shift - band.before
    if 0 <= end <= kv_len - q_len + 1:
        ends = list(range(end, end + q_len))
    else:
        ends = [min(max(end + i, 0), kv_len) for i in range(q_len)]
    return [min(max(start + i, 0), kv_len) for i in range(q_len)] if start + q_len > 1 else None, ends


class Mask(NamedTuple):
    """``atten_mask`` as a matrix for each request: of all its keys, or (a tree) of its last ones, as many as rows."""

    matrices: list[Tensor]  # [S, Skv]; tree: [q, q].  One that serves all requests stands alone
    tree: bool

    def hides(self, request: int, rows: slice, kv_len: int) -> Tensor:
        """Bool [rows, kv_len]: True where a row does not see a key.  May be a view of the caller's mask."""
        matrix = self.matrices[request if len(self.matrices) > 1 else 0][rows]  # [rows, Skv]
        if not self.tree:
            return matrix[:, :kv_len].bool()  # [rows, kv]
        hidden = matrix.new_zeros((len(matrix), kv_len), dtype=torch.bool)  # [rows, kv]
        hidden[:, kv_len - matrix.shape[1]:] = matrix
        return hidden


def mask_of(call: Call, layout: Layout, q_lens: list[int]) -> Mask | None:
    """The mask of a call; None where a mode needs none, or is a band."""
    mask = call.atten_mask
    if mask is None or call.sparse_mode not in (0, 1, 9):
        return None
    if call.sparse_mode == 9:
        if mask.dim() == 1:
            parts = mask.split([q * q for q in q_lens])
            return Mask([part.view(q, q) for part, q in zip(parts, q_lens, strict=True)], True)
        return Mask([mask[b, :q, :q] for b, q in enumerate(q_lens)], True)
    if mask.dim() == 2:
        each = layout.rows(call.query) == 1 and len(mask) == layout.requests(call.query)
        return Mask(list(mask[:, None]) if each else [mask], False)
    return Mask(list(mask.flatten(0, -3)), False)

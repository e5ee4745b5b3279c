"""``Rows``: a tensor that remembers which batch its rows belong to.

What outlives a forward carries its Layout, so that rows of two batches cannot meet by having equal counts.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from trueup.core.layout import Layout


class Kind(Enum):
    """What one row stands for."""

    TOKEN = "token"  # every row of the forward, padded ones too
    REQUEST = "request"  # one of each real request
    SCORED = "scored"  # those whose logits are wanted: layout.scored_rows


@dataclass(frozen=True)
class Rows:
    """``tensor`` [Tp, ...] (TOKEN), or rows of real requests in ``layout.requests`` order (REQUEST: one of each).

    Raises:
        ValueError: the row count is not the layout's, or a selection from rows that are not token rows.
    """

    kind: Kind
    layout: Layout
    tensor: Tensor

    def __post_init__(self) -> None:
        sizes = {Kind.TOKEN: self.layout.padded_tokens, Kind.REQUEST: self.layout.real_requests,
                 Kind.SCORED: sum(map(len, self.layout.scored_rows.values()))}
        expected = sizes[self.kind]
        if self.tensor.shape[0] != expected:
            raise ValueError(f"{self.tensor.shape[0]} {self.kind.value} rows for a layout with {expected}")

    def last(self) -> "Rows":
        """TOKEN to REQUEST, [Tp, ...] to [B, ...]: the last row of each real request."""
        return self._select(Kind.REQUEST, self.layout.last_rows)

    def scored(self) -> "Rows":
        """TOKEN to SCORED: the rows whose logits are wanted."""
        return self._select(Kind.SCORED, [row for rows in self.layout.scored_rows.values() for row in rows])

    def by_request(self) -> dict[int, Tensor]:
        """Unpadded and keyed by request id: [rows, ...] of each, or its one row [...] (REQUEST)."""
        if self.kind is Kind.REQUEST:
            return dict(zip(self.layout.requests, self.tensor, strict=True))
        if self.kind is Kind.SCORED:
            parts = self.tensor.split([len(rows) for rows in self.layout.scored_rows.values()])
            return dict(zip(self.layout.scored_rows, parts, strict=True))
        return {r: self.tensor[rows.start : rows.stop] for r, rows in self.layout.token_rows.items()}

    def _select(self, kind: Kind, rows: Sequence[int]) -> "Rows":
        if self.kind is not Kind.TOKEN:
            raise ValueError(f"rows are selected from token rows; these are {self.kind.value} rows already")
        index = torch.tensor(rows, dtype=torch.int64, device=self.tensor.device)  # [rows]
        return Rows(kind, self.layout, self.tensor[index])  # [rows, ...]

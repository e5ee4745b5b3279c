"""``Rows``: a tensor that remembers which batch its rows belong to.

What outlives a forward carries its Layout, so that rows of two batches cannot meet by having equal counts.
"""
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from trueup.core.layout import Layout


class Kind(Enum):
    """What one row stands for."""

    TOKEN = "token"
    REQUEST = "request"


@dataclass(frozen=True)
class Rows:
    """``tensor`` [Tp, ...] (TOKEN) or one row a real request in ``layout.requests`` order (REQUEST).

    Raises:
        ValueError: the row count is not the layout's, or ``last`` of request rows.
    """

    kind: Kind
    layout: Layout
    tensor: Tensor

    def __post_init__(self) -> None:
        token = self.kind is Kind.TOKEN
        expected = self.layout.padded_tokens if token else self.layout.real_requests
        if self.tensor.shape[0] != expected:
            raise ValueError(f"{self.tensor.shape[0]} {self.kind.value} rows for a layout with {expected}")

    def last(self) -> "Rows":
        """TOKEN to REQUEST, [Tp, ...] to [B, ...]: the last row of each real request."""
        if self.kind is not Kind.TOKEN:
            raise ValueError("last() takes token rows; these are request rows already")
        index = torch.tensor(self.layout.last_rows, dtype=torch.int64, device=self.tensor.device)  # [B]
        return Rows(Kind.REQUEST, self.layout, self.tensor[index])  # [B, ...]

    def by_request(self) -> dict[int, Tensor]:
        """Unpadded and keyed by request id: [q, ...] of each (TOKEN), or its one row [...] (REQUEST)."""
        if self.kind is Kind.REQUEST:
            return dict(zip(self.layout.requests, self.tensor, strict=True))
        return {r: self.tensor[rows.start : rows.stop] for r, rows in self.layout.token_rows.items()}

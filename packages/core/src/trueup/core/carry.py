"""What requests bring along from one forward to the next."""
from collections.abc import Mapping

from torch import Tensor

from trueup.core.layout import Layout
from trueup.core.rows import Kind, Rows


def for_layout(carry: Mapping[int, Tensor], layout: Layout) -> Rows:
    """What requests brought along, [rows, ...] of each, at their token rows of another forward; zeros elsewhere.

    The only place that pads what outlives a forward: a batch may shrink, grow or be reordered between two rounds, so
    what is carried is unpadded and keyed by request id (SB-19).

    Raises:
        ValueError: a request brings another number of rows than it has in ``layout``.
    """
    first = next(iter(carry.values()))
    padded = first.new_zeros(layout.padded_tokens, *first.shape[1:])  # [Tp, ...]
    for request, rows in layout.token_rows.items():
        if len(carry[request]) != len(rows):
            raise ValueError(f"request {request} brings {len(carry[request])} rows for {len(rows)} of this forward")
        padded[rows.start : rows.stop] = carry[request]
    return Rows(Kind.TOKEN, layout, padded)

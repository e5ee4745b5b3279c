"""What requests bring along from one forward to the next."""
from collections.abc import Mapping

from torch import Tensor

from trueup.core.layout import Layout
from trueup.core.rows import Kind, Rows


def for_layout(carry: Mapping[int, Tensor], layout: Layout, padding: Tensor | None = None) -> Rows:
    """What requests brought along, [rows, ...] of each, at their token rows of another forward; zeros elsewhere.

    The only place that pads what outlives a forward: a batch may shrink, grow or be reordered between two rounds, so
    what is carried is unpadded and keyed by request id (SB-19).

    Args:
        carry: by request id; ids that are not in ``layout`` are passed over.
        layout: of the forward that it is for.
        padding: what rows of no request hold instead of zeros, [...].

    Raises:
        ValueError: a request of ``layout`` brings nothing, or another number of rows than it has there.
    """
    if absent := [request for request in layout.requests if request not in carry]:
        raise ValueError(f"requests {absent} bring nothing; expected rows of {list(layout.requests)}, got those of "
                         f"{list(carry)}: a request that joins is learned first")
    first = next(iter(carry.values()))
    padded = first.new_zeros(layout.padded_tokens, *first.shape[1:])  # [Tp, ...]
    if padding is not None:
        padded[:] = padding
    for request, rows in layout.token_rows.items():
        if len(carry[request]) != len(rows):
            raise ValueError(f"request {request} brings {len(carry[request])} rows for {len(rows)} of this forward")
        padded[rows.start : rows.stop] = carry[request]
    return Rows(Kind.TOKEN, layout, padded)

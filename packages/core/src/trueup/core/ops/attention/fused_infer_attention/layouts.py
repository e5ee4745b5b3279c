"""What ``input_layout`` says: the axes of queries, of keys that are not paged, and of the output.

A name is one list of axes for everything, or two: what the operator reads, and what it writes.  B requests, S rows of
each, N heads, D width of a head, H = N*D, T rows of all requests one after the other.  The kernel knows one order,
rows first: [rows, N, D], where the rows are T, or B*S.

Source: torch_npu 2.13.0: op_plugin/meta/_meta_registrations.py, which has this table and no other.
"""
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """Axes of the query and the output; ``keys``: those of key and value, in words, G being their heads.

    ``packed``: whether all requests share one axis of rows.  ``row_axis``, ``head_axis``: where S or T and N stand in
    the query (BSH has no N).
    """

    query: str
    out: str
    keys: str
    packed: bool
    row_axis: int
    head_axis: int

    def rows(self, x: Tensor) -> int:
        """The rows of each request, or of all of them in a packed tensor; of a query, or of keys laid out like it."""
        return x.shape[self.row_axis]

    def requests(self, x: Tensor) -> int:
        """How many requests a tensor holds that is not packed."""
        return x.shape[0] if self.query[0] == "B" else 1


_KEYS = {"BSH": "(B, Skv, G*D)", "BSND": "(B, Skv, G, D)", "BNSD": "(B, G, Skv, D)", "TND": "(Tkv, G, D)",
         "NTD": "(G, Tkv, D)", "NSD": "(G, Skv, D)"}
LAYOUTS = {
    name: Layout(reads, writes or reads, _KEYS[reads], "T" in reads, reads.index("T" if "T" in reads else "S"),
                 reads.find("N"))
    for name in ("BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD",
                 "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
    for reads, _, writes in (name.partition("_"),)
}


def to_rows(x: Tensor, axes: str, heads: int) -> Tensor:
    """[rows, heads, width] of a tensor with these axes; a view where the memory allows it."""
    if axes == "TND":
        return x
    if axes == "BSH":
        return x.reshape(-1, heads, x.shape[2] // heads)  # [B * S, N, D]
    order = [axes.index(axis) for axis in "BSTND" if axis in axes]
    return x.permute(order).flatten(0, -3)  # [B * S, N, D]; [T, N, D]


def from_rows(rows: Tensor, axes: str, requests: int, each: int) -> Tensor:
    """The contiguous tensor with these axes, of ``requests`` times ``each`` rows: the opposite of :func:`to_rows`."""
    if axes == "TND":
        return rows
    known = "SND"
    if "B" in axes:
        rows, known = rows.unflatten(0, (requests, each)), "BSND"  # [B, S, N, D]
    if axes == "BSH":
        return rows.flatten(2)  # [B, S, N * D]
    return rows.permute([known.index(axis) for axis in axes.replace("T", "S")]).contiguous()


def key_shape(axes: str, requests: int, rows: int, heads: int, width: int) -> tuple[int, ...]:
    """The shape of keys or values that are not paged."""
    if "T" in axes or "B" not in axes:
        return (rows, heads, width) if axes == "TND" else (heads, rows, width)
    if axes == "BSH":
        return requests, rows, heads * width
    return (requests, rows, heads, width) if axes == "BSND" else (requests, heads, rows, width)


def value_width(layout: Layout, value: Tensor, key_heads: int, paged: bool) -> int:
    """The width of one head of ``value``, paged or not, which is that of the output."""
    if paged and value.dim() == 5:
        return value.shape[2] * value.shape[4]
    shared = value.dim() == 3 if paged else layout.query == "BSH"
    return value.shape[-1] // key_heads if shared else value.shape[-1]


def output_shapes(layout: Layout, query: Tensor, heads: int, width: int, want_lse: bool
                  ) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output, whose heads are ``width`` wide, and of the lse, (0,) where it is not wanted."""
    B, S = layout.requests(query), layout.rows(query)
    size = {"B": B, "S": S, "T": S, "N": heads, "D": width, "H": heads * width}
    lse = (S, heads, 1) if layout.packed else (B, heads, S, 1)
    return tuple(size[axis] for axis in layout.out), lse if want_lse else (0,)

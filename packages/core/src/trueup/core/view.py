"""``materialise``: the only place where a Layout becomes tensors."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from trueup.core.cache import Pools
from trueup.core.key_value import KeyValuePools
from trueup.core.layout import Form, Layout, Segment
from trueup.core.rows import Kind, Rows


@dataclass(frozen=True)
class SegmentView:
    """A segment as the operators want it.

    FIA takes host integers, LI and SFA take int32 device tensors: both homes are filled in every mode, from
    the same tuples, so they cannot disagree.
    """

    segment: Segment
    rows: slice  # the token rows that attention sees, [T]
    q_cum: list[int]  # [Bp], host
    kv_lens: list[int]  # [Bp], host
    prefix_cum: list[int]  # [Bp], host
    q_cum_device: Tensor  # [Bp] int32
    kv_lens_device: Tensor  # [Bp] int32
    block_table: Tensor  # [Bp, max_pages] int32
    prefix_slots: Tensor  # [sum of prefixes] int64; empty for the absorbed form, which reads pages
    slots: Tensor  # [T] int64
    places: Tensor  # [T, 2] int64, the same as page and offset
    mask: Tensor | None  # [2048, 2048] bool where a request has several query rows


@dataclass(frozen=True)
class DeviceView:
    """Everything a model may know about a batch."""

    layout: Layout
    positions: Tensor  # [Tp] int64
    segments: tuple[SegmentView, ...]


def materialise(layout: Layout, pools: Pools | KeyValuePools) -> DeviceView:
    """Build the tensors of ``layout`` on the device of ``pools``.  Host integers in, device tensors out."""
    device = pools.spec.device
    positions = torch.tensor(layout.positions, dtype=torch.int64, device=device)  # [Tp]
    return DeviceView(layout, positions, tuple(_segment(s, layout.page_size, device) for s in layout.segments))


def input_ids(layout: Layout, tokens: Mapping[int, Sequence[int]], device: torch.device) -> Rows:
    """Token ids at their rows, [Tp] int64; padded rows hold id 0.

    Raises:
        ValueError: a request's ids are not as many as its query rows.
    """
    ids = [0] * layout.padded_tokens
    for request, rows in layout.token_rows.items():
        if len(tokens[request]) != len(rows):
            raise ValueError(f"request {request}: {len(tokens[request])} token ids for {len(rows)} query rows")
        ids[rows.start : rows.stop] = tokens[request]
    return Rows(Kind.TOKEN, layout, torch.tensor(ids, dtype=torch.int64, device=device))  # [Tp]


@lru_cache(maxsize=8)
def causal_mask(device: torch.device) -> Tensor:
    """The one mask of sparse_mode 3: True above the diagonal means excluded.  torch_npu docs: atten_mask."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)  # [2048, 2048]


def _segment(s: Segment, page_size: int, device: torch.device) -> SegmentView:
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    int64 = partial(torch.tensor, dtype=torch.int64, device=device)
    prefix = [
        row[position // page_size] * page_size + position % page_size
        for row, length in zip(s.pages, s.prefix_lens, strict=True)
        for position in range(length if s.form is Form.EXPANDED else 0)
    ]
    slots = int64(s.slots[: s.operator_tokens])  # [T]
    return SegmentView(
        segment=s,
        rows=slice(s.first_row, s.first_row + s.operator_tokens),
        q_cum=list(s.q_cum),
        kv_lens=list(s.kv_lens),
        prefix_cum=list(s.prefix_cum),
        q_cum_device=int32(s.q_cum),  # [Bp]
        kv_lens_device=int32(s.kv_lens),  # [Bp]
        block_table=int32(s.pages),  # [Bp, max_pages]
        prefix_slots=int64(prefix),  # [S]
        slots=slots,
        places=torch.stack((slots // page_size, slots % page_size), 1),  # [T, 2]
        mask=causal_mask(device) if s.width > 1 else None,  # [2048, 2048]
    )

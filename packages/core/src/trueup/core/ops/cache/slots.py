"""Slots of paged caches, for the operators that write new rows into them.

A slot is ``page * block_size + offset``.  A device leaves slots unchecked: a wrong one overwrites foreign rows, and of
two rows with one slot an arbitrary one stays.  Here they are checked.
"""
import torch

from trueup.core.ops.contract import DTYPE, RELATION, Check, describe

INT32_MAX = 2**31 - 1


def check_slots(check: Check, argument: str, slots: list[int], cache: torch.Tensor, source: str) -> None:
    """Slots lie inside the cache, and no two rows share one.

    Page 0 is exempt from the second rule: by the convention of this project it is the dummy page, whose
    contents nobody reads, and all padded rows of a batch may land there.
    """
    block_num, block_size, *_ = cache.shape
    if slots and max(slots) >= block_num * block_size:
        check.fail(RELATION, argument, f"slot {max(slots)}",
                   f"slots below {block_num * block_size} = {block_num} pages of {block_size}: the device does not "
                   "look and writes into foreign memory", source)
    if len(set(slots)) == len(slots):
        return
    real = [slot for slot in slots if slot >= block_size]
    if len(set(real)) != len(real):
        twice = next(slot for slot in real if real.count(slot) > 1)
        rows = [row for row, slot in enumerate(slots) if slot == twice]
        check.fail(RELATION, argument, f"slot {twice} in rows {rows}",
                   "a slot of its own for each row, outside page 0: which row stays is not defined; send padded rows "
                   "to the dummy page 0", source)


def check_slot_dtype(check: Check, argument: str, index: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
                     source: str) -> None:
    """The index into two caches is int64.  A small pool survives int32, so there it is only a wrong dtype."""
    if index.dtype != torch.int64:
        small = index.dtype == torch.int32 and max(first.numel(), second.numel()) <= INT32_MAX
        check.fail(DTYPE if small else RELATION, argument, describe(index),
                   "int64: call .long(); offsets of large pools do not fit into 32 bits", source, "SB-25")


def check_caches(check: Check, caches: dict[str, torch.Tensor], heads: int, widths: tuple[int, int], advice: str,
                 source: str) -> None:
    """Both caches are dense (block_num, block_size, heads, width) with the same pages."""
    pages = next(iter(caches.values())).shape[:2]
    for (name, cache), width in zip(caches.items(), widths, strict=True):
        if cache.dim() != 4 or cache.shape != (*pages, heads, width):
            check.fail(RELATION, name, describe(cache, "block_num, block_size, N, D"),
                       f"4 axes, N = {heads} and D = {width} as the rows to be written, both caches with the same "
                       f"pages: {advice}", source, "SB-26")
        if not cache.is_contiguous():
            check.fail(RELATION, name, f"strided, {describe(cache)}",
                       "a contiguous tensor: a write to a hidden copy would be lost", source)


def slots_of_pages(starts: torch.Tensor, lengths: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots of rows that fill pages from the front; rows of a page with a negative start get negative slots.

    Args:
        starts: the first slot of every page that a request fills, requests one after another.
        lengths: (B,) int64, rows of each request, of which there are T in total.

    Returns:
        (T,).
    """
    pages = (lengths + block_size - 1) // block_size  # [B]
    request = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)  # [T]
    row = torch.arange(len(request), device=lengths.device) - (lengths.cumsum(0) - lengths)[request]  # [T]
    start = starts[(pages.cumsum(0) - pages)[request] + row // block_size]  # [T]
    return torch.where(start < 0, start, start + row % block_size)  # [T]


def write_slots(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, tiled: bool = False) -> None:
    """Rows into their slots, in place; a row with a negative slot goes nowhere.

    int64 slots: slot times width passes 2^31 in large pools (SB-25).

    Args:
        cache: (block_num, block_size, N, D), contiguous.
        slots: (T,) int64.
        rows: (T, N, D), cast to the cache's dtype.
        tiled: whether the memory of each page is FRACTAL_NZ, [N * D / C0, block_size, C0], whatever the shape says.
    """
    skipped = slots < 0  # [T]
    if skipped.any():
        # Before any arithmetic: -1 would otherwise mean the last slot of the pool (SB-09).
        slots, rows = slots[~skipped], rows[~skipped]  # [T'], [T', N, D]
    rows = rows.to(cache.dtype)  # [T, N, D]
    if not tiled:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)  # [slots, N, D]
        return
    pages, block_size, N, D = cache.shape
    C0 = tile_width(cache.dtype)
    tiles = cache.view(pages, N * D // C0, block_size, C0)  # [pages, N*D/C0, P, C0]
    tiles[slots // block_size, :, slots % block_size] = rows.reshape(-1, N * D // C0, C0)  # [T, N*D/C0, C0]


def tile_width(dtype: torch.dtype) -> int:
    """C0 of FRACTAL_NZ: as many elements as fit into 32 bytes; fp32 and fp64 stand in for 16-bit floats."""
    return 32 if dtype == torch.int8 else 16

"""npu_scatter_nd_update: rows of any tensor replaced by index.

With caches seen as (slots, width) and slots as (T, 1) this is how servers write a cache that no other operator fits.
"""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.cache.scatter import MINUS_ONE
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, assumed, describe
from trueup.core.ops.registry import float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_scatter_nd_update_.md"
DTYPES = (torch.float32, torch.bool, torch.int64, torch.int8)  # and 16-bit floats


def _scatter_nd_contract(check: Check, input: Tensor, indices: Tensor, updates: Tensor) -> None:
    if indices.dim() < 2:
        check.fail(RELATION, "indices", describe(indices), "at least 2 axes, the last for one index: slots as (T, 1)",
                   PAGE)
    depth = indices.shape[-1]
    if not 1 <= depth <= input.dim():
        check.fail(RELATION, "indices", describe(indices),
                   f"1 to {input.dim()} on the last axis: an index into so many axes of input {list(input.shape)}",
                   PAGE)
    if updates.shape != indices.shape[:-1] + input.shape[depth:]:
        check.fail(RELATION, "updates", describe(updates),
                   f"{[*indices.shape[:-1], *input.shape[depth:]]}: the axes of indices but its last, then those of "
                   f"input {list(input.shape)} that the index leaves", PAGE, "SB-05")
    if indices.dtype not in (torch.int32, torch.int64):
        check.fail(RELATION, "indices", describe(indices), "int32 or int64", PAGE)
    if indices.numel():
        _check_indices(check, indices.reshape(-1, depth).t().tolist(), input)
    if not 1 <= input.dim() <= 8:
        check.fail(SIZE, "input", describe(input), "1 to 8 axes", PAGE)
    if input.dtype not in DTYPES and input.dtype not in float_dtypes(check):
        check.fail(DTYPE, "input", describe(input), "float16, bfloat16, float32, bool, int64 or int8", PAGE)
    if updates.dtype != input.dtype:
        check.fail(DTYPE, "updates", describe(updates), f"{input.dtype}, the dtype of input", PAGE)


def _check_indices(check: Check, columns: list[list[int]], input: Tensor) -> None:
    """Each column of indices inside its axis; no row named twice but in row or page 0, where padding goes."""
    for axis, (column, size) in enumerate(zip(columns, input.shape, strict=False)):
        if max(column) >= size:
            check.fail(RELATION, "indices", f"{max(column)} in column {axis}",
                       f"below {size}, axis {axis} of input {list(input.shape)}: the device does not look and writes "
                       "into foreign memory", PAGE)
        if min(column) < 0:
            check.fail(RELATION, "indices", f"{min(column)} in column {axis}",
                       "indices >= 0: no document gives negative ones a meaning; send padded rows to row 0 of the "
                       "dummy page", PAGE, "SB-09", unless=MINUS_ONE)
    places: list[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    if len(set(places)) != len(places):
        # The first column is a page, or a slot where the cache is seen as slots; rows with a -1 are left out.
        written = zip(places, columns[0], map(min, zip(*columns, strict=True)), strict=True)
        real = [place for place, first, low in written if first > 0 and low >= 0]
        if len(set(real)) != len(real):
            check.fail(RELATION, "indices", f"{next(place for place in real if real.count(place) > 1)} twice",
                       "an index of its own for each row of updates, but for padded rows, which may share 0: which "
                       "one stays is not defined", PAGE)


def _scatter_nd_in_place_contract(check: Check, input: Tensor, indices: Tensor, updates: Tensor) -> None:
    _scatter_nd_contract(check, input, indices, updates)
    if any(stride == 0 and size > 1 for stride, size in zip(input.stride(), input.shape, strict=True)):
        check.fail(RELATION, "input", f"expanded, {describe(input)}",
                   "memory of its own for each element: one write would show in several rows", PAGE)


def _scatter_nd_axes(call: Mapping[str, Any]) -> str:
    rank, depth, lead = call["input"].dim(), call["indices"].shape[-1], call["indices"].dim() - 1
    data = ["slots", "width"] if rank == 2 else [f"d{i}" for i in range(rank)]
    rows = ["T"] if lead == 1 else [f"t{i}" for i in range(lead)]
    written = "!" if call["in_place"] else ""
    return (f"input{written} [{' '.join(data)}], indices [{' '.join(rows)} {depth}], "
            f"updates [{' '.join(rows + data[depth:])}] -> output [{' '.join(data)}]")


def _axes(call: Mapping[str, Any]) -> str:
    return _scatter_nd_axes({**call, "in_place": False})


def _in_place_axes(call: Mapping[str, Any]) -> str:
    return _scatter_nd_axes({**call, "in_place": True})


def _form(depth: int, *shape: int) -> Mapping[str, Tensor]:
    meta = {"input": shape, "indices": (3, depth), "updates": (3, *shape[depth:])}
    return {name: torch.empty(axes, device="meta") for name, axes in meta.items()}


FORMS = (_form(1, 8, 4), _form(2, 2, 4, 4))


@reference("npu_scatter_nd_update_", _scatter_nd_in_place_contract, _in_place_axes, FORMS)
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``input[indices[i]] = updates[i]``, in place.

    An index of length a names an element of the first a axes; updates hold the rest.  Whoever writes a cache through
    a view of it must have a view: ``reshape`` of a strided cache is a copy, the write goes into it, and nothing says
    so.  ``view`` refuses instead.

    Args:
        input: 1 to 8 axes, any strides; fp32, fp16, bf16, bool, int64 or int8.
        indices: (..., a) int32 or int64, at least 2 axes, 1 <= a <= axes of input.  Bounds are not checked on a
            device, here they are.  Two rows with one index are refused, unless it begins with 0: row 0, or the
            dummy page, where any of them may stay.  Negative indices are refused;
            ``assume("scatter-minus-one")`` admits them, and their rows are left out.
        updates: the axes of indices but the last, then the axes of input from a on; input's dtype.

    Returns:
        ``input``.

    Source: torch_npu docs: npu_scatter_nd_update_.
    """
    depth = indices.shape[-1]
    places = indices.reshape(-1, depth).long()  # [T, a]
    rows = updates.reshape(len(places), *input.shape[depth:])  # [T, ...]
    if assumed(MINUS_ONE):
        named = (places >= 0).all(1)  # [T]
        places, rows = places[named], rows[named]  # [T', a], [T', ...]
    if depth == 1:
        return input.index_copy_(0, places[:, 0], rows)
    return input.index_put_(tuple(places.unbind(1)), rows)


@reference("npu_scatter_nd_update", _scatter_nd_contract, _axes, FORMS)
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of ``input`` after :func:`npu_scatter_nd_update_`; the arguments are the same.

    Source: torch_npu docs: npu_scatter_nd_update.
    """
    return npu_scatter_nd_update_(input.clone(memory_format=torch.contiguous_format), indices, updates)

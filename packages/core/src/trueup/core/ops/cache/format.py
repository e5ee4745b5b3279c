"""Memory formats: how a device lays a tensor out, which neither its shape nor its dtype shows.

ND is plain rows.  FRACTAL_NZ cuts a matrix (K, N) into tiles of 16 rows by C0 columns (32 bytes: 16 columns of 16
bits, 32 of int8) and stores it as (N/C0, K/16, 16, C0).  A cast changes neither shape nor values, so here it copies
the values and keeps a tag; some operators read the tag and take a tensor in one format only.

The tag belongs to the memory and dies with it.  It covers the tensor that was cast, and whatever has its shape,
strides and offset (``weight.data``, ``detach()``), no other view: a device finds row 4 of tiled memory nowhere near
where row 4 of plain memory would be, so it reads slices and transposes of FRACTAL_NZ memory wrongly.  Cast last,
after slicing and transposing.  A copy (``clone``, ``contiguous``) is not in the format of its source.
"""
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from trueup.core.ops.contract import DTYPE, RELATION, Check, describe, open_point
from trueup.core.ops.registry import reference, refuse_unbuilt

NCHW, ND, FRACTAL_NZ, NCDHW = 0, 2, 29, 30
CAST_PAGE = "op-plugin: docs/.../torch_npu-npu_format_cast.md"
ACLNN_PAGE = "ops-math: conversion/npu_format_cast/docs/aclnnNpuFormatCast.md"
CAST_SOURCE = "torch_npu: torch_npu/csrc/aten/common/FormatCastKernelNpu.cpp"
TILED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int32, torch.uint32)
BY_EXAMPLE = open_point(
    "format-cast-by-example",
    "npu_format_cast_ with a tensor as second argument: its page says that the first takes the format of the second "
    "and keeps its values; the source copies the values of the second, and changes no format.",
    "refused, but for a tensor and itself")


class _Tag(NamedTuple):
    format: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


_tags: WeakKeyDictionary[torch.UntypedStorage, _Tag] = WeakKeyDictionary()


def format_of(tensor: torch.Tensor) -> int:
    """The format of a tensor: FRACTAL_NZ (29) for what was cast to it, whole; else a plain one.

    Plain formats differ in name only.  A tensor that nobody cast has the one that torch_npu picks by its number of
    axes: NCHW (0) for four, NCDHW (30) for five, ND (2) for others.
    """
    if tensor.device.type == "npu":  # there torch_npu knows
        return int(torch.ops.npu.get_npu_format(tensor))
    tag = _tags.get(tensor.untyped_storage())
    if tag is None or (tag.format == FRACTAL_NZ and not _whole(tensor, tag)):
        return {4: NCHW, 5: NCDHW}.get(tensor.dim(), ND)
    return tag.format


def _whole(tensor: torch.Tensor, tag: _Tag) -> bool:
    return (tensor.shape, tensor.stride(), tensor.storage_offset()) == tag[1:]


def tag_as(tensor: torch.Tensor, format: int) -> torch.Tensor:
    """Note that the memory of ``tensor`` is in ``format``, moving nothing; returns ``tensor``."""
    _tags[tensor.untyped_storage()] = _Tag(format, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return tensor


def _cast(input: torch.Tensor, format: int) -> torch.Tensor:
    """``input`` in another format.  Between plain ones a device renames what is there, and so does this."""
    here = format_of(input)
    if here == format:
        return input
    if FRACTAL_NZ not in (here, format):
        return tag_as(input, format)
    return tag_as(input.clone(memory_format=torch.contiguous_format), format)


def _check_no_part(check: Check, argument: str, tensor: torch.Tensor) -> None:
    if tensor.device.type == "npu":
        return
    tag = _tags.get(tensor.untyped_storage())
    if tag is not None and tag.format == FRACTAL_NZ and not _whole(tensor, tag):
        check.fail(RELATION, argument, f"a view, {describe(tensor)}, of FRACTAL_NZ memory cast as {list(tag.shape)}",
                   "the whole tensor that was cast: tiled memory has no rows to slice and no axes to swap; slice and "
                   "transpose first, cast last", CAST_SOURCE)


def _check_cast(check: Check, input: torch.Tensor, format: int) -> None:
    """The rules of a cast to ``format``, whatever named it."""
    _check_no_part(check, "input", input)
    if format == FRACTAL_NZ:
        if not 2 <= input.dim() <= 6:
            check.fail(RELATION, "input", describe(input),
                       "2 to 6 axes, for FRACTAL_NZ tiles the last two; a vector silently stays ND", ACLNN_PAGE)
        if input.dtype not in TILED_DTYPES and not (check.host_floats and input.dtype == torch.float64):
            check.fail(DTYPE, "input", describe(input),
                       "float16, bfloat16, float32, int8, uint8, int32 or uint32, for FRACTAL_NZ", ACLNN_PAGE)


def _check_number(check: Check, acl_format: int) -> None:
    if acl_format not in (ND, FRACTAL_NZ):
        check.fail(RELATION, "acl_format", acl_format,
                   "2 (ND) or 29 (FRACTAL_NZ): the formats of convolutions are not built", CAST_PAGE)


def _letters(tensor: torch.Tensor | None, mark: str = "") -> str:
    """The axes of any tensor: K and N are those that FRACTAL_NZ tiles."""
    rank = 2 if tensor is None else tensor.dim()
    letters = [*(f"d{i}" for i in range(rank - 2)), "K", "N"]
    return " ".join(letter + mark for letter in letters[len(letters) - rank :])


def _cast_axes(call: Mapping[str, Any]) -> str:
    return f"input [{_letters(call['input'])}] -> output [{_letters(call['input'])}]"


def _in_place_axes(call: Mapping[str, Any]) -> str:
    return f"input! [{_letters(call['input'])}] -> input! [{_letters(call['input'])}]"


def _like_axes(call: Mapping[str, Any]) -> str:
    axes = _letters(call["input"])
    return f"input [{axes}], dst [{_letters(call['dst'], '_of_dst')}] -> output [{axes}]"


def _by_example_axes(call: Mapping[str, Any]) -> str:
    axes = _letters(call["input"])
    return f"input! [{axes}], src [{_letters(call['src'])}] -> input! [{axes}]"


def _get_axes(call: Mapping[str, Any]) -> str:
    return f"input [{_letters(call['input'])}] -> format []"


def _format_cast_contract(check: Check, input: torch.Tensor, acl_format: int, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    _check_number(check, acl_format)
    _check_cast(check, input, acl_format)


@reference("npu_format_cast", _format_cast_contract, _cast_axes)
def npu_format_cast(input: torch.Tensor, acl_format: int, **rest: Any) -> torch.Tensor:
    """``input`` in another memory format: same shape, same values.

    The result has memory of its own where tiles come or go; ``input`` itself comes back where it is in that format
    already, or where both formats are plain.  A device casts to FRACTAL_NZ only with
    ``torch.npu.config.allow_internal_format = True``.

    Args:
        input: for FRACTAL_NZ 2 to 6 axes, of which the last two are tiled; any strides.
        acl_format: 2 (ND) or 29 (FRACTAL_NZ).
        customize_dtype, input_dtype: not built; for packed 4-bit weights and other element types of Ascend 950.

    Source: torch_npu docs: npu_format_cast; what is copied, from torch_npu's FormatCastKernelNpu.cpp.
    """
    return _cast(input, acl_format)


def _format_cast_like_contract(check: Check, input: torch.Tensor, dst: torch.Tensor, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    _check_no_part(check, "dst", dst)
    _check_cast(check, input, format_of(dst))


@reference("npu_format_cast.Tensor", _format_cast_like_contract, _like_axes)
def npu_format_cast_like(input: torch.Tensor, dst: torch.Tensor, **rest: Any) -> torch.Tensor:
    """``input`` in the memory format of ``dst``, of which nothing else is read: :func:`npu_format_cast`.

    Args:
        input: as in npu_format_cast.
        dst: any tensor that is not a part of a FRACTAL_NZ tensor.
        customize_dtype, input_dtype: not built.

    Source: torch_npu docs: npu_format_cast.
    """
    return _cast(input, format_of(dst))


@reference("npu_format_cast_.acl_format", _format_cast_contract, _in_place_axes)
def npu_format_cast_in_place(input: torch.Tensor, acl_format: int, **rest: Any) -> torch.Tensor:
    """:func:`npu_format_cast` into ``input`` itself: into this one tensor object, not into its memory.

    Where tiles come or go ``input`` gets new memory.  What shared the old one keeps it, in the old format: after
    ``npu_format_cast_(layer.weight.data, 29)`` the weight is what it was.  Write
    ``layer.weight.data = npu_format_cast(layer.weight.data, 29)``.

    Args:
        input: as in npu_format_cast.
        acl_format: 2 (ND) or 29 (FRACTAL_NZ).
        customize_dtype, input_dtype: not built.

    Returns:
        ``input``.

    Source: torch_npu docs: npu_format_cast_; the new memory, from torch_npu's FormatCastKernelNpu.cpp.
    """
    cast = _cast(input, acl_format)
    if cast is not input:
        with torch.no_grad():
            input.set_(cast)  # type: ignore[call-overload]
    return input


def _format_cast_by_example_contract(check: Check, input: torch.Tensor, src: torch.Tensor, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if src is not input and (src.data_ptr(), src.shape, src.stride()) != (input.data_ptr(), input.shape,
                                                                          input.stride()):
        check.fail(RELATION, "src", describe(src),
                   "input itself: what happens with another tensor differs between the operator's page (input takes "
                   "its format) and torch_npu's source (input takes its values); give the number of the format, or "
                   "use copy_", CAST_SOURCE, unless=BY_EXAMPLE)
    _check_no_part(check, "src", src)
    _check_cast(check, input, format_of(src))


@reference("npu_format_cast_", _format_cast_by_example_contract, _by_example_axes)
def npu_format_cast_by_example(input: torch.Tensor, src: torch.Tensor, **rest: Any) -> torch.Tensor:
    """By its page: ``input`` takes the memory format of ``src``.  By torch_npu's source: the values of ``src``.

    So another ``src`` than ``input`` itself is refused, and nothing is left to do.
    ``assume("format-cast-by-example")`` admits others, and believes the page.

    Args:
        input: as in npu_format_cast.
        src: ``input``.
        customize_dtype, input_dtype: not built.

    Returns:
        ``input``.

    Source: torch_npu docs: npu_format_cast_; torch_npu: torch_npu/csrc/aten/common/FormatCastKernelNpu.cpp.
    """
    return npu_format_cast_in_place(input, format_of(src))


def _get_format_contract(check: Check, input: torch.Tensor) -> None:
    _check_no_part(check, "input", input)


@reference("get_npu_format", _get_format_contract, _get_axes)
def get_npu_format(input: torch.Tensor) -> int:
    """The number of a tensor's memory format: :func:`format_of`.

    2 (ND) and 29 (FRACTAL_NZ) for what was cast to them.  What nobody cast is plain, whether the number is 0 (four
    axes), 30 (five) or 2 (others): compare with 29, not with 2.  A view of a FRACTAL_NZ tensor is refused; a device
    answers 29, though no operator reads the view rightly.

    Source: torch_npu docs: get_npu_format, npu_format_cast (its example has a 0).
    """
    return format_of(input)

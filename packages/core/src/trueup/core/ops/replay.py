"""Makes recorded calls again, without a device: each is checked against its contract as a device would have it.

Tensors are rebuilt with the recorded shapes, dtypes and strides over zeros, which the system does not hand out before
somebody reads them, so a pool of gigabytes costs nothing.  Lengths and indices get their recorded values.  Where a
recording lacks these, the tensor has no data at all: a rule that reads it ends the check, instead of finding fault with
zeros that nobody passed.
"""
import json
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trueup.core.ops.cache.format import tag_as
from trueup.core.ops.capture import MASK_SIDE, VERSION, masks, tells, unpacked
from trueup.core.ops.contract import Check, ContractError, profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS


class Replayed(NamedTuple):
    """One call.  ``error``: the rule it breaks.  ``notes``: what could not be checked, and what is only suspicious."""

    number: int
    operator: str
    error: ContractError | None
    notes: tuple[str, ...]


def read(text: str) -> dict[str, Any] | None:
    """The recording in a file's text; None where it is none."""
    if not text.lstrip().startswith('{"capture"'):
        return None
    recording = json.loads(text)
    if recording["capture"] != VERSION:
        raise ValueError(f"the recording has format {recording['capture']}; this version of trueup reads {VERSION}")
    return recording


def replay(recording: dict[str, Any] | str | Path) -> Iterator[Replayed]:
    """Check every call of a recording under the profile 'device'.

    Args:
        recording: the file that :class:`trueup.core.ops.capture.capture` wrote, or what it holds.

    Raises:
        ValueError: it is no recording.
    """
    if not isinstance(recording, dict):
        found = read(Path(recording).read_text(encoding="utf-8"))
        if found is None:
            raise ValueError(f"{recording} is no recording; expected a file written by trueup.core.capture")
        recording = found
    load()
    for call in recording["calls"]:
        yield _check(call["number"], call["operator"], call["arguments"])


def _check(number: int, name: str, recorded: dict[str, Any]) -> Replayed:
    if name not in OPERATORS:
        return Replayed(number, name, None, ("not checked: trueup has no contract for it",))
    arguments, unknown = _rebuilt(recorded)
    notes: list[str] = []
    error = None
    with profile("device"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            OPERATORS[name].contract(Check(name), **arguments)
        except ContractError as broken:
            error = broken
        except Exception as odd:  # a contract that a strange call brings to its knees is news, too
            notes.append(f"checked only as far as no rule reads the values of {', '.join(unknown)}: they are unknown"
                         if unknown else f"not checked: its contract failed with {type(odd).__name__}: {odd}")
    return Replayed(number, name, error, (*notes, *(str(warning.message) for warning in warned)))


def _rebuilt(recorded: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments, and the names of those whose values are unknown."""
    sizes: dict[int, int] = {}
    for tensor in _described(recorded):
        sizes[tensor["memory"]] = max(_bytes(tensor), sizes.get(tensor["memory"], 0))
    storages = {number: _zeros(size) for number, size in sizes.items()}
    arguments = {name: _value(name, value, storages) for name, value in recorded.items()}
    return arguments, [name for name, value in arguments.items()
                       if any(tensor.is_meta for tensor in tree_leaves(value) if isinstance(tensor, Tensor))]


def _described(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _described(item)


def _bytes(tensor: dict[str, Any]) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor["shape"], tensor["stride"], strict=True))
    return (tensor["offset"] + last + 1) * _dtype(tensor).itemsize if 0 not in tensor["shape"] else 0


def _zeros(size: int) -> torch.UntypedStorage | None:
    """Zeros that take no memory until they are written: a recorded cache may be larger than this machine."""
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # more than this system promises; then it is described, and holds nothing
        return None
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


def _dtype(tensor: dict[str, Any]) -> torch.dtype:
    return getattr(torch, tensor["dtype"])


def _value(name: str, value: Any, storages: dict[int, torch.UntypedStorage | None]) -> Any:
    if isinstance(value, list):
        return [_value(name, item, storages) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" not in value:
        return getattr(torch, value["other"].removeprefix("torch."), value["other"])
    tensor = _tensor(name, value["tensor"], storages[value["tensor"]["memory"]])
    return tag_as(tensor, value["tensor"]["format"]) if "format" in value["tensor"] else tensor


def _tensor(name: str, recorded: dict[str, Any], storage: torch.UntypedStorage | None) -> Tensor:
    dtype, mask = _dtype(recorded), recorded.get("mask", "other")
    known = mask != "other" or bool(recorded.keys() & {"values", "packed"})
    if storage is None or (tells(name, dtype) and not known):
        return torch.empty_strided(recorded["shape"], recorded["stride"], dtype=dtype, device="meta")
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, recorded["offset"], recorded["shape"], recorded["stride"])
    if mask != "other":
        _distinct(tensor).copy_(masks((MASK_SIDE, MASK_SIDE), "cpu")[mask])
    elif known and tensor.numel():
        values = unpacked(recorded["packed"], dtype) if "packed" in recorded else torch.tensor(recorded["values"])
        _distinct(tensor).copy_(_distinct(values.view(tensor.shape), like=tensor))
    return tensor


def _distinct(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Without what an expanded tensor shows again and again, which cannot be written."""
    for axis, step in enumerate((tensor if like is None else like).stride()):
        if step == 0 and tensor.shape[axis]:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor

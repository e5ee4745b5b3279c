"""From declared axes to sizes: which letter, how many, and how many of them are real."""
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor: ``size`` elements, of which ``real`` are not padding.

    ``name`` is a letter, a word, a number or an expression of :mod:`trueup.core.ops.axes`, '?' where none is
    declared.  ``real`` is None where nothing says how many are real.
    """

    name: str
    size: int
    real: int | None

    @property
    def padded(self) -> bool:
        """Whether some of the elements are known to be padding."""
        return self.real is not None and self.real != self.size

    @property
    def count(self) -> str:
        """'4', or '3 of 4' where some are padding."""
        return f"{self.real} of {self.size}" if self.padded else str(self.size)

    def __str__(self) -> str:
        return self.count if self.name.isdigit() else f"{self.name} {self.count}"


class Declared(NamedTuple):
    """A tensor's shape, its declared axes, and its axes as a model's weights or an earlier call have them."""

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    known: tuple[Axis, ...] | None


def declared(letters: str, shape: Sequence[int]) -> tuple[Axis, ...] | None:
    """The axes of a parameter or cache, which hold no padding; None where ``letters`` are not one for each axis.

    >>> declared("H 2I", (8, 6))
    (Axis(name='H', size=8, real=8), Axis(name='2I', size=6, real=6))
    """
    names = letters.split()
    return tuple(map(Axis, names, shape, shape)) if len(names) == len(shape) else None


def seen_as(shape: Sequence[int], axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    """Known axes of a tensor that is handed over in this shape: all, or those that are not 1; None in other shapes."""
    for seen in (axes, tuple(axis for axis in axes if axis.name != "1")):
        if tuple(axis.size for axis in seen) == tuple(shape):
            return seen
    return None


def is_letter(name: str) -> bool:
    """Whether ``name`` is one letter or word, not a number, an expression or '?'."""
    return name.isidentifier()


def value_of(expression: str, values: Mapping[str, int | None]) -> int | None:
    """The value of an axis expression; None where a letter has none.

    >>> value_of("R+Dr", {"R": 512, "Dr": 64}), value_of("2I", {"I": 8}), value_of("T*K", {"T": 4})
    (576, 16, None)
    """
    total = 0
    for product in expression.split("+"):
        value = 1
        for factor, letter in re.findall(r"(\d*)(\w*|\?)", product):
            known = values.get(letter) if letter else 1
            if known is None:
                return None
            value *= int(factor or 1) * known
        total += value
    return total


def resolve(tensors: Sequence[Declared], batch: Mapping[str, Axis], owner: Mapping[str, int],
            equal: Mapping[str, str]) -> list[tuple[Axis, ...]]:
    """Name, size and real size of every axis of one call's tensors.

    Args:
        tensors: all of the call.  What is known of one renames letters of the others: a weight known as [E H 2I]
            makes ``x [S Din], weight [E Din Dout]`` an ``x [S H]``.
        batch: T and B, from the layout.
        owner: sizes of letters in the owner's own parameters, which hold no padding.
        equal: letters that equal an expression of others.
    """
    renamed: dict[str, str] = {}
    known: dict[str, Axis] = {}
    for tensor in tensors:
        for name, axis in zip(_names(tensor), tensor.known or (), strict=False):
            if is_letter(name) and not axis.name.isdigit():
                renamed.setdefault(name, axis.name)
                known.setdefault(axis.name, axis)

    def real(name: str, size: int) -> int | None:
        if axis := batch.get(name) or known.get(name):
            # Rows of another number than the batch has are not the batch's: nothing says which are real.
            return axis.real if axis.size == size else None
        # Only padding makes an axis longer than it is in the weights: heads, mostly.
        return min(size, owner.get(name, size))

    named = [(tuple(renamed.get(name, name) for name in _names(tensor)), tensor.shape) for tensor in tensors]
    sizes: dict[str, int | None] = {**owner, **{name: axis.size for name, axis in batch.items()}}
    reals: dict[str, int | None] = {**owner, **{name: axis.real for name, axis in batch.items()}}
    for names, shape in named:
        for name, size in zip(names, shape, strict=True):
            if is_letter(name):
                sizes[name], reals[name] = size, real(name, size)

    def resolved(name: str, size: int) -> Axis:
        if is_letter(name) and name not in equal:
            return Axis(name, size, real(name, size))
        expression = equal.get(name, name)
        return Axis(name, size, value_of(expression, reals) if value_of(expression, sizes) == size else None)

    return [tuple(map(resolved, names, shape)) for names, shape in named]


def _names(tensor: Declared) -> tuple[str, ...]:
    """The declared axes where they fit the rank."""
    if tensor.names is None or len(tensor.names) != len(tensor.shape):
        return ("?",) * len(tensor.shape)
    return tensor.names

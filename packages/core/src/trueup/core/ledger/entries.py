"""What a ledger holds, as plain data: operands, calls, steps."""
from dataclasses import dataclass, field
from typing import Any

from trueup.core.layout import Layout, Mode, Segment
from trueup.core.ledger.letters import Axis, is_letter, value_of


@dataclass(frozen=True)
class Operand:
    """A tensor that a call takes or returns, or a list of lengths on the host (dtype 'host list').

    ``written``: the call writes to it in place; ``unwritten``: a result that this form of the operator leaves alone.
    ``source`` names where it comes from, if that is known: a parameter, a cache pool, or '#3 y', a result of call 3.
    ``values`` are the elements in memory order, of integers only and of at most 16384.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    written: bool = False
    unwritten: bool = False
    source: str | None = None
    values: tuple[int, ...] | None = None

    @property
    def state(self) -> str:
        """'written', 'left unwritten', or ''."""
        return "written" if self.written else "left unwritten" if self.unwritten else ""

    @property
    def shape(self) -> str:
        """'[T 3 of 4, N 5 of 8, R 512]'."""
        return f"[{', '.join(map(str, self.axes))}]"


@dataclass(frozen=True)
class Call:
    """One operator call.

    ``owner`` is the module that made it ('layers.0.attention'), '' outside a model.  ``segment`` is the index of the
    layout's segment that it works on, None where it works on all token rows.  ``error`` is the message of a call that
    was refused; it has no results.
    """

    number: int
    operator: str
    owner: str
    layout: Layout | None
    segment: int | None
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    scalars: dict[str, Any]
    error: str | None = None

    @property
    def part(self) -> Segment | None:
        """The segment that the call works on."""
        return None if self.layout is None or self.segment is None else self.layout.segments[self.segment]

    @property
    def mode(self) -> Mode | None:
        """The mode of that segment."""
        return self.part.mode if self.part else None

    @property
    def batch(self) -> dict[str, Axis]:
        """T and B of that segment, else of the whole batch; empty without a layout."""
        if self.layout is None:
            return {}
        whole = self.part or self.layout
        tokens = self.part.operator_tokens if self.part else self.layout.padded_tokens
        return {"T": Axis("T", tokens, whole.real_tokens), "B": Axis("B", whole.padded_requests, whole.real_requests)}

    @property
    def place(self) -> str:
        """'layers.0.attention, decode'."""
        owner = self.owner or "outside a model"
        return f"{owner}, {self.mode.value}" if self.mode else owner

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Where one letter has two sizes in this call: 'T is 4 in kv, 3 in index'.  Empty in every good call."""
        seen: dict[str, dict[int, str]] = {}
        axes = [(axis, operand.name) for operand in self.operands + self.results for axis in operand.axes]
        for axis, name in axes:
            if is_letter(axis.name):
                seen.setdefault(axis.name, {}).setdefault(axis.size, name)
        found = [
            f"{letter} is " + ", ".join(f"{size} in {name}" for size, name in sizes.items())
            for letter, sizes in seen.items() if len(sizes) > 1
        ]
        sizes = {letter: next(iter(sizes)) for letter, sizes in seen.items()}
        for axis, name in axes:
            expected = value_of(axis.name, sizes)
            if not is_letter(axis.name) and expected not in (None, axis.size):
                found.append(f"{axis.name} is {expected}, but {axis.size} in {name}")
        return tuple(found)


@dataclass
class Step:
    """The calls of one engine round, or of whatever else was recorded at a time (``number`` is None then).

    ``layout`` is the batch that the round planned; a call's own ``layout`` is that of its forward.
    """

    number: int | None
    layout: Layout | None
    calls: list[Call] = field(default_factory=list)

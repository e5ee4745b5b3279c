"""What differs between two steps, call by call."""
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from trueup.core.ledger.entries import Call, Operand, Step
from trueup.core.ledger.letters import Axis
from trueup.core.ledger.render import heading, options, table, title, wrap


@dataclass(frozen=True)
class Change:
    """Tensors of one call, or an option, that changed alike: 'T 27' to 'T 3 of 4'; 'absent' where there is none."""

    names: tuple[str, ...]
    before: str
    after: str


@dataclass(frozen=True)
class Changed:
    """Calls of one operator that changed alike; ``places`` says whose they are."""

    operator: str
    places: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def heading(self) -> str:
        """The operator and its places."""
        return f"{self.operator} in {'; '.join(self.places)}"


@dataclass(frozen=True)
class Diff:
    """The calls that changed between two steps, and those that only one of them has.

    Calls are matched by owner, mode and operator, the first with the first.  Falsy where nothing differs.  Of values,
    only lengths and options are compared; a slot or a page id is not a shape.
    """

    before: str
    after: str
    changed: tuple[Changed, ...]
    only_before: tuple[Changed, ...]
    only_after: tuple[Changed, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_before or self.only_after)

    def text(self) -> str:
        """At most 100 columns wide."""
        lines = [*wrap(f"- {self.before}", 2), *wrap(f"+ {self.after}", 2)]
        for call in self.changed:
            lines += ["", *wrap(call.heading, 4)]
            for change in call.changes:
                lines += wrap(f"    {change.before} -> {change.after}   {', '.join(change.names)}", 8)
        for sign, calls in (("-", self.only_before), ("+", self.only_after)):
            lines += [line for call in calls for line in ("", *wrap(f"{sign} {call.heading}", 4))]
        return "\n".join(lines if self else [*lines, "", "nothing differs"])

    def data(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return asdict(self)

    def _repr_html_(self) -> str:
        rows = []
        for call in self.changed:
            rows.append(heading(call.operator, "; ".join(call.places)))
            for change in call.changes:
                names = ", ".join(f"<code>{escape(name)}</code>" for name in change.names)
                rows.append(f"<tr><td>{names}</td><td>{escape(change.before)}</td><td>{escape(change.after)}</td></tr>")
        for which, calls in (("before", self.only_before), ("after", self.only_after)):
            rows += [heading(call.operator, f"only {which}: {'; '.join(call.places)}") for call in calls]
        return table(("what", self.before, self.after), rows or ['<tr><td colspan="3">nothing differs</td></tr>'])


def compare(before: Step, after: Step) -> Diff:
    """Match the calls of two steps and keep what differs; equal changes of several owners become one entry."""
    first, second = _by_key(before.calls), _by_key(after.calls)
    changed: dict[tuple[str, tuple[Change, ...]], list[str]] = {}
    for key, call in first.items():
        if key in second and (changes := _changes(call, second[key])):
            changed.setdefault((call.operator, changes), []).append(call.place)
    return Diff(
        title(before), title(after),
        tuple(Changed(operator, _once(places), changes) for (operator, changes), places in changed.items()),
        _missing(first, second), _missing(second, first),
    )


_Key = tuple[str, str, str, int]


def _by_key(calls: list[Call]) -> dict[_Key, Call]:
    found: dict[_Key, Call] = {}
    for call in calls:
        mode, count = call.mode.value if call.mode else "", 0
        while (key := (call.owner, mode, call.operator, count)) in found:
            count += 1
        found[key] = call
    return found


def _changes(before: Call, after: Call) -> tuple[Change, ...]:
    alike: dict[tuple[str, str], list[str]] = {}
    tensors, others = _operands(before), _operands(after)
    for name in _union(tensors, others):
        if pair := _difference(tensors.get(name), others.get(name)):
            alike.setdefault(pair, []).append(name)
    found = [Change(tuple(names), *pair) for pair, names in alike.items()]
    given, other = options(before), options(after)
    for name in _union(given, other):
        if given.get(name) != other.get(name):
            found.append(Change((name,), given.get(name, "absent"), other.get(name, "absent")))
    return tuple(found)


def _operands(call: Call) -> dict[str, Operand]:
    return {o.name: o for o in call.operands} | {f"→ {o.name}": o for o in call.results}


def _difference(before: Operand | None, after: Operand | None) -> tuple[str, str] | None:
    """The axes that changed, of two tensors with the same ones; else all of both."""
    if before is None or after is None:
        return _whole(before), _whole(after)
    lengths = _is_lengths(before) and before.values != after.values
    if before.axes == after.axes and before.dtype == after.dtype and not lengths:
        return None
    if lengths or before.dtype != after.dtype or _names(before.axes) != _names(after.axes):
        return _whole(before), _whole(after)
    pairs = [(str(a), str(b)) for a, b in zip(before.axes, after.axes, strict=True) if a != b]
    return ", ".join(a for a, _ in pairs), ", ".join(b for _, b in pairs)


def _whole(operand: Operand | None) -> str:
    if operand is None:
        return "absent"
    return f"{operand.shape} {list(operand.values or ()) if _is_lengths(operand) else operand.dtype}"


def _is_lengths(operand: Operand) -> bool:
    """One number a request, on the host or on the device."""
    return operand.dtype == "host list" or (operand.values is not None and _names(operand.axes) == ["B"])


def _names(axes: tuple[Axis, ...]) -> list[str]:
    return [axis.name for axis in axes]


def _missing(here: dict[_Key, Call], there: dict[_Key, Call]) -> tuple[Changed, ...]:
    places: dict[str, list[str]] = {}
    for key, call in here.items():
        if key not in there:
            places.setdefault(call.operator, []).append(call.place)
    return tuple(Changed(operator, _once(found), ()) for operator, found in places.items())


def _union(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _once(places: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(places))

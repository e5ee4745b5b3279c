"""One token through a step: its index in every tensor that has a row for it."""
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from trueup.core.ledger.entries import Call, Operand, Step
from trueup.core.ledger.letters import Axis
from trueup.core.ledger.render import MOST_SHOWN, heading, table, title, wrap

Rows = tuple[int, ...]


class Stop(NamedTuple):
    """The token in one tensor: ``rows`` holds its indices on each axis, () where it has all of the axis."""

    call: Call
    operand: Operand
    result: bool
    rows: tuple[Rows, ...]

    @property
    def subscript(self) -> str:
        """As it would be written: 'kv[2]', 'out[:, 2]', 'k_cache[3, 17]', 'expanded_x[[1, 9]]'."""
        last = max(axis for axis, rows in enumerate(self.rows) if rows)
        return f"{self.operand.name}[{', '.join(map(_subscript, self.rows[: last + 1]))}]"

    @property
    def shape(self) -> str:
        """The token's part: '[N 5 of 8, R 512]'."""
        axes = zip(self.operand.axes, self.rows, strict=True)
        return f"[{', '.join(f'{a.name} {len(rows)}' if rows else str(a) for a, rows in axes if len(rows) != 1)}]"

    @property
    def values(self) -> tuple[int, ...] | None:
        """The token's part of a tensor of integers, where its index is on the first axis."""
        known = self.operand.values
        if known is None or not self.rows[0]:
            return None
        width = prod(axis.size for axis in self.operand.axes[1:])
        return tuple(value for row in self.rows[0] for value in known[row * width : (row + 1) * width])

    @property
    def note(self) -> str:
        """'float32', 'int64 = 402', 'float32, written'."""
        shown = self.values is not None and len(self.values) <= MOST_SHOWN
        values = f" = {', '.join(map(str, self.values or ()))}" if shown else ""
        return self.operand.dtype + values + ", written" * self.operand.written


@dataclass(frozen=True)
class Trail:
    """The stops of one token, in the order of the calls."""

    heading: str
    stops: tuple[Stop, ...]

    def text(self) -> str:
        """At most 100 columns wide."""
        lines = wrap(self.heading, 4)
        for place, operator, stops in self._calls():
            lines += ["", f"{operator}  ({place})"]
            for stop in stops:
                lines += wrap(f"    {'→ ' * stop.result + stop.subscript:<37} {stop.shape:<28} {stop.note}", 42)
        return "\n".join(lines)

    def markdown(self) -> str:
        """A table of Markdown; each row is one tensor."""
        rows = ["| call | tensor | the token's part | holds |", "|---|---|---|---|"]
        for place, operator, stops in self._calls():
            for i, stop in enumerate(stops):
                call = f"`{operator}`<br>{place}" if i == 0 else ""
                rows.append(f"| {call} | {'→ ' * stop.result}`{stop.subscript}` | {stop.shape} | {stop.note} |")
        return "\n".join(rows)

    def data(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {"heading": self.heading, "stops": [
            {"call": stop.call.number, "operator": stop.call.operator, "place": stop.call.place, "result": stop.result,
             "tensor": stop.operand.name, "rows": stop.rows, "shape": stop.shape, "values": stop.values}
            for stop in self.stops
        ]}

    def _repr_html_(self) -> str:
        rows = []
        for place, operator, stops in self._calls():
            rows.append(heading(operator, place))
            for stop in stops:
                rows.append(f"<tr><td>{'→ ' * stop.result}<code>{escape(stop.subscript)}</code></td>"
                            f"<td>{escape(stop.shape)}</td><td>{escape(stop.note)}</td></tr>")
        return table(("tensor", "the token's part", "holds"), rows, self.heading)

    def _calls(self) -> list[tuple[str, str, list[Stop]]]:
        groups = groupby(self.stops, lambda stop: stop.call.number)
        return [(stops[0].call.place, stops[0].call.operator, stops) for stops in (list(g) for _, g in groups)]


def follow(step: Step, request: int, row: int) -> Trail:
    """See :meth:`trueup.core.ledger.book.Ledger.follow`."""
    if step.layout is None or request not in step.layout.token_rows:
        here = list(step.layout.token_rows) if step.layout else []
        raise ValueError(f"request {request} has no token in this step; those that have: {here}")
    rows = step.layout.token_rows[request]
    if not 0 <= row < len(rows):
        raise ValueError(f"request {request} has {len(rows)} query rows in this step; row {row} is not one of them")
    stops: list[Stop] = []
    sorted_rows: dict[str, Rows] = {}  # by owner: where an MoE has put the token's K copies
    for call in step.calls:
        places = _places(call, request, row)
        if "T" in places and (found := _sorted_rows(call, places["T"][0])):
            sorted_rows[call.owner] = found
        if call.owner in sorted_rows:
            places["S"] = sorted_rows[call.owner]
        for result, operands in ((False, call.operands), (True, call.results)):
            for operand in operands:
                at = tuple(_rows(axis, call, places) for axis in operand.axes)
                if any(at) and not operand.unwritten:
                    stops.append(Stop(call, operand, result, at))
    layout = step.layout
    slot, position = layout.slots[rows[row]], layout.positions[rows[row]]
    return Trail(f"{title(step)}. Request {request}, position {position}: token row {rows[row]}, slot {slot} (page "
                 f"{slot // layout.page_size}, row {slot % layout.page_size})", tuple(stops))


def _places(call: Call, request: int, row: int) -> dict[str, Rows]:
    """The token's indices on the axes that a layout knows; nothing where the call works on another segment."""
    layout, part = call.layout, call.part
    if layout is None or request not in layout.token_rows or (part and request not in part.requests):
        return {}
    token = layout.token_rows[request][row]
    page, offset = divmod(layout.slots[token], layout.page_size)
    places: dict[str, Rows] = {"T": (token - (part.first_row if part else 0),), "pages": (page,), "P": (offset,)}
    return places | {"B": (part.requests.index(request),)} if part else places


def _rows(axis: Axis, call: Call, places: Mapping[str, Rows]) -> Rows:
    """The token's indices on one axis; on T*K or T*N all of its pairs."""
    if axis.name.startswith("T*") and "T" in places:
        each, token = axis.size // call.batch["T"].size, places["T"][0]
        return tuple(range(token * each, (token + 1) * each))
    whole = call.batch.get(axis.name)
    # An axis of another size than the batch's counts something else: one request of several, say.
    return places.get(axis.name, ()) if whole is None or whole.size == axis.size else ()


def _sorted_rows(call: Call, token: int) -> Rows:
    """Where npu_moe_init_routing_v2 puts the token's copies: row_idx_type 0 says it pair by pair."""
    index = next((o for o in call.results if o.name == "expanded_row_idx"), None)
    choices = next((o for o in call.operands if o.name == "expert_idx"), None)
    if index is None or choices is None or index.values is None or call.scalars.get("row_idx_type", 0) != 0:
        return ()
    K = choices.axes[1].size
    return index.values[token * K : (token + 1) * K]


def _subscript(rows: Rows) -> str:
    if len(rows) == 1:
        return str(rows[0])
    if rows and rows == tuple(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]}:{rows[-1] + 1}"
    return str(list(rows)) if rows else ":"

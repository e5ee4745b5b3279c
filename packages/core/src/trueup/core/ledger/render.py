"""A recorded step as text of at most 100 columns, and as an HTML table without styles of its own."""
import textwrap
from html import escape
from itertools import groupby

from trueup.core.layout import Layout
from trueup.core.ledger.entries import Call, Operand, Step

WIDTH = 100
MOST_SHOWN = 8  # elements of an integer tensor


def title(step: Step) -> str:
    """'round 2: decode 3 of 4 requests; 3 of 4 token rows'."""
    name = "recorded calls" if step.number is None else f"round {step.number}"
    return name if step.layout is None else f"{name}: {describe(step.layout)}"


def describe(layout: Layout) -> str:
    counts = [(s.mode.value, _of(s.real_requests, s.padded_requests)) for s in layout.segments]
    parts = [f"{mode} {count} request{'' if count == '1' else 's'}" for mode, count in counts]
    return f"{', '.join(parts)}; {_of(layout.real_tokens, layout.padded_tokens)} token rows"


def as_text(step: Step) -> str:
    lines = [title(step)]
    for place, calls in groupby(step.calls, lambda call: call.place):
        lines += ["", place]
        for call in calls:
            lines += _call_lines(call)
    return "\n".join(lines)


def as_html(step: Step) -> str:
    """A table with one row a tensor; padded sizes are in <b class="padded">, disagreements in rows of class problem."""
    rows = []
    for call in step.calls:
        rows.append(heading(f"{call.number} {call.operator}", call.place))
        rows += [_row("", operand, call) for operand in call.operands]
        rows += [_row("→ ", result, call) for result in call.results]
        if line := _option_line(call):
            rows.append(f'<tr><td>options</td><td colspan="2">{escape(line)}</td></tr>')
        rows += [f'<tr class="problem"><td colspan="3">{escape(problem)}</td></tr>' for problem in _problems(call)]
    return table(("tensor", "axes", "what"), rows, title(step))


def table(head: tuple[str, str, str], rows: list[str], caption: str = "") -> str:
    """Rows of HTML in a table below its caption, in a div of class trueup-ledger; the other texts are plain.

    The table itself has no class: pages and notebooks style such tables by themselves.
    """
    cells = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    top = f"<p>{escape(caption)}</p>\n" if caption else ""
    body = "\n".join(rows)
    return (f'<div class="trueup-ledger">\n{top}<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
            "</table>\n</div>")


def heading(name: str, places: str) -> str:
    """The row above the tensors of a call."""
    return f'<tr class="call"><th colspan="3" scope="colgroup"><code>{escape(name)}</code> {escape(places)}</th></tr>'


def note(operand: Operand, owner: str) -> str:
    """What else is known of a tensor: 'int64 = 128, 256, 0', 'float32, written, pools.rope[0]'."""
    source = (operand.source or "").removeprefix(f"{owner}.")
    shown = operand.values is not None and len(operand.values) <= MOST_SHOWN
    values = f" = {', '.join(map(str, operand.values or ()))}" if shown else ""
    return ", ".join(part for part in (operand.dtype, operand.state, source) if part) + values


def wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _call_lines(call: Call) -> list[str]:
    lines = [f"{call.number:>4} {call.operator}"]
    for arrow, operands in (("", call.operands), ("→ ", call.results)):
        for operand in operands:
            lines += wrap(f"{'':7}{arrow + operand.name:<25} {operand.shape:<30} {note(operand, call.owner)}", 33)
    if line := _option_line(call):
        lines += wrap(f"{'':7}{line}", 9)
    for problem in _problems(call):
        lines += wrap(f"{'':7}! {problem}", 9)
    return lines


def options(call: Call) -> dict[str, str]:
    """The arguments that are no tensors, as they would be written."""
    return {name: f"{value:.6g}" if isinstance(value, float) else repr(value) for name, value in call.scalars.items()}


def _option_line(call: Call) -> str:
    return ", ".join(f"{name}={value}" for name, value in options(call).items())


def _problems(call: Call) -> list[str]:
    return [*call.disagreements, *((call.error or "").splitlines())]


def _row(arrow: str, operand: Operand, call: Call) -> str:
    axes = ", ".join(
        f'{escape(axis.name)} <b class="padded">{axis.count}</b>' if axis.padded else escape(str(axis))
        for axis in operand.axes
    )
    return (f"<tr><td>{arrow}<code>{escape(operand.name)}</code></td><td>[{axes}]</td>"
            f"<td>{escape(note(operand, call.owner))}</td></tr>")


def _of(real: int, padded: int) -> str:
    return str(real) if real == padded else f"{real} of {padded}"

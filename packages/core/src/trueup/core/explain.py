"""``trueup explain``: what a message of a device, one of ours, or a recording means, and what to change."""
import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trueup.core.messages import MESSAGES, Message
from trueup.core.ops.reading.sheet import sheet, sheet_of_call, sheets

if TYPE_CHECKING:
    from trueup.core.ops.contract import ContractError
    from trueup.core.ops.reading.rules import Rule

HELP = "explain an error message, a log, or recorded operator calls"
WHAT = "a message in quotes, a log file, a file written by trueup.core.capture, or - for standard input"
UNKNOWN = ("no message in this is known; record the calls in `with trueup.core.capture('calls.json'):` and run "
           "`trueup explain calls.json`")
# Our own message, also where a logger has put something before each of its lines.
_OWN = re.compile(
    r"(?P<operator>(?:\w+::)?\w*npu_\w+(?:\.\w+)?): (?P<argument>[^\n]+?) is (?P<got>[\s\S]{0,2000}?)\n"
    r"[^\n]*?  expected  (?P<expected>[^\n]*)\n[^\n]*?  rule      (?P<level>[A-Z]+), from (?P<source>[^\n]*)"
    r"(?:\n[^\n]*?  see       (?P<case>SB-\d+)[^\n]*)?(?:\n[^\n]*?  open      (?P<open>[^\n]*))?")


class Finding(NamedTuple):
    """One thing that was recognised: what, and rows of (label, text) about it."""

    title: str
    rows: tuple[tuple[str, str], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MESSAGE_OR_FILE", help=WHAT)


def run(args: argparse.Namespace) -> int:
    """Print what is known.  Nothing known is a mistake of the user's: a message, and exit code 2."""
    print(render(explain(_text(args.what))))
    return 0


def explain(text: str) -> list[Finding]:
    """What is known of the messages in a text, or of the calls in a recording.

    Raises:
        ValueError: nothing in it is known; the message says what to do instead.
    """
    if text.lstrip().startswith('{"capture"'):
        return list(_recording(text))
    found = list(_own(text)) + list(_seen(text))
    if not found:
        raise ValueError(UNKNOWN)
    return found


def render(findings: list[Finding]) -> str:
    """As text, wrapped to the terminal."""
    width = min(shutil.get_terminal_size().columns, 110)
    blocks = []
    for finding in findings:
        lines = [textwrap.fill(finding.title, width)]
        lines += [textwrap.fill(f"  {label:<13}{text}", width, subsequent_indent=" " * 15, break_on_hyphens=False,
                                break_long_words=False) for label, text in finding.rows]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _text(what: str) -> str:
    if what == "-":
        return sys.stdin.read()
    if "\n" not in what and len(what) < 1000 and Path(what).is_file():
        return Path(what).read_text(encoding="utf-8", errors="replace")
    if re.fullmatch(r"\S+\.(?:json|log|txt)", what):
        raise ValueError(f"there is no file {what}; expected {WHAT}")
    return what


def _seen(text: str) -> Iterator[Finding]:
    """Messages of the table; those that name no cause only where no other does."""
    found = [(message, match) for message in MESSAGES if (match := re.search(message.pattern, text, re.DOTALL))]
    telling = [(message, match) for message, match in found if not message.bare]
    for message, match in telling or found:
        yield _explained(message, {name: value or "" for name, value in match.groupdict().items()})


def _explained(message: Message, said: dict[str, str]) -> Finding:
    named = said.get("operator") or said.get("traced") or ""
    called = sheet_of_call(said["call"]) if "call" in said else sheet(named)
    names = dict.fromkeys((*message.sheets, called if called in sheets() else None))
    pages = [f"operators/{name}/" for name in names if name]
    return Finding(message.title.en, (
        ("broken", message.broken.en.format(**said)),
        *((("arguments", ", ".join(message.arguments)),) if message.arguments else ()),
        ("change", message.change.en.format(**said)),
        *_reading(pages, message.case, message.pages),
        ("seen in", message.seen),
    ))


def _own(text: str) -> Iterator[Finding]:
    """Messages of our contracts."""
    said = {tuple(match.group("operator", "argument", "expected")): match.groupdict() for match in _OWN.finditer(text)}
    for parts in said.values():
        yield _broken(parts["operator"], parts)


def _broken(operator: str, said: dict[str, Any], title: str = "") -> Finding:
    stated = [rule for rule in _rules(operator) if rule.states(said["argument"], said["level"], said["expected"])]
    conditions = dict.fromkeys(rule.condition for rule in stated)
    return Finding(title or f"{operator} refuses {said['argument']}", (
        ("broken", textwrap.shorten(f"{said['argument']} is {said['got']}", 400)),
        ("change", f"expected: {said['expected']}"),
        ("rule", f"{said['level']}, from {said['source']}"),
        *(("refused when", condition) for condition in list(conditions)[:1]),
        *((("open", said["open"]),) if said["open"] else ()),
        *_reading([f"operators/{sheet(operator)}/"], said["case"], ()),
    ))


def _rules(operator: str) -> "tuple[Rule, ...]":
    from trueup.core.ops.load import load  # torch takes a second; a device's message needs none
    from trueup.core.ops.reading.rules import rules
    from trueup.core.ops.registry import OPERATORS

    load()
    return rules(operator) if operator in OPERATORS else ()


def _reading(pages: list[str], case: str | None, more: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if case:
        yield "looks like", f"{case} in the bug gallery"
    for page in (*pages, *((f"bugs/#{case.lower()}",) if case else ()), *more):
        yield "read", page


def _recording(text: str) -> Iterator[Finding]:
    from trueup.core.ops.replay import read, replay

    recording = read(text)
    assert recording is not None
    calls = list(replay(recording))
    broken: dict[tuple[str, str, str], list[int]] = {}
    errors: dict[tuple[str, str, str], ContractError] = {}
    notes: dict[str, list[int]] = {}
    for call in calls:
        for note in call.notes:
            notes.setdefault(f"{call.operator}: {note}", []).append(call.number)
        if call.error is not None:
            key = (call.operator, call.error.argument, call.error.expected)
            broken.setdefault(key, []).append(call.number)
            errors.setdefault(key, call.error)
    rows = [("checked", f"{len(calls)} calls, under the rules of a device"),
            ("broken", f"{sum(map(len, broken.values()))} calls break a rule" if broken else
             "no rule" if notes else "no rule: what fails then is none of the things that a contract can see")]
    rows += [("note", f"{note} ({_calls(numbers)})") for note, numbers in notes.items()]
    if failed := recording.get("error"):
        where = f"in call {failed['call']}" if failed["call"] else "outside an operator call"
        rows.append(("ended by", f"{failed['message'].splitlines()[0]}, {where}"))
    yield Finding("A recording of operator calls", tuple(rows))
    for (operator, argument, _), numbers in broken.items():
        error = errors[operator, argument, _]
        said = {"argument": argument, "got": error.got, "expected": error.expected, "level": error.rule,
                "source": error.source, "case": error.case,
                "open": error.open_point and f"nobody confirmed it: assume({error.open_point!r}) lets the call pass"}
        yield _broken(operator, said, f"{operator} refuses {argument} ({_calls(numbers)})")
    if failed:
        yield from _seen(failed["message"])


def _calls(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"call {numbers[0]}"
    shown = ", ".join(map(str, numbers[:5]))
    return f"calls {shown}{' ...' if len(numbers) > 5 else ''}, {len(numbers)} in all"

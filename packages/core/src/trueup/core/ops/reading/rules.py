"""The rules of an operator as data, read from the source of its contract: what the contract sheets show.

A contract says each rule once, where it checks it.  So nothing here can disagree with what is checked.
"""
import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch

from trueup.core.ops.contract import OPEN_POINTS, Level, OpenPoint
from trueup.core.ops.reading.contract_source import Fail, fails
from trueup.core.ops.reading.expressions import negated, written
from trueup.core.ops.registry import OPERATORS, schemas

_OPS = Path(__file__).parents[1]
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# Calls that only put a value into a readable form: the value's name says enough.
_FORMATTERS = {"describe", "list", "tuple", "sorted", "str", "repr"}


class Rule(NamedTuple):
    """One rule.  ``{N}`` in a text stands for what a call makes of it: a size, a dtype, an argument.

    ``condition``: refused when this is true, as Python.  ``case``: an SB number.  ``open_point``: a name for
    :func:`trueup.core.ops.contract.assume`.  ``line``: of the check in ``file``, a path in trueup/core/ops.
    """

    argument: str
    level: str
    expected: str
    condition: str
    source: str
    case: str | None
    open_point: str | None
    file: str
    line: int

    def states(self, argument: str, level: str, expected: str) -> bool:
        """Whether an error with these parts may come from this rule."""
        return level == self.level and _fits(self.argument, argument) and _fits(self.expected, expected)


@cache
def rules(operator: str) -> tuple[Rule, ...]:
    """The rules of an operator that is loaded, in the order in which its contract checks them.

    A check whose text depends on a test is a rule for each outcome; a check in a loop over names, for each name.

    Args:
        operator: a key of schemas.json.

    Raises:
        ValueError: no such operator, or a contract that this cannot read.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r} is unknown; expected one of {', '.join(sorted(OPERATORS))}")
    arguments = [a.name for a in torch._C.parse_schema(schemas()[operator]).arguments]
    found = (rule for fail in fails(OPERATORS[operator].contract, arguments) for rule in _alternatives(fail))
    return tuple(dict.fromkeys(found))


@cache
def open_points(operator: str) -> tuple[OpenPoint, ...]:
    """What is open about an operator that is loaded: points of its rules, those its kernel asks about, and others.

    Args:
        operator: a key of schemas.json.
    """
    found = [OPEN_POINTS[rule.open_point] for rule in rules(operator) if rule.open_point]
    return tuple(dict.fromkeys((*found, *_asked(OPERATORS[operator].kernel, set()), *OPERATORS[operator].points)))


def _asked(function: Any, seen: set[Any]) -> Iterator[OpenPoint]:
    """Open points that a function, or one of this package that it names, names."""
    code = [inspect.unwrap(function).__code__]
    for part in code:
        code += [constant for constant in part.co_consts if isinstance(constant, CodeType)]  # functions inside
    for name in dict.fromkeys(name for part in code for name in part.co_names):
        value = function.__globals__.get(name)
        if isinstance(value, OpenPoint):
            yield value
        elif inspect.isfunction(value) and value.__module__.startswith("trueup.core.ops") and value not in seen:
            seen.add(value)
            yield from _asked(value, seen)


def _place(file: Path) -> str:
    """A file's name, with the folder inside ops that it is in."""
    return file.relative_to(_OPS).as_posix() if file.is_relative_to(_OPS) else file.name


_Tests = dict[str, tuple[ast.expr, bool]]  # by source text: the test, and how it comes out


def _alternatives(fail: Fail) -> Iterator[Rule]:
    """A rule for each way in which the texts of one check can come out."""
    parts = [list(_texts(fail.arguments.get(name, ast.Constant(None))))
             for name in ("level", "argument", "expected", "source", "case", "unless")]
    for (level, a), (argument, b), (expected, c), (source, d), (case, e), (unless, f) in product(*parts):
        tests = _joined(a, b, c, d, e, f)
        if tests is None or any(isinstance(test, ast.Constant) and not test.value for test in fail.conditions):
            continue  # cannot happen
        if not isinstance(level, Level) or not isinstance(unless, OpenPoint | None):
            raise ValueError(f"{fail.file.name}:{fail.line}: level and open point must be constants")
        condition = _all([*fail.conditions, *(test if true else negated(test) for test, true in tests.values())])
        yield Rule(str(argument), str(level.name), str(expected), condition, str(source), case,
                   unless and unless.name, _place(fail.file), fail.line)


def _texts(node: ast.expr) -> Iterator[tuple[Any, _Tests]]:
    """What an expression comes out as: a constant, or a text with placeholders; and the tests that decide it."""
    match node:
        case ast.Constant(value):
            yield value, {}
        case ast.IfExp(test, body, orelse):
            for branch, true in ((body, True), (orelse, False)):
                for text, tests in _texts(branch):
                    if (both := _joined({ast.unparse(test): (test, true)}, tests)) is not None:
                        yield text, both
        case ast.JoinedStr(values):
            yield from _concatenated(values)
        case ast.BinOp(left, ast.Add(), right) if any(isinstance(n, ast.Constant) and isinstance(n.value, str)
                                                      for n in ast.walk(node)):
            yield from _concatenated([left, right])
        case ast.FormattedValue(value, conversion) if _is_known(value):
            known = eval(ast.unparse(value), {"torch": torch})
            yield repr(known) if conversion == ord("r") else str(known), {}
        case ast.FormattedValue(ast.IfExp(test, body, orelse)):
            yield from _texts(ast.IfExp(test, ast.FormattedValue(body, -1), ast.FormattedValue(orelse, -1)))
        case ast.FormattedValue(ast.Call(ast.Name("list") as of, [ast.IfExp(test, body, orelse)])):
            either = (ast.FormattedValue(ast.Call(of, [branch], []), -1) for branch in (body, orelse))
            yield from _texts(ast.IfExp(test, *either))
        case ast.FormattedValue(ast.Call(ast.Name("list"), [ast.Tuple(items) | ast.List(items)])):
            yield from _texts(ast.FormattedValue(ast.List(items), -1))
        case ast.FormattedValue(ast.Tuple(items) | ast.List(items) as whole):
            plain = [item.value if isinstance(item, ast.Starred) else
                     ast.Constant(repr(item.value)) if isinstance(item, ast.Constant) else item for item in items]
            ends = "[]" if isinstance(whole, ast.List) else "()"
            for text, tests in _concatenated(plain, ", "):
                yield f"{ends[0]}{text}{',' if ends == '()' and len(items) == 1 else ''}{ends[1]}", tests
        case ast.FormattedValue(value):
            yield from _texts(value)
        case _:
            yield f"{{{_name(node)}}}", {}


def _is_known(node: ast.expr) -> bool:
    """Whether it is the same in every call."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} <= {"torch", "list", "map", "sorted", "str"}


def _concatenated(nodes: list[ast.expr], between: str = "") -> Iterator[tuple[str, _Tests]]:
    for pieces in product(*(list(_texts(node)) for node in nodes)):
        if (tests := _joined(*(tests for _, tests in pieces))) is not None:
            yield between.join(str(text) for text, _ in pieces), tests


def _joined(*all_tests: _Tests) -> _Tests | None:
    """All of them together; None where two contradict each other."""
    joined: _Tests = {}
    for tests in all_tests:
        for text, (test, true) in tests.items():
            if joined.setdefault(text, (test, true))[1] != true:
                return None
    return joined


def _name(node: ast.expr) -> str:
    """What to call a placeholder."""
    match node:
        case ast.Call(func=ast.Name(id=formatter), args=[inner, *_]) if formatter in _FORMATTERS:
            return _name(inner)
        case ast.Call(func=ast.Name(id="one_or"), args=[inner]):
            return f"{_name(inner)} or 1"
        case ast.Call(func=ast.Attribute(value=ast.Constant(str()), attr="join"), args=[inner]):
            return _name(inner)
        case ast.Call(func=ast.Name(id="map"), args=[_, inner]):
            return _name(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="tolist" | "item")):
            return _name(inner)
    return re.sub(r"[{}]", "", written(node))


def _all(tests: list[ast.expr]) -> str:
    """All tests as one, each said once."""
    flat = [value for test in tests
            for value in (test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test])]
    once = list({ast.unparse(test): test for test in flat if not _says_nothing(test)}.values())
    return written(ast.BoolOp(ast.And(), once) if len(once) > 1 else once[0]) if once else "True"


def _says_nothing(test: ast.expr) -> bool:
    """A constant; and `if rest:`, before rules on what is in it."""
    return isinstance(test, ast.Constant) or (isinstance(test, ast.Name) and test.id == "rest")


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(".*?".join(re.escape(text) for text in _PLACEHOLDER.split(template)), re.DOTALL)


def _fits(template: str, text: str) -> bool:
    return _pattern(template).fullmatch(text) is not None

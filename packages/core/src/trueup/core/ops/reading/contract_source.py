"""Reads contract functions instead of running them: every ``check.fail`` one reaches, and the tests above it.

A contract is plain Python, so that it is fast and can say anything.  What it says as a whole is read from its source:
this file follows it into the helpers that take ``check`` as their first argument, and writes everything in the names
of the operator's own arguments.  :mod:`trueup.core.ops.reading.rules` makes text of it.
"""
import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trueup.core.ops.contract import Check
from trueup.core.ops.reading import expressions
from trueup.core.ops.reading.expressions import Names, entries, literal, negated, replaced, truth_of

_FIELDS = [name for name in inspect.signature(Check.fail).parameters if name != "self"]


class Fail(NamedTuple):
    """One ``check.fail``: its arguments by name, and the tests that are true when it is reached."""

    arguments: Names
    conditions: tuple[ast.expr, ...]
    file: Path
    line: int


def fails(contract: Callable[..., None], arguments: Sequence[str]) -> list[Fail]:
    """Every ``check.fail`` that ``contract`` reaches, in the order of the source.

    Args:
        arguments: of the operator, from its schema; those that the contract takes as ``**rest`` are among them.

    Raises:
        ValueError: a helper that is called in a way this reader does not follow.
    """
    node = _definition(contract).args
    named = {a.arg for a in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
    rest = [name for name in arguments if name not in named]
    bound: Names = {}
    if node.kwarg:
        bound[node.kwarg.arg] = expressions.dictionary({name: ast.Name(name) for name in rest})
    return list(_Walk(contract, bound).block(_definition(contract).body, ()))


class _Walk:
    """The way through one function; ``names`` is filled in as assignments and loops are passed."""

    def __init__(self, function: Callable[..., Any], names: Names, above: tuple[Callable[..., Any], ...] = ()) -> None:
        self.function, self.names, self.above = function, names, (*above, function)
        self.node = _definition(function)
        self.file = Path(inspect.getfile(function))
        self.check = (self.node.args.posonlyargs + self.node.args.args)[0].arg
        stored = [n.id for n in ast.walk(self.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.once = {name for name in stored if stored.count(name) == 1}
        local = {*stored, *(a.arg for a in ast.walk(self.node.args) if isinstance(a, ast.arg))}
        known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        self.constants = {name: value for name, value in known.items() if name not in local}

    def block(self, body: Sequence[ast.stmt], conditions: tuple[ast.expr, ...]) -> Iterator[Fail]:
        for statement in body:
            yield from self.statement(statement, conditions)
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                test = self.plain(statement.test)
                if truth_of(test):
                    return
                if not any(self.is_fail(inner) for inner in statement.body):  # what was refused needs no "not"
                    conditions = (*conditions, negated(test))

    def statement(self, node: ast.stmt, conditions: tuple[ast.expr, ...]) -> Iterator[Fail]:
        match node:
            case ast.If(test, body, orelse):
                yield from self.calls(test, conditions)
                plain = self.plain(test)
                truth = truth_of(plain)  # a helper's parameter may decide it
                if truth is not False:
                    yield from self.block(body, conditions if truth else (*conditions, plain))
                if not truth:
                    yield from self.block(orelse, conditions if truth is False else (*conditions, negated(plain)))
            case ast.For(target, over, body):
                yield from self.calls(over, conditions)
                items: Sequence[ast.expr | None] | None = self.items(self.plain(over))
                for item in [None] if items is None else items:
                    self.assign(target, item, loop=True)
                    yield from self.block(body, conditions)
            case ast.Assign([target], value):
                yield from self.calls(value, conditions)
                self.assign(target, self.plain(value))
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        yield from self.statement(child, conditions)
                    elif isinstance(child, ast.ExceptHandler | ast.match_case):
                        yield from self.block(child.body, conditions)
                    else:
                        yield from self.calls(child, conditions)

    def is_fail(self, node: ast.AST) -> bool:
        """Whether it is a check.fail: a call, or a statement that is one."""
        match node:
            case ast.Expr(inner):
                return self.is_fail(inner)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=self.check), attr="fail")):
                return True
        return False

    def assign(self, target: ast.expr, value: ast.expr | None, loop: bool = False) -> None:
        """Remember what a name stands for, where that reads better than the name: a text, or another name."""
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for t, v in zip(targets, values, strict=True):
                    self.assign(t, v, loop)
            case ast.Name(id=name), _:
                self.names.pop(name, None)
                if value is not None and (loop or (name in self.once and expressions.tells_more(value))):
                    self.names[name] = value

    def calls(self, node: ast.AST, conditions: tuple[ast.expr, ...]) -> Iterator[Fail]:
        if isinstance(node, ast.IfExp):
            yield from self.calls(node.body, (*conditions, self.plain(node.test)))
            yield from self.calls(node.orelse, (*conditions, negated(self.plain(node.test))))
            return
        for child in ast.iter_child_nodes(node):
            yield from self.calls(child, conditions)
        match node:
            case ast.Call() if self.is_fail(node):
                given = dict(zip(_FIELDS, node.args, strict=False)) | {k.arg or "": k.value for k in node.keywords}
                yield Fail({name: self.plain(value) for name, value in given.items()}, conditions, self.file,
                           node.lineno)
            case ast.Call(args=[ast.Name(id=self.check), *_]):
                for callee in self.callees(node.func):
                    if callee.__module__.startswith("trueup.core.ops") and callee not in self.above:
                        inner = _Walk(callee, self.bound(callee, node), self.above)
                        yield from inner.block(inner.node.body, conditions)

    def callees(self, func: ast.expr) -> list[Callable[..., Any]]:
        """The function that is called; all that may be, where it is picked from a dictionary."""
        found: Any = None
        with suppress(Exception):
            found = eval(compile(ast.Expression(func), "", "eval"), self.constants)
        if found is None and isinstance(func, ast.Subscript):
            with suppress(Exception):
                found = eval(compile(ast.Expression(func.value), "", "eval"), self.constants)
        functions = found.values() if isinstance(found, Mapping) else [found]
        options = [inspect.unwrap(function) for function in functions if callable(function)]
        if not options or not all(inspect.isfunction(option) for option in options):
            raise ValueError(f"{self.file.name}: cannot tell which function {ast.unparse(func)} is")
        return options

    def bound(self, callee: Callable[..., Any], call: ast.Call) -> Names:
        """The parameters of a helper, in the names of its caller."""
        node = _definition(callee).args
        params = [a.arg for a in (*node.posonlyargs, *node.args)][1:]
        placed = [item for value in call.args[1:] for item in self.spread(value)]
        bound: Names = dict(zip(params, placed, strict=False))
        if node.vararg:
            bound[node.vararg.arg] = ast.Tuple(placed[len(params):])
        left: Names = {}
        keyed: Names = {}
        for keyword in call.keywords:
            keyed |= {keyword.arg: self.plain(keyword.value)} if keyword.arg else entries(self.plain(keyword.value))
        for name, value in keyed.items():
            (bound if name in params or name in {a.arg for a in node.kwonlyargs} else left)[name] = value
        if node.kwarg:
            bound[node.kwarg.arg] = expressions.dictionary(left)
        for name, parameter in inspect.signature(callee).parameters.items():
            default = literal(parameter.default)
            if name not in bound and default is not None:
                bound[name] = default
        return bound

    def spread(self, value: ast.expr) -> list[ast.expr]:
        if isinstance(value, ast.Starred):
            return self.items(self.plain(value.value)) or []
        return [self.plain(value)]

    def items(self, over: ast.expr) -> list[ast.expr] | None:
        """What a loop goes through, where the source says it."""
        match over:
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                return elts
            case ast.Dict():
                return [ast.Constant(key) for key in entries(over)]
            case ast.Call(func=ast.Attribute(value=ast.Dict() as inner, attr="items")):
                return [ast.Tuple([ast.Constant(key), value]) for key, value in entries(inner).items()]
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner]):
                found = self.items(inner)
                return found and [ast.Tuple([ast.Constant(i), item]) for i, item in enumerate(found)]
            case ast.Call(func=ast.Name(id="zip"), args=args):
                columns = [self.items(arg) for arg in args]
                if all(column is not None for column in columns):
                    return [ast.Tuple(list(row)) for row in zip(*columns, strict=False)]
        return None

    def plain(self, node: ast.expr) -> ast.expr:
        """The expression with names replaced by what they stand for."""
        return replaced(node, self.names, self.constants, self.check)


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


@cache
def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    first = function.__code__.co_firstlineno  # of a decorator, where there is one
    for node in ast.walk(_tree(inspect.getfile(function))):
        if isinstance(node, ast.FunctionDef) and first in (node.lineno, *(d.lineno for d in node.decorator_list)):
            return node
    raise ValueError(f"{function.__qualname__} has no def of its own: a contract and its helpers need one")


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue)

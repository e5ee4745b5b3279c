"""Python expressions as data, for contract_source.py beside it: names replaced, tests turned around."""
import ast
import inspect
import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from trueup.core.ops.contract import Check, Level, OpenPoint, profile

Names = dict[str, ast.expr]  # what a name stands for
_MOST_TEXT = 80  # characters of a tuple that is written out in place of its name


def replaced(node: ast.expr, names: Names, constants: Mapping[str, Any], check: str) -> ast.expr:
    """A copy of ``node`` in which names are what they stand for, and what is known is worked out.

    Args:
        names: of locals and parameters.
        constants: names of the module, of which those are used that have a value one can read.
        check: the name of the contract's Check, on which calls such as float_dtypes(check) depend.
    """
    return _Replace(names, constants, check).visit(_copied(node))


def _copied(node: Any) -> Any:
    """A copy of a tree, without its places in the source."""
    if isinstance(node, list):
        return [_copied(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    made = type(node)(**{name: _copied(value) for name, value in ast.iter_fields(node)})
    if hasattr(node, "written"):
        made.written = node.written  # type: ignore[attr-defined]
    return made


class _Replace(ast.NodeTransformer):
    def __init__(self, names: Names, constants: Mapping[str, Any], check: str) -> None:
        self.names, self.constants, self.check = names, constants, check

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.names.get(node.id)
        if value is None and node.id in self.constants:
            value = literal(self.constants[node.id])
        if isinstance(value, ast.Dict) and not hasattr(value, "written"):
            value.written = node.id  # type: ignore[attr-defined]
        return value or node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(ast.Dict() as inner, "get"), args=[ast.Constant(str(key)), *default]):
                return entries(inner).get(key, default[0] if default else ast.Constant(None))
            case ast.Call(func=ast.Attribute(ast.Name(), "get"), args=[ast.Constant(str(key))]):
                return ast.Name(key)  # of what the caller gave, whatever it is called here
            case ast.Call(func=ast.Name(name), args=[ast.Name(self.check)]) if callable(self.constants.get(name)):
                with profile("device"):  # the dtypes that a device takes, for one
                    return literal(self.constants[name](Check(""))) or node
            case ast.Call(func=ast.Name(name)) if fields := getattr(self.constants.get(name), "_fields", None):
                keyed = {keyword.arg or "": keyword.value for keyword in node.keywords}
                return dictionary(dict(zip(fields, node.args, strict=False)) | keyed)
            case ast.Call(func=ast.Name(name)) if inspect.isfunction(self.constants.get(name)):
                made = inspect.signature(self.constants[name]).return_annotation
                if fields := getattr(made, "_fields", None):  # a record of arguments: each has its own name
                    return dictionary({field: ast.Name(field) for field in fields})
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        held = entries(node.value)
        if node.attr == "_fields" and held:
            return ast.Tuple([ast.Constant(name) for name in held])
        return held.get(node.attr, node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        items = list(entries(node.value).values()) or (node.value.elts if isinstance(node.value, ast.Tuple) else [])
        match node.slice:
            case ast.Constant(str(key)) if key in entries(node.value):
                return entries(node.value)[key]
            case ast.Slice(None, ast.Constant(int(end)), None) if items:
                return ast.Tuple(items[:end])
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        self.generic_visit(node)
        flat: list[ast.expr] = []
        for item in node.elts:
            spread = isinstance(item, ast.Starred) and isinstance(item.value, ast.Tuple)
            flat += item.value.elts if spread else [item]  # type: ignore[attr-defined]
        return ast.Tuple(flat)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(int() | float() as value)):
                return ast.Constant(-value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        and_ = isinstance(node.op, ast.And)
        left: list[ast.expr] = []
        for value in node.values:
            truth = truth_of(value)
            if truth is None or (value is node.values[-1] and not left):
                left.append(value)
            elif truth != and_:  # False and ..., True or ...: what follows is not looked at
                left.append(value)
                break
        if and_ and any(truth_of(value) is False for value in left):
            return ast.Constant(False)
        return ast.BoolOp(node.op, left) if len(left) > 1 else left[0]

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Compare(left, [ast.NotEq()], [right]) if ast.unparse(left) == ast.unparse(right):
                return ast.Constant(False)  # a loop over tensors compares the first with itself, too
            case ast.Compare(left, [ast.NotEq()], [ast.Constant(None) as none]) if not isinstance(left, ast.Constant):
                return ast.Compare(left, [ast.IsNot()], [none])
        with suppress(ValueError, TypeError):  # of constants
            sides = [ast.literal_eval(side) for side in (node.left, *node.comparators)]
            return ast.Constant(all(_COMPARED[type(op)](a, b) for op, a, b
                                    in zip(node.ops, sides, sides[1:], strict=False)))
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        truth = truth_of(node.test)
        return node if truth is None else node.body if truth else node.orelse


def truth_of(node: ast.expr) -> bool | None:
    """Whether a test is true, where that is known."""
    match node:
        case ast.Constant(value):
            return bool(value)
        case ast.Dict(keys):
            return bool(keys)
        case ast.UnaryOp(ast.Not(), operand):
            inner = truth_of(operand)
            return None if inner is None else not inner
    return None


_COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b}


class _Written(ast.NodeTransformer):
    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        return ast.Name(getattr(node, "written", "..."))


def written(node: ast.expr) -> str:
    """The source text; a dictionary that was looked through has its name there."""
    return ast.unparse(_Written().visit(_copied(node)))


_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.Lt: ast.GtE, ast.Gt: ast.LtE}
_OPPOSITE |= {opposite: op for op, opposite in _OPPOSITE.items()}


def negated(test: ast.expr) -> ast.expr:
    """The opposite of a test, as a person would write it."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return inner
        case ast.Constant(value):
            return ast.Constant(not value)
        case ast.Compare(left, [op], comparators):
            return ast.Compare(left, [_OPPOSITE[type(op)]()], comparators)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), [negated(v) for v in values])
    return ast.UnaryOp(ast.Not(), test)


def tells_more(value: ast.expr) -> bool:
    """Whether an expression reads better than the name it was given: a text, a constant, or another name for a tensor.

    A size does not: its letter says more.
    """
    match value:
        case ast.Name() | ast.Constant() | ast.Dict() | ast.JoinedStr():
            return True
        case ast.IfExp(_, body, orelse):
            return _is_text(body) and _is_text(orelse)
        case ast.BinOp(left, ast.Add(), _):
            return _is_text(left)
        case ast.Subscript(ast.Attribute(attr="shape")):
            return False
        case ast.Attribute(inner) | ast.Subscript(inner, ast.Constant()):
            return tells_more(inner)
    return False


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def dictionary(items: Names) -> ast.Dict:
    return ast.Dict([ast.Constant(key) for key in items], list(items.values()))


def entries(node: ast.expr) -> Names:
    """What a written-out dictionary holds; nothing for any other expression."""
    if not isinstance(node, ast.Dict):
        return {}
    return {key.value: value for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def literal(value: Any) -> ast.expr | None:
    """A value as source; None for what has none, or none that reads well."""
    if isinstance(value, str | int | float | Level | OpenPoint | None):
        return ast.Constant(value)  # type: ignore[arg-type]  # in memory a Constant holds any object
    if isinstance(value, torch.dtype):
        return ast.Attribute(ast.Name("torch"), str(value).removeprefix("torch."))
    if isinstance(value, Mapping | tuple | list | set | frozenset) and not hasattr(value, "_fields"):
        keys = [literal(key) for key in value]
        values = [literal(item) for item in value.values()] if isinstance(value, Mapping) else keys
        if None in keys or None in values:
            return None
        if isinstance(value, Mapping):
            return ast.Dict(keys, values)  # type: ignore[arg-type]
        written = ast.Tuple(keys)  # type: ignore[arg-type]
        return written if len(ast.unparse(written)) <= _MOST_TEXT else None
    return None

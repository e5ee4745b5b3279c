"""What the contract sheets show of the operators, as plain data."""
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import trueup.core
from trueup.core.ops.axes import Signature, signature
from trueup.core.ops.contract import OpenPoint
from trueup.core.ops.reading.rules import Rule, open_points, rules
from trueup.core.ops.reading.sheet import sheet
from trueup.core.ops.registry import OPERATORS, schemas

_LENGTHS = re.compile(r"^actual_s|^seq_lens|^group_(list|index)$")


class Form(NamedTuple):
    """One form of an operator: what chooses it (as Python, in one or several ways), and the axes of its tensors."""

    chosen: tuple[str, ...]
    axes: Signature


class Row(NamedTuple):
    """Rules that are one check: its arguments (``each`` in a condition stands for each of them)."""

    arguments: tuple[str, ...]
    rule: Rule
    conditions: tuple[str, ...]
    operators: tuple[str, ...]  # on the same sheet, that have it


class Doc(NamedTuple):
    """A kernel's docstring in parts."""

    first: str
    notes: tuple[str, ...]
    arguments: Mapping[str, str]
    returns: str


@functools.cache
def pages() -> dict[str, tuple[str, ...]]:
    """The operators of each sheet, the one that names it first."""
    trueup.core.load()
    found: dict[str, list[str]] = {}
    for name in OPERATORS:
        found.setdefault(sheet(name), []).append(name)
    return {page: tuple(sorted(names, key=lambda name: name.rpartition("::")[2] != page))
            for page, names in sorted(found.items(), key=lambda item: item[0].lstrip("_"))}


@functools.cache
def doc(operator: str) -> Doc:
    """The docstring of an operator's kernel."""
    text = inspect.cleandoc(OPERATORS[operator].kernel.__doc__ or "")
    body, *sections = re.split(r"^(Args|Returns|Raises|Source):", text, flags=re.MULTILINE)
    parts = dict(zip(sections[::2], sections[1::2], strict=True))
    first, *notes = [" ".join(part.split()) for part in body.strip().split("\n\n")]
    arguments: dict[str, str] = {}
    for names, words in re.findall(r"^    (\w[\w, ]*?): (.*(?:\n      .*)*)", parts.get("Args", ""), re.MULTILINE):
        arguments |= dict.fromkeys(names.split(", "), " ".join(words.split()))
    return Doc(first, tuple(notes), arguments, " ".join(parts.get("Returns", "").split()))


@functools.cache
def forms(operator: str) -> list[Form]:
    """The forms of an operator; those with the same axes are one."""
    arguments = torch._C.parse_schema(schemas()[operator]).arguments
    defaults = {a.name: a.default_value for a in arguments}
    given = OPERATORS[operator].forms
    found: dict[Signature, list[str]] = {}
    optional = {a.name for a in arguments if str(a.type).startswith("Optional")}
    for form, words in zip(given, _chosen(given, optional), strict=True):
        axes = signature(operator, defaults | dict(form))
        assert axes is not None
        found.setdefault(axes._replace(inputs=_Frozen(axes.inputs), sizes=_Frozen(axes.sizes)), []).append(words)
    return [Form(tuple(dict.fromkeys(filter(None, words))), axes) for axes, words in found.items()]


class _Frozen(dict[str, Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def _chosen(given: tuple[Mapping[str, Any], ...], optional: set[str]) -> list[str]:
    """What sets each form apart, in as few words as do it: layouts and modes, which tensors there are, then numbers."""
    facts = [_facts(form, optional) for form in given]
    words = [""] * len(given)
    for key in sorted(dict.fromkeys(key for fact in facts for key in fact), key=lambda key: key[0]):
        longer = [", ".join(filter(None, (word, fact.get(key, "")))) if words.count(word) > 1 else word
                  for word, fact in zip(words, facts, strict=True)]
        if len(set(longer)) > len(set(words)):
            words = longer
    return words


def _facts(form: Mapping[str, Any], optional: set[str]) -> dict[tuple[int, str], str]:
    facts = {}
    for name, value in form.items():
        if isinstance(value, torch.Tensor):
            if name in optional:
                facts[1, name] = f"{name} is not None"
            facts[3, name] = f"{name}.dim() == {value.dim()}"
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            facts[2, name] = f"len({name}) == {len(value)}"
        else:
            facts[0 if isinstance(value, str) else 2, name] = f"{name}={value!r}"
    return facts


def lengths(operator: str) -> dict[str, str]:
    """Arguments that hold lengths or counts of rows: 'list' on the host, or 'tensor'."""
    return {a.name: "list" if "int" in str(a.type).lower() else "tensor"
            for a in torch._C.parse_schema(schemas()[operator]).arguments if _LENGTHS.match(a.name)}


@functools.cache
def rows(names: tuple[str, ...]) -> list[Row]:
    """The rules of the operators of one sheet, each check once."""
    checks: dict[Rule, list[tuple[str, Rule]]] = {}
    for name in names:
        for rule in rules(name):
            checks.setdefault(rule._replace(argument="", condition=""), []).append((name, rule))
    merged = []
    for found in checks.values():
        arguments = tuple(dict.fromkeys(rule.argument for _, rule in found))
        conditions = tuple(dict.fromkeys(_each(rule, arguments) for _, rule in found))
        merged.append(Row(arguments, found[0][1], conditions, tuple(dict.fromkeys(name for name, _ in found))))
    return merged


def points(names: tuple[str, ...]) -> list[OpenPoint]:
    """What is open about the operators of one sheet."""
    return list(dict.fromkeys(point for name in names for point in open_points(name)))


def _each(rule: Rule, arguments: tuple[str, ...]) -> str:
    """The condition, in words that are the same for all arguments of a check."""
    if len(arguments) == 1:
        return rule.condition
    return re.sub(rf"(?<![\w.]){re.escape(rule.argument)}\b", "each", rule.condition)

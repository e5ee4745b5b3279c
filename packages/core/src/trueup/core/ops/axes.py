"""The axes of every tensor that goes into an operator or comes out of it, by letter.

Each operator declares them (``axes`` of :func:`trueup.core.ops.registry.reference`), because a size does not say what
it counts: 64 may be a rope width, a number of heads, or the rows of a batch.  This file is the notation;
:mod:`trueup.core.ledger` and the contract sheets read it.

A signature reads like a call: ``kv [T 1 1 R+Dr], k_cache! [pages P 1 Dr] -> rope [T 1 1 Dr]``.  An axis is a letter,
a word, a number, or a sum or product of them (``R+Dr``, ``T*K``, ``2I``); within one call a letter has one size.
``!`` marks what is written in place, which schemas do not always say, and ``~`` a result that the operator leaves
unwritten in this form.  Behind ``where``: sizes that follow from others.  ``out[0]`` is one tensor of a list, where
they differ.

Letters of this project: T token rows, B requests, N query heads, G key heads, K top-k, E experts, P page size, H
hidden, I inner width of an MLP, R latent rank, D head width (Dn nope, Dr rope, Dv value), Ni index heads and Di their
width, S rows sorted by expert (in attention: key rows).  ``width``, Din and Dout stand for whatever a caller's weights
are wide: a ledger replaces them.
"""
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from trueup.core.ops.registry import OPERATORS

Axes = tuple[str, ...]


class Signature(NamedTuple):
    """The axes of one form of an operator.  Keys of ``inputs`` are the schema's argument names."""

    inputs: dict[str, Axes]
    outputs: tuple[tuple[str, Axes], ...]
    written: frozenset[str]
    unwritten: frozenset[str]
    sizes: dict[str, str]  # letter to the expression that it equals


def signature(operator: str, arguments: Mapping[str, Any]) -> Signature | None:
    """The axes of one call; None for an operator that is not declared.

    Args:
        operator: its key in schemas.json, without ``npu::``.
        arguments: by schema name, defaults included; some operators have several forms.
    """
    if operator not in OPERATORS:
        return None
    form = OPERATORS[operator].axes
    return parse(form if isinstance(form, str) else form(arguments))


@cache
def parse(text: str) -> Signature:
    """Read the notation of this file.

    >>> parse("x [T 2I], cache! [pages P] -> y [T I] where S = T*K").outputs
    (('y', ('T', 'I')),)
    """
    text, _, where = text.partition(" where ")
    takes, _, returns = text.partition("->")
    inputs, outputs = _operands(takes), _operands(returns)
    written, unwritten = (frozenset(name for name, m, _ in inputs + outputs if m == mark) for mark in "!~")
    sizes = dict(equation.replace(" ", "").split("=") for equation in where.split(",") if equation)
    return Signature({name: axes for name, _, axes in inputs}, tuple((name, axes) for name, _, axes in outputs),
                     written, unwritten, sizes)


def _operands(text: str) -> list[tuple[str, str, Axes]]:
    operand = r"(\w+(?:\[\d+\])?)([!~]?) \[([^\]]*)\]"
    return [(name, mark, tuple(axes.split())) for name, mark, axes in re.findall(operand, text)]

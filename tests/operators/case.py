"""What a family file of this folder says of an operator, and how the tests call it.

A call is a dictionary of all that is given, by the schema's argument names.  The same calls serve three tests: the
kernel against a naive float64 version, both operator paths against each other, and the real torch_npu's shape
inference against ours.
"""
import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from trueup.core.ops.registry import schemas

Call = dict[str, Any]


class Wrong(NamedTuple):
    """A legal call with some arguments changed, which must be refused.

    ``change``: from the legal call to the arguments that replace its own (an argument of value ``LEFT_OUT`` is
    dropped).  ``level``: of the rule.  ``message``: a regular expression in the error.  ``of``: makes the legal call,
    where the first random one of the operator would be of another form.
    """

    name: str
    change: Callable[[Call], Call]
    level: str
    message: str
    of: Callable[[Random], Call] | None = None


class Case(NamedTuple):
    """One operator.

    ``legal``: a random call that a device takes (profile 'device', 16-bit floats), from small sizes, of every form.
    ``naive``: the operator once more, written for clarity from its documents alone: takes the same arguments, floats
    in float64, writes in place what the operator writes, and returns its results, with :func:`unwritten` where a
    device leaves memory alone, and a meta tensor where nothing but the number of axes is known.
    ``wrong``: calls to be refused.
    ``wide``: how far fp32 results may be off, of the largest; more than 1e-5 where they come from rounded 16-bit ones.
    """

    legal: Callable[[Random], Call]
    naive: Callable[..., Any]
    wrong: list[Wrong]
    wide: float = 1e-5


LEFT_OUT = object()


def floats(r: Random, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Normal numbers, drawn from ``r`` alone."""
    generator = torch.Generator().manual_seed(r.getrandbits(40))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def ints(r: Random, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Integers from ``low`` up to but without ``high``."""
    generator = torch.Generator().manual_seed(r.getrandbits(40))
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def half(r: Random) -> torch.dtype:
    return r.choice((torch.float16, torch.bfloat16))


def unwritten(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """What a naive version returns where a device writes nothing."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype)


def invoke(function: Callable[..., Any], name: str, call: Call) -> Any:
    """Call an operator, or a function with its signature: by place what the schema has before its ``*``."""
    arguments = torch._C.parse_schema(schemas()[name]).arguments
    unknown = call.keys() - {a.name for a in arguments}
    if unknown:
        raise TypeError(f"{name} has no argument {', '.join(sorted(unknown))}")
    placed, left_out = [], False
    for a in arguments:
        if a.kwarg_only:
            break
        left_out = left_out or a.name not in call
        if not left_out:
            placed.append(call[a.name])
    by_place = {a.name for a in arguments[: len(placed)]}
    return function(*placed, **{k: v for k, v in call.items() if k not in by_place})


def changed(call: Call, change: Callable[[Call], Call]) -> Call:
    return {k: v for k, v in (call | change(call)).items() if v is not LEFT_OUT}


def copied(call: Call, dtype: torch.dtype | None = None) -> Call:
    """A copy of its own memory, floats as ``dtype``; tensors that share memory share it in the copy."""
    known: dict[tuple, Tensor] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.copy(x)
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if key not in known:
            known[key] = x.to(dtype, copy=True) if dtype and x.dtype.is_floating_point else x.clone()
        return known[key]

    return tree_map(one, call)


def cases() -> dict[str, Case]:
    """Every operator's case, from the files beside this one."""
    found: dict[str, Case] = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if not file.stem.startswith(("test_", "case")):
            found |= importlib.import_module(f"operators.{file.stem}").CASES
    return found

"""Joins a contract and a reference kernel under the name of an operator.

A family file declares its operators with :func:`reference`; :mod:`trueup.core.ops.load` registers what is
declared here with PyTorch's dispatcher.  Everything above calls ``torch.ops.npu.X``.
"""
import functools
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from trueup.core.ops.contract import RELATION, Check, OpenPoint, describe

Axes = str | Callable[[Mapping[str, Any]], str]


class Operator(NamedTuple):
    """One operator: contract and kernel take the operator's own arguments; :func:`reference` explains the rest."""

    name: str
    contract: Callable[..., None]
    kernel: Callable[..., Any]
    axes: Axes
    forms: tuple[Mapping[str, Any], ...]
    points: tuple[OpenPoint, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.contract(Check(self.name), *args, **kwargs)
        return self.kernel(*args, **kwargs)


OPERATORS: dict[str, Operator] = {}


def reference(name: str, contract: Callable[..., None], axes: Axes,
              forms: tuple[Mapping[str, Any], ...] = ({},), points: tuple[OpenPoint, ...] = ()
              ) -> Callable[[Callable], Callable]:
    """Declare the decorated function as the reference kernel of ``torch.ops.npu.<name>``.

    Both the kernel and ``contract(check, ...)`` take the schema's arguments, with the schema's names and
    defaults: the dispatcher may leave out an argument that equals its default.

    Args:
        name: the key in schemas.json: ``npu_x``, ``npu_x.out`` for an overload, ``atb::x`` in another namespace.
        contract: raises ContractError for a call that a device refuses, misreads or answers wrongly.
        axes: the letters of every tensor (notation: ops/axes.py), or a function from the arguments of a call to
            them, where the operator has several forms.
        forms: arguments that choose each of these forms, for the sheet that lists them all; ({},) is the only one.
        points: open points of its results that neither the contract nor the kernel asks about.
    """

    def declare(kernel: Callable) -> Callable:
        OPERATORS[name] = Operator(name, contract, kernel, axes, forms, points)
        return kernel

    return declare


def qualified(name: str) -> tuple[str, str, str]:
    """(namespace, operator, overload) of a key in schemas.json; overload '' is the default one."""
    namespace, _, rest = name.rpartition("::")
    operator, _, overload = rest.partition(".")
    return namespace or "npu", operator, overload


def packet(name: str) -> Any:
    """What the dispatcher answers for a key in schemas.json, once load() has run."""
    namespace, operator, overload = qualified(name)
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def name_of(func: Any) -> str:
    """The key in schemas.json of an operator that a TorchDispatchMode was handed."""
    overload = func._schema.overload_name
    return func._schema.name.removeprefix("npu::") + (f".{overload}" if overload else "")


@functools.cache
def schemas() -> dict[str, str]:
    """Operator schemas by name, as torch_npu 2.13.0's dispatcher prints them."""
    return json.loads(files("trueup.core.ops").joinpath("schemas.json").read_text(encoding="utf-8"))


def refuse_unbuilt(check: Check, rest: dict[str, Any], neutral: dict[str, Any] | None = None) -> None:
    """Refuse arguments that the reference kernel does not implement, instead of ignoring them.

    ``rest`` holds the arguments a kernel takes but does not use; each must be None, or its value in ``neutral``.
    """
    for argument, value in rest.items():
        harmless = (neutral or {}).get(argument)
        if value is not None and value != harmless:
            check.fail(RELATION, argument, _said(value),
                       f"{harmless!r}: other forms of this operator are not built yet", "trueup: ops/registry.py")


def _said(value: Any) -> str:
    """A value as a message has it: of tensors, also in a list, nothing but what they are."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    return f"[{', '.join(map(_said, value))}]" if isinstance(value, list | tuple) else repr(value)


def poison(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a device leaves unwritten: NaN, or the largest integer, so that a wrong read shows."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel computes in: fp32, as the device does; fp64 where the input is fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_DEVICE_FLOATS = (torch.float16, torch.bfloat16)
_HOST_FLOATS = (*_DEVICE_FLOATS, torch.float32, torch.float64)


def float_dtypes(check: Check) -> tuple[torch.dtype, ...]:
    """16-bit floats, as most operators demand; a laptop's profile also takes fp32 and fp64."""
    return _HOST_FLOATS if check.host_floats else _DEVICE_FLOATS

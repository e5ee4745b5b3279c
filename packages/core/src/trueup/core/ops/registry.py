"""Joins a contract and a reference kernel under the name of an operator.

A family file declares its operators with :func:`reference`; :mod:`trueup.core.ops.load` registers what is
declared here with PyTorch's dispatcher.  Everything above calls ``torch.ops.npu.X``.
"""
import functools
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from trueup.core.ops.contract import RELATION, Check, describe


class Operator(NamedTuple):
    """One operator: contract and kernel take the operator's own arguments."""

    name: str
    contract: Callable[..., None]
    kernel: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.contract(Check(self.name), *args, **kwargs)
        return self.kernel(*args, **kwargs)


OPERATORS: dict[str, Operator] = {}


def reference(name: str, contract: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Declare the decorated function as the reference kernel of ``torch.ops.npu.<name>``.

    Both the kernel and ``contract(check, ...)`` take the schema's arguments, with the schema's names and
    defaults: the dispatcher may leave out an argument that equals its default.
    """

    def declare(kernel: Callable) -> Callable:
        OPERATORS[name] = Operator(name, contract, kernel)
        return kernel

    return declare


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
            got = describe(value) if isinstance(value, torch.Tensor) else repr(value)
            check.fail(RELATION, argument, got, f"{harmless!r}: other forms of this operator are not built yet",
                       "trueup: ops/registry.py")


def poison(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a device leaves unwritten: NaN, or the largest integer, so that a wrong read shows."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel computes in: fp32, as the device does; fp64 where the input is fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def float_dtypes(check: Check) -> tuple[torch.dtype, ...]:
    """16-bit floats, as most operators demand; a laptop's profile also takes fp32 and fp64."""
    device = (torch.float16, torch.bfloat16)
    return (*device, torch.float32, torch.float64) if check.host_floats else device

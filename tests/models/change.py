"""Operator calls of a model with some arguments replaced on their way to the kernel."""
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from trueup.core.ops.registry import name_of

Arguments = dict[str, Any]
Swap = Callable[[Arguments], Arguments | None]  # what to replace; None: not applicable to this call


class Change(TorchDispatchMode):
    """Counts operator calls, and applies one swap: to the call of one number, or to all calls of one operator."""

    def __init__(self, which: int | str | None = None, swap: Swap | None = None) -> None:
        super().__init__()
        self.which, self.swap, self.applied = which, swap, False
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "npu":
            return func(*args, **kwargs)
        self.calls.append(name_of(func))
        if self.which not in (len(self.calls) - 1, self.calls[-1]) or self.swap is None:
            return func(*args, **kwargs)
        schema = func._schema.arguments
        given = {a.name: a.default_value for a in schema}
        given |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        replaced = self.swap(given)
        if replaced is None:
            return func(*args, **kwargs)
        self.applied = True
        given |= replaced
        by_place = [a.name for a in schema if not a.kwarg_only]
        return func(*(given[n] for n in by_place), **{a.name: given[a.name] for a in schema if a.kwarg_only})

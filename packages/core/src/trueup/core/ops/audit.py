"""Check every operator call of a block under the device's rules, whichever kernel answers it.

On a laptop the reference kernels check their contract anyway, in the profile that is active.  On an NPU the kernels
are torch_npu's and check little: there, and for a laptop run that shall hold on a device, this mode is the check.
It also sees calls made inside other people's code.
"""
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from trueup.core.ops.contract import Check, profile
from trueup.core.ops.registry import OPERATORS, name_of


class audit(TorchDispatchMode):
    """``with audit() as calls:`` - ``calls.checked`` and ``calls.unknown`` count calls by operator name.

    A contract reads lengths and indices that lie on the device, so each call waits for it: for finding faults, never
    for measuring, and not inside a graph capture.

    Raises:
        ContractError: at the first call that breaks a rule of the profile 'device'.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("npu", "atb"):
            self._check(name_of(func), args, kwargs)
        return func(*args, **kwargs)

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        if (operator := OPERATORS.get(name)) is None:
            self.unknown[name] += 1
            return
        with profile("device"):
            operator.contract(Check(name), *args, **kwargs)
        self.checked[name] += 1

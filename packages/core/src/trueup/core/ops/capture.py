"""Records operator calls in a file, so that they can be checked where there is no device.

What contracts read is recorded: shapes, dtypes, strides, lengths, indices.  Data is not: a recording has no activations
and no weights in it.  :mod:`trueup.core.ops.replay` makes the calls again.
"""
import base64
import json
import platform
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.core import hostnpu
from trueup.core.ops.cache.format import FRACTAL_NZ, format_of
from trueup.core.ops.registry import name_of

VERSION = 1
LISTED = 4096  # lengths and indices up to this size are written as numbers, for people to read
MOST_VALUES = 2**20  # and up to this size, packed
MASK_SIDE = 2048
_DATA = re.compile(r"x\d?|query|key|value|input|input_ids|src|dst|tokens|updates|bias|weight\w*|\w*(_cache|scale)")
_END = "\n]}\n"


def tells(argument: str, dtype: torch.dtype) -> bool:
    """Whether a tensor says how a call is meant (lengths, indices, masks); floats and int8 are a model's data.

    So are integers of some arguments: 4-bit weights packed into int32, scales packed into int64.
    """
    if "mask" in argument:
        return True
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.int8 or _DATA.fullmatch(argument))


def packed(tensor: Tensor) -> str:
    """The values of a tensor, in the order of its axes, as text: base64 of their compressed bytes."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)  # [bytes]
    return base64.b64encode(zlib.compress(values.numpy().tobytes(), 1)).decode()


def unpacked(text: str, dtype: torch.dtype) -> Tensor:
    """(n,): what :func:`packed` made text of."""
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=dtype)


def masks(shape: tuple[int, ...], device: torch.device | str) -> dict[str, Tensor]:
    """What a causal mask of this shape may hold, right or wrong, by name."""
    ones = torch.ones(shape, dtype=torch.bool, device=device)
    return {"triu(1)": ones.triu(1), "triu(0)": ones.triu(0), "tril(0)": ones.tril(0), "zeros": ~ones}


class capture(TorchDispatchMode):
    """``with capture("calls.json"):`` - records every ``torch.ops.npu`` and ``torch.ops.atb`` call of this thread.

    Works on a device and without one, inside other people's code too.  Each call is written before it is made, so the
    file holds the one that failed, even where the process dies of it.  ``trueup explain calls.json`` checks the calls.

    A device answers late: set ``ASCEND_LAUNCH_BLOCKING=1``, so that an error comes out of the call that caused it.
    Lengths and indices are read from the device, which makes each call wait: not for measuring, and not inside a
    graph capture.

    Attributes:
        calls: what has been recorded, as plain data.
        error: ``{"call": number or None, "message": ...}`` where the block ended by an exception.

    Args:
        file: where to write, or None to keep the calls only in memory.  An existing file is replaced.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None
        self._path = Path(file) if file is not None else None
        self._file: TextIO | None = None
        self._end = 0  # where the next call goes in the file
        self._masks: dict[tuple[Any, ...], tuple[Tensor, str]] = {}
        self._failed: tuple[int, BaseException] | None = None

    def __enter__(self) -> "capture":
        if self._path:
            self._file = self._path.open("w", encoding="utf-8")
            head = json.dumps({"capture": VERSION, "versions": _versions()})
            self._write(head.removesuffix("}") + ', "calls": [', _END)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            number = self._failed[0] if self._failed and self._failed[1] is error else None
            self.error = {"call": number, "message": f"{type(error).__name__}: {error}"}
        if self._file:
            if self.error:
                self._write("", f'\n], "error": {json.dumps(self.error)}}}\n')
            self._file.close()
            self._file = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("npu", "atb"):
            return func(*args, **kwargs)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        call = {"number": len(self.calls) + 1, "operator": name_of(func), "arguments": self.recorded(given)}
        self.calls.append(call)
        if self._file:
            self._write(f"{',' if len(self.calls) > 1 else ''}\n{json.dumps(call)}", _END)
        try:
            return func(*args, **kwargs)
        except BaseException as error:
            self._failed = (len(self.calls), error)
            raise

    def recorded(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call as JSON has them."""
        memory: dict[int, int] = {}
        return {name: self._record(name, value, memory) for name, value in arguments.items()}

    def _write(self, text: str, end: str) -> None:
        """Put ``text`` after what was written last, and ``end`` after it, so that the file is whole at any time."""
        assert self._file is not None
        self._file.seek(self._end)
        self._file.write(text)
        self._end = self._file.tell()
        self._file.write(end)
        self._file.truncate()
        self._file.flush()

    def _record(self, name: str, value: Any, memory: dict[int, int]) -> Any:
        """One argument.  ``memory``: numbers of the call's storages, by address."""
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(name, value, memory)}
        if isinstance(value, list | tuple):
            return [self._record(name, item, memory) for item in value]
        if isinstance(value, torch.SymInt):
            return int(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return {"other": str(value)}

    def _tensor(self, name: str, tensor: Tensor, memory: dict[int, int]) -> dict[str, Any]:
        real = not (tensor.is_meta or isinstance(tensor, FakeTensor))
        address = tensor.untyped_storage().data_ptr() if real else id(tensor)
        found: dict[str, Any] = {
            "shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": int(tensor.storage_offset()),
            "dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device),
            "memory": memory.setdefault(address, len(memory)),
        }
        if real and format_of(tensor) == FRACTAL_NZ:
            found["format"] = FRACTAL_NZ
        if not real or not tells(name, tensor.dtype):
            return found
        most = MOST_VALUES
        if "mask" in name and tensor.shape[-2:] == (MASK_SIDE, MASK_SIDE) and not tensor.is_floating_point():
            found["mask"] = self._mask(tensor)
            most = MASK_SIDE**2 if found["mask"] == "other" else 0
        if tensor.numel() <= min(LISTED, most):
            found["values"] = tensor.tolist()
        elif tensor.numel() <= most:
            found["packed"] = packed(tensor)
        return found

    def _mask(self, tensor: Tensor) -> str:
        """Which of the known masks it is, or 'other'; looked up once for a tensor and version of it."""
        version = 0 if tensor.is_inference() else tensor._version
        key = (tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._masks:
            known = masks(tuple(tensor.shape), tensor.device)
            name = next((name for name, mask in known.items() if torch.equal(tensor.bool(), mask)), "other")
            self._masks[key] = tensor, name  # kept alive, so that its address stays its own
        return self._masks[key][1]


def _versions() -> Mapping[str, str | None]:
    packages = ("trueup-core", "torch", "torch_npu")
    return {name: hostnpu.installed(name) for name in packages} | {"python": platform.python_version()}

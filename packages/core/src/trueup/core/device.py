"""Which device, dtype and operator path: the only place that asks."""
import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trueup.core import hostnpu

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ActivePath:
    """Who answers ``torch.ops.npu.*`` in this process, and why.

    ``device``: an NPU; torch_npu's own kernels run.
    ``hostnpu``: the real torch_npu without an NPU; trueup's kernels answer CPU tensors on torch_npu's schemas.
    ``own``: no torch_npu; trueup brings the schemas and the kernels.
    """

    name: Literal["device", "hostnpu", "own"]
    reason: str


@functools.cache
def active_path() -> ActivePath:
    """Decide the operator path, once per process; imports torch_npu where it is installed.

    The decision is by what is installed, never by trying: torch_npu ends the process when it finds operators
    of its own already defined.

    Raises:
        ValueError: torch_npu is installed but cannot work here (see :func:`trueup.core.hostnpu.preload`).
    """
    if importlib.util.find_spec("torch_npu") is None:
        return ActivePath("own", "torch_npu is not installed, so trueup defines the operators and runs its own kernels")
    stand_ins = hostnpu.preload()
    torch_npu = _import_torch_npu(quiet=stand_ins)
    version, devices = torch_npu.__version__, torch_npu.npu.device_count()
    if stand_ins:
        if nodes := device_nodes():
            log.warning("%s exists but libascendcl.so cannot be loaded; source CANN's set_env.sh to use it", nodes[0])
        return ActivePath("hostnpu", f"torch_npu {version} has no Ascend driver here, so it is imported over "
                                     "stand-in libraries and trueup's kernels answer on the CPU")
    if devices == 0:
        return ActivePath("hostnpu", f"torch_npu {version} sees no NPU, so trueup's kernels answer on the CPU")
    return ActivePath("device", f"torch_npu {version} drives {devices} NPU{'s' if devices > 1 else ''}")


def device_nodes() -> list[Path]:
    """Ascend device files, /dev/davinci0 and on."""
    return sorted(Path("/dev").glob("davinci[0-9]*"))


def pick_device(name: str | None = None) -> torch.device:
    """The device called ``name``: 'cpu', 'npu' or 'npu:<index>'; None is an NPU where one is, else the CPU.

    Raises:
        ValueError: an unknown name, or a device that this machine does not have.
    """
    path = active_path()
    if name is None:
        name = "npu" if path.name == "device" else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"npu(?::(\d+))?", name)
    if not match:
        raise ValueError(f"device {name!r} is unknown; expected 'cpu', 'npu' or 'npu:<index>'")
    count = 0 if path.name == "own" else torch.get_device_module("npu").device_count()
    if count == 0:
        raise ValueError(f"device {name!r} is not here: {path.reason}; use 'cpu', or see `trueup doctor`")
    if int(match[1] or 0) >= count:
        raise ValueError(f"device {name!r} is not here: expected an index below {count}, the number of visible NPUs")
    return torch.device(name)


def pick_dtype(name: str | None, device: torch.device, checkpoint_dtype: str | torch.dtype) -> torch.dtype:
    """The dtype to compute in: ``name``, or for None the checkpoint's on an NPU and float32 on a CPU.

    float32 because a bfloat16 matmul is many times slower than that on most CPUs.

    Raises:
        ValueError: a name other than float32, bfloat16 and float16.
    """
    if name is None:
        name = "float32" if device.type == "cpu" else str(checkpoint_dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _import_torch_npu(quiet: bool) -> Any:
    # Over stand-ins torch_npu prints that CANN is not set up, which is known and would spoil --json output.
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        return importlib.import_module("torch_npu")

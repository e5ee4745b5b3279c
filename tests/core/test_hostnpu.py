"""Machines that this one is not: torch_npu without a driver, in a wrong version, or with an NPU.

Each is built from small parts on a path of its own and looked at from a fresh process.  The real torch_npu is
tested in tests/conformance.
"""
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

MINOR = ".".join(torch.__version__.split("+")[0].split(".")[:2])
compiler = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(not compiler, reason="no C compiler here")

# What torch_npu does without its driver.
BROKEN = "raise ImportError('libhccl.so: cannot open shared object file')\n"
# What it does with two NPUs, as far as trueup asks.
WORKING = f"""
import sys, types, torch
__version__ = "{MINOR}.0"
npu = types.ModuleType("torch.npu")
npu.device_count = lambda: 2
npu.get_device_name = lambda index: "Ascend910B1"
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
def _autoload(): pass
"""


class Machine:
    """A folder that Python and the loader search first, and a process on it."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        self.env |= {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}

    def install_torch_npu(self, version: str, source: str) -> None:
        info = self.folder / f"torch_npu-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        (self.folder / "torch_npu").mkdir()
        (self.folder / "torch_npu/__init__.py").write_text(source)

    def install_driver(self) -> None:
        (self.folder / "empty.c").write_text("typedef int nothing;\n")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", "libascendcl.so", "empty.c"], cwd=self.folder, check=True)
        self.env["LD_LIBRARY_PATH"] = str(self.folder)

    def python(self, *args: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *args], env=self.env, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_importing_core_first_makes_torch_safe(machine):
    machine.install_torch_npu(f"{MINOR}.0", BROKEN)
    alone = machine.python("-c", "import torch")
    assert "Failed to load the backend extension" in alone.stderr
    done = machine.python("-c", "import trueup.core, torch; print(torch.ones(2).sum())")
    assert (done.returncode, done.stdout) == (0, "tensor(2.)\n"), done.stderr


def test_another_version_of_torch_is_refused_and_explained(machine):
    """Importing such a torch_npu would end the process without a Python error."""
    machine.install_torch_npu("1.11.0", "import os; os.abort()\n")
    done = machine.python("-m", "trueup.core.cli", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["path"]["name"] is None and report["advice"][0] == report["path"]["reason"]
    assert f"torch_npu 1.11.0 needs torch 1.11, but torch {torch.__version__} is installed" in report["advice"][0]
    assert "pip install 'torch==1.11.*'" in report["advice"][0]


@needs_compiler
def test_doctor_reports_a_torch_npu_that_cannot_be_imported(machine):
    machine.install_torch_npu(f"{MINOR}.0", BROKEN)
    machine.install_driver()
    machine.env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = machine.python("-m", "trueup.core.cli", "doctor")
    assert done.returncode == 0, done.stderr
    assert "none: ImportError: libhccl.so" in done.stdout


def test_a_missing_or_failing_compiler_is_explained(machine):
    machine.install_torch_npu(f"{MINOR}.0", BROKEN)
    machine.env |= {"CC": "false"}
    done = machine.python("-c", """if True:
        import os, trueup.core
        for compiler in ("false", ""):
            os.environ |= {"CC": compiler, "PATH": compiler and os.environ["PATH"]}
            try:
                trueup.core.load()
            except ValueError as error:
                print(error)
    """)
    failing, missing = done.stdout.splitlines()
    assert "the C compiler 'false' cannot build stand-in libraries" in failing
    assert "install gcc or set CC" in missing


@needs_compiler
def test_an_npu_is_used_and_nothing_is_registered(machine):
    machine.install_torch_npu(f"{MINOR}.0", WORKING)
    machine.install_driver()
    done = machine.python("-c", """if True:
        import os, trueup.core
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
        import torch
        from trueup.core.device import pick_device, pick_dtype
        print(trueup.core.load())
        print(hasattr(torch.ops.npu, "npu_rms_norm"))
        print(pick_device(), pick_device("npu:1"), pick_device("cpu"), pick_dtype(None, pick_device(), "bfloat16"))
        from trueup.core import doctor
        print(doctor.examine()["soc"])
        pick_device("npu:2")
    """)
    path, registered, picked, chip = done.stdout.splitlines()
    assert path == f"ActivePath(name='device', reason='torch_npu {MINOR}.0 drives 2 NPUs')"
    assert registered == "False"
    assert picked == "npu npu:1 cpu torch.bfloat16"
    assert chip == "Ascend910B1"
    assert done.stderr.splitlines()[-1] == (
        "ValueError: device 'npu:2' is not here: expected an index below 2, the number of visible NPUs"
    )

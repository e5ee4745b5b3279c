"""Stand-in driver libraries: import the real torch_npu where there is no Ascend driver and no CANN.

A torch_npu wheel links to a handful of libraries (libascendcl, libhccl, ...) that only CANN brings.  While
torch_npu is imported nothing in them computes: the import registers operator schemas, meta kernels and
Python code.  So libraries of the same names with the same symbols, each returning 0, are enough, and with
the import come the real signatures and the real argument parsing.

What stand-ins do not give is a device: ``torch_npu.npu.device_count()`` is 0, and what launches work fails.
"""
import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from trueup.core.hostnpu.elf import Elf

DRIVER = "libascendcl.so"
# torch_npu opens it by name while it runs; with it the torch.ops.atb.* schemas appear as well.
OPENED_LATER = ("libatb.so",)
# Symbols that must do more than `return 0`, which in this API means success, a null pointer or the number 0.
BODIES = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = 0; return 0; }",
    # An operator without a kernel must fail: success here would be a silent wrong result.
    "aclopCompileAndExecute": "int aclopCompileAndExecute(void) { return 500000; }",
}
FLAGS = ("-shared", "-fPIC", "-O1", "-w")

# Held for good: a library that torch_npu links to must not be unloaded.
_loaded: list[ctypes.CDLL] = []


def standing_in() -> bool:
    """Whether this process runs torch_npu over stand-ins (or would, once it is imported)."""
    return bool(_loaded)


def driver_present() -> bool:
    """Whether the loader finds a real libascendcl.so, as it does once CANN's set_env.sh is sourced."""
    return not standing_in() and _can_load(DRIVER)


def check_versions() -> None:
    """torch_npu X.Y works with torch X.Y only; any other pair ends the process while torch_npu registers.

    Raises:
        ValueError: the installed pair does not match.
    """
    torch, npu = installed("torch"), installed("torch_npu")
    if torch and npu and _minor(torch) != _minor(npu):
        raise ValueError(
            f"torch_npu {npu} needs torch {_minor(npu)}, but torch {torch} is installed; "
            f"run: pip install 'torch=={_minor(npu)}.*' (or 'torch_npu=={_minor(torch)}.*', or uninstall torch_npu)"
        )


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def preload_if_needed() -> None:
    """Make ``import torch`` safe where torch_npu is installed and no driver is.

    torch imports torch_npu while it is itself being imported (an entry point), and fails with it.  Does
    nothing where torch_npu is absent, a driver is present, or torch is imported already.  Never raises: an
    installation that does not fit must still be able to run ``trueup doctor``, and ``load`` meets the same
    trouble and explains it.
    """
    if "torch" in sys.modules or importlib.util.find_spec("torch_npu") is None or driver_present():
        return
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with contextlib.suppress(ValueError, OSError):
        preload()


def preload() -> bool:
    """Make ``import torch_npu`` work in this process; True where stand-ins serve it.

    The loader satisfies a needed name with an already loaded library of that name (its SONAME), so no
    environment variable is needed.  Where a driver is present nothing is built and nothing is loaded.

    Raises:
        ValueError: torch and torch_npu do not match, or there is no working C compiler.
    """
    check_versions()
    if standing_in() or "torch_npu" in sys.modules or driver_present():
        return standing_in()
    folder, names = build()
    _loaded.extend(ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in names)
    return True


def survey() -> tuple[list[str], list[str]]:
    """What the installed torch_npu misses on this machine: library names (the driver's first), symbol names."""
    npu, torch = _package("torch_npu"), _package("torch")
    ours = [*npu.glob("*.so"), *(npu / "lib").glob("*.so*"), *npu.parent.glob("torch_npu.libs/*.so*")]
    theirs = [*(torch / "lib").glob("*.so*"), *torch.parent.glob("torch.libs/*.so*")]
    present = {path.name for path in ours + theirs}
    elves = [Elf(path) for path in ours]
    needed = {name for elf in elves for name in elf.needed if name not in present} | set(OPENED_LATER)
    libraries = sorted((n for n in needed if not _can_load(n)), key=lambda name: (name != DRIVER, name))
    undefined = set().union(*(elf.undefined for elf in elves))
    undefined -= set().union(*(elf.defined for elf in [*elves, *map(Elf, theirs)]))
    system = [ctypes.CDLL(name) for name in needed if name not in libraries]
    system.append(ctypes.CDLL(None))  # what the interpreter itself has loaded
    symbols = sorted(s for s in undefined if not any(hasattr(library, s) for library in system))
    return libraries, symbols


def build() -> tuple[Path, list[str]]:
    """Compile the stand-ins of the installed torch_npu into the user's cache; returns the folder and the names.

    The folder is named by a hash of everything that goes into it, so a finished one is reused as it is.

    Raises:
        ValueError: no working C compiler.
    """
    libraries, symbols = survey()
    text = _source(symbols)
    key = hashlib.sha256("\n".join([text, *libraries, *FLAGS, sysconfig.get_platform()]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trueup" / f"stand-ins-{key[:16]}"
    if all((folder / name).exists() for name in libraries):
        return folder, libraries
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        work = Path(scratch)
        (work / "symbols.c").write_text(text)
        (work / "empty.c").write_text("typedef int nothing;\n")
        for name in libraries:
            # torch_npu looks names up in the library it expects them in.  So one library holds all of them,
            # and the others link to it: a look-up in any of them finds the symbol.
            first = name == libraries[0]
            content = ["symbols.c"] if first else ["empty.c", "-Wl,--no-as-needed", libraries[0]]
            _compile(work, name, content)
        for name in libraries:  # a rename is atomic, so two processes may build at once
            os.replace(work / name, folder / name)
    return folder, libraries


def _source(symbols: list[str]) -> str:
    lines = ["#include <stdint.h>", "#include <stdlib.h>", "#include <string.h>", "#include <time.h>"]
    lines += BODIES.values()
    lines += [f"long {symbol}(void) {{ return 0; }}" for symbol in symbols if symbol not in BODIES]
    return "\n".join(lines) + "\n"


def _compile(folder: Path, name: str, content: list[str]) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise ValueError(
            "torch_npu is installed without an Ascend driver, and its stand-in libraries need a C compiler: "
            "install gcc or set CC (or uninstall torch_npu: trueup then defines the operators itself)"
        )
    command = [compiler, *FLAGS, f"-Wl,-soname,{name}", "-o", name, *content]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise ValueError(f"the C compiler {compiler!r} cannot build stand-in libraries: {detail}") from error


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed", name=name)
    return Path(spec.submodule_search_locations[0])


def _can_load(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])

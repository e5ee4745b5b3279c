"""Our schemas and kernels against the dispatcher of the real torch_npu 2.13.0, imported over stand-in libraries.

The real package is in a folder of its own, on nobody's path: defining operators of our own where torch_npu is
importable would end the process.
"""
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from trueup.core.hostnpu import stub
from trueup.core.ops.load import load, schema_differences
from trueup.core.ops.registry import OPERATORS, schemas

REPO = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("TRUEUP_TORCH_NPU", REPO / ".venv/torch_npu"))
PROGRAM = Path(__file__).with_name("calls.py")
CALLS = runpy.run_path(str(PROGRAM))["CALLS"]
INSTALL = f"pip install --no-deps --target {FOLDER} torch_npu==2.13.0"

needs_torch_npu = pytest.mark.skipif(not (FOLDER / "torch_npu").is_dir(), reason=f"not installed; run: {INSTALL}")


def run(out: Path, *path: Path) -> dict:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run([sys.executable, str(PROGRAM), str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # torch_npu's own remarks would spoil a command's --json
    return torch.load(out)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> dict:
    if find_spec("torch_npu"):
        pytest.skip("torch_npu is installed beside torch, so this environment has no path 'own'")
    return run(tmp_path_factory.mktemp("own") / "out.pt")


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("real") / "out.pt", FOLDER)


def test_every_operator_has_a_sample_call():
    load()
    assert set(CALLS) == set(OPERATORS)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_explicit_defaults_change_nothing(name):
    """A default given explicitly must mean the same as one left out; the dispatcher may do either."""
    load()
    torch.manual_seed(0)
    args, kwargs = CALLS[name]()
    arguments = torch._C.parse_schema(schemas()[name]).arguments
    explicit = {a.name: a.default_value for a in arguments[len(args):] if a.has_default_value()} | kwargs
    first = OPERATORS[name](*args, **kwargs)
    torch.manual_seed(0)
    args, _ = CALLS[name]()  # some kernels write to their arguments
    assert_same_bytes(OPERATORS[name](*args, **explicit), first)


def test_own_path(own):
    assert own["path"] == "own" and not own["torch_npu"]
    assert own["schemas"] == schemas()


@needs_torch_npu
def test_schemas_equal_the_real_ones(real):
    assert real["differences"] == {}
    assert real["schemas"] == schemas()


@needs_torch_npu
def test_kernels_answer_under_the_real_schemas(real):
    assert real["path"] == "hostnpu" and real["torch_npu"]
    assert all(real["on_cpu"].values())


@needs_torch_npu
@pytest.mark.parametrize("name", sorted(CALLS))
def test_both_paths_agree_to_the_bit(own, real, name):
    assert_same_bytes(real["answers"][name], own["answers"][name])


def test_a_difference_is_seen(monkeypatch):
    load()
    name = "npu_rms_norm"
    changed = schemas()[name].replace("epsilon=9.9999999999999995e-07", "epsilon=1e-5")
    assert changed != schemas()[name]
    monkeypatch.setitem(schemas(), name, changed)
    monkeypatch.setitem(schemas(), "npu_of_tomorrow", "npu::npu_of_tomorrow(Tensor x) -> Tensor")
    assert schema_differences().keys() == {name, "npu_of_tomorrow"}


@needs_torch_npu
@pytest.mark.skipif(stub.standing_in(), reason="with stand-ins in this process nothing is missing any more")
def test_stand_ins_are_cached_and_complete(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    libraries, symbols = stub.survey()
    assert libraries[0] == stub.DRIVER and "libhccl.so" in libraries and "aclrtMalloc" in symbols
    folder, names = stub.build()
    assert folder.is_relative_to(tmp_path / "trueup") and names == libraries
    assert {path.name for path in folder.iterdir()} == set(libraries)
    built = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert stub.build() == (folder, names)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == built
    assert set(symbols) <= stub.Elf(folder / stub.DRIVER).defined


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Compared instead of the values, because poison is NaN, which equals nothing."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bytes(got, expected) -> None:
    (got, got_form), (expected, expected_form) = tree_flatten(got), tree_flatten(expected)
    assert got_form == expected_form
    for g, e in zip(got, expected, strict=True):
        if isinstance(e, torch.Tensor):
            assert (g.dtype, g.shape) == (e.dtype, e.shape)
            assert torch.equal(as_bytes(g), as_bytes(e))
        else:
            assert g == e

"""Our schemas, kernels and contracts against the dispatcher of the real torch_npu 2.13.0, over stand-in libraries.

The real package is in a folder of its own, on nobody's path: defining operators of our own where torch_npu is
importable would end the process.  So probe.py runs in two processes, and this file compares what they saved.  What it
found is printed as one table at the end of the run (conftest.py).
"""
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
import torch
from torch.utils._pytree import tree_flatten

from operators.case import cases, copied, invoke
from trueup.core.hostnpu import stub
from trueup.core.ops.load import load, schema_differences
from trueup.core.ops.registry import OPERATORS, schemas

REPO = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("TRUEUP_TORCH_NPU", REPO / ".venv/torch_npu"))
PROGRAM = Path(__file__).with_name("probe.py")
KNOWN = REPO / "docs/conformance.json"  # what the contract sheets say of each operator
INSTALL = f"pip install --no-deps --target {FOLDER} torch_npu==2.13.0"
load()
CASES = cases()
FEW, MANY = 30, 400  # random calls of each operator in `make test`, and under the marker "long"

needs_torch_npu = pytest.mark.skipif(not (FOLDER / "torch_npu").is_dir(), reason=f"not installed; run: {INSTALL}")
by_operator = pytest.mark.parametrize("name", sorted(CASES))


def run(out: Path, calls: int, *path: Path) -> dict:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, str(PROGRAM), str(out), str(calls)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # torch_npu's own remarks would spoil a command's --json
    return torch.load(out)


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.long)])
def calls(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def own(calls, tmp_path_factory) -> dict:
    if find_spec("torch_npu"):
        pytest.skip("torch_npu is installed beside torch, so this environment has no path 'own'")
    return run(tmp_path_factory.mktemp("own") / "out.pt", calls)


@pytest.fixture(scope="module")
def real(calls, tmp_path_factory, record_conformance) -> dict:
    found = run(tmp_path_factory.mktemp("real") / "out.pt", calls, FOLDER)
    record_conformance(found)
    return found


@by_operator
def test_explicit_defaults_change_nothing(name):
    """A default given explicitly must mean the same as one left out; the dispatcher may do either."""
    call = CASES[name].legal(Random(0))
    defaults = {a.name: a.default_value for a in torch._C.parse_schema(schemas()[name]).arguments
                if a.has_default_value()}
    first, second = copied(call), copied(defaults | call)
    results = [invoke(OPERATORS[name], name, c) for c in (first, second)]
    assert_same_bytes([results[1], {k: second[k] for k in first}], [results[0], first])


def test_own_path(own):
    assert own["path"] == "own" and not own["torch_npu"]
    assert own["schemas"] == {name: schemas()[name] for name in OPERATORS}


@needs_torch_npu
def test_schemas_equal_the_real_ones(real):
    assert real["differences"] == {}
    assert real["schemas"] == {name: schemas()[name] for name in OPERATORS}


@needs_torch_npu
def test_kernels_answer_under_the_real_schemas(real):
    assert real["path"] == "hostnpu" and real["torch_npu"]
    assert all(real["on_cpu"].values())


@needs_torch_npu
@by_operator
def test_both_paths_agree_to_the_bit(own, real, name):
    assert real["digests"][name] == own["digests"][name]


@needs_torch_npu
@by_operator
def test_shapes_are_those_of_the_real_meta_kernel(real, name):
    assert real["rows"][name]["mismatches"] == []


@needs_torch_npu
@by_operator
def test_what_meta_refuses_we_refuse_and_nothing_crashes(real, name):
    assert real["rows"][name]["faults"] == []


@needs_torch_npu
def test_the_sheets_say_which_operators_have_a_meta_kernel(real):
    assert json.loads(KNOWN.read_text()) == {name: {"meta": row["meta"]} for name, row in sorted(real["rows"].items())}


def test_a_difference_is_seen(monkeypatch):
    name = "npu_rms_norm"
    changed = schemas()[name].replace("epsilon=9.9999999999999995e-07", "epsilon=1e-5")
    assert changed != schemas()[name]
    monkeypatch.setitem(schemas(), name, changed)
    monkeypatch.setitem(schemas(), "npu_of_tomorrow", "npu::npu_of_tomorrow(Tensor x) -> Tensor")
    assert {name, "npu_of_tomorrow"} <= schema_differences().keys()


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

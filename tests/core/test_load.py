"""What load() registers, and that each kernel and contract agrees with its schema."""
import inspect
import subprocess
import sys

import pytest
import torch

import trueup.core
from trueup.core.ops.contract import Check, ContractError
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS, refuse_unbuilt, schemas

PATH = load()


def disagreements(name: str, function, schema_text: str) -> list[str]:
    """Where a Python signature would answer a dispatched call differently from what the schema promises.

    The dispatcher passes arguments before the schema's ``*`` by place, and may leave out one that equals its
    default: so places, names and defaults must all be the schema's.
    """
    arguments = {a.name: a for a in torch._C.parse_schema(schema_text).arguments}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "check"]
    found = []
    by_place = [a.name for a in arguments.values() if not a.kwarg_only]
    taken = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][:len(by_place)]
    if taken != by_place:
        found.append(f"{name}: takes {taken} by place, the schema passes {by_place}")
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    found += [f"{name}: {extra} is not in the schema" for extra in named.keys() - arguments.keys()]
    if not open_ended:
        found += [f"{name}: does not take {missing}" for missing in arguments.keys() - named.keys()]
    for argument in arguments.keys() & named.keys():
        given, promised = named[argument].default, arguments[argument]
        if given is inspect.Parameter.empty:
            if promised.has_default_value() and promised.default_value is not None:
                found.append(f"{name}: {argument} has no default, the schema's is {promised.default_value!r}")
        elif not promised.has_default_value():
            found.append(f"{name}: {argument} has the default {given!r}, the schema has none")
        elif (list(given) if isinstance(given, tuple) else given) != promised.default_value:
            found.append(f"{name}: {argument} defaults to {given!r}, in the schema to {promised.default_value!r}")
    return found


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_kernel_and_contract_agree_with_the_schema(name):
    operator = OPERATORS[name]
    assert disagreements(name, operator.kernel, schemas()[name]) == []
    assert disagreements(name, operator.contract, schemas()[name]) == []


@pytest.mark.parametrize(("signature", "expected"), [
    ("x, k, *, eps=1e-20, **rest", []),
    ("x, k, *, eps=1e-6, **rest", ["eps defaults to 1e-06"]),
    ("x, k, *, eps, **rest", ["eps has no default"]),
    ("x, k, *, eps=1e-20", ["does not take flag"]),
    ("x, k=1, *, eps=1e-20, **rest", ["k has the default 1"]),
    ("k, x, *, eps=1e-20, **rest", ["takes ['k', 'x'] by place"]),
    ("x, *, k, eps=1e-20, **rest", ["takes ['x'] by place"]),
    ("x, k, *, epsilon=1e-20, **rest", ["epsilon is not in the schema"]),
])
def test_a_wrong_signature_is_seen(signature, expected):
    scope: dict = {}
    exec(f"def kernel({signature}): ...", scope)
    found = disagreements("npu_x", scope["kernel"],
                          "npu::npu_x(Tensor x, int k, *, float eps=1e-20, bool flag=False) -> Tensor")
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True))


def test_declared_operators_are_those_with_a_schema():
    assert set(OPERATORS) == set(schemas())
    assert list(schemas()) == sorted(schemas())


def test_what_is_not_built_is_described_and_not_printed():
    big = torch.zeros(100, 100)
    for value, said in ((big, "[100, 100] float32"), ([big, None], "[[100, 100] float32, None]"), (7, "7")):
        with pytest.raises(ContractError, match="not built yet") as error:
            refuse_unbuilt(Check("npu_x"), {"scales": value, "other": None})
        assert error.value.got == said


def test_load_may_be_repeated():
    assert load() is PATH is trueup.core.load()
    assert PATH.name in ("device", "hostnpu", "own") and PATH.reason


@pytest.mark.skipif(PATH.name == "device", reason="an NPU's own kernels answer here")
def test_a_dispatched_call_meets_contract_and_kernel():
    x, gamma = torch.randn(3, 8), torch.ones(8)
    y, _ = torch.ops.npu.npu_rms_norm(x, gamma)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), gamma, 1e-6))
    with pytest.raises(trueup.core.ContractError, match="npu_rms_norm: gamma is"):
        torch.ops.npu.npu_rms_norm(x, torch.ones(7))


def test_importing_core_imports_no_torch():
    code = "import sys, trueup.core; assert 'torch' not in sys.modules and 'load' in trueup.core.__all__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    for name in trueup.core.__all__:
        assert getattr(trueup.core, name) and name in dir(trueup.core)
    with pytest.raises(AttributeError, match="has no attribute 'laod'"):
        trueup.core.laod  # noqa: B018

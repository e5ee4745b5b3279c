"""Every operator: its reference kernel against a naive float64 version, and what its contract refuses."""
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from operators.case import Call, Wrong, cases, changed, copied, invoke
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS

load()
CASES = cases()
# Of the largest value: rounding of the result, and of what was rounded on the way (int8: one step).
TOLERANCE = {torch.float64: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def agree(got: Tensor, want: Tensor, wide: float) -> None:
    if want.is_meta:
        assert got.dim() == want.dim()
        return
    assert got.shape == want.shape
    if got.dtype == torch.int8:
        assert (got.int() - want.int()).abs().max() <= 1 if got.numel() else True
    elif not got.dtype.is_floating_point:
        assert torch.equal(got, want)
    else:
        largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0
        atol = TOLERANCE.get(got.dtype, wide) * max(largest, 1e-3)
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol, equal_nan=True)


def compare(name: str, call: Call) -> None:
    """Results, and what became of the arguments: some operators write to them."""
    exact = copied(call, torch.float64)
    with profile("device"):
        got = invoke(OPERATORS[name], name, call)
    want = invoke(CASES[name].naive, name, exact)
    pairs = list(zip(tree_leaves((got, call)), tree_leaves((want, exact)), strict=True))
    for ours, theirs in pairs:
        if isinstance(theirs, Tensor):
            agree(ours, theirs, CASES[name].wide)
        else:
            assert ours == theirs


def test_every_operator_has_a_case():
    assert set(CASES) == set(OPERATORS)


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(r=st.randoms(use_true_random=False))
def test_kernel_equals_naive(name, r):
    compare(name, CASES[name].legal(r))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES))
def test_kernel_equals_naive_at_length(name):
    for seed in range(400):
        compare(name, CASES[name].legal(Random(seed)))


@pytest.mark.parametrize(("name", "wrong"), [pytest.param(name, wrong, id=f"{name}-{wrong.name}")
                                             for name, case in sorted(CASES.items()) for wrong in case.wrong])
def test_refused(name: str, wrong: Wrong):
    call = (wrong.of or CASES[name].legal)(Random(1))
    with profile("device"):
        invoke(OPERATORS[name], name, copied(call))  # legal before the change
        with pytest.raises(ContractError, match=wrong.message) as error:
            invoke(OPERATORS[name], name, changed(call, wrong.change))
    assert error.value.rule == wrong.level
    assert error.value.source and error.value.expected

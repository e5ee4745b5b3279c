"""npu_swiglu against a loop in float64."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import activation  # noqa: F401  (declares the operator)
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS

SWIGLU = OPERATORS["npu_swiglu"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([-1, 0, 1]),
       st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**16))
def test_swiglu(T, half, dim, dtype, seed):
    torch.manual_seed(seed)
    shape = (2 * half, T) if dim == 0 else (T, 2 * half)
    x = (3 * torch.randn(shape)).to(dtype)
    before = x.clone()
    y = SWIGLU(x, dim)
    assert y.dtype == dtype and torch.equal(x, before)

    rows = x.double().T.tolist() if dim == 0 else x.double().tolist()
    want = torch.tensor([[row[i] / (1 + math.exp(-row[i])) * row[i + half] for i in range(half)] for row in rows],
                        dtype=torch.float64)
    torch.testing.assert_close(y.double(), want.T if dim == 0 else want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


X = torch.randn(2, 8).bfloat16()


@pytest.mark.parametrize("x, dim, rule, fragment", [
    (X, 2, "RELATION", r"dim is 2\n.*an axis of input \[2, 8\]"),
    (X[:, :7], -1, "RELATION", "even length"),
    (X[:0], -1, "SIZE", "skip the call"),
    (X[:, :4], -1, "SIZE", "strided.*\n.*contiguous"),
    (X.view([1] * 8 + [16]), -1, "SIZE", "at most 8 axes"),
    (X.double(), -1, "DTYPE", "float16, bfloat16 or float32"),
])
def test_refused(x, dim, rule, fragment):
    with profile("device"), pytest.raises(ContractError, match=fragment) as error:
        SWIGLU(x, dim)
    assert error.value.rule == rule

"""npu_rms_norm and npu_add_rms_norm against loops in float64."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS
from trueup.core.ops.rowwise import norm  # noqa: F401  (declares the operators)

RMS, ADD = OPERATORS["npu_rms_norm"], OPERATORS["npu_add_rms_norm"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
FLOATS = st.sampled_from([torch.float32, torch.bfloat16])


def naive(x, gamma, epsilon):
    width, lead = gamma.numel(), x.shape[:x.dim() - gamma.dim()]
    y, rstd = [], []
    for row in x.double().reshape(-1, width).tolist():
        r = 1 / math.sqrt(sum(v * v for v in row) / width + epsilon)
        y.append([v * r * g for v, g in zip(row, gamma.double().flatten().tolist(), strict=True)])
        rstd.append(r)
    y, rstd = (torch.tensor(rows, dtype=torch.float64) for rows in (y, rstd))
    return y.reshape(x.shape), rstd.reshape(*lead, *[1] * gamma.dim())


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 9), min_size=1, max_size=2), FLOATS,
       st.booleans(), st.integers(0, 2**16))
def test_rms_norm(lead, axes, dtype, wide_gamma, seed):
    torch.manual_seed(seed)
    x = torch.randn(*lead, *axes).to(dtype)
    gamma = torch.randn(*axes).to(torch.float32 if wide_gamma else dtype)
    y, rstd = RMS(x, gamma, epsilon=1e-3)
    want_y, want_rstd = naive(x, gamma, 1e-3)
    assert (y.dtype, rstd.dtype, rstd.shape) == (dtype, torch.float32, want_rstd.shape)
    close(y, want_y, dtype)
    close(rstd, want_rstd, torch.float32)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(1, 9), FLOATS, st.integers(0, 2**16))
def test_add_rms_norm(T, H, dtype, seed):
    torch.manual_seed(seed)
    x1, x2, gamma = (torch.randn(*shape).to(dtype) for shape in ((T, H), (T, H), (H,)))
    before = x1.clone()
    y, rstd, x = ADD(x1, x2, gamma)
    assert torch.equal(x, x1 + x2) and torch.equal(x1, before) and x.dtype == y.dtype == dtype
    want_y, want_rstd = naive(x, gamma, 1e-6)
    close(y, want_y, dtype)
    assert rstd.shape == (T, 1)
    torch.testing.assert_close(rstd.double(), want_rstd, rtol=1e-5, atol=0)


def test_strided_input_and_default_epsilon():
    x, gamma = torch.zeros(3, 8)[:, ::2], torch.ones(4)
    assert RMS(x, gamma)[1].flatten().tolist() == pytest.approx([1000.0] * 3, rel=1e-5)


X, G = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)


@pytest.mark.parametrize("op, arguments, rule, fragment", [
    (RMS, (X, G[:4]), "RELATION", r"gamma is \[4\] bfloat16\n.*the last axes of input \[2, 8\]"),
    (RMS, (G, X), "RELATION", "the last axes of input"),
    (RMS, (X.view([1] * 8 + [16]), torch.ones(16).bfloat16()), "SIZE", "at most 8 axes"),
    (RMS, (X.double(), G.double()), "DTYPE", "float16, bfloat16 or float32"),
    (RMS, (X, G.half()), "DTYPE", "float32 or input's torch.bfloat16"),
    (ADD, (X, X[:1], G), "RELATION", "nothing is broadcast"),
    (ADD, (X, X, G.float()), "DTYPE", "gamma is .*\n.*x1's torch.bfloat16"),
    (ADD, (X, X.float(), G), "DTYPE", "x2 is"),
])
def test_refused(op, arguments, rule, fragment):
    with profile("device"), pytest.raises(ContractError, match=fragment) as error:
        op(*arguments)
    assert error.value.rule == rule

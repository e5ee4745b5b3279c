"""npu_attention_update against a loop in float64."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import attention_update  # noqa: F401  (declares the operator)
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS

UPDATE = OPERATORS["npu_attention_update"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def naive(lse, local_out):
    out, merged = [], []
    for r in range(len(lse[0])):
        parts = [(part[r].item(), rows[r].double()) for part, rows in zip(lse, local_out, strict=True)]
        present = [(value, row) for value, row in parts if value != -math.inf]
        peak = max((value for value, _ in present), default=0.0)
        total = sum(math.exp(value - peak) for value, _ in present)
        out.append(sum((math.exp(value - peak) / total * row for value, row in present), 0 * parts[0][1]))
        merged.append(peak + math.log(total) if present else -math.inf)
    return torch.stack(out), torch.tensor(merged, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]),
       st.floats(0, 1), st.sampled_from([1, 300]), st.integers(0, 2**16))
def test_merge(parts, R, D, dtype, absent, spread, seed):
    torch.manual_seed(seed)
    lse = [spread * torch.randn(R) for _ in range(parts)]
    for part in lse:
        part[torch.rand(R) < absent] = -math.inf
    local_out = [torch.randn(R, D).to(dtype) for _ in range(parts)]
    with profile("paper"):
        out, merged = UPDATE(lse, local_out, 1)
    want_out, want_merged = naive(lse, local_out)
    assert (out.dtype, merged.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), want_out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(merged.double(), want_merged, rtol=1e-5, atol=1e-5)


def test_two_halves_make_the_whole():
    """What the operator is for: attention over keys in two parts is attention over all keys."""
    scores, values = torch.randn(3, 10).double(), torch.randn(10, 8).double()
    halves = [(scores[:, part], values[part]) for part in (slice(0, 4), slice(4, 10))]
    out, lse = UPDATE([s.logsumexp(1) for s, _ in halves], [s.softmax(1) @ v for s, v in halves], 1)
    torch.testing.assert_close(out, scores.softmax(1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(1))


def test_lse_is_poisoned_unless_asked_for():
    out, lse = UPDATE([torch.zeros(3)] * 2, [torch.ones(3, 8)] * 2, 0)
    assert out.eq(1).all() and lse.shape == (3,) and lse.isnan().all()


def test_a_row_without_keys_is_zero_and_a_nan_shows():
    lse, rows = torch.tensor([-math.inf, 0.0]), torch.ones(2, 8)
    out, merged = UPDATE([lse, lse], [rows, rows], 1)
    assert out.tolist() == [[0.0] * 8, [1.0] * 8] and merged[0] == -math.inf
    poisoned = rows.clone()
    poisoned[0] = math.nan
    assert UPDATE([lse, lse.clone().fill_(0)], [poisoned, rows], 0)[0][0].isnan().all()


LSE, OUT = [torch.zeros(3)] * 2, [torch.zeros(3, 8).bfloat16()] * 2


@pytest.mark.parametrize("lse, out, update_type, rule, fragment", [
    (LSE, OUT[:1], 0, "RELATION", "1 parts\n.*each of the 2 lse"),
    ([], [], 0, "RELATION", "0 parts"),
    (LSE, OUT, 2, "RELATION", "update_type is 2"),
    (LSE, [OUT[0][0]] * 2, 0, "RELATION", "flatten rows and heads"),
    (LSE, [OUT[0], OUT[0][:2]], 0, "RELATION", r"local_out\[1\] is \[2, 8\]"),
    ([LSE[0], torch.zeros(3, 1)], OUT, 0, "RELATION", r"lse\[1\] is \[3, 1\].*\n.*\[3\] \(R\)"),
    ([LSE[0], torch.tensor([0, math.inf, math.nan])], OUT, 0, "RELATION", "map it to -inf"),
    ([LSE[0]] * 17, [OUT[0]] * 17, 0, "SIZE", "1 to 16 parts"),
    (LSE, [torch.zeros(3, 12).bfloat16()] * 2, 0, "SIZE", "multiple of 8"),
    (LSE, [torch.zeros(3, 520).bfloat16()] * 2, 0, "SIZE", "8 to 512"),
    (LSE, [OUT[0], OUT[0].half()], 0, "DTYPE", "all alike"),
    (LSE, [OUT[0].double()] * 2, 0, "DTYPE", "bfloat16 or float32"),
    ([LSE[0].bfloat16()] * 2, OUT, 0, "DTYPE", "float32"),
])
def test_refused(lse, out, update_type, rule, fragment):
    with profile("device"), pytest.raises(ContractError, match=fragment) as error:
        UPDATE(lse, out, update_type)
    assert error.value.rule == rule

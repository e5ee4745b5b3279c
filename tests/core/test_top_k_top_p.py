"""npu_top_k_top_p: ties, and k outside the documented range."""
import math
from random import Random

import pytest
import torch

from operators.top_k_top_p import filtered, naive
from trueup.core.ops.contract import assume
from trueup.core.ops.registry import OPERATORS
from trueup.core.ops.rowwise import top_k_top_p  # noqa: F401  (declares the operator)

FILTER = OPERATORS["npu_top_k_top_p"]
INF = -math.inf


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_ties_at_the_threshold_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert FILTER(logits, None, ints(2)).tolist() == [[INF, 3.0, 2.0, 2.0, INF]]


def test_of_equal_logits_p_drops_the_left_ones_first():
    logits = torch.zeros(1, 4)
    assert FILTER(logits, torch.tensor([0.5])).tolist() == [[INF, INF, 0.0, 0.0]]
    assert FILTER(logits, torch.tensor([0.0])).tolist() == [[INF, INF, INF, 0.0]]


@pytest.mark.parametrize("seed", range(20))
def test_p_alone(seed):
    call = filtered(Random(seed))
    p = torch.rand(len(call["k"]), generator=torch.Generator().manual_seed(seed)).to(call["logits"].dtype)
    want = naive(call["logits"].double(), p.double())
    assert torch.equal(FILTER(call["logits"], p).double(), want)


def test_k_outside_its_range_may_be_assumed_to_filter_nothing():
    logits = torch.randn(4, 2000)
    with assume("top-k-range"):
        out = FILTER(logits, None, ints(0, -1, 2000, 1500))
    assert torch.equal(out[:3], logits[:3]) and out[3].isfinite().sum() == 1500

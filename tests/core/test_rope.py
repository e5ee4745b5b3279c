"""npu_interleave_rope against a loop in float64 on small sizes, and what rotation is for."""
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops.contract import profile
from trueup.core.ops.registry import OPERATORS
from trueup.core.ops.rowwise import rope  # noqa: F401  (declares the operators)

ROPE = OPERATORS["npu_interleave_rope"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def naive(x, cos, sin):
    """Pair i, at (2i, 2i + 1), is rotated and comes out at (i, i + D/2)."""
    B, N, S, D = x.shape
    y, x, cos, sin = torch.zeros(B, N, S, D, dtype=torch.float64), x.double(), cos.double(), sin.double()
    for b in range(B):
        for n in range(N):
            for s in range(S):
                row = 0 if cos.shape[2] == 1 else s
                for i in range(D // 2):
                    even, odd, j = x[b, n, s, 2 * i], x[b, n, s, 2 * i + 1], i + D // 2
                    y[b, n, s, i] = even * cos[b, 0, row, i] - odd * sin[b, 0, row, i]
                    y[b, n, s, j] = odd * cos[b, 0, row, j] + even * sin[b, 0, row, j]
    return y


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6]), st.booleans(),
       st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**16))
def test_rope(B, N, S, D, one_table, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(B, N, S, D).to(dtype)
    cos, sin = torch.randn(2, B, 1, 1 if one_table else S, D).to(dtype)
    before = x.clone()
    with profile("paper"):
        y = ROPE(x, cos, sin)
    assert y.dtype == dtype and torch.equal(x, before)
    torch.testing.assert_close(y.double(), naive(x, cos, sin), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_scores_depend_on_the_distance_only():
    """What rotation is for: q.k is the same at positions (3, 1) and (13, 11), regrouped or not."""
    def at(x, position):
        angles = torch.tensor([position * 100.0 ** (-2 * i / 64) for i in range(32)] * 2).view(1, 1, 1, 64)
        return ROPE(x, angles.cos(), angles.sin())

    q, k = torch.randn(2, 1, 1, 1, 64)
    near, far = (at(q, a) * at(k, b) for a, b in ((3, 1), (13, 11)))
    assert math.isclose(near.sum(), far.sum(), abs_tol=1e-4)
    assert not math.isclose(near.sum(), (at(q, 3) * at(k, 2)).sum(), abs_tol=1e-4)


def test_rotation_in_place_returns_its_arguments():
    query, key, (cos, sin) = torch.randn(3, 2, 64), torch.randn(3, 1, 64), torch.randn(2, 3, 1, 64)
    first, second = OPERATORS["npu_apply_rotary_pos_emb"](query, key, cos, sin, layout="TND")
    assert first is query and second is key

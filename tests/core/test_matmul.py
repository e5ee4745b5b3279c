"""npu_grouped_matmul and npu_transpose_batchmatmul against loops in float64."""
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import matmul  # noqa: F401  (declares the operators)
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS

GROUPED, BATCHED = OPERATORS["npu_grouped_matmul"], OPERATORS["npu_transpose_batchmatmul"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
FLOATS = st.sampled_from([torch.float32, torch.bfloat16])


def dot(row, matrix):
    """row (K,) times matrix (K, N), in plain floats."""
    return [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*matrix, strict=True)]


def close(got, want, dtype):
    want = torch.tensor(want, dtype=torch.float64).reshape(got.shape)
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 2), st.integers(1, 5), st.integers(1, 5),
       st.sampled_from([0, 1]), st.booleans(), FLOATS, st.integers(0, 2**16))
def test_grouped(counts, rest, K, N, list_type, transposed, dtype, seed):
    torch.manual_seed(seed)
    x = torch.randn(sum(counts) + rest, K).to(dtype)
    weight = torch.randn(len(counts), N, K).to(dtype).transpose(1, 2)
    weight = weight if transposed else weight.contiguous()
    group_list = torch.tensor(counts if list_type else list(itertools.accumulate(counts)))
    (y,) = GROUPED([x], [weight], group_list=group_list, group_list_type=list_type, group_type=0, split_item=2)
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    assert y.shape == (len(x), N) and y.dtype == dtype and y[len(experts):].isnan().all()
    want = [dot(x[row].double().tolist(), weight[e].double().tolist()) for row, e in enumerate(experts)]
    close(y[:len(experts)], want, dtype)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans(), FLOATS,
       st.integers(0, 2**16))
def test_batched(M, B, K, N, swapped, dtype, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(M, B, K).to(dtype), torch.randn(B, K, N).to(dtype)
    with profile("paper"):
        if swapped:
            y = BATCHED(x, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
        else:
            y = BATCHED(x.transpose(0, 1), weight)  # the defaults
    assert y.shape == (M, B, N) and y.dtype == dtype and y.is_contiguous()
    close(y, [dot(x[m, b].double().tolist(), weight[b].double().tolist()) for m in range(M) for b in range(B)], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_accumulate_in_fp32(dtype):
    """A 16-bit sum of ones stops at 256 (bf16) or 2048 (fp16)."""
    ones = torch.ones(1, 4096, dtype=dtype), torch.ones(1, 4096, 16, dtype=dtype)
    (y,) = GROUPED([ones[0]], [ones[1]], group_list=torch.tensor([1]), group_type=0, split_item=2)
    assert y.eq(4096).all() and BATCHED(ones[0][None], ones[1]).eq(4096).all()


X, W, ENDS = torch.randn(4, 16).bfloat16(), torch.randn(3, 16, 32).bfloat16(), torch.tensor([1, 1, 4])
GOOD = {"x": [X], "weight": [W], "group_list": ENDS, "group_type": 0, "split_item": 2}


@pytest.mark.parametrize("changes, rule, fragment", [
    ({"x": [X, X]}, "RELATION", "2 and 1 tensors"),
    ({"split_item": 0}, "RELATION", "split_item is 0\n.*one output"),
    ({"group_type": None}, "RELATION", "group_type is None\n.*default None is refused"),
    ({"group_list_type": 2}, "RELATION", "group_list_type is 2"),
    ({"bias": [W[:, 0]]}, "RELATION", "bias is (.*\n)*.*not built yet"),
    ({"act_type": 5}, "RELATION", "act_type is 5"),
    ({"x": [X[:, :8]]}, "RELATION", "the K of x"),
    ({"group_list": None}, "RELATION", "group_list is None"),
    ({"group_list": ENDS[:2]}, "RELATION", "one entry for each expert"),
    ({"group_list": ENDS.int()}, "RELATION", "int64: the device reads 8 bytes"),
    ({"group_list": torch.tensor([1, 0, 3])}, "RELATION", r"\[1, 0, 3\]\n.*meant as the other type"),
    ({"group_list": torch.tensor([1, -1, 3]), "group_list_type": 1}, "RELATION", "counts"),
    ({"group_list_type": 1}, "RELATION", "6 rows in total\n.*at most the 4 rows"),
    ({"weight": [W[:1].expand(1025, 16, 32)], "group_list": torch.zeros(1025).long()}, "SIZE", "1024 groups"),
    ({"weight": [torch.empty(3, 16, 65536, dtype=torch.bfloat16)]}, "SIZE", "below 65536"),
    ({"x": [torch.randn(16, 4).bfloat16().T]}, "SIZE", "transposed view"),
    ({"x": [X.double()], "weight": [W.double()]}, "DTYPE", "float16, bfloat16 or float32"),
    ({"weight": [W.float()]}, "DTYPE", "x's torch.bfloat16"),
])
def test_grouped_refused(changes, rule, fragment):
    with profile("device"), pytest.raises(ContractError, match=fragment) as error:
        GROUPED(**GOOD | changes)
    assert error.value.rule == rule


HEADS = torch.randn(5, 3, 16).bfloat16()
SWAP = {"perm_x1": [1, 0, 2]}


@pytest.mark.parametrize("changes, rule, fragment", [
    ({"perm_x1": [0, 2, 1]}, "RELATION", r"perm_x1 is \[0, 2, 1\]"),
    ({"perm_x2": [0, 2, 1]}, "RELATION", "weight .B, K, N."),
    ({"perm_y": [0, 1, 2]}, "RELATION", "the result is .M, B, N."),
    ({"bias": W}, "RELATION", "not built yet"),
    ({"batch_split_factor": 2}, "RELATION", "batch_split_factor is 2"),
    ({"input": X}, "RELATION", "3 axes each"),
    ({"perm_x1": None}, "RELATION", r"B and K of input \[5, 3, 16\], read as \(B, M, K\)"),
    ({"input": HEADS[..., :8]}, "RELATION", r"read as \(M, B, K\)"),
    ({"weight": W[..., :8]}, "SIZE", "multiples of 16"),
    ({"input": HEADS[:, :1].expand(5, 4096, 16), "weight": W[:1].expand(4096, 16, 32)}, "SIZE", "below 65536"),
    ({"input": HEADS.double(), "weight": W.double()}, "DTYPE", "float16, bfloat16 or float32"),
    ({"weight": W.float()}, "DTYPE", "input's torch.bfloat16"),
])
def test_batched_refused(changes, rule, fragment):
    with profile("device"), pytest.raises(ContractError, match=fragment) as error:
        BATCHED(**{"input": HEADS, "weight": W} | SWAP | changes)
    assert error.value.rule == rule

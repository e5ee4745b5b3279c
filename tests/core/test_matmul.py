"""Grouped and batched products: what random calls do not show, and the far sides of open points."""
import pytest
import torch

from trueup.core.ops.contract import assume
from trueup.core.ops.matmul import grouped_matmul, transpose_batchmatmul  # noqa: F401  (declare the operators)
from trueup.core.ops.registry import OPERATORS

GROUPED, ON_HOST = OPERATORS["npu_grouped_matmul"], OPERATORS["npu_grouped_matmul.List"]
BATCHED = OPERATORS["npu_transpose_batchmatmul"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_accumulate_in_fp32(dtype):
    """A 16-bit sum of ones stops at 256 (bf16) or 2048 (fp16)."""
    ones = torch.ones(1, 4096, dtype=dtype), torch.ones(1, 4096, 16, dtype=dtype)
    (y,) = GROUPED([ones[0]], [ones[1]], group_list=torch.tensor([1]), group_type=0, split_item=2)
    assert y.eq(4096).all() and BATCHED(ones[0][None], ones[1]).eq(4096).all()


def test_int8_products_are_exact_at_any_length():
    """fp32 alone would lose the ones: 4096 products of 127 * 127 are above 2**24."""
    x, weight = torch.full((1, 4097), 127, dtype=torch.int8), torch.full((1, 4097, 1), 127, dtype=torch.int8)
    x[0, -1] = 1
    weight[0, -1] = 1
    (y,) = GROUPED([x], [weight], group_list=torch.tensor([1]), group_type=0, split_item=2, output_dtype=3)
    assert y.dtype == torch.int32 and y.item() == 4096 * 127 * 127 + 1


def test_experts_of_other_ranks_leave_rows_unwritten():
    x, weight = torch.randn(4, 3), torch.randn(2, 3, 5)
    (y,) = GROUPED([x], [weight], group_list=torch.tensor([1, 1]), group_list_type=1, group_type=0, split_item=2)
    assert y[:2].isfinite().all() and y[2:].isnan().all()


def test_one_group_of_counts_may_be_assumed():
    x, weight = torch.randn(4, 3), torch.randn(1, 3, 5)
    with assume("gmm-one-group"):
        (y,) = GROUPED([x], [weight], group_list=torch.tensor([4]), group_list_type=1, group_type=0, split_item=2)
    torch.testing.assert_close(y, x @ weight[0])


def test_split_item_of_the_page_may_be_assumed():
    x, weight = torch.randn(3, 4), [torch.randn(4, 5), torch.randn(4, 6)]
    with assume("gmm-split-item"):
        divided = ON_HOST([x], weight, group_list=[1, 3], split_item=0)
        separate = GROUPED([x, x], weight, group_type=-1, split_item=1)
    for got, want in zip([*divided, *separate], [x[:1] @ weight[0], x[1:] @ weight[1], x @ weight[0], x @ weight[1]],
                         strict=True):
        torch.testing.assert_close(got, want)


def test_an_empty_group_of_the_reduced_axis_is_poisoned_or_assumed_zero():
    call = dict(x=[torch.randn(6, 4).T], weight=[torch.randn(6, 5)], group_type=2, split_item=2,
                group_list=torch.tensor([2, 2, 6]))
    assert GROUPED(**call)[0].isnan().flatten(1).any(1).tolist() == [False, True, False]
    with assume("gmm-empty-group"):
        (y,) = GROUPED(**call)
    assert not y[1].any() and y[0].all()


def test_parts_of_a_head_may_be_assumed():
    x, weight = torch.randn(3, 2, 16), torch.randn(2, 16, 32)
    with assume("batch-split-factor"):
        y = BATCHED(x, weight, perm_x1=[1, 0, 2], batch_split_factor=4)
    whole = BATCHED(x, weight, perm_x1=[1, 0, 2]).flatten(1)
    assert torch.equal(torch.cat(list(y), 1), whole)

"""Quantisation to int8 and back: whose scale a row has, packed scales, and the far sides of open points."""
import math

import pytest
import torch

from trueup.core.ops.contract import ContractError, assume
from trueup.core.ops.matmul import dynamic_quant, quant_matmul  # noqa: F401  (declare the operators)
from trueup.core.ops.matmul.int8 import pack, unpack
from trueup.core.ops.registry import OPERATORS

QUANT, PRODUCT = OPERATORS["npu_dynamic_quant"], OPERATORS["npu_quant_matmul"]
generator = torch.Generator().manual_seed(0)


def rows(*shape):
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("tail", [math.nan, math.inf, 1e30])
def test_sb07_what_stands_in_padded_rows_spoils_no_real_row(tail, smooth):
    """5 real rows padded to 8: each has the scale that it has beside zeros, and beside nothing."""
    x, scales = rows(8, 16), {"smooth_scales": rows(16)} if smooth else {}
    x[5:] = tail
    y, scale = QUANT(x, **scales)
    x[5:] = 0
    for clean_y, clean_scale in (QUANT(x, **scales), QUANT(x[:5], **scales)):
        assert torch.equal(y[:5], clean_y[:5]) and torch.equal(scale[:5], clean_scale[:5])
    assert scale[:5].isfinite().all()


def test_a_row_of_zeros_has_scale_0_and_value_0():
    x = rows(3, 16)
    x[1] = 0
    y, scale = QUANT(x)
    assert scale[1] == 0 and not y[1].any() and scale[[0, 2]].all()


def test_int8_times_scale_is_the_row_again():
    x = rows(2, 5, 64)
    y, scale = QUANT(x)
    assert (y.float() * scale[..., None] - x.float()).abs().le(scale[..., None] / 2 * 1.001).all()


def test_the_modes_of_an_ascend_950_may_be_assumed():
    x, by_row, by_column = rows(2, 4, 6), rows(4), rows(6)
    with assume("dynamic-quant-mode"):
        y, scale = QUANT(x, quant_mode="pertensor", smooth_scales=by_column)
        smoothed = x.float() * by_column.float()
        torch.testing.assert_close(scale, smoothed.abs().max().view(1) / 127)
        assert torch.equal(y, (smoothed / scale).round().char())

        y, scale = QUANT(x, quant_mode="perchannel", smooth_scales=by_row)
        smoothed = x.float() * by_row.float()[:, None]
        assert scale.shape == (2, 6)
        torch.testing.assert_close(scale, smoothed.abs().amax(1) / 127)
        assert torch.equal(y, (smoothed / scale[:, None]).round().char())


def test_the_other_modes_know_no_experts_and_smooth_other_axes():
    x, ends = rows(4, 6), torch.tensor([4], dtype=torch.int32)
    with assume("dynamic-quant-mode"):
        with pytest.raises(ContractError, match="'pertoken' beside group_index"):
            QUANT(x, quant_mode="pertensor", group_index=ends, smooth_scales=rows(1, 6))
        with pytest.raises(ContractError, match="'perchannel' smooths rows"):
            QUANT(x, quant_mode="perchannel", smooth_scales=rows(6))


def test_packed_scales_hold_19_bits_and_an_integer():
    scale, offset = torch.tensor([1 / 3, 1e-4, -2.0]), torch.tensor([0.5, -300.0, 7.6])
    cut, whole = unpack(pack(scale, offset))
    assert whole.tolist() == [0, -256, 8] and cut[2] == -2
    torch.testing.assert_close(cut, scale, rtol=2**-10, atol=0)
    assert cut.abs().le(scale.abs()).all() and not torch.equal(cut, scale)
    assert torch.equal(pack(cut, whole), pack(scale, offset))
    assert torch.equal(unpack(pack(scale, offset).view(torch.uint64))[0], cut)


@pytest.mark.parametrize("output_dtype", [1, 5])
def test_the_host_packs_a_float_scale(output_dtype):
    x1, x2 = (torch.randint(-9, 9, shape, dtype=torch.int8, generator=generator) for shape in ((4, 6), (6, 5)))
    scale = torch.rand(5, generator=generator)
    packed = PRODUCT(x1, x2, pack(scale), output_dtype=output_dtype)
    assert torch.equal(PRODUCT(x1, x2, scale, output_dtype=output_dtype), packed)


def test_a_scale_beside_pertoken_scale_is_whole():
    """Without it the host cuts the scale to 10 bits behind the point: 1.9 steps of fp16 become 1."""
    one, scale = torch.ones(1, 1, dtype=torch.int8), torch.tensor([1 + 1.9 * 2**-10])
    assert PRODUCT(one, one, scale, output_dtype=5).item() == 1 + 2**-10
    assert PRODUCT(one, one, scale, pertoken_scale=torch.ones(1), output_dtype=5).item() == 1 + 2**-9


def test_of_two_offsets_the_packed_one_may_be_assumed():
    x1, x2 = torch.ones(1, 3, dtype=torch.int8), torch.ones(3, 2, dtype=torch.int8)
    with assume("quant-matmul-two-offsets"):
        y = PRODUCT(x1, x2, pack(torch.ones(2), torch.tensor([10.0, 20.0])), offset=torch.zeros(2))
    assert y.tolist() == [[13, 23]]


def test_quantise_multiply_scale():
    """What the two operators are for: a product of floats, at int8."""
    x, weight = torch.randn(5, 256, generator=generator), torch.randn(256, 7, generator=generator)
    a, a_scale = QUANT(x)
    b, b_scale = QUANT(weight.T)
    y = PRODUCT(a, b.T, b_scale, pertoken_scale=a_scale, output_dtype=5)
    torch.testing.assert_close(y.float(), x @ weight, rtol=0, atol=0.02 * (x @ weight).abs().max().item())

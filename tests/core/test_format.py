"""Memory formats: who has the tag, who loses it, and who is refused for it."""
import gc

import pytest
import torch
from torch import nn

from trueup.core.ops.cache import format
from trueup.core.ops.cache.format import FRACTAL_NZ, NCHW, ND, format_of
from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.registry import OPERATORS

CAST, CAST_, LIKE, EXAMPLE, GET = (OPERATORS[name] for name in (
    "npu_format_cast", "npu_format_cast_.acl_format", "npu_format_cast.Tensor", "npu_format_cast_", "get_npu_format"))


def test_a_cast_gives_new_memory_a_format_and_changes_no_value():
    x = torch.randn(4, 6)
    tiled = CAST(x, FRACTAL_NZ)
    assert torch.equal(tiled, x) and tiled.data_ptr() != x.data_ptr()
    assert (GET(x), GET(tiled)) == (ND, FRACTAL_NZ)
    back = CAST(tiled, ND)
    assert (GET(tiled), GET(back)) == (FRACTAL_NZ, ND) and back.data_ptr() != tiled.data_ptr()


def test_what_is_there_already_is_not_copied():
    x = torch.randn(2, 3, 4, 5)
    assert GET(x) == NCHW  # the example of the operator's page
    assert CAST(x, ND) is x and GET(x) == ND
    tiled = CAST(x, FRACTAL_NZ)
    assert CAST(tiled, FRACTAL_NZ) is tiled


def test_the_whole_keeps_the_format_and_its_parts_are_refused():
    weight = nn.Parameter(CAST(torch.randn(4, 6), FRACTAL_NZ))
    for whole in (weight, weight.data, weight.detach(), weight.view(4, 6)):
        assert GET(whole) == FRACTAL_NZ
    for part in (weight[:2], weight[2:], weight.T, weight.view(6, 4)):
        assert format_of(part) == ND
        for call in (lambda part=part: GET(part), lambda part=part: CAST(part, ND),
                     lambda part=part: LIKE(torch.randn(4, 6), part)):
            with pytest.raises(ContractError, match="cast last"):
                call()
    assert GET(weight.clone()) == ND


def test_in_place_means_the_tensor_not_its_memory():
    weight = nn.Parameter(torch.randn(4, 6))
    values = weight.detach().clone()
    assert GET(CAST_(weight.data, FRACTAL_NZ)) == FRACTAL_NZ and GET(weight) == ND
    weight.data = CAST_(weight.data, FRACTAL_NZ)
    assert GET(weight) == FRACTAL_NZ and torch.equal(weight, values)
    assert CAST_(weight, ND) is weight and GET(weight) == ND


def test_a_slice_of_a_pool_leaves_the_pool_when_cast():
    pool = torch.zeros(2, 4, 6)
    first = pool[0]
    CAST_(first, FRACTAL_NZ)
    first += 1
    assert GET(pool) == ND and not pool.any()


def test_the_format_of_another_tensor():
    tiled = CAST(torch.randn(4, 6), FRACTAL_NZ)
    assert GET(LIKE(torch.randn(3, 5), tiled)) == FRACTAL_NZ
    assert GET(LIKE(tiled, torch.randn(3))) == ND
    plain = torch.randn(4, 6)
    with pytest.raises(ContractError, match="its values"):
        EXAMPLE(plain, tiled)
    with assume("format-cast-by-example"):
        before = plain.clone()
        assert EXAMPLE(plain, tiled) is plain and GET(plain) == FRACTAL_NZ and torch.equal(plain, before)


def test_a_laptop_may_cast_what_stands_in_for_16_bits():
    CAST(torch.zeros(2, 2, dtype=torch.float64), FRACTAL_NZ)
    with profile("device"), pytest.raises(ContractError, match="for FRACTAL_NZ"):
        CAST(torch.zeros(2, 2, dtype=torch.float64), FRACTAL_NZ)


def test_the_tag_dies_with_the_memory():
    gc.collect()
    before = len(format._tags)
    tiled = CAST(torch.randn(4, 6), FRACTAL_NZ)
    view = tiled[1:]
    assert len(format._tags) == before + 1
    del tiled
    gc.collect()
    assert len(format._tags) == before + 1  # a view keeps the memory
    del view
    gc.collect()
    assert len(format._tags) == before

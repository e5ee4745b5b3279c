"""What the generic tests cannot reach: tiled caches that are told by their format, and what is only assumed."""
import pytest
import torch

from trueup.core.ops.cache import scatter_nd  # noqa: F401  (declares its operators)
from trueup.core.ops.cache.format import FRACTAL_NZ, npu_format_cast
from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.registry import OPERATORS

PAGED, ATB, ND = (OPERATORS[name] for name in ("npu_scatter_pa_kv_cache", "atb::_npu_reshape_and_cache",
                                               "npu_scatter_nd_update_"))
SLOTS = torch.tensor([4, 11, 5], dtype=torch.int32)


def rows(N, D, dtype=torch.bfloat16):
    return torch.arange(3 * N * D).view(3, N, D).to(dtype)


def caches(*tiles, dtypes=(torch.bfloat16, torch.bfloat16)):
    """Tiled, 4 pages of 3."""
    return [torch.zeros(4, pieces, 3, C0, dtype=dtype) for (pieces, C0), dtype in zip(tiles, dtypes, strict=True)]


@pytest.fixture(autouse=True)
def device():
    with profile("device"):
        yield


def test_a_row_stands_in_pieces_and_a_piece_of_neighbours_together():
    key_cache, value_cache = caches((4, 16), (2, 16))
    PAGED(rows(2, 32), rows(2, 16), key_cache, value_cache, SLOTS)
    assert key_cache[1, :, 1].flatten().equal(rows(2, 32)[0].flatten())  # slot 4: page 1, place 1
    assert key_cache[3, :, 2].flatten().equal(rows(2, 32)[1].flatten())
    assert key_cache[1, 0, 1:].equal(rows(2, 32)[[0, 2], 0, :16])
    assert value_cache[1, 1, 1].equal(rows(2, 16)[0, 1])


def test_atb_reads_the_form_of_the_caches_from_their_format():
    tiled = [npu_format_cast(cache, FRACTAL_NZ) for cache in caches((2, 16), (1, 16))]
    same = caches((2, 16), (1, 16))
    ATB(rows(1, 32), rows(1, 16), *tiled, SLOTS)
    PAGED(rows(1, 32), rows(1, 16), *same, SLOTS)
    for one, other in zip(tiled, same, strict=True):
        assert one.any() and torch.equal(one, other)
    with pytest.raises(ContractError, match=r"N = 1 and D = 32(.*\n)*.*SB-26"):
        ATB(rows(1, 32), rows(1, 16), *caches((2, 16), (1, 16)), SLOTS)
    with pytest.raises(ContractError, match="cast both"):
        ATB(rows(1, 32), rows(1, 16), tiled[0], same[1], SLOTS)
    with pytest.raises(ContractError, match="the 16 values"):
        ATB(rows(1, 32), rows(1, 16), tiled[0], npu_format_cast(caches((2, 16), (2, 16))[0], FRACTAL_NZ), SLOTS)


def test_atb_takes_an_int8_key_beside_a_16_bit_value():
    """The quantised latent and its rope part."""
    tiled = [npu_format_cast(c, FRACTAL_NZ) for c in caches((1, 32), (1, 16), dtypes=(torch.int8, torch.bfloat16))]
    ATB(rows(1, 32, torch.int8), rows(1, 16), *tiled, SLOTS)
    assert tiled[0][1, 0, 1].tolist() == list(range(32)) and tiled[1][3, 0, 2].tolist() == list(range(16, 32))


def test_scatter_takes_two_dtypes_only_on_assumption():
    call = rows(1, 32, torch.int8), rows(1, 16), *caches((1, 32), (1, 16), dtypes=(torch.int8, torch.bfloat16)), SLOTS
    with pytest.raises(ContractError, match="scatter-mixed-dtypes"):
        PAGED(*call)
    with assume("scatter-mixed-dtypes"):
        PAGED(*call)
    assert call[2][1, 0, 1].tolist() == list(range(32))
    with assume("scatter-mixed-dtypes"), pytest.raises(ContractError, match=r"key's torch\.int8"):
        plain = [torch.zeros(4, 3, 1, D, dtype=dtype) for D, dtype in ((32, torch.int8), (16, torch.bfloat16))]
        PAGED(*call[:2], *plain, SLOTS, cache_mode="Norm")


def test_minus_one_leaves_a_row_out_only_on_assumption():
    slots = torch.tensor([4, -1, -1], dtype=torch.int32)
    for write in (
        lambda cache: PAGED(rows(1, 16), rows(1, 16), cache, cache.clone(), slots, cache_mode="Norm"),
        lambda cache: ATB(rows(1, 16), rows(1, 16), cache, cache.clone(), slots),
        lambda cache: ND(cache.view(12, 16), slots[:, None], rows(1, 16)[:, 0]),
    ):
        cache = torch.full((4, 3, 1, 16), 7, dtype=torch.bfloat16)
        with pytest.raises(ContractError, match="scatter-minus-one"):
            write(cache)
        with assume("scatter-minus-one"):
            write(cache)
        flat = cache.view(12, 16)
        assert flat[4].equal(rows(1, 16)[0, 0])
        assert flat[[s for s in range(12) if s != 4]].eq(7).all()  # the last slot too (SB-09)
    tiled = torch.full((4, 1, 3, 16), 7, dtype=torch.bfloat16)
    with assume("scatter-minus-one"):
        PAGED(rows(1, 16), rows(1, 16), tiled, tiled.clone(), slots)
    assert tiled.ne(7).any(-1).nonzero().tolist() == [[1, 0, 1]]


def test_a_strided_cache_is_written_through_and_a_reshape_of_it_is_not():
    pool = torch.zeros(6, 2, 4)
    ND(pool[:, 0], torch.tensor([[2]]), torch.ones(1, 4))
    assert pool[2, 0].eq(1).all() and pool.sum() == 4
    ND(pool.transpose(0, 1).reshape(12, 4), torch.tensor([[5]]), torch.ones(1, 4))
    assert pool.sum() == 4


def test_padded_rows_share_a_place_of_the_dummy_page_and_of_no_other():
    cache, rows = torch.zeros(4, 2, 8), torch.ones(4, 8)
    ND(cache, torch.tensor([[0, 1], [0, 1], [3, 0], [3, 1]]), rows)
    assert cache.sum((1, 2)).tolist() == [8, 0, 0, 16]
    with pytest.raises(ContractError, match=r"\(3, 1\) twice"):
        ND(cache, torch.tensor([[0, 1], [0, 1], [3, 1], [3, 1]]), rows)


def test_rows_that_are_left_out_may_have_one_index():
    cache = torch.zeros(4, 2, 8)
    with assume("scatter-minus-one"):
        ND(cache, torch.tensor([[3, -1], [3, -1], [2, 0]]), torch.ones(3, 8))
    assert cache.sum((1, 2)).tolist() == [0, 0, 8, 0]

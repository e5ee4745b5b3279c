"""The small parts of sparse attention, each by itself."""
import pytest
import torch

from trueup.core.attention import sparse
from trueup.core.attention.choices import DraftReuse, IndexReuse, grown, padding_choice
from trueup.core.attention.sparse import everything, per_head, sees_all
from trueup.core.cache import CacheSpec, Pools
from trueup.core.carry import for_layout
from trueup.core.layers.layer_norm import LayerNorm
from trueup.core.layout import Mode
from trueup.core.ops.capture import capture
from trueup.core.ops.contract import ContractError
from trueup.core.ops.load import load
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.rows import Kind, Rows
from trueup.core.view import materialise

load()


# 128 heads of rank 512 are DeepSeek-V3.2's, 65,536 together; the operator takes less.
@pytest.mark.parametrize(("heads", "Din", "pieces"), [(128, 512, 2), (127, 512, 1), (5, 64, 1), (129, 512, 3)])
def test_a_product_in_halves_is_the_undivided_one(heads, Din, pieces):
    x, weight = torch.randn(3, heads, Din), torch.randn(heads, Din, 16)
    with capture() as calls:
        out = per_head(x, weight)
    assert len(calls.calls) == pieces
    expected = torch.einsum("tnd,nde->tne", x.double(), weight.double())
    assert out.shape == (3, heads, 16) and (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_without_halves_the_operator_refuses(monkeypatch):
    monkeypatch.setattr(sparse, "MAX_AXIS", 2**17)
    with pytest.raises(ContractError, match="65536"):
        per_head(torch.randn(3, 128, 512), torch.randn(128, 512, 16))


def int32(rows):
    return torch.tensor(rows, dtype=torch.int32)[:, None]


def test_grown_rows_hold_their_own_position_and_lose_the_worst():
    chosen = int32([[4, 0, 2, -1], [4, 0, 2, 1], [0, -1, -1, -1], [3, 5, 2, 1]])
    more = grown(chosen, torch.tensor([5, 5, 0, 5]))
    assert more[:, 0].tolist() == [[5, 4, 0, 2], [5, 4, 0, 2], [0, -1, -1, -1], [3, 5, 2, 1]]
    assert more.dtype == torch.int32 and chosen[0, 0].tolist() == [4, 0, 2, -1]
    again = grown(more, torch.tensor([6, 6, 0, 6]))
    assert again[1, 0].tolist() == [6, 5, 4, 0]  # what was drafted before stays
    assert grown(int32([[7]]), torch.tensor([8]))[0, 0].tolist() == [8]


def test_a_padded_row_chooses_the_first_position_of_its_request():
    assert padding_choice(4, int32([[9] * 4])).tolist() == [[0, -1, -1, -1]]
    assert padding_choice(1, int32([[9]])).dtype == torch.int32
    layout = plan([Work(7, Mode.DRAFT, 5, 1, (1,)), Work(8, Mode.DRAFT, 2, 1, (2,))], page_size=16, buckets=(4,))
    carry = {8: int32([[2, 0]]), 7: int32([[5, 3]]), 9: int32([[1, 1]])}
    rows = for_layout(carry, layout, padding_choice(2, carry[8]))
    assert rows.tensor[:, 0].tolist() == [[5, 3], [2, 0], [0, -1], [0, -1]] and rows.tensor.dtype == torch.int32
    for some in ({}, {8: carry[8]}):
        with pytest.raises(ValueError, match="bring nothing"):
            for_layout(some, layout)


def test_everything_is_all_up_to_a_rows_own_position():
    assert everything(torch.tensor([0, 2, 3]), 4)[:, 0].tolist() == [[0, -1, -1, -1], [2, 1, 0, -1], [3, 2, 1, 0]]
    assert everything(torch.tensor([0]), 4).dtype == torch.int32


@pytest.mark.parametrize(("mode", "lengths", "short"), [
    (Mode.PREFILL, (8, 3), True), (Mode.PREFILL, (9, 3), False), (Mode.DECODE, (1, 1), False)])
def test_only_prompts_no_longer_than_k_see_all(mode, lengths, short):
    """Decoding never takes the short cut, so its operators do not depend on lengths."""
    pool = PagePool(4, 16)
    pools = Pools(CacheSpec(1, 8, 4, torch.float32, torch.device("cpu"), 4, (0,)), pool)
    layout = plan([Work(r, mode, 0, n, pool.allocate(1)) for r, n in enumerate(lengths)], page_size=16)
    rows = Rows(Kind.TOKEN, layout, torch.zeros(sum(lengths), 1, 8, dtype=torch.int32))
    (seg,) = materialise(layout, pools).segments
    assert sees_all(seg, rows) is short


@pytest.mark.parametrize(("source", "layer"), [((1, 1), 0), ((0, 0, 1), 2), ((0, 2, 2), 1), ((0, -1), 1), ((0, 7), 1)])
def test_a_layer_takes_its_own_choice_or_that_of_one_before_it_that_chooses(source, layer):
    with pytest.raises(ValueError, match=f"layer {layer} would take the choice of layer {source[layer]}; expected"):
        IndexReuse(source)


def test_a_policy_that_holds():
    assert IndexReuse((0, 1, 1, 3)).drafts is DraftReuse.OWN


def test_layer_norm_is_the_textbooks():
    """And it centres: what an RMSNorm would leave in is gone."""
    norm = LayerNorm(16, 1e-6)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    x = torch.randn(5, 16) + 3
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias
    with torch.no_grad():
        assert (norm(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (norm(x + 7) - norm(x)).abs().max() <= 1e-4

"""Sparse attention and its indexer: the bug gallery's cases with sizes for paper, and both ways through the kernels."""
from random import Random

import pytest
import torch
from torch import Tensor

from operators.case import copied, invoke
from operators.case_sparse_requests import LAYOUTS, UNWRITTEN, Batch, int32
from operators.sparse_attention import naive_sparse, quantised, sparse
from operators.sparse_indexer import indexer, naive_indexer
from trueup.core import pad_topk
from trueup.core.ops.attention import lightning_indexer, sparse_attend, sparse_indices
from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS

load()
R, DR, N, P, SCALE = 8, 4, 5, 4, 0.3
sparse_attention = OPERATORS["npu_sparse_flash_attention"]
index = OPERATORS["npu_lightning_indexer"]


@pytest.fixture
def paper():
    with profile("paper"):
        yield


class Pages:
    """Keys of some requests in pages; the rest of the pool is NaN, as if nobody had written there yet."""

    def __init__(self, *kv: int, width: int = R + DR) -> None:
        self.kv, columns = kv, -(-max(kv) // P)
        self.pool = torch.full((1 + columns * len(kv), P, 1, width), float("nan"))
        self.table = torch.arange(1, 1 + columns * len(kv), dtype=torch.int32).view(len(kv), columns)
        for b, n in enumerate(kv):
            for place in range(n):
                self.pool[self.table[b, place // P], place % P] = torch.randn(1, width)

    def keys(self, b: int) -> Tensor:
        return self.pool[self.table[b].long()].flatten(0, 2)[:self.kv[b]]

    def attend(self, query: Tensor, indices: Tensor, ends: list[int], **more) -> Tensor:
        key = self.pool[..., :R].contiguous()
        return sparse_attention(
            query[..., :R].contiguous(), key, key, indices, SCALE, query_rope=query[..., R:].contiguous(),
            key_rope=self.pool[..., R:].contiguous(), block_table=self.table, actual_seq_lengths_query=int32(ends),
            actual_seq_lengths_kv=int32([*self.kv]), layout_query="TND", layout_kv="PA_BSND", attention_mode=2, **more,
        )[0]

    def index(self, query: Tensor, weights: Tensor, ends: list[int], k: int) -> Tensor:
        return index(query, self.pool, weights, actual_seq_lengths_query=int32(ends), block_table=self.table,
                     actual_seq_lengths_key=int32([*self.kv]), layout_query="TND", layout_key="PA_BSND",
                     sparse_count=k)[0]


def dense(query: Tensor, keys: Tensor) -> Tensor:
    """One row, [N, R], over all the keys given."""
    scores = SCALE * (query.double() @ keys.double().T)
    return (scores.softmax(-1) @ keys[:, :R].double()).float()


def queries(rows: int) -> Tensor:
    return torch.randn(rows, N, R + DR)


def test_sb_01_query_lengths_of_the_padded_batch(paper):
    index_pages, pages = Pages(9, 5, 12, width=R), Pages(9, 5, 12)
    index_query, weights, query = torch.randn(12, 2, R), torch.rand(12, 2), queries(12)
    indices = torch.full((12, 1, 4), -1, dtype=torch.int32)
    for call in (lambda ends: index_pages.index(index_query, weights, ends, 4),
                 lambda ends: pages.attend(query, indices, ends)):
        with pytest.raises(ContractError, match=r"(?s) is 3 lengths.*expected  4 lengths.*SB-01"):
            call([3, 6, 9, 12])

    # Planned before the padding: rows 9 to 11 belong to no request, and nothing is known of what comes out for them.
    chosen = index_pages.index(index_query, weights, [3, 6, 9], 4)
    assert torch.equal(chosen[:9], index_pages.index(index_query[:9], weights[:9], [3, 6, 9], 4))
    assert (chosen[9:] == UNWRITTEN).all()
    out = pages.attend(query, chosen, [3, 6, 9])
    torch.testing.assert_close(out[:9], pages.attend(query[:9], chosen[:9], [3, 6, 9]))
    assert out[9:].isnan().all() and not out[:9].isnan().any()
    with assume("rows-past-the-end"):
        assert (index_pages.index(index_query, weights, [3, 6, 9], 4)[9:] == -1).all()
        assert (pages.attend(query, chosen, [3, 6, 9])[9:] == 0).all()
    # One token each.
    assert not pages.attend(query[:3], chosen[[2, 5, 8]], [1, 2, 3]).isnan().any()


def test_sb_02_index_rows_of_another_forward(paper):
    pages, query = Pages(6, 6, 6, 6), queries(4)
    carried = int32([0, 1, 4, -1, 2, 3, -1, -1, 5, 1, 0, 2]).view(3, 1, 4)
    for rows, got in ((carried, 3), (torch.cat([carried, carried])[:5], 5)):
        with pytest.raises(ContractError, match=rf"(?s)is {got} rows.*expected  4 rows.*pad_topk.*SB-02"):
            pages.attend(query, rows, [1, 2, 3, 4])

    padded = pad_topk(carried, 4)
    assert torch.equal(padded, torch.cat([carried, int32([-1] * 4).view(1, 1, 4)])) and padded.dtype == torch.int32
    # Whatever the keys are that -1 might be taken for: key 0, or the last one.
    for row in (0, 5):
        pages.pool[pages.table[3, row // P], row % P] = 1e6
    out = pages.attend(query, padded, [1, 2, 3, 4])
    assert torch.equal(out[3], torch.zeros(N, R))
    for b, row in enumerate(carried.flatten(1).tolist()):
        torch.testing.assert_close(out[b], dense(query[b], pages.keys(b)[[e for e in row if e >= 0]]))
    # As the project repaired it: the padded row lies past the last request, and is never read.
    assert torch.equal(Pages.attend(pages_of(pages, 3), query, padded, [1, 2, 3])[:3], out[:3])


def pages_of(pages: Pages, requests: int) -> Pages:
    fewer = Pages(*[1] * requests)
    fewer.kv, fewer.pool, fewer.table = pages.kv[:requests], pages.pool, pages.table[:requests]
    return fewer


def test_sb_02_what_no_indexer_has_written(paper):
    """Index rows past the indexer's last request, used for a request of the next call."""
    index_pages, pages = Pages(9, 5, width=R), Pages(9, 5)
    chosen = index_pages.index(torch.randn(4, 2, R), torch.rand(4, 2), [2, 3], 4)
    with pytest.raises(ContractError, match=r"sparse_indices\[3\] is 2147483647, which no indexer writes"):
        pages.attend(queries(4), chosen, [2, 4])


def test_sb_29_fewer_keys_than_k(paper):
    index_pages, pages, query = Pages(5, width=R), Pages(5), queries(5)
    chosen = index_pages.index(torch.randn(5, 2, R), torch.rand(5, 2), [5], 8)
    assert chosen.shape == (5, 1, 8)
    for i, row in enumerate(chosen.flatten(1).tolist()):  # a prefill: row i sees i + 1 keys
        assert sorted(row[:i + 1]) == list(range(i + 1)) and row[i + 1:] == [-1] * (7 - i)
    out = pages.attend(query, chosen, [5])
    for i in range(5):
        torch.testing.assert_close(out[i], dense(query[i], pages.keys(0)[:i + 1]))
    # Decoding: the last row alone.
    torch.testing.assert_close(pages.attend(query[4:], chosen[4:], [1])[0], out[4])


def test_what_a_row_does_not_choose_never_reaches_it(paper):
    """Not even NaN: neither where rows share their keys, nor where one row's keys are gathered."""
    pages, query = Pages(6), queries(4)
    indices = int32([5, 2, 4, -1] * 4).view(4, 1, 4)  # of these keys, row 0 sees one
    want = pages.attend(query, indices, [4])
    for place in (0, 1, 3):
        pages.pool[pages.table[0, place // P], place % P] = float("nan")
    torch.testing.assert_close(pages.attend(query, indices, [4]), want)
    torch.testing.assert_close(pages.attend(query[3:], indices[3:], [1])[0], want[3])


@pytest.mark.parametrize("elements", [1 << 21, 500])  # the second cuts everything into small blocks
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_both_ways_give_the_same(monkeypatch, layouts, elements):
    monkeypatch.setattr(sparse_attend, "ELEMENTS", elements)
    for seed, mode in ((1, 0), (2, 3)):
        r = Random(seed)
        call = sparse(r, Batch(r, layouts, [5, 5, 1, 0, 3], [30, 17, 33, 4, 2]), sparse_mode=mode)
        answers = []
        for gather in (0, 10**9):
            monkeypatch.setattr(sparse_attend, "GATHER", gather)
            answers.append(invoke(OPERATORS["npu_sparse_flash_attention"], "npu_sparse_flash_attention", call)[0])
        torch.testing.assert_close(*answers, equal_nan=True, rtol=0, atol=2e-2)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_in_fp64_nothing_is_lost(monkeypatch, layouts):
    """A laptop's own dtypes, and small blocks."""
    monkeypatch.setattr(sparse_attend, "ELEMENTS", 3000)
    monkeypatch.setattr(lightning_indexer, "ELEMENTS", 3000)
    r = Random(3)
    batch = Batch(r, layouts, [4, 1, 0, 6], [40, 3, 5, 6], past=2)
    call = copied(sparse(r, batch), torch.float64)
    for got, want in zip(invoke(sparse_attention, "npu_sparse_flash_attention", call),
                         invoke(naive_sparse, "npu_sparse_flash_attention", call), strict=True):
        torch.testing.assert_close(got.double(), want.double(), equal_nan=True, rtol=0, atol=1e-6)
    exact, narrow = (copied(indexer(Random(3), batch), dtype) for dtype in (torch.float64, torch.float32))
    want, _ = invoke(naive_indexer, "npu_lightning_indexer", exact)
    for call in (exact, narrow):
        assert torch.equal(invoke(index, "npu_lightning_indexer", call)[0], want)


def test_of_equal_scores_the_earlier_key_comes_first(paper):
    key = torch.tensor([1.0, -1.0, 1.0, 2.0, -3.0]).view(1, 5, 1, 1)
    for weight in (1.0, -1.0):
        query, weights = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), weight)
        for dtype in (torch.float32, torch.float64):
            chosen, _ = index(query.to(dtype), key.to(dtype), weights.to(dtype), sparse_count=4, sparse_mode=0)
            assert chosen.flatten().tolist() == ([3, 0, 2, 1] if weight > 0 else [1, 4, 0, 2])
    assert lightning_indexer._best(torch.tensor([[[-0.0, 0.0, -1.0, -0.0]]]), 4).tolist() == [[[0, 1, 3, 2]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantised_keys_are_keys_of_the_queries_dtype(dtype):
    r = Random(4)
    batch = Batch(r, LAYOUTS[0], [3, 1], [20, 9])
    call = quantised(r, batch, sparse_mode=3)
    query, record = call["query"].to(dtype), call["key"]
    latent, scales = record[..., :512], record[..., 640:].clone().view(torch.float32)
    rope = record[..., 512:640].clone().view(torch.bfloat16).to(dtype)
    key = (latent.unflatten(-1, (4, 128)) * scales[..., None]).flatten(-2).to(dtype)
    record = torch.cat([latent, rope.view(torch.int8), scales.view(torch.int8)], -1)
    got = invoke(OPERATORS["npu_kv_quant_sparse_flash_attention"], "npu_kv_quant_sparse_flash_attention",
                 call | {"query": query, "key": record, "value": record})
    shared = {n: x for n, x in call.items() if n not in ("key_quant_mode", "value_quant_mode")}
    want, _, _ = invoke(sparse_attention, "npu_sparse_flash_attention", shared | {
        "query": query[..., :512].contiguous(), "query_rope": query[..., 512:].contiguous(), "key": key, "value": key,
        "key_rope": rope})
    assert got.dtype == dtype and torch.equal(got, want)


def test_value_may_be_a_copy_of_key():
    call = sparse(Random(5))
    call["key"][0] = float("nan")  # a cache has pages that nobody has written yet
    call |= {"sparse_indices": torch.full_like(call["sparse_indices"], -1), "value": call["key"].clone()}
    invoke(sparse_attention, "npu_sparse_flash_attention", call)


def test_many_rows_are_searched_as_thoroughly(monkeypatch, paper):
    """The search that picks rows to look at: each fault in its turn."""
    pages, query = Pages(6, 6), queries(6)
    good = torch.tensor([[3, 2, 1, 0], [0, 1, 2, 4], [5, 3, 0, -1]] * 2, dtype=torch.int32).view(6, 1, 4)
    want = pages.attend(query, good, [3, 6])
    monkeypatch.setattr(sparse_indices, "FEW", 0)
    assert torch.equal(pages.attend(query, good, [3, 6]), want)
    for fault in ([-1, 2, 1, 0], [3, 3, 1, 0], [3, -2, -1, -1], [3, 2, UNWRITTEN, 0]):
        bad = good.clone()
        bad[4, 0] = int32(fault)
        with pytest.raises(ContractError, match=r"sparse_indices\[4\]"):
            pages.attend(query, bad, [3, 6])
        pages.attend(query, bad, [3, 4])  # row 4 belongs to nobody


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("shape", [(0, 3), (1, 4), (3, 4), (3, 1, 4), (2,), (2, 1, 1, 5)])
def test_pad_topk(shape, dtype):
    topk = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    before = topk.clone()
    for more in (0, 1, 4):
        padded = pad_topk(topk, shape[0] + more)
        assert padded.dtype == dtype and padded.shape == (shape[0] + more, *shape[1:])
        assert torch.equal(padded[:shape[0]], topk) and (padded[shape[0]:] == -1).all()
        padded.fill_(7)
        assert torch.equal(topk, before)


def test_pad_topk_never_cuts():
    with pytest.raises(ValueError, match="has 5 rows, more than the 4 asked for"):
        pad_topk(torch.zeros(5, 1, 4, dtype=torch.int32), 4)
    for wrong in (torch.tensor(3), torch.zeros(2, 4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="an axis of rows and a signed dtype"):
            pad_topk(wrong, 4)

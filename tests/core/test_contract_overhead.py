"""The benchmark of contract costs runs, and contracts keep its limit."""
import pytest

from benchmarks import contract_overhead
from trueup.core.ops.registry import OPERATORS


@pytest.fixture(scope="module")
def costs():
    return contract_overhead.measure(repetitions=3)


def test_it_measures_the_operators_of_a_decode_round_and_the_paged_ones(costs):
    at = {requests: {c.name for c in costs if c.requests == requests} for requests in (8, 64)}
    assert at[8] >= {"npu_rms_norm", "npu_grouped_matmul", "npu_transpose_batchmatmul", "npu_kv_rmsnorm_rope_cache",
                     "npu_fused_infer_attention_score_v2", "npu_moe_gating_top_k"}
    assert at[64] >= {*contract_overhead.PAGED, "npu_lightning_indexer", "npu_sparse_flash_attention"}
    assert (at[8] | at[64]) <= set(OPERATORS) and len(costs) == len(at[8]) + len(at[64])
    assert all(min(c.contract, c.checked, c.kernel, c.share) > 0 for c in costs)


def test_integers_may_be_looked_at(costs):
    attention, sparse = (next(c for c in costs if c.requests == 64 and c.name == name)
                         for name in ("npu_fused_infer_attention_score_v2", "npu_sparse_flash_attention"))
    assert 10 + 0.015 * 3 * 64 <= attention.limit() < 14  # ends, lengths, and a page of each
    assert 10 + 0.003 * 64 * 512 < sparse.limit() < 130


def test_the_table_has_a_line_for_each(costs):
    head, *lines = contract_overhead.table(costs).splitlines()
    assert head.split()[:2] == ["operator", "requests"] and len(lines) == len(costs)
    assert {(line.split()[0], int(line.split()[1])) for line in lines} == {(c.name, c.requests) for c in costs}


def test_above_the_limit_it_ends_with_1(monkeypatch, capsys):
    cheap, dear = (contract_overhead.Cost("npu_x", 8, 0, contract, 100.0, 90.0) for contract in (9.0, 11.0))
    for costs, flags, ends in (([cheap], [], 0), ([cheap, dear], [], 1), ([dear], ["--no-limit"], 0),
                               ([dear], ["--limit", "12"], 0)):
        monkeypatch.setattr(contract_overhead, "measure", lambda repetitions, costs=costs: costs)
        assert contract_overhead.main(flags) == ends
    assert "npu_x" in capsys.readouterr().err


@pytest.mark.long
def test_no_contract_is_above_its_limit():
    assert [c for c in contract_overhead.measure(repetitions=2000) if c.contract > c.limit()] == []

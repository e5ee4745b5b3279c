"""Sparse attention against transformers 5.24: what is chosen, row by row, and the logits; same weights, same ids, fp32.

GLM-5 (each layer chooses), GLM-5.2 (two of five take what another chose) and DeepSeek-V3.2 (yarn, expert groups,
halves in the indexer's rope), of the smallest sizes that every contract admits; test_sparse_heads.py has the real ones.
The requests are shorter than top-k, as long, and up to 128 times as long.

Measured: of 35,000 choices none differs, and logits are within 1e-5 of the scale.
"""
import pytest
import torch

from oracle.batch import library_model, ours
from oracle.sparse import TOPK, Indexed, SparseBatch, assert_equal, deepseek, feed_side_by_side, first_tie, glm, run
from trueup.core.layout import Mode

CONFIGS = {
    "glm-5": lambda: glm(3),
    "glm-5.2": lambda: glm(5, ["full", "full", "shared", "shared", "full"]),
    "deepseek": lambda: deepseek(3),
}
LENGTHS = (131, 1, 40, 128, 17, TOPK - 1, TOPK, TOPK + 1)
LONG = 1030  # half mode of npu_rotary_mul takes no more than 999 rows on its batch axis


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(the library's model, ours loaded from the folder that it wrote)."""
    oracle = library_model(*CONFIGS[request.param]())
    return oracle, ours(oracle, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sequences(pair):
    return run(pair[0], LENGTHS)


@pytest.mark.parametrize("count", [1, 8])
def test_prefill_in_one_shot(pair, sequences, count):
    batch = SparseBatch(pair[1], sequences[:count])
    batch.feed(batch.left(), Mode.PREFILL)
    assert_equal(batch, sequences[:count])


def test_prefill_in_uneven_chunks(pair, sequences):
    """From shorter than top-k, where attention is dense, to longer; behind prefixes, with rows of no request."""
    batch = SparseBatch(pair[1], sequences)
    batch.in_uneven_chunks()
    assert not any(batch.left())
    assert_equal(batch, sequences)


def test_step_by_step_decoding_padded_to_eight(pair, sequences):
    """All but up to 12 tokens as a prompt, the rest one by one; short requests leave the batch early."""
    batch = SparseBatch(pair[1], sequences)
    batch.to_the_end(tail=12, most=1, mode=Mode.DECODE)
    assert_equal(batch, sequences)


def test_verify_rows_equal_the_library_too(pair, sequences):
    """Several query rows a request in the absorbed form, as speculation asks."""
    batch = SparseBatch(pair[1], sequences)
    batch.to_the_end(tail=9, most=4, mode=Mode.VERIFY)
    assert_equal(batch, sequences)


def test_prompts_beside_decoding_and_verification(pair, sequences):
    """Each segment chooses by its own lengths."""
    batch = SparseBatch(pair[1], sequences)
    feed_side_by_side(batch)
    assert_equal(batch, sequences)


def test_a_prompt_of_more_than_a_thousand_tokens(pair):
    """In one forward, and then in pieces, of which the last are decoded."""
    sequences = run(pair[0], (LONG,))
    batch = SparseBatch(pair[1], sequences)
    batch.feed([LONG], Mode.PREFILL)
    assert_equal(batch, sequences)
    batch = SparseBatch(pair[1], sequences, buckets=(1,))
    for length, mode in ((TOPK, Mode.PREFILL), (LONG - TOPK - 4, Mode.PREFILL), (1, Mode.DECODE), (3, Mode.VERIFY)):
        batch.feed([length], mode)
    assert_equal(batch, sequences)


@pytest.mark.parametrize("pair", ["glm-5", "deepseek"], indirect=True)
def test_ties_are_told_by_the_librarys_scores(sequences):
    for _, _, indexed in sequences:
        for one in indexed.values():
            for t in range(TOPK, len(one.chosen), 7):
                assert set(one.scores(t).topk(TOPK).indices.tolist()) == set(one.chosen[t].tolist())


@pytest.mark.parametrize("pair", ["glm-5"], indirect=True)
def test_only_a_tie_is_a_tie(pair, sequences, monkeypatch):
    """A choice with a best key exchanged for the worst is an error; were the scores equal, it would be counted."""
    batch = SparseBatch(pair[1], sequences[:1])
    batch.feed([131], Mode.PREFILL)
    indexed = sequences[0][2]
    chosen = {layer: [parts[0].clone()] for layer, parts in batch.chosen[0].items()}
    assert first_tie(chosen, indexed) == (131, 0)
    chosen[1][0][100, 0, 0] = indexed[1].scores(100).argmin()
    with pytest.raises(AssertionError, match="layer 1, row 100: not a tie"):
        first_tie(chosen, indexed)
    monkeypatch.setattr(Indexed, "scores", lambda self, t: torch.ones(t + 1))
    assert first_tie(chosen, indexed) == (100, 1)

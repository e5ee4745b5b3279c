"""What a decoded token reads, counted: sparse attention reads top-k keys a layer, however long the context is."""
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from benchmarks.sparse_decode import (
    CASES,
    FIA,
    LI,
    PAGE,
    SFA,
    WORDS,
    Bench,
    Case,
    Cost,
    drawing,
    measure,
    table,
)
from trueup.core.ops.capture import capture
from trueup.models.build import model_class
from trueup.models.config import ModelConfig

SMALL, LARGE, SHORT, LONG = 32, 96, 200, 700  # top-k; tokens of context


@pytest.fixture(scope="module")
def bench():
    return Bench((0, SMALL, LARGE), requests=2, longest=LONG)


def calls(bench, case, operator):
    """The arguments of an operator's calls in one step, a layer each."""
    with capture() as recorded:
        bench.step(case)
    return [call["arguments"] for call in recorded.calls if call["operator"] == operator]


def chosen(bench, topk, context, requests=1):
    """By layer, the places that each request's row attends to."""
    return [[[place for place in row if place >= 0] for (row,) in call["sparse_indices"]["tensor"]["values"]]
            for call in calls(bench, Case(requests, context, topk), SFA)]


@pytest.mark.parametrize("requests", [1, 2])
def test_keys_that_sparse_attention_reads_grow_with_top_k_and_not_with_context(bench, requests):
    for topk in (SMALL, LARGE):
        for context in (SHORT, LONG):
            layers = chosen(bench, topk, context, requests)
            assert [[len(set(row)) for row in rows] for rows in layers] == [[topk] * requests] * 2
    short = chosen(bench, LARGE, 50, requests)  # fewer than it could choose
    assert [[sorted(row) for row in rows] for rows in short] == [[list(range(50))] * requests] * 2


def test_what_is_not_chosen_is_never_read():
    """The rest of the latent cache may hold anything."""
    bench, case = Bench((0, SMALL), requests=1, longest=LONG), Case(1, LONG, SMALL)
    right = bench.step(case)
    for layer, (row,) in enumerate(chosen(bench, SMALL, LONG)):
        slots = torch.tensor([bench.pages[0][place // PAGE] * PAGE + place % PAGE for place in row])
        for pool in (bench.pools.latent[layer], bench.pools.rope[layer]):
            rows = pool.view(-1, pool.shape[-1])  # [slots, R] or [slots, Dr]
            kept = rows[slots]
            rows.fill_(float("nan"))
            rows[slots] = kept
    assert torch.equal(bench.step(case), right)
    assert bench.step(Case(1, LONG, 0)).isnan().all()  # dense attention reads all


def test_the_indexer_and_dense_attention_read_the_whole_context(bench):
    for context in (SHORT, LONG):
        for topk in (SMALL, LARGE):
            found = calls(bench, Case(1, context, topk), LI)
            assert [call["actual_seq_lengths_key"]["tensor"]["values"] for call in found] == [[context]] * 2
        assert [call["actual_seq_kvlen"] for call in calls(bench, Case(1, context, 0), FIA)] == [[context]] * 2


def test_the_models_are_the_same_but_for_the_indexer(bench):
    dense, sparse = (bench.models[topk].state_dict() for topk in (0, LARGE))
    assert {name for name in sparse if name not in dense} == {name for name in sparse if ".indexer." in name}
    assert all(sparse[name].data_ptr() == weight.data_ptr() for name, weight in dense.items())
    # Where it may choose all, it is the dense model.
    logits = [bench.step(Case(2, LARGE, topk)) for topk in (0, LARGE)]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()


@pytest.mark.parametrize(("mtp", "bytes_per_token"), [(0, 95_232), (1, 96_640)])
def test_cache_bytes_of_glm_5_2(mtp, bytes_per_token):
    """78 latents and 21 index keys a token in bfloat16; its MTP layer has one of each."""
    published = json.loads((Path(__file__).parent / "glm-5.2.json").read_text())
    c = ModelConfig.from_hf(published | {"num_nextn_predict_layers": mtp})
    with torch.device("meta"):
        spec = model_class(c)(c).to(torch.bfloat16).cache_spec
    assert (spec.layers, len(spec.index_layers)) == (78 + mtp, 21 + mtp)
    assert spec.bytes_per_token == bytes_per_token


def test_the_benchmark_measures_prints_and_draws(bench):
    cases = [Case(1, SHORT, 0), Case(1, SHORT, SMALL)]
    costs = measure(bench, cases, rounds=1)
    assert list(costs) == cases
    for case, cost in costs.items():
        assert {name for name, ms in cost.calls.items() if ms > 0} == ({LI, SFA} if case.topk else {FIA})
        assert sum(cost.calls.values()) > 0 and cost.without_indexer <= cost.step
    assert [line.split()[:3] for line in table(costs).splitlines()[3:]] == [
        ["1", str(SHORT), "dense"], ["1", str(SHORT), str(SMALL)]]


@pytest.mark.parametrize("words", WORDS)
def test_the_drawing_names_its_lines_and_ends_at_their_values(words):
    costs = {case: Cost(case.context / 1024 * (2 if case.topk else 4), {FIA: 0, SFA: 1, LI: 1}) for case in CASES}
    svg = ET.fromstring(drawing(costs, words))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == list(words[:2])
    assert set(texts) >= {f"{value}  {label}" for value, label in zip(("16.0", "8.0", "7.8", "0.2"), words[2:],
                                                                      strict=True)}
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 4

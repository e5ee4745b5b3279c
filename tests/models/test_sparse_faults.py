"""Faults of sparse attention put back: each is refused, or moves the logits by far more than the oracle tests allow.

Most of them change only what is chosen.  They are invisible as long as a context fits into top-k, which is why they
came so far in public; that is shown, too.
"""
from dataclasses import replace

import pytest
import torch

from models.change import Change
from models.tiny_sparse import KINDS, TOPK, Requests, logits, off, random_ids, tiny
from trueup.core.attention import sparse
from trueup.core.attention.choices import Choices
from trueup.core.layers.norm import RMSNorm
from trueup.core.layout import Form, Mode
from trueup.core.ops.contract import ContractError
from trueup.core.view import materialise
from trueup.models import indexer as indexing
from trueup.models.indexer import Indexer

NOTICED = 1e-2  # of the logit scale; the oracle tests allow 3e-5
SAME = 1e-5
SHORT = (TOPK, 5, TOPK - 1)  # contexts that fit


def indexers(model):
    return [m for m in model.modules() if isinstance(m, Indexer)]


def other_rope(model, monkeypatch):
    """The pairs of the other family, in queries and keys (SB-28)."""
    for one in indexers(model):
        monkeypatch.setattr(one, "i", replace(one.i, rope_interleave=not one.i.rope_interleave))


def other_rope_in_queries(model, monkeypatch):
    real = Indexer._rotate

    def rotate(self, x, cos, sin):
        if x.shape[1] > 1:  # the queries'
            turned, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
            x = torch.cat([turned.unflatten(-1, (2, -1)).mT.flatten(-2), still], -1)
        return real(self, x, cos, sin)
    monkeypatch.setattr(Indexer, "_rotate", rotate)


def rms_norm_of_the_key(model, monkeypatch):
    """The norm that every other place has."""
    for one in indexers(model):
        norm = RMSNorm(one.i.head_dim, one.k_norm.eps)
        norm.weight = one.k_norm.weight
        monkeypatch.setitem(one._modules, "k_norm", norm)


def no_bias_of_the_norm(model, monkeypatch):
    for one in indexers(model):
        monkeypatch.setitem(one.k_norm._parameters, "bias", torch.zeros_like(one.k_norm.bias))


def weights_before_relu(model, monkeypatch):
    """relu(w * q . k) for w * relu(q . k)."""
    monkeypatch.setattr(indexing, "choose", lambda query, weights, *rest: sparse.choose(
        query * weights[..., None], torch.ones_like(weights), *rest))


def rope_on_the_last_widths(model, monkeypatch):
    """As MLA has it; an indexer turns the first."""
    real = Indexer._rotate
    monkeypatch.setattr(Indexer, "_rotate", lambda self, x, *tables: real(self, x.flip(-1), *tables).flip(-1))


def hadamard_of_the_keys(model, monkeypatch):
    """An orthogonal matrix changes no score, if both sides have it."""
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    real = indexing.write_index_keys
    monkeypatch.setattr(indexing, "write_index_keys", lambda key, *rest: real(key @ matrix, *rest))


def no_keys_where_attention_is_dense(model, monkeypatch):
    """The short cut of short prompts leaves out the indexer as a whole."""
    real = indexing.write_index_keys

    def write(key, view, *rest):
        needed = [s for s in view.segments if s.segment.form is not Form.EXPANDED or max(s.kv_lens) > TOPK]
        real(key, replace(view, segments=tuple(needed)), *rest)
    monkeypatch.setattr(indexing, "write_index_keys", write)


UNSEEN_WHILE_SHORT = [other_rope, other_rope_in_queries, rms_norm_of_the_key, no_bias_of_the_norm, weights_before_relu,
                      rope_on_the_last_widths, hadamard_of_the_keys, no_keys_where_attention_is_dense]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def right(model):
    """Logits with contexts longer and shorter than top-k."""
    return logits(model), logits(model, SHORT)


@pytest.mark.parametrize("fault", UNSEEN_WHILE_SHORT)
def test_a_wrong_choice_shows_once_a_context_is_longer_than_top_k(model, right, fault, monkeypatch):
    fault(model, monkeypatch)
    assert off(logits(model), right[0]) > NOTICED
    assert off(logits(model, SHORT), right[1]) <= SAME


def test_runs_without_a_fault_are_equal(model, right):
    assert off(logits(model), right[0]) <= SAME and off(logits(model, SHORT), right[1]) <= SAME


@pytest.mark.parametrize("model", ["glm"], indirect=True)
def test_a_shared_layers_choice_is_that_of_the_layer_before_it(model, right, monkeypatch):
    """Layer 2 has no indexer and takes layer 1's choice; layer 0's would do as well for all shapes."""
    monkeypatch.setattr(model, "reuse", replace(model.reuse, source=(0, 1, 0, 3)))
    assert off(logits(model), right[0]) > NOTICED
    assert off(logits(model, SHORT), right[1]) <= SAME


@pytest.mark.parametrize("model", ["glm"], indirect=True)
@pytest.mark.parametrize(("source", "message"), [
    ((0, 1, 2, 3), r"layer 2 has no indexer.*IndexReuse\.source"), ((0, 1, 1), "names 3 layers; expected 4"),
    ((0, 1, 1, 1), r"MTP layers the choices of layers \(1,\); expected their own"),
])
def test_a_policy_that_does_not_fit_the_model_is_refused(model, source, message):
    before = model.reuse
    with pytest.raises(ValueError, match=message):
        model.reuse = replace(before, source=source)
    assert model.reuse is before


def test_attention_to_everything_shows_too(model, right, monkeypatch):
    monkeypatch.setattr(type(model).attention, "choose", lambda *args: None)
    assert off(logits(model), right[0]) > NOTICED
    assert off(logits(model, SHORT), right[1]) <= SAME  # and is equal where all is chosen


# ---- arguments of the operators


def rows_of_another(name):
    return lambda a: {name: a[name].roll(1, 0)}


def plain(name):
    """Lengths where cumulative ones belong."""
    return lambda a: {name: torch.diff(a[name], prepend=a[name][:1] * 0)}


def cumulative(name):
    return lambda a: {name: a[name].cumsum(0).int()}


ARGUMENTS = {
    "index rows of other tokens": ("npu_sparse_flash_attention", rows_of_another("sparse_indices")),
    "chosen, but of other requests' pages": ("npu_sparse_flash_attention", rows_of_another("block_table")),
    "attending: q lengths plain": ("npu_sparse_flash_attention", plain("actual_seq_lengths_query")),
    "attending: kv lengths cumulative": ("npu_sparse_flash_attention", cumulative("actual_seq_lengths_kv")),
    "attending: sparse blocks of two": ("npu_sparse_flash_attention", lambda a: {"sparse_block_size": 2}),
    "attending: another width's scale": ("npu_sparse_flash_attention",
                                         lambda a: {"scale_value": a["query"].shape[-1] ** -0.5}),
    "attending: halves for pairs": ("npu_sparse_flash_attention", lambda a: {
        "query_rope": a["query_rope"].unflatten(-1, (2, -1)).mT.flatten(-2).contiguous()}),
    "choosing: not causal": ("npu_lightning_indexer", lambda a: {"sparse_mode": 0}),
    "choosing: weights of other tokens": ("npu_lightning_indexer", rows_of_another("weights")),
    "choosing: other requests' pages": ("npu_lightning_indexer", rows_of_another("block_table")),
    "choosing: q lengths plain": ("npu_lightning_indexer", plain("actual_seq_lengths_query")),
    "choosing: kv lengths cumulative": ("npu_lightning_indexer", cumulative("actual_seq_lengths_key")),
    "keys to another place": ("npu_scatter_nd_update_", rows_of_another("indices")),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_exchanged_arguments_are_refused_or_show(model, right, name):
    with Change(*ARGUMENTS[name]) as change:
        try:
            wrong = logits(model)
        except ContractError:
            wrong = None
    assert change.applied
    assert wrong is None or off(wrong, right[0]) > NOTICED or wrong.isnan().any()


REFUSED = {
    "a row too few": (lambda chosen: chosen[:-1], "(?s)11 rows.*12 rows.*SB-02"),
    "a row too many": (lambda chosen: torch.cat([chosen, chosen[-1:]]), "(?s)13 rows.*12 rows.*SB-02"),
    "-1 not last": (lambda chosen: chosen.roll(1, -1), "(?s)-1 in entry 0 and choices behind it.*SB-29"),
    "a hole": (lambda chosen: torch.where(chosen == 1, -1, chosen), "(?s)-1 in entry . and choices behind it.*SB-29"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_index_rows_that_the_contract_refuses(model, name):
    """Three requests that verify, padded to four: 12 rows, of which the first see fewer keys than top-k."""
    change, message = REFUSED[name]
    requests = Requests(model, [random_ids(20, seed) for seed in range(3)], buckets=(4,))
    requests.feed([2, 2, 12], Mode.PREFILL)
    exchanged = Change("npu_sparse_flash_attention", lambda a: {"sparse_indices": change(a["sparse_indices"])})
    with exchanged, pytest.raises(ContractError, match=message):
        requests.feed([3, 3, 3], Mode.VERIFY)


def test_positions_of_another_forward_are_refused_even_of_equal_counts(model):
    """The two layouts are alike in every number; they are two batches all the same (SB-02)."""
    requests = Requests(model, [random_ids(40, seed) for seed in range(3)], buckets=(4,))
    requests.feed([20, 5, 12], Mode.PREFILL)
    layouts = [requests.plan([1, 1, 1], Mode.DECODE) for _ in range(2)]
    assert layouts[0].segments == layouts[1].segments
    views = [materialise(layout, requests.pools) for layout in layouts]
    choices, hidden = Choices(model.reuse), torch.zeros(4, model.config.hidden_size)
    with torch.inference_mode():
        model.forward_mtp(torch.zeros(4, dtype=torch.int64), hidden, views[0], requests.pools, choices)
        stale = Choices(model.reuse, choices.by_layer)
        with pytest.raises(ValueError, match=r"positions are .* of another forward.*for_layout"):
            model.forward_mtp(torch.zeros(4, dtype=torch.int64), hidden, views[1], requests.pools, stale)

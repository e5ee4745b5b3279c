"""The public bugs of sparse attention through the model: SB-01, SB-02, SB-19, SB-28 and SB-29 of the bug gallery."""
from collections import Counter
from dataclasses import replace

import pytest
import torch

from models.change import Change
from models.tiny_sparse import KINDS, TOPK, Requests, logits, off, random_ids, tiny
from trueup.core import pad_topk
from trueup.core.attention import mla, sparse
from trueup.core.attention.choices import Choices, DraftReuse, padding_choice
from trueup.core.carry import for_layout
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.layout import Mode
from trueup.core.ops.capture import capture
from trueup.core.ops.contract import ContractError, profile
from trueup.core.rows import Kind, Rows
from trueup.core.sampling import SamplingParams
from trueup.core.speculation import shared_choice
from trueup.core.speculation.chain import ChainDrafter
from trueup.core.view import materialise
from trueup.models import indexer as indexing
from trueup.models.drafters import mtp_drafter
from trueup.models.indexer import Indexer

SAME = 1e-5
OPERATORS = {"npu_lightning_indexer": "key", "npu_sparse_flash_attention": "kv"}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny(request.param)


@pytest.fixture
def three(model):
    """Three requests with 6, 2 and 9 cached tokens, padded to four."""
    requests = Requests(model, [random_ids(20, seed) for seed in range(3)], buckets=(4,))
    requests.feed([6, 2, 9], Mode.PREFILL)
    return requests


# ---- SB-01: queries and keys of different batches


def lengths(calls):
    """By operator: (q lengths, kv lengths, rows of the block table) of each of its calls."""
    found = {name: [] for name in OPERATORS}
    for call in calls.calls:
        if side := OPERATORS.get(call["operator"]):
            names = ("actual_seq_lengths_query", f"actual_seq_lengths_{side}", "block_table")
            q, kv, table = (call["arguments"][name]["tensor"]["values"] for name in names)
            found[call["operator"]].append((q, kv, len(table)))
    return found


def test_sb01_all_lengths_are_of_the_padded_batch(three):
    with capture() as calls:
        three.feed([3, 3, 3], Mode.VERIFY)
    for of_operator in lengths(calls).values():
        assert of_operator and all(one == ([3, 6, 9, 12], [9, 5, 12, 3], 4) for one in of_operator)


@pytest.mark.parametrize("name", OPERATORS)
def test_sb01_lengths_from_two_moments_are_refused(three, name, monkeypatch):
    """Upstream: keys planned for three requests, then four of queries, counted in the padded tensor."""
    view = materialise(three.plan([3, 3, 3], Mode.VERIFY), three.pools)
    (seg,) = view.segments
    assert seg.q_cum_device.tolist() == [3, 6, 9, 12]
    mixed = replace(seg, kv_lens_device=seg.kv_lens_device[:3], block_table=seg.block_table[:3])
    if name == "npu_sparse_flash_attention":  # is reached only if the choice before it is a right one
        monkeypatch.setattr(indexing, "choose", lambda *args: sparse.choose(*args[:3], view, *args[4:]))
    with pytest.raises(ContractError, match=f"(?s){name}.*3 lengths.*4 lengths.*SB-01"):
        three.run(view.layout, replace(view, segments=(mixed,)))


@pytest.mark.parametrize("mode", Mode)
def test_sb01_every_length_is_given_in_every_mode(model, mode):
    requests = Requests(model, [random_ids(40, seed) for seed in range(3)], buckets=(4,))
    if mode is not Mode.PREFILL:
        requests.feed([16, 13, 19], Mode.PREFILL)
    wide = {Mode.DECODE: 1, Mode.DRAFT: 1, Mode.IDLE: 0}.get(mode, TOPK + 2)
    with capture() as calls:
        requests.feed([wide] * 3, mode)
    for of_operator in lengths(calls).values():
        assert of_operator and all(q and len(q) == len(kv) == rows for q, kv, rows in of_operator)


# ---- SB-02: index rows of another forward


@pytest.fixture(scope="module")
def narrow():
    return tiny("deepseek", index_topk=4)


@pytest.fixture
def carried(narrow):
    """(requests, their index rows [1, 1, 4] of the MTP layer, the layout of the draft step that they are for)."""
    requests = Requests(narrow, [random_ids(30, seed) for seed in range(3)], buckets=(4,))
    requests.feed([9, 13, 16], Mode.PREFILL)
    layout = requests.plan([2, 2, 2], Mode.DRAFT_EXTEND)
    choices, view = Choices(narrow.reuse), materialise(layout, requests.pools)
    with torch.inference_mode():
        narrow.forward_mtp(torch.arange(8), torch.arange(512.0).view(8, 64).sin(), view, requests.pools, choices)
    requests.done = [11, 15, 18]
    carry = {r: rows[-1:] for r, rows in choices.by_layer[3].by_request().items()}
    return requests, carry, requests.plan([1, 1, 1], Mode.DRAFT)


@torch.inference_mode()
def draft(requests, layout, chosen):
    """One draft step with given positions; its hidden rows, and what attention returned for them."""
    attended, real = [], sparse.sparse
    view, choices = materialise(layout, requests.pools), Choices(requests.model.reuse, {3: chosen})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "sparse", lambda *args: attended.append(real(*args)) or attended[-1])
        tokens, hidden = torch.arange(4), torch.arange(256.0).view(4, 64).sin()
        return requests.model.forward_mtp(tokens, hidden, view, requests.pools, choices), attended[0]


def test_sb02_three_carried_rows_become_four(carried):
    requests, carry, layout = carried
    unpadded = torch.cat([carry[r] for r in layout.requests])
    padded = for_layout(carry, layout, padding_choice(4, unpadded))
    assert padded.tensor.shape == (4, 1, 4) and padded.tensor.dtype == torch.int32
    assert torch.equal(padded.tensor[:3], unpadded) and padded.tensor[3].tolist() == [[0, -1, -1, -1]]
    of_nothing = Rows(Kind.TOKEN, layout, pad_topk(unpadded, 4))
    assert torch.equal(of_nothing.tensor[:3], unpadded) and of_nothing.tensor[3].tolist() == [[-1] * 4]
    hidden, attended = draft(requests, layout, padded)
    same, with_zeros = draft(requests, layout, of_nothing)
    assert torch.equal(hidden[:3], same[:3]) and torch.equal(attended[:3], with_zeros[:3])
    assert attended.isfinite().all() and attended[3].any()
    assert not with_zeros[3].any()  # a row that chooses nothing: no key at all, and not NaN


def test_sb02_as_many_rows_as_queries(carried):
    """By whom the rows were counted wrong: each says both counts."""
    requests, carry, layout = carried
    five = torch.cat([*carry.values(), carry[0], carry[1]])
    with pytest.raises(ValueError, match="5 token rows for a layout with 4"):
        Rows(Kind.TOKEN, layout, five)
    with pytest.raises(ValueError, match="5 rows, more than the 4"):
        pad_topk(five, 4)
    with pytest.raises(ValueError, match="request 1 brings 2 rows for 1"):
        for_layout(carry | {1: five[:2]}, layout, padding_choice(4, five))
    right = for_layout(carry, layout, padding_choice(4, five))
    with (Change("npu_sparse_flash_attention", lambda a: {"sparse_indices": five}),
          pytest.raises(ContractError, match=r"(?s)5 rows.*4 rows.*SB-02")):
        draft(requests, layout, right)


# ---- SB-19: one of several requests finishes


def drafts(model, prompts, most, at_a_time, bucket):
    """What was proposed for each prompt, round by round."""
    config = EngineConfig(num_pages=40, page_size=16, max_requests=at_a_time, prefill_tokens=500, buckets=(bucket,))
    engine = Engine(model, config, mtp_drafter(model, 3))
    ids = [engine.add(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in zip(prompts, most, strict=True)]
    proposed = {r: [] for r in ids}
    while engine.has_work:
        for r, tokens in engine.step().drafted.items():
            proposed[r].append(tokens)
    return [proposed[r] for r in ids]


PROMPTS = [random_ids(n, seed) for seed, n in enumerate((21, 17, 30, 12, 26))]
MOST = (14, 4, 14, 14, 10)  # the second finishes soon, and the fifth takes its place


@pytest.fixture
def frozen(model, monkeypatch):
    monkeypatch.setattr(model, "reuse", replace(model.reuse, drafts=DraftReuse.FROZEN))
    return model


@pytest.mark.parametrize("bucket", [4, 8])
def test_sb19_drafts_are_those_of_a_request_alone(frozen, bucket):
    together = drafts(frozen, PROMPTS, MOST, 4, bucket)
    alone = [drafts(frozen, [p], [n], 1, 1)[0] for p, n in zip(PROMPTS, MOST, strict=True)]
    assert together == alone and all(len(rounds) > 5 for rounds in (alone[0], *alone[2:]))


def test_sb19_rows_kept_by_their_place_are_those_of_another(frozen, monkeypatch):
    """Put back: who finishes leaves its row behind, and rows are dealt out in order."""
    right = drafts(frozen, PROMPTS, MOST, 4, 4)

    def dealt(carry, layout, padding):
        return for_layout(dict(zip(layout.requests, carry.values(), strict=False)), layout, padding)
    monkeypatch.setattr(shared_choice, "for_layout", dealt)
    monkeypatch.setattr(shared_choice.SharedChoiceDrafter, "forget", ChainDrafter.forget)
    wrong = drafts(frozen, PROMPTS, MOST, 4, 4)
    assert wrong[:2] == right[:2]  # in front of the gap all rows are right
    assert all(w != r for w, r in zip(wrong[2:], right[2:], strict=True))


# ---- SB-28: the pairs that rope turns


def turned(kind, x, position):
    """By an indexer with one head of 4, at angles of 1 and 0.01 a position."""
    indexer = Indexer(replace(tiny(kind).config.indexer, heads=1, head_dim=4), hidden=4, query_rank=4, layer=0)
    with profile("paper"):
        return indexer._rotate(x, *rope_cos_sin(torch.tensor([position]), 4, 1e4, torch.float32))


@pytest.mark.parametrize(("kind", "expected"), [
    ("deepseek", [-1.9841, 1.9599, 2.4624, 4.0198]),
    ("glm", [-1.1426, 2.9599, 1.9221, 4.0298]),  # first members of the pairs in front, as npu_interleave_rope has them
])
def test_sb28_the_pairs_are_the_configs(kind, expected):
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert torch.allclose(turned(kind, x, 1).flatten(), torch.tensor(expected), atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sb28_scores_depend_on_distance_alone(kind):
    q, k = torch.randn(2, 1, 1, 4, generator=torch.Generator().manual_seed(0))
    near, far = ((turned(kind, q, p + 3) * turned(kind, k, p)).sum() for p in (2, 200))
    assert torch.allclose(near, far, atol=1e-4) and not torch.allclose(near, (q * k).sum(), atol=1e-3)


@pytest.mark.parametrize(("kind", "halves"), [("glm", 0), ("deepseek", 2)])
def test_sb28_each_use_reads_its_own_pairing(kind, halves):
    """MLA turns neighbours in both families; an indexer, query and key alike, what its config says."""
    model = tiny(kind)
    requests = Requests(model, [random_ids(20)])
    with capture() as calls:
        requests.feed([12], Mode.PREFILL)
    called = Counter(call["operator"] for call in calls.calls)
    layers, indexers = 4, sum(model.config.indexer.full)
    assert called["npu_rotary_mul"] == halves * indexers
    assert called["npu_kv_rmsnorm_rope_cache"] == layers
    assert called["npu_interleave_rope"] == layers + (2 - halves) * indexers


# ---- SB-29: fewer keys than k


def choices_of(requests, lengths, mode):
    """[rows, K] of layer 0."""
    layout = requests.plan(lengths, mode)
    seen, real = [], Indexer.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "choose", lambda self, *args: seen.append(real(self, *args)) or seen[-1])
        requests.run(layout)
    return seen[0].tensor[: layout.real_tokens, 0].tolist()


def is_full(row, keys):
    """All ``keys`` positions, each once, then -1; as wide as ever."""
    return len(row) == TOPK and sorted(row[:keys]) == list(range(keys)) and row[keys:] == [-1] * (TOPK - keys)


@pytest.mark.parametrize("short_cut", [True, False])
def test_sb29_rows_with_fewer_keys_choose_them_all(model, short_cut, monkeypatch):
    """k is 8: five keys in decoding, and in a prompt of five tokens one for row 0, two for row 1, and so on."""
    if not short_cut:
        monkeypatch.setattr(sparse, "sees_all", lambda *args: False)
    requests = Requests(model, [random_ids(7)])
    rows = choices_of(requests, [5], Mode.PREFILL)
    assert all(is_full(row, i + 1) for i, row in enumerate(rows))
    assert is_full(choices_of(requests, [1], Mode.DECODE)[0], 6)
    alone = Requests(model, [random_ids(7)])
    alone.feed([4], Mode.PREFILL)
    assert is_full(choices_of(alone, [1], Mode.DECODE)[0], 5)


def test_sb29_sparse_attention_to_all_is_dense_attention(model, monkeypatch):
    """With and without the short cut of short prompts, and where there is no indexer at all."""
    short = (5, TOPK, 7)
    right = logits(model, short)
    for module in (sparse, mla):
        monkeypatch.setattr(module, "sees_all", lambda *args: False)
    assert off(logits(model, short), right) <= SAME
    monkeypatch.setattr(type(model).attention, "choose", lambda *args: None)
    assert off(logits(model, short), right) <= SAME

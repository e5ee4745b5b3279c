"""The ledger of a small model: real sizes, owners, segments, differences, one token."""
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import trueup.core
from trueup.core import ledger
from trueup.core.attention.mla import UpProjection, mla_attention
from trueup.core.cache import CacheSpec
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layers.norm import RMSNorm
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.layout import Mode
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.load import load
from trueup.core.planning import Work, plan
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedModel
from trueup.core.view import materialise

load()
npu = torch.ops.npu


class Tiny(nn.Module):
    """Two attention layers over rows of width 8: 3 heads (padded to 4), R 8, Dn = Dr = Dv = 4."""

    max_positions, vocab_size, eos_token_ids = 64, 16, ()
    cache_spec = CacheSpec(2, 8, 4, torch.float32, torch.device("cpu"))

    def __init__(self):
        super().__init__()
        self.parameter_axes = {"weight": "H", "kv_norm.weight": "R", "w_uk": "N Dn R", "w_uv": "N R Dv"}
        self.embed = nn.Parameter(torch.randn(16, 8))
        self.layers = nn.ModuleList(TinyAttention(i) for i in range(2))
        self.norm = RMSNorm(8, 1e-6)
        self.requires_grad_(False)

    def forward(self, tokens, view, pools):
        x = self.embed[tokens]
        for layer in self.layers:
            x = layer(x, view, pools)
        return self.norm(x)

    def logits(self, hidden):
        return hidden @ self.embed.T


class TinyAttention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.q, self.kv = nn.Parameter(torch.randn(3 * 8, 8)), nn.Parameter(torch.randn(8 + 4, 8))
        self.kv_norm = RMSNorm(8, 1e-6)
        self.w_uk, self.w_uv = nn.Parameter(torch.randn(3, 4, 8)), nn.Parameter(torch.randn(3, 8, 4))
        self.o = nn.Parameter(torch.randn(8, 12))

    def forward(self, x, view, pools):
        q = (x @ self.q.T).view(-1, 3, 8)
        cos, sin = rope_cos_sin(view.positions, 4, 1e4, x.dtype)
        up = UpProjection(self.w_uk, self.w_uv)
        o = mla_attention(q[..., :4], q[..., 4:], x @ self.kv.T, self.kv_norm, up, cos, sin, 0.5, view, pools,
                          self.layer)
        return x + o.flatten(1) @ self.o.T


@pytest.fixture(autouse=True)
def paper():
    with profile("paper"):
        yield


@pytest.fixture
def engine():
    torch.manual_seed(0)
    return Engine(Tiny(), EngineConfig(num_pages=33, page_size=4, max_requests=4, prefill_tokens=6, buckets=(1, 2, 4)))


def add(engine, *lengths, max_tokens=8):
    return [engine.add([1 + i % 9 for i in range(n)], SamplingParams(max_tokens=max_tokens)) for n in lengths]


def shape(call, name, results=False):
    return next(o.shape for o in (call.results if results else call.operands) if o.name == name)


def test_the_public_name_is_the_module():
    assert trueup.core.ledger is ledger and "ledger" in trueup.core.__all__ and callable(ledger.record)


# A model's rounds.


def test_a_round_names_its_calls_owners_segments_and_real_sizes(engine):
    add(engine, 2, 2, 2)
    with ledger.record(engine) as led:
        first, second = engine.step(), engine.step()
    assert [step.number for step in led.rounds] == [1, 2] and len(led) == 2
    assert [step.layout for step in led.rounds] == [first.layout, second.layout]
    assert {call.owner for call in led.calls} == {"layers.0", "layers.1", "norm"}
    assert all(call.layout is step.layout for step in led.rounds for call in step.calls)
    assert all(not call.disagreements and call.operands for call in led.calls)

    calls = {call.operator: call for call in led[1].only("layers.1").calls}
    attention = calls["npu_fused_infer_attention_score_v2"]
    assert attention.mode is Mode.DECODE and attention.part is second.layout.segments[0]
    assert shape(attention, "query") == "[T 3 of 4, N 3 of 4, R 8]"
    assert shape(attention, "out", True) == "[N 3 of 4, T 3 of 4, R 8]"
    assert shape(attention, "block_table") == "[B 3 of 4, max_pages 1]"
    lengths = next(o for o in attention.operands if o.name == "actual_seq_kvlen")
    assert (lengths.dtype, lengths.shape, lengths.values) == ("host list", "[B 3 of 4]", (3, 3, 3, 1))
    assert attention.scalars["num_query_heads"] == 4
    assert calls["npu_interleave_rope"].segment is None
    assert shape(calls["npu_interleave_rope"], "x") == "[T 3 of 4, N 3, 1, Dr 4]"
    assert shape(calls["npu_transpose_batchmatmul"], "y", True) == "[T 3 of 4, N 3, Dv 4]"
    (norm,) = led[1].only("norm").calls
    assert shape(norm, "input") == "[T 3 of 4, H 8]"


def test_written_caches_and_parameters_have_their_names(engine):
    add(engine, 2)
    with ledger.record(engine) as led:
        engine.step()
    write = led.only("layers.1", "npu_kv").calls[0]
    written = {o.name: o.source for o in write.operands if o.written}
    assert written == {"k_cache": "pools.rope[1]", "ckv_cache": "pools.latent[1]"}
    assert next(o.source for o in write.operands if o.name == "gamma") == "layers.1.kv_norm.weight"
    assert next(o.values for o in write.operands if o.name == "index") == led.rounds[0].layout.slots
    assert [o.name for o in write.results if o.unwritten] == []  # prompts use the returned rows
    with ledger.record(engine) as led:
        engine.step()
    write = led.only("layers.1", "npu_kv").calls[0]
    assert [o.name for o in write.results if o.unwritten] == ["k_rope", "c_kv"]


def test_segments_of_one_batch_are_told_apart_even_when_they_have_as_many_rows(engine):
    add(engine, 1)
    engine.step()
    add(engine, 9, 1)
    with ledger.record(engine) as led:  # decode 1; the long prompt's chunk of 6
        layout = engine.step().layout
        second = engine.step().layout  # decode 1; the rest of it behind a prefix of 6, and the short one
    assert [s.mode for s in layout.segments] == [Mode.DECODE, Mode.PREFILL]
    writes = led[0].only("layers.0", "npu_kv").calls
    assert [(c.mode, shape(c, "kv")) for c in writes] == [
        (Mode.DECODE, "[T 1, 1, 1, R+Dr 12]"), (Mode.PREFILL, "[T 6, 1, 1, R+Dr 12]")]
    assert [s.mode for s in second.segments] == [Mode.DECODE, Mode.EXTEND, Mode.PREFILL]
    modes = [c.mode for c in led[1].only("layers.0", "npu_fused").calls]
    assert modes == [Mode.DECODE, Mode.EXTEND, Mode.EXTEND, Mode.PREFILL]
    (merge,) = led[1].only("layers.0", "npu_attention_update").calls
    assert shape(merge, "lse[0]") == "[T*N 9]" and merge.mode is Mode.EXTEND
    assert shape(led[1].only("norm").calls[0], "input") == "[T 5, H 8]"


def test_rows_that_attention_does_not_see_are_padding_of_the_batch_not_of_the_segment(engine):
    pages = engine.pages.allocate(1)
    layout = plan([Work(1, Mode.PREFILL, 0, 3, pages)], page_size=4, rows=5)
    with ledger.record(engine.model) as led, torch.inference_mode():
        engine.model.forward(torch.tensor([1, 2, 3, 0, 0]), materialise(layout, engine.pools), engine.pools)
        npu.npu_swiglu(torch.ones(5, 4))
    *_, norm, loose = led.calls
    write = led.only("layers.0", "npu_kv").calls[0]
    assert shape(write, "kv") == "[T 3, 1, 1, R+Dr 12]" and write.operands[0].axes[0] == ledger.Axis("T", 3, 3)
    assert shape(norm, "input") == "[T 3 of 5, H 8]" and norm.owner == "norm"
    assert loose.layout is None and loose.owner == "" and shape(loose, "input") == "[T 5, 2I 4]"


def test_a_result_of_another_round_has_no_number(engine):
    add(engine, 2)
    forward, kept = engine.model.norm.forward, []

    def norm_twice(x):
        kept.append(forward(x))
        forward(kept[0])  # in the second round, what the first one made
        return kept[-1]

    engine.model.norm.forward = norm_twice
    with ledger.record(engine) as led:
        engine.step()
        engine.step()
    sources = [[c.operands[0].source for c in led[i].only("norm").calls] for i in range(2)]
    assert sources[0][1] == f"#{led[0].only('norm').calls[0].number} y" and sources[1][1] is None


def test_recording_changes_nothing_and_leaves_nothing_behind(engine):
    torch.manual_seed(0)
    other = Engine(Tiny(), engine.config)
    add(engine, 5, 3)
    add(other, 5, 3)
    attributes = [set(vars(part)) for part in (other, other.model, *other.model.modules())]
    while engine.has_work:
        with ledger.record(other) as led:
            done = other.step()
        assert engine.step().tokens == done.tokens
    count = len(led.calls)
    assert [set(vars(part)) for part in (other, other.model, *other.model.modules())] == attributes
    add(other, 2, max_tokens=1)
    other.step()
    assert len(led.calls) == count  # the block is over


def test_two_ledgers_at_once_see_the_same(engine):
    add(engine, 1)
    engine.step()
    add(engine, 3)
    with ledger.record(engine) as outer, ledger.record(engine) as inner:
        engine.step()
    assert outer.text() == inner.text() and {call.mode for call in inner.calls} == {None, Mode.DECODE, Mode.PREFILL}


def test_a_model_without_modules_and_an_idle_round():
    engine = Engine(ScriptedModel(), EngineConfig())
    with ledger.record(engine) as led:
        engine.step()
        add(engine, 3)
        engine.step()
    assert [(s.number, s.layout.segments[0].mode, s.calls) for s in led.rounds] == [
        (1, Mode.IDLE, []), (2, Mode.PREFILL, [])]
    assert led.text().startswith("round 1: idle 0 of 1 requests; 0 of 1 token rows")


def test_calls_without_a_model_take_the_batch_that_is_given():
    layout = plan([Work(7, Mode.DECODE, 0, 1, (1,))], page_size=4, buckets=(2,))
    with ledger.record(layout=layout) as led:
        npu.npu_swiglu(torch.randn(2, 6))
        npu.npu_swiglu(torch.randn(5, 6))
    assert [shape(call, "y", True) for call in led.calls] == ["[T 1 of 2, I 3]", "[T 5, I 3]"]
    assert led.rounds[0].number is None and led.rounds[0].layout is layout
    assert led.calls[0].place == "outside a model"


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="a str cannot be recorded; expected an Engine, a model, or nothing"), \
            ledger.record("engine"):
        pass


def test_a_refused_call_is_in_the_ledger_and_shows_which_letter_has_two_sizes(engine):
    """SB-05: four rows of kv, three slots."""
    table, pool = torch.ones(4, 1, 1, 4), torch.zeros(3, 4, 1, 4)
    with ledger.record() as led, pytest.raises(ContractError):
        npu.npu_kv_rmsnorm_rope_cache(torch.randn(4, 1, 1, 8), torch.ones(4), table, table, torch.tensor([4, 5, 6]),
                                      pool, pool.clone(), cache_mode="PA")
    (call,) = led.calls
    assert call.disagreements == ("T is 4 in kv, 3 in index",)
    assert call.results == () and "index is 3 rows" in call.error
    assert "       ! T is 4 in kv, 3 in index" in led.text().splitlines()
    assert '<tr class="problem"><td colspan="3">T is 4 in kv, 3 in index</td></tr>' in led._repr_html_()
    json_call = led.data()[0]["calls"][0]
    assert json_call["error"] == call.error


def test_an_expression_that_does_not_add_up_is_a_disagreement():
    with ledger.record() as led, pytest.raises(ContractError):
        table, pool = torch.ones(1, 1, 1, 4), torch.zeros(3, 4, 1, 4)
        npu.npu_kv_rmsnorm_rope_cache(torch.randn(1, 1, 1, 9), torch.ones(4), table, table, torch.tensor([4]),
                                      pool, pool.clone(), cache_mode="PA")
    assert led.calls[0].disagreements == ("R+Dr is 8, but 9 in kv",)


def test_a_round_that_fails_keeps_its_calls(engine):
    add(engine, 2)
    engine.pools.latent[1] = torch.zeros(33, 4, 1, 7)
    with ledger.record(engine) as led, pytest.raises(ContractError):
        engine.step()
    assert led.rounds[0].layout is not None and led.calls[-1].owner == "layers.1" and led.calls[-1].error


# Ways to look.


def test_only_takes_a_module_with_its_children_and_no_namesake():
    def call(owner, operator="npu_x"):
        return ledger.Call(1, operator, owner, None, None, (), (), {})

    owners = ["layers.1", "layers.1.mlp.shared", "layers.10.mlp", "", "norm"]
    led = ledger.Ledger([ledger.Step(1, None, [call(owner) for owner in owners])])
    assert [c.owner for c in led.only("layers.1").calls] == owners[:2]
    assert [c.owner for c in led.only(operator="npu_").calls] == owners and not led.only(operator="npu_y").calls
    assert led.rounds[0].calls and led.only("layers.1").rounds[0].number == 1


def test_text_and_tables_fit_and_are_well_formed(engine):
    add(engine, 5, 9, 2)
    with ledger.record(engine) as led:
        for _ in range(4):
            engine.step()
    views = [led, led[3], led[1].diff(led[3]), led[3].follow(1)]
    for view in views:
        assert max(map(len, view.text().splitlines())) <= 100
        html = view._repr_html_()
        assert "style=" not in html and "font" not in html
        for part in ElementTree.fromstring(f"<body>{html}</body>"):
            assert (part.tag, part.get("class"), part[-1].tag) == ("div", "trueup-ledger", "table")
    assert views[1].text().startswith("round 4: ")
    assert '<b class="padded">3 of 4</b>' in led[3]._repr_html_()


def test_html_escapes_everything():
    evil = "<script>&"
    operand = ledger.Operand(evil, (ledger.Axis(evil, 4, 3),), evil, source=evil)
    call = ledger.Call(1, evil, evil, None, None, (operand,), (operand,), {evil: evil}, error=evil)
    step = ledger.Step(1, None, [call])
    other = ledger.Step(2, None, [ledger.Call(1, evil, evil, None, None, (), (), {})])
    for view in (ledger.Ledger([step]), ledger.Ledger([step]).diff(ledger.Ledger([other]))):
        assert "<script" not in view._repr_html_() and "&lt;script&gt;&amp;" in view._repr_html_()


def test_diff_of_three_padded_to_four_against_one(engine):
    add(engine, 2, 2, max_tokens=3)
    (last,) = add(engine, 2, max_tokens=6)
    with ledger.record(engine) as led:
        while engine.has_work:
            engine.step()
    diff = led[1].diff(led[4])
    assert led.rounds[4].layout.requests == (last,)
    (attention,) = [c for c in diff.changed if c.operator == "npu_fused_infer_attention_score_v2"]
    assert attention.places == ("layers.0, decode", "layers.1, decode")
    changes = {name: (c.before, c.after) for c in attention.changes for name in c.names}
    assert changes["query"] == changes["→ out"] == ("T 3 of 4", "T 1")
    assert changes["actual_seq_kvlen"] == ("[B 3 of 4] [3, 3, 3, 1]", "[B 1] [6]")
    assert changes["block_table"] == ("B 3 of 4, max_pages 1", "B 1, max_pages 2")
    assert "key" not in changes and not diff.only_before and not diff.only_after
    assert "    T 3 of 4 -> T 1   query, query_rope, → out" in diff.text().splitlines()


def test_diff_of_calls_that_only_one_step_has_and_of_equal_steps(engine):
    add(engine, 2)
    with ledger.record(engine) as led:
        engine.step()
        engine.step()
    diff = led[0].diff(led[1])
    assert "layers.0, prefill" in diff.only_before[0].places and "layers.0, decode" in diff.only_after[0].places
    assert diff and not led[0].diff(led[0]) and led[0].diff(led[0]).text().endswith("nothing differs")
    with pytest.raises(ValueError, match="diff: 2 steps are recorded here; take one of them"):
        led.diff(led[0])


def test_options_and_dtypes_are_compared():
    def norm(epsilon, dtype):
        with ledger.record() as led:
            npu.npu_rms_norm(torch.ones(2, 4, dtype=dtype), torch.ones(4), epsilon)
        return led

    (changed,) = norm(1e-6, torch.float32).diff(norm(1e-5, torch.bfloat16)).changed
    assert [(c.names, c.before, c.after) for c in changed.changes] == [
        (("input", "→ y"), "[T 2, width 4] float32", "[T 2, width 4] bfloat16"), (("epsilon",), "absent", "1e-05")]


def test_following_a_token_gives_its_row_its_slot_and_its_request(engine):
    add(engine, 2)
    engine.step()
    _, two = add(engine, 3, 2)
    with ledger.record(engine) as led:
        layout = engine.step().layout
    trail = led.follow(two, 1)
    token = layout.token_rows[two][1]
    assert token == 5 and f"Request {two}, position 1: token row 5, slot {layout.slots[5]}" in trail.heading
    found = {(stop.call.operator, stop.subscript) for stop in trail.stops if stop.call.owner == "layers.0"}
    page, row = divmod(layout.slots[5], 4)
    assert ("npu_interleave_rope", "x[5]") in found  # a row of the batch
    assert ("npu_kv_rmsnorm_rope_cache", "kv[4]") in found  # of its segment, behind the decoding request
    assert ("npu_kv_rmsnorm_rope_cache", f"ckv_cache[{page}, {row}]") in found
    assert ("npu_fused_infer_attention_score_v2", "actual_seq_qlen[1]") in found
    assert all(stop.call.mode is not Mode.DECODE for stop in trail.stops)
    index = next(stop for stop in trail.stops if stop.operand.name == "index")
    assert index.values == (layout.slots[5],) and index.note == f"int64 = {layout.slots[5]}" and index.shape == "[]"
    assert "| `npu_interleave_rope`<br>layers.0 | `x[5]` | [N 3, 1, Dr 4] | float32 |" in trail.markdown()
    assert trail.data()["stops"][0]["rows"]


def test_a_row_is_not_looked_for_in_a_tensor_of_another_size(engine):
    _, two = add(engine, 2, 3)
    norm = engine.model.norm.forward

    def extra(x):
        npu.npu_swiglu(torch.ones(9, 4))
        return norm(x)

    engine.model.norm.forward = extra
    with ledger.record(engine) as led:
        engine.step()
    operators = {stop.call.operator for stop in led.only("norm").follow(two).stops}
    assert operators == {"npu_rms_norm"} and {c.operator for c in led.only("norm").calls} > operators


@pytest.mark.parametrize("request_id, row, message", [
    (9, 0, r"request 9 has no token in this step; those that have: \[1\]"),
    (1, 2, "request 1 has 2 query rows in this step; row 2 is not one of them"),
])
def test_following_what_is_not_there(engine, request_id, row, message):
    add(engine, 2)
    with ledger.record(engine) as led:
        engine.step()
    with pytest.raises(ValueError, match=message):
        led.follow(request_id, row)

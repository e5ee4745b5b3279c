"""The ledger of the nano model: every letter of a real step, one token's true path, and ``trueup ledger``."""
import dataclasses
import json
import math
from xml.etree import ElementTree

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.core import ledger
from trueup.core.cli import main
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.ops.contract import profile
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.sampling import SamplingParams
from trueup.core.view import materialise
from trueup.models import LLM, zoo
from trueup.models.axes import PARAMETER_AXES
from trueup.models.config import ModelConfig
from trueup.models.demo import TOGETHER
from trueup.models.drafters import make_drafter
from trueup.models.generate import MODEL
from trueup.models.glm4_moe_lite import Glm4MoeLite
from trueup.models.ledger_command import rounds

SPARSE = "glm-5-nano"
INDEXER, SPARSE_ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"


@pytest.fixture(scope="module")
def llm():
    return LLM.from_pretrained(MODEL, progress=False)


@pytest.fixture(scope="module")
def sparse():
    return LLM.from_pretrained(SPARSE, progress=False)


@pytest.fixture(scope="module")
def mixed(llm):
    """Rounds with every mode that the engine has: prefill; decode beside a chunk; decode padded; extend."""
    engine = Engine(llm.model, EngineConfig(num_pages=17, prefill_tokens=8))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with ledger.record(engine) as led:
        for length in (3, 2, 3, 20):
            engine.add(list(range(16, 16 + length)), params)
            engine.step()
        for _ in range(4):
            engine.step()
    return led


@pytest.fixture(scope="module")
def drafted(llm):
    """The MTP layer's forward, which no engine calls yet."""
    pool = PagePool(5, 128)
    engine = Engine(llm.model, EngineConfig(num_pages=5))
    layout = plan([Work(1, Mode.DRAFT_EXTEND, 0, 3, pool.allocate(1))], page_size=128, rows=5)
    view = materialise(layout, engine.pools)
    hidden = torch.randn(5, llm.model.config.hidden_size)
    with ledger.record(llm.model) as led, torch.inference_mode():
        llm.model.forward_mtp(torch.tensor([1, 2, 3, 0, 0]), hidden, view, engine.pools)
    return led


@pytest.fixture(scope="module")
def sparse_rounds(sparse):
    """The sparse model, with drafts: prompts shorter and longer than its top-k of 64, in every mode."""
    engine = Engine(sparse.model, EngineConfig(num_pages=17, prefill_tokens=70), make_drafter("mtp", sparse.model, 2))
    with ledger.record(engine) as led:
        for length, speculate in ((3, True), (100, True), (2, False)):
            engine.add(list(range(16, 16 + length)), SamplingParams(9, ignore_eos=True, speculate=speculate))
            engine.step()
        for _ in range(3):
            engine.step()
    return led


def letters(config, owner=""):
    """Letter to size in a part of the model, from the config alone."""
    sizes = {
        "H": config.hidden_size, "N": config.num_attention_heads, "E": config.n_routed_experts,
        "K": config.num_experts_per_tok, "R": config.kv_lora_rank, "Rq": config.q_lora_rank,
        "Dn": config.qk_nope_head_dim, "Dr": config.qk_rope_head_dim, "Dv": config.v_head_dim, "P": 128,
    }
    if config.indexer:
        sizes |= {"Ni": config.indexer.heads, "Di": config.indexer.head_dim}
        if "attention" in owner:
            sizes["K"] = config.indexer.topk
        if owner.endswith("indexer"):
            del sizes["N"]  # rope knows no index heads: it turns Ni of them in a query, one in a key
    return sizes


def check_letters(led, config):
    seen = set()
    for call in led.calls:
        sizes = letters(config, call.owner)
        assert not call.disagreements and not call.error
        for tensor in call.operands + call.results:
            for axis in tensor.axes:
                seen.add(axis.name)
                assert axis.name not in ("?", "width", "Din", "Dout"), (call.operator, tensor)
                if axis.name in sizes:
                    assert axis.real == sizes[axis.name], (call.operator, tensor)
                if axis.name in ("T", "S") and call.operator != "npu_fused_infer_attention_score_v2":
                    assert axis.real is not None, (call.operator, tensor)
                if axis.name == "T":
                    part = call.part or call.layout
                    padded = call.part.operator_tokens if call.part else call.layout.padded_tokens
                    assert (axis.size, axis.real) == (padded, part.real_tokens)
                if axis.name == "B" and tensor.dtype == "host list":
                    assert (axis.size, axis.real) == (call.part.padded_requests, call.part.real_requests)
    return seen


def test_every_axis_of_a_real_step_has_its_letter_and_the_configs_size(mixed, llm):
    modes = {s.mode for step in mixed.rounds for s in step.layout.segments}
    assert modes == {Mode.PREFILL, Mode.EXTEND, Mode.DECODE}
    assert check_letters(mixed, llm.model.config) >= {*letters(llm.model.config), "T", "B", "S", "T*K", "R+Dr", "2I"}
    assert any(axis.count == "5 of 8" for call in mixed.calls for o in call.operands for axis in o.axes)


def test_the_mtp_layer_too(drafted, llm):
    check_letters(drafted, llm.model.config)
    owners = {call.owner for call in drafted.calls}
    assert {"mtp.0.e_norm", "mtp.0.decoder.attention", "mtp.0.decoder.mlp.shared", "mtp.0.norm"} <= owners
    assert drafted.rounds[0].layout.padded_tokens == 5
    assert drafted.only("mtp.0.decoder.attention", "npu_fused").calls[0].mode is Mode.DRAFT_EXTEND


def test_the_sparse_model_in_every_mode_that_it_has(sparse_rounds, sparse):
    assert {s.mode for call in sparse_rounds.calls for s in call.layout.segments} == set(Mode) - {Mode.IDLE}
    seen = check_letters(sparse_rounds, sparse.model.config)
    assert seen >= {*letters(sparse.model.config), "T", "B", "S", "pages", "max_pages"}
    chosen = sparse_rounds.only(operator=SPARSE_ATTENTION).calls
    assert {o.axes[1].count for call in chosen for o in call.operands if o.name == "query"} == {"5 of 8"}
    assert {call.mode for call in chosen} == set(Mode) - {Mode.IDLE}
    # Short prompts attend to everything.
    assert {call.mode for call in sparse_rounds.only(operator="npu_fused").calls} == {Mode.PREFILL}


def test_index_keys_are_written_and_read_in_their_own_pools(sparse_rounds):
    writes, reads = (sparse_rounds.only(operator=name).calls for name in ("npu_scatter_nd_update_", INDEXER))
    for call, name in [*((c, "input") for c in writes), *((c, "key") for c in reads)]:
        (pool,) = (o for o in call.operands if o.name == name)
        part = call.owner.split(".")
        assert pool.source == f"pools.index[{part[1] if part[0] == 'layers' else 3}]"
        assert [axis.name for axis in pool.axes if axis.name != "1"] == ["pages", "P", "Di"]
        assert pool.written == (name == "input")
    assert {call.owner for call in reads} == {call.owner for call in writes} >= {
        "layers.0.attention.indexer", "mtp.0.decoder.attention.indexer"}


@pytest.mark.parametrize("nope, v, heads", [(192, 256, 20), (128, 128, 128)])
def test_other_geometries_take_other_forms_of_attention(llm, nope, v, heads):
    base = ModelConfig.from_folder(zoo.path(MODEL))
    config = dataclasses.replace(base, num_hidden_layers=1, num_nextn_predict_layers=0, moe_layers=(True,),
                                 vocab_size=64, num_attention_heads=heads, qk_nope_head_dim=nope, v_head_dim=v)
    model = Glm4MoeLite(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05)
    engine = Engine(model, EngineConfig(num_pages=9, prefill_tokens=8))
    engine.add(list(range(20)), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.add([5], SamplingParams(max_tokens=3, ignore_eos=True))
    with profile("host"), ledger.record(engine) as led:
        while engine.has_work:
            engine.step()
    check_letters(led, config)


def test_owners_are_modules_and_sources_are_their_parameters(mixed, llm):
    parameters = dict(llm.model.named_parameters())
    for call in mixed.calls:
        llm.model.get_submodule(call.owner)
        for operand in call.operands:
            if operand.source in parameters:
                assert operand.source.startswith(f"{call.owner}.")
                assert tuple(axis.size for axis in operand.axes) == parameters[operand.source].shape
    used = {o.source for call in mixed.calls for o in call.operands if o.source in parameters}
    assert {"layers.0.input_norm.weight", "layers.1.mlp.gate_up", "layers.2.attention.w_uv", "norm.weight"} <= used


def test_each_declared_parameter_ending_exists_and_rows_of_one_ending_have_one_rank(llm, sparse):
    names = [name for model in (llm.model, sparse.model) for name, _ in model.named_parameters()]
    for ending in PARAMETER_AXES:
        assert any(name == ending or name.endswith(f".{ending}") for name in names), ending


def test_results_are_recognised_where_the_next_call_takes_them(mixed):
    step = mixed[5].only("layers.1.mlp")
    numbers = {call.operator: call.number for call in step.calls}
    route = next(c for c in step.calls if c.operator == "npu_moe_init_routing_v2")
    sources = {o.name: o.source for o in route.operands}
    assert sources["expert_idx"] == f"#{numbers['npu_moe_gating_top_k']} expert_idx" and sources["x"].endswith(" y")
    assert mixed.calls[0].operands[0].source is None  # the first call of all takes nobody's result


class Tensors(TorchDispatchMode):
    """The tensors themselves, call by call, copied before and after."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "npu":
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        results = result if isinstance(result, tuple) else [result]

        def copy(value):
            return [v.clone() for v in value] if isinstance(value, list) and torch.is_tensor(value[0]) else (
                value.clone() if torch.is_tensor(value) else value)

        self.calls.append(({name: copy(v) for name, v in given.items()}, [copy(r) for r in results]))
        return result


def walk(llm, prompts):
    """The last of three decoding requests through its second decode step: the ledger's trail, and the tensors."""
    engine = Engine(llm.model, EngineConfig(num_pages=9))
    ids = [engine.add(p, SamplingParams(max_tokens=9, ignore_eos=True)) for p in prompts]
    engine.step()
    engine.step()
    with Tensors() as seen, ledger.record(engine) as led:
        layout = engine.step().layout
    return led, led.follow(ids[2]), seen.calls, layout, ids[2]


@pytest.fixture(scope="module")
def walked(llm):
    return walk(llm, [llm.tokenizer.encode(p) for p in TOGETHER])


def part(stop, calls):
    """The rows of the real tensor that a stop of the trail names."""
    given, results = calls[stop.call.number - 1]
    if stop.result:
        value = results[[o.name for o in stop.call.results].index(stop.operand.name)]
        value = value[0] if isinstance(value, list) else value
    else:
        name, _, index = stop.operand.name.partition("[")
        value = given[name][int(index[:-1])] if index else given[name]
    value = value if torch.is_tensor(value) else torch.tensor(value)
    return value[tuple(list(rows) if rows else slice(None) for rows in stop.rows)]


def test_the_followed_rows_hold_what_they_must(walked):
    _, trail, calls, layout, request = walked
    (row,) = layout.token_rows[request]
    stops = {(stop.call.owner, stop.call.operator, stop.operand.name, stop.result): stop for stop in trail.stops}

    def at(operator, name, result=False, owner="layers.1.attention"):
        return part(stops[owner, operator, name, result], calls).squeeze()

    position, slot = layout.positions[row], layout.slots[row]
    write, attend = "npu_kv_rmsnorm_rope_cache", "npu_fused_infer_attention_score_v2"
    assert at(write, "index") == slot and at(attend, "actual_seq_kvlen") == position + 1
    assert at(attend, "block_table").flatten()[position // 128] == slot // 128
    # What was written to the cache is what attention finds at the followed place.
    assert torch.equal(at(write, "ckv_cache", True), at(attend, "key")) and at(attend, "key").any()
    assert torch.equal(at(write, "k_cache", True), at(attend, "key_rope"))
    assert torch.equal(at(attend, "out", True)[:5], part(next(
        s for s in trail.stops if s.call.operator == "npu_transpose_batchmatmul" and s.rows[0] == () and
        s.call.owner == "layers.1.attention"), calls).squeeze())

    mlp, route, back = "layers.1.mlp", "npu_moe_init_routing_v2", "npu_moe_finalize_routing"
    x, copies = at(route, "x", owner=mlp), at(route, "expanded_x", True, owner=mlp)
    assert copies.shape == (2, 192) and torch.equal(copies, x.expand(2, -1))
    index = stops[mlp, route, "expanded_row_idx", True]
    assert index.rows == ((2 * row, 2 * row + 1),) and index.values == stops[mlp, route, "expanded_x", True].rows[0]
    rows, scales = at(back, "expanded_permuted_rows", owner=mlp), at(back, "scales", owner=mlp)
    total = at(back, "skip1", owner=mlp) + (rows * scales[:, None]).sum(0)
    assert torch.allclose(at(back, "out", True, owner=mlp), total, rtol=1e-4, atol=1e-5)


def test_the_followed_rows_of_sparse_attention(sparse):
    led, trail, calls, layout, request = walk(sparse, [[5], [6, 7], list(range(16, 116))])
    (row,) = layout.token_rows[request]
    position, owner = layout.positions[row], "layers.1.attention.indexer"
    stops = {(stop.call.owner, stop.call.operator, stop.operand.name): stop for stop in trail.stops}
    assert {stop.call.number for stop in trail.stops} == {call.number for call in led.calls}

    def at(operator, name, owner=owner):
        return part(stops[owner, operator, name], calls).squeeze()

    written = at("npu_scatter_nd_update_", "updates")
    assert torch.equal(written, at("npu_scatter_nd_update_", "output")) and written.any()
    assert torch.equal(written, at(INDEXER, "key")) and at(INDEXER, "actual_seq_lengths_key") == position + 1
    chosen = at(INDEXER, "sparse_indices")
    assert len(set(chosen.tolist())) == 64 and chosen.min() >= 0 and chosen.max() <= position == 101
    assert torch.equal(chosen, at(SPARSE_ATTENTION, "sparse_indices", "layers.1.attention"))


def test_the_trail_visits_every_call_and_reports_the_integers_that_are_there(walked):
    led, trail, calls, *_ = walked
    assert {stop.call.number for stop in trail.stops} == {call.number for call in led.calls}
    assert not {"c_kv", "scores", "expanded_scale"} & {stop.operand.name for stop in trail.stops}  # left unwritten
    for stop in trail.stops:
        if stop.values is not None:
            assert list(stop.values) == part(stop, calls).flatten().tolist()
        sizes = [len(rows) or axis.size for rows, axis in zip(stop.rows, stop.operand.axes, strict=True)]
        assert part(stop, calls).numel() == math.prod(sizes)


# The command.


def run(capsys, *arguments):
    assert main(["ledger", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_default_is_a_decode_round_of_three_padded_to_four(capsys):
    out = run(capsys)
    assert out.startswith("round 2: decode 3 of 4 requests; 3 of 4 token rows\n")
    assert max(map(len, out.splitlines())) <= 100 and "[T 3 of 4, N 5 of 8, R 512]" in out
    assert all(f"layers.{i}.attention, decode" in out for i in range(3))


def test_round_layer_and_prompts_are_chosen(capsys):
    out = run(capsys, "import os\n", "x = 1\n", "--round", "1", "--layer", "1")
    assert out.startswith("round 1: prefill 2 requests;") and "layers.1.attention, prefill" in out
    assert "layers.0" not in out and "layers.2" not in out


def test_json_is_everything(capsys):
    (step,) = json.loads(run(capsys, "--json"))
    assert step["round"] == 2 and step["batch"][0]["requests"] == [1, 2, 3, None]
    call = next(c for c in step["calls"] if c["operator"] == "npu_fused_infer_attention_score_v2")
    assert call["mode"] == "decode" and call["operands"][0]["axes"][1] == {"name": "N", "size": 8, "real": 5}


def test_diff_and_follow(capsys):
    assert "actual_seq_kvlen" in run(capsys, "--diff", "3")
    diff = json.loads(run(capsys, "--diff", "1", "--json"))
    assert diff["before"].startswith("round 2") and diff["after"].startswith("round 1")
    trail = run(capsys, "--follow", "3", "--layer", "1")
    assert "Request 3" in trail and "out[:, 2]" in trail and "layers.0" not in trail
    stops = json.loads(run(capsys, "--follow", "3", "--json"))["stops"]
    assert any(stop["tensor"] == "ckv_cache" for stop in stops)


def test_html_is_a_page_of_its_own(tmp_path, capsys):
    file = tmp_path / "ledger.html"
    assert run(capsys, "--html", str(file), "--layer", "0") == ""
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "http" not in text
    body = text[text.index("<body>") : text.index("</body>") + 7]
    assert ElementTree.fromstring(body).find("div/p").text.startswith("round 2")


@pytest.mark.parametrize("arguments, message", [
    (["--round", "0"], "round 0 was asked for; rounds count from 1"),
    (["--layer", "7"], "no call was made in layer 7; the model has layers 0 to 2"),
    (["--follow", "9"], "request 9 has no token in this step; those that have: [1, 2, 3]"),
    (["", "--round", "1"], "the prompt is empty; give at least one token"),
    (["x", "--round", "9999"], "1 prompt tokens and max_tokens=9999 need "),
])
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["ledger", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"trueup: {message}") and err.count("\n") == 1


def test_only_wanted_rounds_are_recorded(llm):
    fresh = LLM(llm.model, llm.tokenizer, llm.name)
    found = rounds(fresh, TOGETHER, {1, 4})
    assert {n: led.rounds[0].number for n, led in found.items()} == {1: 1, 4: 4}


def test_a_drafters_calls_are_listed_too(capsys):
    assert main(["ledger", "def f(x):", "--spec", "eagle3"]) == 0
    out = capsys.readouterr().out
    assert "drafter, draft" in out and "drafter.post_norm" in out


def test_the_sparse_model(capsys):
    out = run(capsys, "--model", SPARSE, "--layer", "1")
    assert out.startswith("round 2: decode 3 of 4 requests; 3 of 4 token rows\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in ("query [T 3 of 4, Ni 16, Di 128] float32", "→ sparse_indices [T 3 of 4, 1, K 64] int32",
                 "key [pages 129, P 128, 1, Di 128] float32, pools.index[1]",
                 "query [T 3 of 4, N 5 of 8, R 512] float32"):
        assert line in lines
    diff = run(capsys, "--model", SPARSE, "--layer", "1", "--diff", "3")
    assert "[B 3 of 4] [12, 11, 7, 1] -> [B 3 of 4] [13, 12, 8, 1]   actual_seq_lengths_kv" in diff
    drafted = run(capsys, "--model", SPARSE, "--spec", "mtp", "--round", "3")
    assert "verify 3 of 4 requests; 12 of 16 token rows" in drafted
    assert "mtp.0.decoder.attention.indexer, draft\n" in drafted

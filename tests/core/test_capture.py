"""capture() and replay(): what is written of a call, and that it breaks the same rules when it is made again."""
import json
import resource
import subprocess
import sys
from random import Random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from operators.case import cases, changed, invoke
from trueup.core import ContractError, capture, load
from trueup.core.explain import explain
from trueup.core.ops.cache.format import FRACTAL_NZ, format_of
from trueup.core.ops.capture import packed, tells, unpacked
from trueup.core.ops.contract import Check, profile
from trueup.core.ops.registry import OPERATORS, packet
from trueup.core.ops.replay import replay

load()
CASES = cases()
WRONG = [pytest.param(name, wrong, id=f"{name}-{wrong.name}") for name, case in sorted(CASES.items())
         for wrong in case.wrong[:: 1 + len(case.wrong) // 8]]  # some of each operator; test_rules.py has all


def broken(recording):
    return [(done.number, done.operator, done.error and done.error.argument) for done in replay(recording)]


def recorded(call):
    """One call as a recording, without making it: some illegal calls the dispatcher itself refuses."""
    name, arguments = call
    return {"capture": 1, "calls": [{"number": 1, "operator": name, "arguments": capture().recorded(arguments)}]}


@pytest.mark.parametrize("name", sorted(CASES))
def test_legal_calls_replay_without_a_fault(name):
    r = Random(3)
    with profile("device"), capture() as record:
        for _ in range(5):
            invoke(packet(name), name, CASES[name].legal(r))
    recording = json.loads(json.dumps({"capture": 1, "calls": record.calls}))
    assert [(done.number, done.error, done.notes) for done in replay(recording) if done.operator == name] \
        == [(i, None, ()) for i in range(1, 6)]


def without_data(call):
    """The call with zeros where a recording has none of the numbers, in the same memory."""
    for name, value in call.items():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor) and not tells(name, tensor.dtype):
                tensor.zero_()
    return call


def refused(name, call):
    """What the contract of an operator says to a call, in parts; None if nothing."""
    try:
        with profile("device"):
            OPERATORS[name].contract(Check(name), **call)
    except ContractError as error:
        return error.argument, error.rule, error.expected


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_an_illegal_call_breaks_the_same_rule_when_replayed(name, wrong):
    call = changed((wrong.of or CASES[name].legal)(Random(1)), wrong.change)
    [done] = replay(json.loads(json.dumps(recorded((name, call)))))
    said = done.error and (done.error.argument, done.error.rule, done.error.expected)
    # What depends on the numbers of a model (a probability above 1, an infinite lse) is beyond a recording.
    assert said == refused(name, call) or said == refused(name, without_data(call))


def test_the_failing_call_is_in_the_file(tmp_path):
    file = tmp_path / "calls.json"
    x = torch.randn(4, 8)
    with pytest.raises(ContractError), capture(file) as record:
        torch.ops.npu.npu_rms_norm(x, torch.ones(8))
        assert len(json.loads(file.read_text())["calls"]) == 1  # whole at any time
        torch.ops.npu.npu_rms_norm(x[:, :7], torch.ones(8), epsilon=1e-3)
    written = json.loads(file.read_text())
    assert written["calls"] == json.loads(json.dumps(record.calls)) and len(written["calls"]) == 2
    assert written["error"]["call"] == 2 and "gamma" in written["error"]["message"]
    assert written["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert written["calls"][1] == {"number": 2, "operator": "npu_rms_norm", "arguments": {
        "input": {"tensor": {"shape": [4, 7], "stride": [8, 1], "offset": 0, "dtype": "float32", "device": "cpu",
                             "memory": 0}},
        "gamma": {"tensor": {"shape": [8], "stride": [1], "offset": 0, "dtype": "float32", "device": "cpu",
                             "memory": 1}},
        "epsilon": 1e-3}}
    assert broken(file) == [(1, "npu_rms_norm", None), (2, "npu_rms_norm", "gamma")]


def test_a_call_that_ends_the_process_is_in_the_file(tmp_path):
    file = tmp_path / "calls.json"
    code = ("import os, torch; from trueup.core import capture, load; load()\n"
            "from trueup.core.ops.registry import OPERATORS\n"
            "lib = torch.library.Library('npu', 'FRAGMENT')\n"
            "lib.define('npu_dies(Tensor x) -> Tensor'); lib.impl('npu_dies', lambda x: os._exit(7), 'CPU')\n"
            f"with capture({str(file)!r}):\n"
            "    torch.ops.npu.npu_swiglu(torch.ones(2, 4)); torch.ops.npu.npu_dies(torch.ones(3))\n")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7
    calls = json.loads(file.read_text())["calls"]
    assert [call["operator"] for call in calls] == ["npu_swiglu", "npu_dies"]
    [_, unknown] = replay(file)
    assert unknown.error is None and "no contract" in unknown.notes[0]


def test_an_error_outside_an_operator_names_no_call():
    with pytest.raises(ZeroDivisionError), capture() as record:
        torch.ops.npu.npu_swiglu(torch.ones(2, 4))
        1 / 0  # noqa: B018
    assert record.error == {"call": None, "message": "ZeroDivisionError: division by zero"}


def test_what_is_recorded_of_a_tensor():
    taker = capture()

    def seen(tensor):
        return taker.recorded({"lengths": tensor})["lengths"]["tensor"]

    pool = torch.zeros(6, 4)
    parts = taker.recorded({"a": pool[:2], "b": pool[2:], "c": torch.zeros(3)})
    key, value, other = (part["tensor"] for part in parts.values())
    assert (key["memory"], value["memory"], other["memory"]) == (0, 0, 1) and value["offset"] == 8
    assert seen(torch.tensor([[1, 2], [3, 4]]).T)["values"] == [[1, 3], [2, 4]]
    assert seen(torch.tensor([True, False]))["values"] == [True, False]
    assert "values" not in seen(torch.randn(3)) and "values" not in seen(torch.zeros(3, dtype=torch.int8))  # data
    for name in ("weight", "x2", "scale", "key_cache", "input_ids"):
        assert "values" not in taker.recorded({name: torch.zeros(3, dtype=torch.int32)})[name]["tensor"]
    assert "values" in seen(torch.zeros(4096, dtype=torch.int32))
    assert "packed" in seen(torch.zeros(4097, dtype=torch.int32))
    assert not seen(torch.zeros(2**20 + 1, dtype=torch.int32)).keys() & {"values", "packed"}
    ones = torch.ones(2048, 2048, dtype=torch.int8)
    for mask, name in ((ones.triu(1), "triu(1)"), (ones.tril(0), "tril(0)"), (ones, "other")):
        found = taker.recorded({"mask": mask})["mask"]["tensor"]
        assert found["mask"] == name and ("packed" in found) == (name == "other") and "values" not in found
    with FakeTensorMode():
        assert "values" not in seen(torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_many_values_are_packed(dtype):
    values = torch.arange(9000).view(2, 50, 90).to(dtype).transpose(0, 1)
    assert torch.equal(unpacked(packed(values), dtype).view(values.shape), values)
    assert len(packed(torch.zeros(2**20, dtype=torch.int64))) < 2**16


def test_a_changed_mask_is_looked_at_again():
    taker = capture()
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    for value, name in ((False, "triu(1)"), (True, "other")):
        mask[0, 0] = value
        assert taker.recorded({"mask": mask})["mask"]["tensor"]["mask"] == name


def test_scalars_and_lists():
    given = {"a": [1, (2, None), "TND", 0.5, torch.float16]}
    assert capture().recorded(given) == {"a": [1, [2, None], "TND", 0.5, {"other": "torch.float16"}]}


def put(monkeypatch, contract):
    """Let a contract of a test's own see what is made again."""
    monkeypatch.setitem(OPERATORS, "npu_swiglu", OPERATORS["npu_swiglu"]._replace(contract=contract))


def test_a_tensor_comes_back_as_it_was(monkeypatch):
    kept = {}

    def contract(check, x, lengths, table, dtype=None):
        kept.update(x=x, lengths=lengths, table=table, dtype=dtype)

    pool = torch.ones(40_000, 1000, dtype=torch.bfloat16).as_strided((10, 5), (1, 10), 7)
    call = {"x": pool, "lengths": torch.tensor([3, 4]), "table": torch.tensor([[5], [6]]).expand(2, 3),
            "dtype": torch.int8}
    put(monkeypatch, contract)
    [done] = replay(json.loads(json.dumps(recorded(("npu_swiglu", call)))))
    assert done.notes == ()
    assert (kept["x"].shape, kept["x"].stride(), kept["x"].storage_offset()) == (pool.shape, pool.stride(), 7)
    assert kept["x"].dtype == torch.bfloat16 and not kept["x"].any()
    assert kept["lengths"].tolist() == [3, 4] and kept["table"].tolist() == [[5, 5, 5], [6, 6, 6]]
    assert kept["table"].stride() == (1, 0) and kept["dtype"] == torch.int8


def test_a_pool_of_a_hundred_gigabytes_costs_nothing():
    tensor = {"shape": [100_000, 128, 4, 1024], "stride": [524288, 4096, 1024, 1], "offset": 0, "dtype": "bfloat16",
              "device": "npu:0", "memory": 0}
    gamma = {"shape": [1023], "stride": [1], "offset": 0, "dtype": "bfloat16", "device": "npu:0", "memory": 1}
    call = {"number": 1, "operator": "npu_rms_norm", "arguments": {"input": {"tensor": tensor},
                                                                   "gamma": {"tensor": gamma}}}
    [done] = replay({"capture": 1, "calls": [call]})
    assert done.error is not None and "[100000, 128, 4, 1024]" in str(done.error)


def test_the_format_of_memory_is_kept(monkeypatch):
    weight = torch.ops.npu.npu_format_cast(torch.ones(16, 16, dtype=torch.float16), FRACTAL_NZ)
    recording = recorded(("npu_swiglu", {"input": weight}))
    assert recording["calls"][0]["arguments"]["input"]["tensor"]["format"] == FRACTAL_NZ
    seen = []
    put(monkeypatch, lambda check, input: seen.append(format_of(input)))
    list(replay(recording))
    assert seen == [FRACTAL_NZ]


def sparse_call(rows, **changes):
    """Sparse attention of ``rows`` rows, each to 2048 of 4096 keys; its contract reads all indices."""
    def floats(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    key = floats(4096, 1, 512)
    return dict(query=floats(rows, 1, 512), key=key, value=key, query_rope=floats(rows, 1, 64),
                key_rope=floats(4096, 1, 64), scale_value=1.0, layout_query="TND", layout_kv="TND", attention_mode=2,
                sparse_indices=torch.stack([torch.randperm(4096)[:2048] for _ in range(rows)])[:, None].int(),
                actual_seq_lengths_query=torch.tensor([rows], dtype=torch.int32), sparse_mode=0,
                actual_seq_lengths_kv=torch.tensor([4096], dtype=torch.int32)) | changes


def replayed(name, call):
    [done] = replay(json.loads(json.dumps(recorded((name, call)))))
    return done


def test_the_indices_of_a_real_sparse_call_are_kept():
    name, call = "npu_sparse_flash_attention", sparse_call(8)
    done = replayed(name, call)
    assert (done.error, done.notes) == (None, ())
    call["sparse_indices"][5, 0, 7] = call["sparse_indices"][5, 0, 6]
    assert replayed(name, call).error.argument == "sparse_indices[5]"


def test_values_that_are_too_many_are_unknown_and_nobodys_fault():
    name = "npu_sparse_flash_attention"
    done = replayed(name, sparse_call(513))
    assert done.error is None
    assert done.notes == ("checked only as far as no rule reads the values of sparse_indices: they are unknown",)
    narrow = torch.zeros(513, 1, 63, dtype=torch.bfloat16)
    assert replayed(name, sparse_call(513, query_rope=narrow)).error.argument == "key_rope"  # before the values
    [found] = explain(json.dumps(recorded((name, sparse_call(513)))))
    assert dict(found.rows)["broken"] == "no rule" and "sparse_indices" in dict(found.rows)["note"]


def test_a_recorded_cache_takes_no_memory():
    """4 GiB, which nothing writes: a device's cache is larger than a laptop."""
    def most():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    before = most()
    cache = torch.empty(2**18, 8192, dtype=torch.bfloat16, device="meta")
    assert replayed("npu_rms_norm", {"self": cache, "gamma": torch.ones(8192, dtype=torch.bfloat16)}).error is None
    assert most() - before < 2**29


def test_values_that_no_rule_reads_need_not_be_known(monkeypatch):
    put(monkeypatch, lambda check, index: index.shape)
    done = replayed("npu_swiglu", {"index": torch.ones(1024, 1040, dtype=torch.int32)})
    assert (done.error, done.notes) == (None, ())


def test_a_mask_that_is_none_of_the_known_ones_comes_back(monkeypatch):
    mask = torch.ones(1, 2048, 2048, dtype=torch.int8).triu(1)
    mask[0, 7, 3] = 1
    seen = []
    put(monkeypatch, lambda check, mask: seen.append(mask))
    for one in (mask, mask.triu(1).expand(3, -1, -1)):
        replayed("npu_swiglu", {"mask": one})
        assert torch.equal(seen[-1], one)


def test_a_contract_that_fails_is_said(monkeypatch):
    put(monkeypatch, lambda check, input: input.nothing)
    [done] = replay(recorded(("npu_swiglu", {"input": torch.zeros(3)})))
    assert "not checked: its contract failed with AttributeError" in done.notes[0]


@pytest.mark.parametrize(("text", "says"), [("a log", "is no recording"), ('{"capture": 9}', "format 9")])
def test_what_is_no_recording_is_refused(tmp_path, text, says):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        list(replay(file))

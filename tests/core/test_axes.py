"""The declared axes of every operator, and how letters become sizes."""
from random import Random

import pytest
import torch

from operators.case import cases, invoke
from trueup.core import ledger
from trueup.core.ledger.letters import Declared, resolve, value_of
from trueup.core.ops.axes import signature
from trueup.core.ops.contract import profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS, packet, schemas

load()
CASES = cases()
npu = torch.ops.npu


@pytest.fixture(autouse=True)
def paper():
    with profile("paper"):
        yield


def shape(call, name, results=False):
    return next(o.shape for o in (call.results if results else call.operands) if o.name == name)


# What is declared.


def test_every_operator_declares_the_axes_of_arguments_that_it_has():
    for name, operator in OPERATORS.items():
        schema = torch._C.parse_schema(schemas()[name])
        defaults = {argument.name: argument.default_value for argument in schema.arguments}
        for form in operator.forms:
            declared = signature(name, defaults | form)
            assert {argument.partition("[")[0] for argument in declared.inputs} <= defaults.keys()
            assert len(declared.outputs) == len(schema.returns)


@pytest.mark.parametrize("name", sorted(CASES))
def test_declared_axes_fit_good_calls_of_every_operator(name):
    lettered = 0
    for seed in range(12):
        call = CASES[name].legal(Random(seed))
        with ledger.record() as led:
            invoke(packet(name), name, call)
        (entry,) = led.calls
        tensors = entry.operands + entry.results
        assert entry.operator == name and entry.owner == "" and entry.layout is None and not entry.error
        assert not entry.disagreements and all(a.real in (a.size, None) for t in tensors for a in t.axes)
        # Other ranks than the declared one get question marks.
        lettered += bool(tensors) and all(axis.name != "?" for t in tensors for axis in t.axes)
        # A tensor that the schema marks as written is declared as written.
        schema = torch._C.parse_schema(schemas()[name])
        marked = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert marked <= {operand.name for operand in entry.operands if operand.written}
    assert lettered


@pytest.mark.parametrize("lse", [False, True])
def test_each_form_of_attention_has_its_own_axes(lse):
    def rand(*sizes):
        return torch.randn(sizes)

    lens = dict(actual_seq_qlen=[2, 3], actual_seq_kvlen=[4, 6], return_softmax_lse=lse, num_query_heads=4)
    with ledger.record() as led:
        npu.npu_fused_infer_attention_score_v2(
            rand(3, 4, 8), rand(6, 2, 8), rand(6, 2, 16), input_layout="TND", num_key_value_heads=2, **lens)
        npu.npu_fused_infer_attention_score_v2(
            rand(2, 3, 4, 8), rand(2, 6, 2, 8), rand(2, 6, 2, 8), input_layout="BSND", num_key_value_heads=2,
            num_query_heads=4, return_softmax_lse=lse)
        for pages in ((9, 16), (9, 1, 16)):
            pool, ropes = rand(*pages, 8), rand(*pages, 4)
            npu.npu_fused_infer_attention_score_v2(
                rand(3, 4, 8), pool, pool, query_rope=rand(3, 4, 4), key_rope=ropes, input_layout="TND",
                block_table=torch.tensor([[1], [2]], dtype=torch.int32), block_size=16, num_key_value_heads=1, **lens)
    assert not any(call.disagreements for call in led.calls)
    packed, batched, paged, paged4 = led.calls
    assert shape(packed, "key") == "[S 6, G 2, D 8]" and shape(packed, "out", True) == "[T 3, N 4, Dv 16]"
    assert shape(packed, "actual_seq_kvlen") == "[B 2]"
    assert shape(batched, "query") == "[B 2, q 3, N 4, D 8]"
    assert shape(paged, "key") == "[pages 9, P 16, R 8]" and shape(paged, "block_table") == "[B 2, max_pages 1]"
    assert shape(paged4, "key_rope") == "[pages 9, 1, P 16, Dr 4]"
    assert shape(batched, "lse", True) == ("[B 2, N 4, q 3, 1]" if lse else "[0]")
    assert [o.unwritten for o in packed.results] == [False, not lse]


def test_an_undeclared_shape_gets_question_marks_and_no_guess():
    with ledger.record() as led:
        npu.npu_rms_norm(torch.randn(2, 3, 8), torch.ones(8))
    assert shape(led.calls[0], "input") == "[? 2, ? 3, ? 8]" and shape(led.calls[0], "gamma") == "[width 8]"


# Letters and sizes.


@pytest.mark.parametrize("expression, value", [("R+Dr", 12), ("2I", 6), ("T*K", 10), ("1", 1), ("2048", 2048),
                                               ("X", None), ("T*X", None), ("?", None)])
def test_the_value_of_an_expression(expression, value):
    assert value_of(expression, {"R": 8, "Dr": 4, "I": 3, "T": 5, "K": 2}) == value


def test_what_is_known_of_one_tensor_names_the_axes_of_the_others():
    Axis = ledger.Axis
    known = (Axis("E", 4, 4), Axis("H", 8, 8), Axis("2I", 6, None))
    rows = (Axis("S", 10, 6), Axis("H", 8, 8))
    x, w, y = resolve(
        [Declared((10, 8), ("S", "Din"), rows), Declared((4, 8, 6), ("E", "Din", "Dout"), known),
         Declared((10, 6), ("S", "Dout"), None)], {}, {}, {})
    assert (x, w) == (rows, known) and y == (Axis("S", 10, 6), Axis("2I", 6, None))


def test_a_known_number_renames_no_letter():
    Axis = ledger.Axis
    known = (Axis("T", 3, 3), Axis("1", 1, 1))
    x, _ = resolve([Declared((3, 1), ("T", "N"), known), Declared((3, 5), ("T", "N"), None)], {}, {}, {})
    assert x[1].name == "N"


def test_real_sizes_come_from_the_batch_the_owner_and_equations():
    Axis = ledger.Axis
    tensors = [Declared((4, 8, 2), ("T", "N", "K"), None), Declared((8,), ("S",), None), Declared((5,), ("T",), None)]
    batch = {"T": Axis("T", 4, 3)}
    first, _, other = resolve(tensors, batch, {"N": 5}, {})
    assert first == (Axis("T", 4, 3), Axis("N", 8, 5), Axis("K", 2, 2))
    assert other[0].real is None  # 5 rows are not the batch's 4
    (_, (s,)) = resolve(tensors[:2], batch, {}, {"S": "T*K"})
    assert s == Axis("S", 8, 6)

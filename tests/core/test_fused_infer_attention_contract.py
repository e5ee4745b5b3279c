"""What dense attention says to its caller: names, warnings, and the words of the bug gallery.

Which calls are legal and which are refused: tests/operators/fused_infer_attention.py.
"""
import inspect
import timeit
import warnings

import pytest
import torch

import trueup.core.ops.attention.fused_infer_attention  # noqa: F401  declares the operators
from trueup.core.ops.attention.fused_infer_attention import arguments
from trueup.core.ops.contract import Check, ContractError, profile
from trueup.core.ops.registry import OPERATORS, schemas

op = OPERATORS["npu_fused_infer_attention_score_v2"]
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
CAUSAL = {"sparse_mode": 3, "atten_mask": MASK}


def half(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


def packed(operator=op, **over):
    """TND: two requests, of 2 and 3 rows."""
    call = {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5], "num_query_heads": 4, "softmax_scale": 0.1,
            "input_layout": "TND", **CAUSAL, **over}
    return operator(half(5, 4, 128), half(5, 4, 128), half(5, 4, 128), **call)


def paged(N=4, T=3, **over):
    """Absorbed MLA: two requests, of 2 rows on 200 keys (two pages) and 1 row on 3 keys; 4 pages in all."""
    latent = half(4, 128, 512)
    call = {"query_rope": half(T, N, 64), "key_rope": half(4, 128, 64), "actual_seq_qlen": [T - 1, T],
            "actual_seq_kvlen": [200, 3], "num_query_heads": N, "num_key_value_heads": 1, "softmax_scale": 0.1,
            "input_layout": "TND", "block_size": 128, "block_table": torch.tensor([[1, 3], [2, 10**6]]).int(), **CAUSAL,
            **over}
    return op(half(T, N, 512), latent, latent, **call)


@pytest.mark.parametrize("good", [
    pytest.param(lambda: paged(N=32, input_layout="TND_NTD"), id="absorbed decoding, heads first"),
    pytest.param(lambda: paged(return_softmax_lse=True, sparse_mode=0, atten_mask=None), id="absorbed, every key"),
    pytest.param(lambda: op(half(1, 7, 20, 256), half(1, 7, 20, 256), half(1, 7, 20, 256), num_query_heads=20,
                            softmax_scale=0.1, input_layout="BSND", **CAUSAL), id="GLM-4.7-Flash prefill"),
])
def test_the_calls_of_our_models_are_legal_on_a_device(good):
    with profile("device"):
        good()


@pytest.mark.parametrize("bad, case, fragments", [
    (lambda: packed(actual_seq_qlen=[2, 4]), "SB-03", ("queryT(5)", "actual_seq_qlen(4)", "the other 1 rows")),
    (lambda: packed(actual_seq_qlen=[2, 7]), "SB-03", ("queryT(5)", "query lacks 2 of the planned rows")),
    (lambda: packed(actual_seq_kvlen=[5]), "SB-04", ("1 lengths", "2 lengths, one for each of actual_seq_qlen")),
    (lambda: paged(block_table=torch.tensor([[1, 3]]).int()), "SB-04", ("[1, 2]", "2 rows")),
    (lambda: paged(N=20), "SB-06", ("num_query_heads is 20", "pad the heads with zeros to 32")),
])
def test_the_gallery_s_faults_are_refused_with_both_counts(bad, case, fragments):
    with profile("device"), pytest.raises(ContractError) as refusal:
        bad()
    assert refusal.value.case == case
    for fragment in fragments:
        assert fragment in str(refusal.value)


def test_version_1_is_spoken_to_in_its_own_names():
    q = half(2, 3, 4, 32)
    with pytest.raises(ContractError, match=r"num_heads is 5(.|\n)*npu_fused_infer_attention_score$"):
        OPERATORS["npu_fused_infer_attention_score"](q, q, q, num_heads=5, scale=0.1, input_layout="BSND")


def test_mask_changed_in_place_is_looked_at_again():
    mask = MASK.clone()
    packed(atten_mask=mask)
    mask[5, 2] = True
    with pytest.raises(ContractError, match="not causal"):
        packed(atten_mask=mask)


def test_a_mask_is_looked_at_once():
    """4 million elements: a second look would cost milliseconds."""
    q = half(1, 4, 128)
    call = {"actual_seq_qlen": [1], "actual_seq_kvlen": [1], "num_query_heads": 4, "softmax_scale": 0.1,
            "input_layout": "TND", **CAUSAL}
    op.contract(Check(op.name), q, q, q, **call)
    assert min(timeit.repeat(lambda: op.contract(Check(op.name), q, q, q, **call), number=1, repeat=20)) < 5e-4


def test_default_scale_is_warned_about():
    with pytest.warns(UserWarning, match="softmax_scale is 1.0") as caught:
        packed(softmax_scale=1.0)
    assert caught[0].filename == __file__
    with profile("paper"), warnings.catch_warnings():
        warnings.simplefilter("error")
        packed(softmax_scale=1.0)


@pytest.mark.parametrize("mode, warned", [({"sparse_mode": 4, "pre_tokens": 3}, True), ({"sparse_mode": 2}, True),
                                          ({"sparse_mode": 4}, False), ({"sparse_mode": 3}, False)])
def test_a_mode_without_effect_is_warned_about(mode, warned):
    q, k = half(2, 1, 4, 32), half(2, 6, 4, 32)
    call = {"num_query_heads": 4, "softmax_scale": 0.1, "input_layout": "BSND"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, _ = op(q, k, k, **call, atten_mask=MASK, **mode)
    assert [f"sparse_mode {mode['sparse_mode']} has no effect" in str(w.message) for w in caught] == [True] * warned
    assert torch.equal(out, op(q, k, k, **call)[0])


@pytest.mark.parametrize("version, name", [(arguments.v1, "npu_fused_infer_attention_score"),
                                           (arguments.v2, "npu_fused_infer_attention_score_v2")])
def test_names_and_defaults_are_the_schema_s(version, name):
    expected = {argument.name: argument for argument in torch._C.parse_schema(schemas()[name]).arguments}
    for parameter in inspect.signature(version).parameters.values():
        if parameter.name != "rest":
            default = expected[parameter.name].default_value
            assert default == (None if parameter.default is inspect.Parameter.empty else parameter.default)

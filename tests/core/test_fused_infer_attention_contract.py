"""What npu_fused_infer_attention_score_v2 takes and refuses on a device, at device sizes."""
import inspect

import pytest
import torch

import trueup.core.ops.fused_infer_attention  # noqa: F401  declares the operator
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS, schemas

op = OPERATORS["npu_fused_infer_attention_score_v2"]
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
CAUSAL = {"sparse_mode": 3, "atten_mask": MASK}
FULL = {"sparse_mode": 0, "atten_mask": None}


def half(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


def table(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def call(tensors, arguments, over):
    """The operator with some of a legal call's tensors and arguments replaced."""
    arguments = {**tensors, "softmax_scale": 0.1, **CAUSAL, **arguments, **over}
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    return op(query, key, value, **arguments)


def packed(D=128, Dv=128, rope=None, N=4, G=4, **over):
    """TND: two requests, of 2 and 3 rows."""
    tensors = {"query": half(5, N, D), "key": half(5, G, D), "value": half(5, G, Dv)}
    if rope:
        tensors |= {"query_rope": half(5, N, rope), "key_rope": half(5, G, rope)}
    return call(tensors, {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5], "num_query_heads": N,
                          "num_key_value_heads": G, "input_layout": "TND"}, over)


def paged(D=512, N=4, P=128, T=3, axes=3, **over):
    """Absorbed MLA: two requests, of 2 rows on 200 keys (two pages) and 1 row on 3 keys; 4 pages in all."""
    page = (4, P) if axes == 3 else (4, 1, P)
    latent = half(*page, D)
    tensors = {"query": half(T, N, D), "key": latent, "value": latent, "query_rope": half(T, N, 64),
               "key_rope": half(*page, 64)}
    return call(tensors, {"actual_seq_qlen": [T - 1, T], "actual_seq_kvlen": [200, 3], "num_query_heads": N,
                          "num_key_value_heads": 1, "input_layout": "TND", "block_size": P,
                          "block_table": table([1, 3], [2, 10**6])}, over)


def batched(D=32, Dv=None, B=2, S=3, N=4, **over):
    """BSND: requests of 3 rows."""
    tensors = {"query": half(B, S, N, D), "key": half(B, S, N, D), "value": half(B, S, N, Dv or D)}
    return call(tensors, {"num_query_heads": N, "num_key_value_heads": N, "input_layout": "BSND"}, over)


LEGAL = {
    "packed 128": lambda: packed(),
    "packed 64, grouped": lambda: packed(64, 64, G=2),
    "packed 192 with values of 128": lambda: packed(192),
    "packed 192": lambda: packed(192, 192),
    "packed 128 beside rope 64": lambda: packed(rope=64),
    "packed without mask": lambda: packed(**FULL, next_tokens=0),
    "five heads are fine where D is 128": lambda: packed(N=5, G=5),
    "paged, 32 heads": lambda: paged(N=32, input_layout="TND_NTD"),
    "paged, 4 axes": lambda: paged(axes=4, return_softmax_lse=True),
    "paged, full attention over several rows": lambda: paged(**FULL),
    "paged, a padded request without keys": lambda: paged(T=6, actual_seq_kvlen=[200, 0]),
    "GLM-4.7-Flash prefill": lambda: batched(256, B=1, S=7, N=20),
    "a mask with leading ones": lambda: batched(atten_mask=MASK.to(torch.int8)[None, None]),
    "more lengths than requests": lambda: batched(actual_seq_qlen=[3, 3, 9], actual_seq_kvlen=[3, 3, 9]),
}


@pytest.mark.parametrize("good", LEGAL.values(), ids=LEGAL)
def test_legal_on_a_device(good):
    with profile("device"):
        good()


ILLEGAL = {  # name: (call, fragments of the message)
    "layout not built": (lambda: packed(input_layout="NTD"), "'NTD', which is not built yet"),
    "layout unknown": (lambda: packed(input_layout="TDN"), "'TDN', which does not exist"),
    "axes": (lambda: packed(input_layout="BSND"), "4 axes in layout BSND"),
    "heads": (lambda: packed(num_query_heads=8), "num_query_heads is 8", "4, the heads of query"),
    "groups": (lambda: packed(num_key_value_heads=3), "num_key_value_heads is 3", "divisor"),
    "group too large": (lambda: packed(N=130, G=2), "at most 64 query heads"),
    "too many heads": (lambda: batched(N=257), "at most 256"),
    "fp32 on a device": (lambda: packed(query=torch.randn(5, 4, 128)), "float16 or bfloat16"),
    "mixed dtypes": (lambda: packed(value=torch.randn(5, 4, 128)), "value is torch.float32", "as query"),
    "strided": (lambda: packed(query=half(4, 5, 128).transpose(0, 1)), "call .contiguous()"),
    "quantised": (lambda: packed(quant_scale_out=torch.ones(1)), "quant_scale_out", "not built yet"),
    "another precision": (lambda: packed(inner_precise=2), "inner_precise is 2", "not built yet"),
    "wider queries than keys": (lambda: packed(key=half(5, 4, 64)), "last axis 128, as query"),
    "key rows": (lambda: packed(value=half(6, 4, 128)), "Tkv alike"),
    "256 in TND": (lambda: packed(256, 256), "for D = 256 call once per request in layout BSND"),
    "values of 192, grouped": (lambda: packed(192, 192, G=2), "as many key heads as query heads"),
    "one rope": (lambda: packed(query_rope=half(5, 4, 64)), "key_rope is None", "or neither"),
    "rope width": (lambda: packed(rope=32), "last axis 64"),
    "ropes differ": (lambda: packed(rope=64, key_rope=half(5, 4, 32)), "last axis 64, as query_rope"),
    "rope rows": (lambda: packed(rope=64, query_rope=half(4, 4, 64)), "[5, 4] and a width"),
    "key rope rows": (lambda: packed(rope=64, key_rope=half(5, 1, 64)), "(Tkv, 4, Dr)"),
    "192 beside rope": (lambda: packed(192, rope=64), "128 and 128 beside rope"),
    "absorbed, packed keys": (lambda: packed(512, 512, rope=64, G=1), "without a block_table is not built yet"),
    "NTD out of packed keys": (lambda: packed(input_layout="TND_NTD"), "'TND', or a block_table"),
    "no q lengths": (lambda: packed(actual_seq_qlen=None), "actual_seq_qlen is None"),
    "decreasing": (lambda: packed(actual_seq_qlen=[3, 2]), "cumulative"),
    "q end": (lambda: packed(actual_seq_qlen=[2, 4]), "queryT(5)", "actual_seq_qlen(4)", "the other 1 rows", "SB-03"),
    "q end past the rows": (lambda: packed(actual_seq_qlen=[2, 7]), "query lacks 2 of the planned rows", "SB-03"),
    "kv end": (lambda: packed(actual_seq_kvlen=[2, 4]), "keyT(5)", "actual_seq_kvlen(4)"),
    "too few kv lengths": (lambda: packed(actual_seq_kvlen=[5]), "1 lengths", "2 lengths", "SB-04"),
    "no kv lengths": (lambda: paged(actual_seq_kvlen=None), "actual_seq_kvlen is None"),
    "more rows than keys": (lambda: packed(actual_seq_kvlen=[1, 5]), "1 keys for the 2 query rows of request 0"),
    "mask missing": (lambda: packed(atten_mask=None), "atten_mask is None", "triu(1)"),
    "mask in mode 0": (lambda: packed(sparse_mode=0), "atten_mask", "sparse_mode 3"),
    "mask inverted": (lambda: packed(atten_mask=~MASK), "inverted: it marks what is visible"),
    "mask shifted": (lambda: packed(atten_mask=torch.ones_like(MASK).triu(0)), "hides each row from itself"),
    "mask not causal": (lambda: packed(atten_mask=torch.zeros_like(MASK)), "not causal"),
    "mask size": (lambda: packed(atten_mask=torch.ones(8, 8, dtype=torch.bool).triu(1)), "whatever the lengths are"),
    "mask axes": (lambda: packed(atten_mask=MASK.expand(2, -1, -1)), "leading 1"),
    "mask dtype": (lambda: packed(atten_mask=MASK.float()), "bool, int8 or uint8"),
    "mask strided": (lambda: packed(atten_mask=MASK.mT.contiguous().mT), "not contiguous"),
    "tree mask": (lambda: packed(sparse_mode=9), "9, which is not built yet"),
    "prefix mode": (lambda: packed(sparse_mode=5), "5, which does not exist"),
    "20 heads": (lambda: paged(N=20), "num_query_heads is 20", "pad the heads with zeros to 32", "SB-06"),
    "latent width": (lambda: paged(D=256), "D = 512"),
    "two latents": (lambda: paged(num_key_value_heads=2), "share one latent"),
    "pages of another size": (lambda: paged(block_size=64), "key is [4, 128, 512]", "(pages, 64, 512)"),
    "page size 24": (lambda: paged(P=24), "a multiple of 16"),
    "no page size": (lambda: paged(block_size=0), "the number of rows in a page"),
    "heads after rows": (lambda: paged(key=half(4, 128, 1, 512)), "(pages, 1, 128, 512)"),
    "NZ pages": (lambda: paged(key=half(4, 1, 32, 128, 16)), "[4, 1, 32, 128, 16]"),
    "rope pages": (lambda: paged(key_rope=half(2, 128, 64)), "pages and axes alike"),
    "axes of rope pages": (lambda: paged(key_rope=half(4, 1, 128, 64)), "pages and axes alike"),
    "17 rows": (lambda: paged(T=18), "17 rows in one request"),
    "empty": (lambda: paged(T=0, actual_seq_qlen=[0, 0]), "query is empty"),
    "table dtype": (lambda: paged(block_table=table([1, 3], [2, 0]).long()), "int32"),
    "table rows": (lambda: paged(block_table=table([1, 3])), "2 rows", "SB-04"),
    "table strided": (lambda: paged(block_table=table([1, 2], [3, 0]).T), "not contiguous"),
    "table too narrow": (lambda: paged(block_table=table([1], [2])), "from 0 to 128"),
    "negative kv length": (lambda: paged(actual_seq_kvlen=[200, -1]), "from 0 to 256"),
    "cumulative kv over pages": (lambda: paged(actual_seq_kvlen=[200, 403]), "not cumulative over pages"),
    "page past the pool": (lambda: paged(block_table=table([1, 4], [2, 9])), "block_table[0, 1] is 4", "0 to 3"),
    "page -1": (lambda: paged(block_table=table([1, 3], [-1, 0])), "block_table[1, 0] is -1"),
    "lse of TND_NTD": (lambda: paged(input_layout="TND_NTD", return_softmax_lse=True), "layout TND returns it"),
    "paged without rope": (lambda: packed(block_table=table([0], [0])), "other paged forms are not built yet"),
    "batched, values narrower": (lambda: batched(Dv=16), "as query and key"),
    "batched, keys of other requests": (lambda: batched(key=half(3, 3, 4, 32)), "(2, Skv, 4, D)"),
    "batched, D": (lambda: batched(24), "a multiple of 16"),
    "batched, too few lengths": (lambda: batched(B=3, actual_seq_qlen=[1, 2]), "2 lengths", "each of 3 requests"),
    "batched, length": (lambda: batched(actual_seq_kvlen=[3, 6]), "not cumulative", "from 0 to 3"),
    "batched, rope": (lambda: batched(query_rope=half(2, 3, 4, 64), key_rope=half(2, 3, 4, 64)), "not built yet"),
}


@pytest.mark.parametrize("bad, fragments", [(bad, rest) for bad, *rest in ILLEGAL.values()], ids=ILLEGAL)
def test_illegal_on_a_device(bad, fragments):
    with profile("device"), pytest.raises(ContractError) as refusal:
        bad()
    for fragment in fragments:
        assert fragment in str(refusal.value)


def test_mask_changed_in_place_is_looked_at_again():
    mask = MASK.clone()
    packed(atten_mask=mask)
    mask[5, 2] = True
    with pytest.raises(ContractError, match="not causal"):
        packed(atten_mask=mask)


def test_default_scale_is_warned_about(recwarn):
    with pytest.warns(UserWarning, match="softmax_scale is 1.0"):
        packed(softmax_scale=1.0)
    recwarn.clear()
    with profile("paper"):
        packed(softmax_scale=1.0)
    assert not recwarn


@pytest.mark.parametrize("part", [op.contract, op.kernel])
def test_names_and_defaults_are_the_schema_s(part):
    schema = torch._C.parse_schema(schemas()[op.name])
    expected = {argument.name: argument for argument in schema.arguments}
    for name, parameter in inspect.signature(part).parameters.items():
        if name in ("check", "rest"):
            continue
        default = expected[name].default_value
        assert default == (None if parameter.default is inspect.Parameter.empty else parameter.default), name

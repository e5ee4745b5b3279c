"""Dense attention (FIA) into memory of the caller, as graphs call it: both versions, every layout."""
import pytest
import torch

from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS

load()
NAMES = {
    1: {"op": "npu_fused_infer_attention_score", "q": "actual_seq_lengths", "kv": "actual_seq_lengths_kv",
        "heads": "num_heads", "scale": "scale", "lse": "softmax_lse_flag"},
    2: {"op": "npu_fused_infer_attention_score_v2", "q": "actual_seq_qlen", "kv": "actual_seq_kvlen",
        "heads": "num_query_heads", "scale": "softmax_scale", "lse": "return_softmax_lse"},
}
# [requests, rows, heads, width] to the axes of a layout
LAID_OUT = {"BSH": lambda x: x.flatten(2), "BSND": lambda x: x, "BNSD": lambda x: x.transpose(1, 2),
            "TND": lambda x: x.flatten(0, 1), "NTD": lambda x: x.flatten(0, 1).transpose(0, 1),
            "NSD": lambda x: x[0].transpose(0, 1)}
PLAIN = ("BSH", "BSND", "BNSD", "TND", "NTD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "NSD")
LATENT = ("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD")
LAYOUTS = [(version, layout) for version in NAMES for layout in PLAIN + LATENT]
WRITTEN = 7.0  # what stands in memory that nobody wrote


def call(version, layout, lse, B=2, S=3, N=4, D=128):
    """The operator's arguments: all rows of all requests, except that one batched request is shorter."""
    names, reads = NAMES[version], layout.partition("_")[0]
    B = 1 if reads == "NSD" else B
    torch.manual_seed(len(layout))
    D, G = (512, 1) if layout in LATENT else (D, 2)

    def laid_out(*shape):
        return LAID_OUT[reads](torch.randn(shape).bfloat16()).contiguous()

    tensors = {"query": laid_out(B, S, N, D), "key": laid_out(B, 5, G, D), "value": laid_out(B, 5, G, D)}
    if layout in LATENT:
        tensors |= {"query_rope": laid_out(B, S, N, 64), "key_rope": laid_out(B, 5, G, 64)}
    packed = "T" in reads
    lengths = {names["q"]: [S * (b + 1) for b in range(B)] if packed else [S - 1] + [S] * (B - 1),
               names["kv"]: [5 * (b + 1) for b in range(B)] if packed else [5, 4]}
    return tensors | lengths | {names["heads"]: N, "num_key_value_heads": G, names["scale"]: 0.1, names["lse"]: lse,
                                "input_layout": layout}


def run(name, arguments):
    """Through the dispatcher, under the device's rules; what is not settled is taken to work."""
    packet, _, overload = name.partition(".")
    with profile("device"), assume("fia-packed-latent", "fia-nsd"):
        return getattr(getattr(torch.ops.npu, packet), overload or "default")(
            *(arguments[x] for x in ("query", "key", "value")),
            **{x: y for x, y in arguments.items() if x not in ("query", "key", "value")})


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("version", "layout"), LAYOUTS)
def test_it_writes_exactly_what_it_was_given(version, layout, lse):
    op = NAMES[version]["op"]
    arguments = call(version, layout, lse and layout not in LATENT)
    wanted = run(op, arguments)
    workspace = run(f"_{op}_get_max_workspace", arguments)
    assert workspace.dim() == 1 and workspace.dtype == torch.bfloat16
    # Between guards, so that a row too many shows.
    memory = [torch.full((len(x.flatten()) + 32,), WRITTEN, dtype=x.dtype) for x in wanted]
    out = [m[16:-16].view(x.shape) for m, x in zip(memory, wanted, strict=True)]
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    returned = run(f"{op}.out", arguments | {"workspace": workspace, "out": out})
    assert [x.data_ptr() for x in returned] == [x.data_ptr() for x in out]
    for got, want, around in zip(out, wanted, memory, strict=True):
        assert torch.equal(got, want.nan_to_num(WRITTEN)), "unwritten rows keep their content"
        assert (around[:16] == WRITTEN).all() and (around[-16:] == WRITTEN).all()
    assert all(torch.equal(x, arguments[name]) for name, x in before.items())
    assert wanted[0].isnan().any() == ("T" not in layout), "the batched ones have a row that is unwritten"


@pytest.mark.parametrize("version", NAMES)
def test_an_lse_that_is_not_wanted_is_left_alone(version):
    op, arguments = NAMES[version]["op"], call(version, "TND", False)
    out = [torch.empty(6, 4, 128, dtype=torch.bfloat16), torch.full((1,), WRITTEN)]
    _, lse = run(f"{op}.out", arguments | {"out": out})
    assert lse.tolist() == [WRITTEN] and torch.equal(out[0], run(op, arguments)[0])


def paged(version, lse):
    names = NAMES[version]
    query, pool = torch.randn(6, 4, 128).bfloat16(), torch.randn(4, 16, 256).bfloat16()
    return {"query": query, "key": pool, "value": pool, names["q"]: [2, 6], names["kv"]: [3, 20], names["heads"]: 4,
            "num_key_value_heads": 2, names["scale"]: 0.1, names["lse"]: lse, "input_layout": "TND", "block_size": 16,
            "block_table": torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)}


@pytest.mark.parametrize("version", NAMES)
def test_replays_write_the_same_memory_with_new_lengths(version):
    names, arguments = NAMES[version], paged(version, True)
    out = [torch.zeros(6, 4, 128, dtype=torch.bfloat16), torch.zeros(6, 4, 1)]
    workspace = run(f"_{names['op']}_get_max_workspace", arguments)
    for kv_lens in ([3, 20], [16, 32], [1, 4]):
        again = arguments | {names["kv"]: kv_lens}
        run(f"{names['op']}.out", again | {"workspace": workspace, "out": out})
        assert all(torch.equal(x, y) for x, y in zip(out, run(names["op"], again), strict=True))
        # Sizes are a function of shapes: one workspace serves all lengths.
        assert run(f"_{names['op']}_get_max_workspace", again).shape == workspace.shape


def refused(version, layout, lse, change, message):
    op, arguments = NAMES[version]["op"], call(version, layout, lse)
    out = [torch.empty_like(x) for x in run(op, arguments)]
    workspace = run(f"_{op}_get_max_workspace", arguments)
    with pytest.raises(ContractError, match=message) as error:
        run(f"{op}.out", arguments | {"out": out, "workspace": workspace} | change(out, workspace))
    assert error.value.operator == f"{op}.out"


@pytest.mark.parametrize(("version", "layout"), LAYOUTS)
def test_memory_of_another_shape_or_dtype_or_too_small_a_workspace(version, layout):
    lse = layout not in LATENT
    refused(version, layout, lse, lambda out, _: {"out": [out[0].flatten(), out[1]]}, r"out\[0\] is \[")
    refused(version, layout, lse, lambda out, _: {"out": [torch.cat([out[0], out[0]]), out[1]]}, r"out\[0\] is \[")
    refused(version, layout, lse, lambda out, _: {"out": [out[0].half(), out[1]]}, r"out\[0\] is torch.float16")
    refused(version, layout, lse, lambda _, workspace: {"workspace": workspace[1:]}, "workspace is .*\n.*at least")
    refused(version, layout, lse, lambda _, workspace: {"workspace": workspace.half()}, "workspace is torch.float16")
    if lse:
        refused(version, layout, lse, lambda out, _: {"out": [out[0], out[1].flatten()]}, r"out\[1\] is \[")
        refused(version, layout, lse, lambda out, _: {"out": [out[0], out[1].half()]}, r"out\[1\] is torch.float16")


@pytest.mark.parametrize("version", NAMES)
def test_the_functional_contract_comes_first(version):
    names = NAMES[version]
    refused(version, "TND", True, lambda *_: {names["kv"]: [5]}, f"{names['kv']} is 1 lengths")


def test_a_transposed_output_is_refused_where_its_shape_fits():
    """Four heads and four rows: the layout of the memory is right in shape and wrong in stride."""
    arguments = call(2, "TND_NTD", False, B=1, S=4)
    out = torch.empty(4, 4, 512, dtype=torch.bfloat16).transpose(0, 1)
    with pytest.raises(ContractError, match=r"out\[0\] is not contiguous"):
        run(f"{NAMES[2]['op']}.out", arguments | {"out": [out, torch.empty(0)]})


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("version", "layout"), LAYOUTS)
def test_shape_inference_says_what_the_operator_returns(version, layout, quantised):
    names, arguments = NAMES[version], call(version, layout, layout not in LATENT)
    wanted = run(names["op"], arguments)
    scale = {"quant_scale2" if version == 1 else "quant_scale_out": torch.ones(1)} if quantised else {}
    decisive = ("query", "value", "query_rope", names["heads"], "num_key_value_heads", names["lse"], "input_layout")
    got = OPERATORS[f"_{names['op']}_infer_output"](**{x: arguments[x] for x in decisive if x in arguments}, **scale)
    assert [x.shape for x in got] == [x.shape for x in wanted]
    assert [x.dtype for x in got] == [torch.int8 if quantised else torch.bfloat16, torch.float32]

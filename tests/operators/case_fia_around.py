"""What stands around dense attention (FIA) for graphs: results given as arguments, workspace, shapes of the results."""
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from operators.case import Call, Wrong, copied, floats, unwritten
from operators.case_fia_calls import chance, v1_names
from operators.case_fia_forms import BSND, DTYPE, PAGED_TND, RELATION, SIZE, strided
from operators.case_fia_naive import V1, naive_v2

SHAPE_DECIDES = ("query", "value", "query_rope", "block_table", "num_query_heads", "num_key_value_heads",
                 "input_layout", "return_softmax_lse")


def with_out(call: Callable[[Random], Call], naive: Callable[..., Any]) -> Callable[[Random], Call]:
    """Calls of an ``.out`` overload: the same, with results of the right shapes to write to."""

    def make(r: Random) -> Call:
        given = call(r)
        out, lse = naive(**copied(given, torch.float64))
        dtype = given["query"].dtype
        if lse.shape == (0,) and chance(r, 0.5):
            lse = lse.new_empty(1)  # not asked for: callers pass some tensor
        given["out"] = [unwritten(out.shape, dtype), unwritten(lse.shape, torch.float32)]
        return given | ({"workspace": torch.zeros(1 << 20, dtype=dtype)} if chance(r, 0.5) else {})

    return make


def naive_out(naive: Callable[..., Any]) -> Callable[..., Any]:
    def run(query, key, value, *, out, workspace=None, **named):
        results = naive(query, key, value, **named)
        for memory, result in zip(out, results, strict=True):
            if memory.shape == result.shape:
                memory.copy_(result)
        return tuple(out)

    return run


def naive_workspace(query, key, value, **named):
    """How much memory a device wants is its own affair: one axis."""
    return torch.empty(0, device="meta")


def infer_output(call: Callable[[Random], Call]) -> Callable[[Random], Call]:
    """Calls of ``_infer_output``: the arguments that decide shapes, and the scale that makes results int8."""

    def make(r: Random) -> Call:
        given = call(r)
        given = {name: x for name, x in given.items() if name in SHAPE_DECIDES or name in map(V1.get, SHAPE_DECIDES)}
        if "query_rope" not in given and given["input_layout"] in ("BSH", "BSND", "BNSD") and chance(r, 0.3):
            scale = "quant_scale2" if "num_heads" in given else "quant_scale_out"
            given[scale] = floats(r, 1, dtype=torch.float32)
        return given

    return make


def naive_infer_output(query, value, *, query_rope=None, input_layout="BSH", quant_scale_out=None, block_table=None,
                       num_query_heads=1, num_key_value_heads=0, return_softmax_lse=False):
    reads, _, writes = input_layout.partition("_")
    N, G = num_query_heads, num_key_value_heads or num_query_heads
    size = dict(zip(reads, query.shape, strict=True)) | {"N": N}
    Dv = value.shape[-1]
    if value.dim() == 3 and (reads == "BSH" or block_table is not None):
        Dv //= G
    if value.dim() == 5:
        Dv *= value.shape[2]
    size |= {"D": Dv, "H": N * Dv}
    out = tuple(size[axis] for axis in writes or reads)
    lse = (*(size[axis] for axis in ("TN" if "T" in reads else "BNS")), 1) if return_softmax_lse else (0,)
    return unwritten(out, torch.int8 if quant_scale_out is not None else torch.float64), unwritten(lse)


def out_of(r: Random) -> Call:
    """With the lse, and workspace."""
    make = with_out(lambda r: BSND(r) | {"return_softmax_lse": True}, naive_v2)
    call = make(r)
    return call | {"workspace": torch.zeros(1 << 20, dtype=call["query"].dtype)}


OUT = [
    Wrong("of the wrong layout", lambda c: {"input_layout": "SBH"}, RELATION, "input_layout is 'SBH'", out_of),
    Wrong("one result", lambda c: {"out": c["out"][:1]}, RELATION, "out is 1 tensors", out_of),
    Wrong("a result of fewer rows", lambda c: {"out": [c["out"][0][:-1], c["out"][1]]},
          RELATION, r"out\[0\] is(.|\n)*shape of the output", out_of),
    Wrong("an lse of fewer rows", lambda c: {"out": [c["out"][0], c["out"][1][:-1]]},
          RELATION, r"out\[1\] is(.|\n)*shape of the lse", out_of),
    Wrong("a result for an lse that is not wanted", lambda c: {"return_softmax_lse": False},
          RELATION, r"out\[1\] is(.|\n)*return_softmax_lse is False", out_of),
    Wrong("a result in fp32", lambda c: {"out": [c["out"][0].float(), c["out"][1]]},
          DTYPE, r"out\[0\] is(.|\n)*as query", out_of),
    Wrong("an lse in 16 bits", lambda c: {"out": [c["out"][0], c["out"][1].half()]},
          DTYPE, r"out\[1\] is(.|\n)*float32", out_of),
    Wrong("a strided result", lambda c: {"out": [strided(c["out"][0]), c["out"][1]]},
          SIZE, r"out\[0\] is not contiguous", out_of),
    Wrong("too little workspace", lambda c: {"workspace": c["workspace"][:1]},
          RELATION, "workspace is(.|\n)*get_max_workspace", out_of),
    Wrong("workspace in bytes", lambda c: {"workspace": c["workspace"].view(torch.uint8)},
          DTYPE, "workspace is(.|\n)*as query", out_of),
]

SHAPES = [
    Wrong("unknown layout", lambda c: {"input_layout": "SBH"},
          RELATION, "input_layout is 'SBH', which does not exist", infer_output(BSND)),
    Wrong("query of another rank", lambda c: {"query": c["query"].unsqueeze(0)},
          RELATION, "query is(.|\n)*4 axes", infer_output(BSND)),
    Wrong("no query heads", lambda c: {"num_query_heads": 0}, RELATION, "num_query_heads is 0", infer_output(BSND)),
    Wrong("negative key heads", lambda c: {"num_key_value_heads": -1},
          RELATION, "num_key_value_heads is -1", infer_output(BSND)),
    Wrong("value of another rank", lambda c: {"value": c["value"].flatten(2)},
          RELATION, "value is(.|\n)*as query", infer_output(BSND)),
    Wrong("pages of values with 6 axes", lambda c: {"value": c["value"][None, None, None]},
          RELATION, "value is(.|\n)*3, 4 or 5", infer_output(PAGED_TND)),
]


SHAPES_V2 = [
    Wrong("low-bit type", lambda c: {"query_dtype": 1},
          RELATION, "query_dtype is 1(.|\n)*not built", infer_output(BSND)),
]


def unbuilt(why: str, *arguments: str, value: Any = None) -> list[Wrong]:
    """Arguments that belong to forms of the operator which are not built."""
    return [Wrong(name, lambda c, name=name: {name: torch.ones(1) if value is None else value}, RELATION,
                  f"{name} is(.|\n)*{why}", BSND) for name in arguments]


UNBUILT_V2 = [
    *unbuilt("quantised forms are not built", "dequant_scale_query", "dequant_scale_key", "dequant_offset_key",
             "dequant_scale_value", "dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out",
             "quant_offset_out", "quant_scale_p"),
    *unbuilt("quantised forms are not built", "query_quant_mode", "key_quant_mode", "value_quant_mode", value=1),
    *unbuilt("low-bit types are not built", "query_dtype", "out_dtype", value=1),
]

UNBUILT_V1 = [w._replace(of=lambda r: v1_names(BSND(r))) for w in (
    *unbuilt("quantised forms are not built", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2",
             "quant_offset2", "antiquant_scale", "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset",
             "value_antiquant_scale", "value_antiquant_offset", "key_rope_antiquant_scale"),
    *unbuilt("quantised forms are not built", "antiquant_mode", "key_antiquant_mode", "value_antiquant_mode", value=1),
    *unbuilt("padding on the left is not built", "query_padding_size", "kv_padding_size"),
    *unbuilt("shared prefixes are not built", "key_shared_prefix", "value_shared_prefix"),
    *unbuilt("shared prefixes are not built", "actual_shared_prefix_len", value=[1]),
    Wrong("the tree mask", lambda c: {"sparse_mode": 9}, RELATION, "sparse_mode is 9(.|\n)*in version 2 only"),
)]

"""What npu_grouped_matmul refuses, in both overloads."""
from functools import partial

import torch

from operators.case import Wrong
from operators.case_grouped_matmul import (
    grouped_list,
    of,
    on_host,
    pairs,
    quantised,
    two_experts,
    two_matrices,
    two_reduced,
    two_x,
)
from operators.case_int8 import BF16, FP16, INT8, INT32

EXPERTS, SEPARATE, REDUCED = of("experts"), of("separate"), of("reduced")


def each(name, change):
    """Change every tensor of a list."""
    return lambda c: {name: [change(t) for t in c[name]]}


def first(name, change):
    return lambda c: {name: [change(c[name][0]), *c[name][1:]]}


def given(**arguments):
    return lambda c: arguments


def both(two, several):
    """Rules of the two overloads; ``two``: one x and two matrices, ``several``: two x."""
    wide, int8 = torch.empty(4, 65536, dtype=torch.bfloat16), torch.zeros(4, 5, dtype=torch.int8)
    columns = [torch.zeros(5)] * 2
    return [
        Wrong("no x", given(x=[]), "RELATION", "at least one of each", two),
        Wrong("129 matrices", lambda c: {"weight": c["weight"][:1] * 129}, "SIZE", "at most 128", two),
        Wrong("3 x of 2 groups", lambda c: {"x": c["x"] * 3}, "RELATION", "one for each of the 2 weights", two),
        Wrong("K of a matrix differs", first("weight", lambda w: w.repeat(2, 1)), "RELATION",
              r"weight.0..*\n.*the K of x", two),
        Wrong("N differs", first("weight", lambda w: w.repeat(1, 2)), "RELATION", "N = 10 as", two),
        Wrong("a matrix is too wide", given(weight=[wide] * 2), "SIZE", "K and N below 65536", two),
        Wrong("one matrix is transposed", first("weight", lambda w: w.T.contiguous().T), "SIZE",
              "all transposed views, or none", two),
        Wrong("x is transposed", each("x", lambda t: t.T.contiguous().T), "SIZE", "dense rows", two),
        Wrong("3 axes of x", each("x", lambda t: t[None].expand(6, -1, -1)), "RELATION", "2 axes .M, K., unless", two),
        Wrong("a vector", lambda c: {"weight": [w[0] for w in c["weight"]]}, "RELATION", "matrices", two),
        Wrong("ends too high", lambda c: {"group_list": [7, 6] if isinstance(c["group_list"], list)
                                          else torch.tensor([7, -1])}, "RELATION", "meant as the other type", two),
        Wrong("more than all", lambda c: {"group_list": [2, 7] if isinstance(c["group_list"], list)
                                          else torch.tensor([2, 5])}, "RELATION", "at most the 6 rows", two),
        Wrong("x have other rows", lambda c: {"x": c["x"][::-1]}, "RELATION", "the rows of each x", several),
        Wrong("the second x in fp16", lambda c: {"x": [c["x"][0], c["x"][1].half()]}, "DTYPE", "x.0.'s", several),
        Wrong("one matrix in fp16", lambda c: {"weight": [c["weight"][0], c["weight"][1].half()]}, "DTYPE",
              "weight.0.'s torch.bf", two),
        Wrong("matrices in fp16", each("weight", lambda w: w.half()), "DTYPE", "or int8 beside a 16-bit", two),
        Wrong("a bias too few", given(bias=columns[:1]), "RELATION", "as many as weight, 2", two),
        Wrong("a bias too long", given(bias=[torch.zeros(6)] * 2), "RELATION", "without its K axis", two),
        Wrong("bias in fp16", given(bias=[t.half() for t in columns]), "DTYPE", "float32 beside bfloat16", two),
        Wrong("a scale of floats", given(scale=columns), "RELATION", "None beside x in", two),
        Wrong("antiquant of floats", given(antiquant_scale=columns), "RELATION", "unless weight is int8", two),
        Wrong("no antiquant_scale", given(weight=[int8] * 2), "RELATION", "given, both", two),
        Wrong("one antiquant_scale", given(weight=[int8] * 2, antiquant_scale=columns[:1]), "RELATION",
              "as many as weight, 2", two),
        Wrong("antiquant_scale is too long", given(weight=[int8] * 2, antiquant_scale=[torch.zeros(6)] * 2),
              "RELATION", "without its K axis", two),
        Wrong("antiquant_scale in fp32", given(weight=[int8] * 2, antiquant_scale=columns), "DTYPE", "x's torch.bf",
              two),
    ]


WRONG = [
    Wrong("x in fp8", given(x_dtype=24), "RELATION", "x_dtype is 24\n.*not built yet"),
    Wrong("group_type is left out", given(group_type=None), "RELATION", "the default None is for", EXPERTS),
    Wrong("group_list_type 3", given(group_list_type=3), "RELATION", "0 .ends., 1 .counts. or 2", EXPERTS),
    Wrong("split_item is left out", given(split_item=0), "RELATION", "2 or 3 .one y.", EXPERTS),
    *both(two_matrices, two_x),
    # group_type -1
    Wrong("a group_list without groups", given(group_list=torch.tensor([1])), "RELATION",
          "None where group_type is -1", SEPARATE),
    Wrong("one y of separate products", given(split_item=2), "RELATION", "0 or 1 .a y for each x.", SEPARATE),
    Wrong("split_item 1 of separate products", given(split_item=1), "RELATION", "gmm-split-item", SEPARATE),
    Wrong("one x of separate products", lambda c: {"x": c["x"][:1], "weight": c["weight"][:1] * 2, "bias": None},
          "RELATION", "one for each of the 1 x", SEPARATE),
    Wrong("one weight of all groups", lambda c: {"x": c["x"][:1], "weight": [c["weight"][0][None]], "bias": None},
          "RELATION", "2 axes, and the K of x", SEPARATE),
    Wrong("7 axes", each("x", lambda t: t[(None,) * (7 - t.dim())]), "SIZE", "2 to 6 axes", SEPARATE),
    # group_type 0
    Wrong("K differs", each("x", lambda t: t.repeat(1, 2)), "RELATION", "of its K", EXPERTS),
    Wrong("an axis is too long", given(weight=[torch.empty(2, 4, 65536, dtype=torch.bfloat16)]), "SIZE",
          "N below 65536", two_experts),
    Wrong("x of experts is transposed", each("x", lambda t: t.T.contiguous().T), "SIZE", "dense rows", two_experts),
    Wrong("1025 groups", lambda c: {"weight": [c["weight"][0][:1].expand(1025, 4, 5)],
                                    "group_list": torch.zeros(1025, dtype=torch.int64)},
          "SIZE", "1 to 1024 groups", two_experts),
    Wrong("no group_list", given(group_list=None), "RELATION", "it divides the rows", EXPERTS),
    Wrong("a group too few", lambda c: {"group_list": c["group_list"][1:]}, "RELATION", "one entry for each group",
          EXPERTS),
    Wrong("int32", lambda c: {"group_list": c["group_list"].int()}, "RELATION", "reads 8 bytes", EXPERTS),
    Wrong("counts as ends", given(group_list=torch.tensor([4, 2]), group_list_type=0), "RELATION",
          "meant as the other type", two_experts),
    Wrong("ends as counts", given(group_list=torch.tensor([2, 6])), "RELATION", "at most the 6 rows", two_experts),
    Wrong("one group of counts", lambda c: {"weight": [c["weight"][0][:1]], "group_list": torch.tensor([6])}, "SIZE",
          "2 groups or more", two_experts),
    Wrong("counts as pairs", given(group_list=torch.tensor([2, 4])), "RELATION", r"2\]: .group, size.", pairs),
    Wrong("pairs out of order", given(group_list=torch.tensor([[1, 4], [0, 2]])), "RELATION", "groups in order", pairs),
    Wrong("a pair twice", given(group_list=torch.tensor([[0, 2], [0, 4]])), "RELATION", "each group from 0 to 1 once",
          pairs),
    # group_type 2
    Wrong("two x of the reduced axis", lambda c: {"x": c["x"] * 2}, "RELATION", "one .K, N. beside one x", REDUCED),
    Wrong("a bias of the reduced axis", given(bias=[torch.zeros(5)]), "RELATION", "None where group_type", REDUCED),
    Wrong("pairs of the reduced axis", given(group_list_type=2), "RELATION", "0 or 1 where group_type is 2", REDUCED),
    Wrong("y is too wide", given(weight=[torch.empty(6, 65536, dtype=torch.bfloat16)]), "SIZE", "M and N below 65536",
          two_reduced),
    Wrong("x of the reduced axis is not transposed", each("x", lambda t: t.contiguous()), "SIZE", "a transposed view",
          two_reduced),
    Wrong("weight of the reduced axis is transposed", each("weight", lambda t: t.T.contiguous().T), "SIZE",
          "dense rows", two_reduced),
    Wrong("1025 groups of the reduced axis", given(group_list=torch.full((1025,), 6)), "SIZE", "1 to 1024",
          two_reduced),
    Wrong("int8 of the reduced axis", lambda c: {"x": [c["x"][0].char()], "weight": [c["weight"][0].char()]},
          "RELATION", "-1 or 0 beside x in int8", REDUCED),
    Wrong("int8 weight of the reduced axis", each("weight", lambda t: t.char()), "RELATION",
          "-1 or 0 beside weight in int8", REDUCED),
    # Dtypes
    Wrong("fp64", lambda c: {"x": [c["x"][0].double()], "weight": [c["weight"][0].double()]}, "DTYPE",
          "float16, bfloat16 or int8", two_experts),
    Wrong("fp32 matrices in a list", lambda c: {name: [t.float() for t in c[name]] for name in ("x", "weight")},
          "DTYPE", "float32 where x, weight and y are one", two_matrices),
    Wrong("bias has one row", given(bias=[torch.zeros(5)]), "RELATION", "without its K axis", two_experts),
    Wrong("rows' scales of floats", given(per_token_scale=[torch.ones(6)]), "RELATION", "None beside x in",
          two_experts),
    Wrong("pairs of floats", given(group_list=torch.tensor([[0, 2], [1, 4]]), group_list_type=2), "DTYPE",
          "pairs need int8", two_experts),
    Wrong("tuning of floats", given(tuning_config=[4]), "DTYPE", "it is for int8", two_experts),
    Wrong("another result of floats", given(output_dtype=FP16), "RELATION", "the id of x's torch.bfloat16",
          two_experts),
    Wrong("no antiquant_offset", given(antiquant_offset=None), "RELATION", "given, both", of("experts", "antiquant")),
    Wrong("antiquant_offset in fp32", each("antiquant_offset", lambda t: t.float()), "DTYPE", "x's torch",
          of("experts", "antiquant")),
    Wrong("activation of floats", given(act_type=5), "RELATION", "0 without per_token_scale", two_experts),
    # int8
    Wrong("output_dtype 1", given(output_dtype=1), "RELATION", "shape inference refuses 1", quantised(INT8)),
    Wrong("no scale", given(scale=None), "RELATION", "unless the result is int32", quantised(INT8)),
    Wrong("a scale that is not used", given(output_dtype=INT32), "RELATION", "None where the result is int32",
          quantised(INT8)),
    Wrong("a packed scale for bf16", given(output_dtype=BF16), "RELATION", "None .int8. where scale is int64",
          quantised(INT8)),
    Wrong("the default is int8", given(output_dtype=None), "RELATION", "the default is int8", quantised(BF16)),
    Wrong("a bf16 scale for fp16", given(output_dtype=FP16), "DTYPE", "15 .bfloat16. where scale is bfloat16",
          quantised(BF16)),
    Wrong("scale in fp16", each("scale", lambda t: t.half()), "DTYPE", "bfloat16 or float32, all alike",
          quantised(BF16)),
    Wrong("a scale too many", lambda c: {"scale": c["scale"] * 2}, "RELATION", "as many as weight, 1",
          quantised(BF16)),
    Wrong("a scale for each expert", each("scale", lambda t: t[:, 0]), "RELATION", "without its K axis",
          quantised(BF16)),
    Wrong("rows' scales of a list", lambda c: {"per_token_scale": [torch.ones(len(c["x"][0]))]}, "RELATION",
          "one tensor each", quantised(BF16, "matrices")),
    Wrong("a row's scale too many", each("per_token_scale", lambda t: torch.ones(len(t) + 1)), "RELATION",
          "one for each row of x", quantised(BF16)),
    Wrong("rows' scales beside a packed one", lambda c: {"per_token_scale": [torch.ones(len(c["x"][0]))]}, "RELATION",
          "unless scale is bfloat16 or float32", quantised(INT8)),
    Wrong("rows' scales in bf16", each("per_token_scale", lambda t: t.bfloat16()), "DTYPE", "float32", quantised(BF16)),
    Wrong("act_type 3", given(act_type=3), "RELATION", "5 .SiLU.", quantised(BF16)),
]

TWO, TWO_X = on_host(two_matrices), on_host(two_x)
HOST_INT8 = partial(grouped_list, form="matrices", number="int8")
WRONG_LISTS = [
    Wrong("activation_input", lambda c: {"activation_input": [c["x"][0]]}, "RELATION", "not built yet"),
    Wrong("group_type", given(group_type=0), "RELATION", "group_type is 0\n.*None where group_list is on the"),
    Wrong("counts", given(group_list_type=1), "RELATION", "0 or None.*ends"),
    Wrong("activation", given(act_type=1), "RELATION", "act_type is 1"),
    Wrong("rows' scales", given(per_token_scale=[torch.ones(6)]), "RELATION", "None where group_list"),
    Wrong("output_dtype", given(output_dtype=torch.bfloat16), "RELATION", "y has x's dtype"),
    Wrong("no group_list", given(group_list=None), "RELATION", "the end of each group"),
    Wrong("split_item 4", given(split_item=4), "RELATION", "0 or 1 .a y for each weight., 2 or 3"),
    *both(TWO, TWO_X),
    Wrong("one weight of all groups", lambda c: {"weight": [torch.stack(c["weight"])]}, "RELATION", "2 axes", TWO),
    Wrong("several x into several y", given(split_item=1), "RELATION", "one where group_list is given", TWO_X),
    Wrong("split_item 0", given(split_item=0), "RELATION", "gmm-split-item", TWO),
    Wrong("an end too many", given(group_list=[2, 6, 6]), "RELATION", "one for each weight", TWO),
    Wrong("rows are left", given(group_list=[2, 5]), "RELATION", "a last end of 6", TWO),
    Wrong("fp64", lambda c: {name: [t.double() for t in c[name]] for name in ("x", "weight")}, "DTYPE",
          "float16, bfloat16 or int8", TWO),
    Wrong("no antiquant_offset", given(antiquant_offset=None), "RELATION", "given, both",
          partial(grouped_list, form="matrices", number="antiquant")),
    Wrong("antiquant_offset in fp32", each("antiquant_offset", lambda t: t.float()), "DTYPE", "x's torch",
          partial(grouped_list, form="matrices", number="antiquant")),
    Wrong("no scale", given(scale=None), "RELATION", "given beside x in int8", HOST_INT8),
    Wrong("a scale too many", lambda c: {"scale": c["scale"] * 2}, "RELATION", "as many as weight", HOST_INT8),
    Wrong("a scale too long", each("scale", lambda t: t.repeat(2)), "RELATION", "without its K axis", HOST_INT8),
    Wrong("scale in fp16", each("scale", lambda t: t.half()), "DTYPE", "bfloat16 or float32, all alike", HOST_INT8),
    Wrong("a float scale", each("scale", lambda t: t.float()), "DTYPE", "int64 where group_list is on the host",
          HOST_INT8),
]

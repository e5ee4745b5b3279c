"""Calls that the MoE operators must refuse: who is blamed, by which rule, and what the message says."""
import pytest
import torch

import trueup.core.ops.moe_gating
import trueup.core.ops.moe_routing  # noqa: F401  both declare their operators
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS

GATING = OPERATORS["npu_moe_gating_top_k"]
INIT = OPERATORS["npu_moe_init_routing_v2"]
FINALIZE = OPERATORS["npu_moe_finalize_routing"]



def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


LEGAL = {
    "gating": (GATING, {"x": torch.zeros(4, 16), "k": 2}),
    "init": (INIT, {"x": torch.zeros(4, 6), "expert_idx": torch.zeros(4, 2, dtype=torch.int32), "expert_num": 3,
                    "active_expert_range": [0, 3]}),
    "finalize": (FINALIZE, {
        "expanded_permuted_rows": torch.zeros(8, 6), "skip1": None, "skip2": None, "bias": None,
        "scales": torch.zeros(4, 2), "expanded_src_to_dst_row": torch.arange(8, dtype=torch.int32),
        "export_for_source_row": None, "drop_pad_mode": 2}),
}
GROUPED = {"group_count": 4, "k_group": 2}
BIAS = {"bias": torch.zeros(3, 6), "export_for_source_row": torch.zeros(4, 2, dtype=torch.int32)}
REFUSED = [
    # operator, change to the legal call, argument blamed, part of the message, rule
    ("gating", {"x": torch.zeros(2, 4, 16)}, "x", "one row of logits a token", "RELATION"),
    ("gating", {"bias": torch.zeros(15)}, "bias", "[16], one number an expert", "RELATION"),
    ("gating", {"bias": torch.zeros(1, 16)}, "bias", "[16], one number an expert", "RELATION"),
    ("gating", {"group_count": 5}, "group_count", "a divisor of the 16 experts", "RELATION"),
    ("gating", {"group_count": 0}, "group_count", "a divisor", "RELATION"),
    ("gating", {"group_count": 4, "k_group": 5}, "k_group", "1 to 4", "RELATION"),
    ("gating", {"k_group": 2}, "k_group", "1 to 1", "RELATION"),
    ("gating", GROUPED | {"k": 9}, "k", "2 groups of 4", "RELATION"),
    ("gating", {"k": 0}, "k", "1 to 16", "RELATION"),
    ("gating", {"norm_type": 2}, "norm_type", "sigmoid", "RELATION"),
    ("gating", {"group_select_mode": 2}, "group_select_mode", "best two", "RELATION"),
    ("gating", {"renorm": 1}, "renorm", "before the top-k", "RELATION"),
    ("gating", {"input_ids": torch.zeros(4)}, "input_ids", "not built yet", "RELATION"),
    ("gating", {"x": torch.zeros(1, 4096)}, "x", "at most 2048", "SIZE"),
    ("gating", {"group_count": 8, "k_group": 2}, "group_count", "more than 2 experts a group", "SIZE"),
    ("gating", {"x": torch.zeros(1, 390), "group_count": 130}, "group_count", "multiple of 32", "SIZE"),
    ("gating", {"x": torch.zeros(4, 16, dtype=torch.int32)}, "x", "bfloat16", "DTYPE"),
    ("gating", {"bias": torch.zeros(16, dtype=torch.bfloat16)}, "bias", "torch.float32", "DTYPE"),
    ("init", {"x": torch.zeros(4, 2, 3)}, "x", "[T, H]", "RELATION"),
    ("init", {"expert_idx": i32(0, 1, 2, 0)}, "expert_idx", "[T, K]", "RELATION"),
    ("init", {"expert_idx": i32([0, 1])}, "expert_idx", "[4, K], as many rows as x", "RELATION"),
    ("init", {"scale": torch.zeros(5)}, "scale", "one number a row", "RELATION"),
    ("init", {"scale": torch.zeros(4, 1)}, "scale", "one number a row", "RELATION"),
    ("init", {"expert_num": -1}, "expert_num", "the default -1", "RELATION"),
    ("init", {"active_expert_range": []}, "active_expert_range", "remembers the default of the first call", "RELATION"),
    ("init", {"active_expert_range": [0, 4]}, "active_expert_range", "last < 3", "RELATION"),
    ("init", {"active_expert_range": [2, 2]}, "active_expert_range", "first <= last", "RELATION"),
    ("init", {"active_expert_range": [-1, 2]}, "active_expert_range", "0 <= first", "RELATION"),
    ("init", {"active_expert_range": [3]}, "active_expert_range", "[first, last + 1]", "RELATION"),
    ("init", {"expert_idx": i32([0, 1], [2, 3], [0, 0], [0, 0])}, "expert_idx", "values from 0 to 3", "RELATION"),
    ("init", {"expert_idx": i32([0, 1], [-1, -1], [0, 0], [0, 0])}, "expert_idx", "drop a padding row", "RELATION"),
    ("init", {"active_num": -2}, "active_num", "-1 for all", "RELATION"),
    ("init", {"expert_tokens_num_type": 2}, "expert_tokens_num_type", "not built yet", "RELATION"),
    ("init", {"row_idx_type": 2}, "row_idx_type", "scatter", "RELATION"),
    ("init", {"quant_mode": 1}, "quant_mode", "not built yet", "RELATION"),
    ("init", {"drop_pad_mode": 1}, "drop_pad_mode", "not built yet", "RELATION"),
    ("init", {"offset": torch.zeros(1)}, "offset", "not built yet", "RELATION"),
    ("init", {"expert_num": 10241}, "expert_num", "at most 10240", "SIZE"),
    ("init", {"x": torch.zeros(4, 6, dtype=torch.int32)}, "x", "int8", "DTYPE"),
    ("init", {"expert_idx": torch.zeros(4, 2, dtype=torch.int64)}, "expert_idx", "int32", "DTYPE"),
    ("init", {"scale": torch.zeros(4, dtype=torch.bfloat16)}, "scale", "float32", "DTYPE"),
    ("finalize", {"drop_pad_mode": 1}, "drop_pad_mode", "not built yet", "RELATION"),
    ("finalize", {"drop_pad_mode": 4}, "drop_pad_mode", "0 (entry j*T + t", "RELATION"),
    ("finalize", {"expanded_permuted_rows": torch.zeros(2, 4, 6)}, "expanded_permuted_rows", "[T*K, H]", "RELATION"),
    ("finalize", {"expanded_src_to_dst_row": torch.zeros(4, 2, dtype=torch.int32)}, "expanded_src_to_dst_row", "[T*K]",
     "RELATION"),
    ("finalize", {"scales": torch.zeros(8)}, "scales", "[T, K]", "RELATION"),
    ("finalize", {"scales": torch.zeros(3, 2)}, "expanded_src_to_dst_row", "[6]: 3 tokens, 2 choices", "RELATION"),
    ("finalize", {"expanded_src_to_dst_row": i32(0, 1, 2)}, "expanded_src_to_dst_row", "[8]: 4 tokens", "RELATION"),
    ("finalize", {"expanded_permuted_rows": torch.zeros(7, 6)}, "expanded_permuted_rows", "[8, H]", "RELATION"),
    ("finalize", {"k": 3}, "k", "2, as in scales", "RELATION"),
    ("finalize", {"scales": None, "k": 2}, "k", "of ones", "RELATION"),
    ("finalize", {"skip1": torch.zeros(4, 5)}, "skip1", "[4, 6], the shape of the result", "RELATION"),
    ("finalize", {"skip1": torch.zeros(4, 6), "skip2": torch.zeros(3, 6)}, "skip2", "[4, 6]", "RELATION"),
    ("finalize", {"skip2": torch.zeros(4, 6)}, "skip2", "None without skip1", "RELATION"),
    ("finalize", {"export_for_source_row": torch.zeros(4, 3, dtype=torch.int32)}, "export_for_source_row", "[4, 2]",
     "RELATION"),
    ("finalize", {"bias": torch.zeros(3, 6)}, "export_for_source_row", "whose bias", "RELATION"),
    ("finalize", BIAS | {"bias": torch.zeros(3, 5)}, "bias", "H of the rows", "RELATION"),
    ("finalize", BIAS | {"export_for_source_row": torch.full((4, 2), 3, dtype=torch.int32)}, "export_for_source_row",
     "0 to 2 (E of bias)", "RELATION"),
    ("finalize", {"expanded_src_to_dst_row": i32(0, 1, 2, 3, 4, 5, 6, -1)}, "expanded_src_to_dst_row", "know no -1",
     "RELATION"),
    ("finalize", {"expanded_src_to_dst_row": i32(0, 1, 2, 3, 4, 5, 6, 8)}, "expanded_src_to_dst_row", "rows 0 to 7",
     "RELATION"),
    ("finalize", {"bias": torch.zeros(1, 6), "export_for_source_row": torch.zeros(4, 2, dtype=torch.int32)}, "bias",
     "at least 2 experts", "SIZE"),
    ("finalize", {"expanded_permuted_rows": torch.zeros(8, 6, dtype=torch.int32)}, "expanded_permuted_rows", "bfloat16",
     "DTYPE"),
    ("finalize", {"expanded_src_to_dst_row": torch.arange(8)}, "expanded_src_to_dst_row", "int32", "DTYPE"),
    ("finalize", {"scales": torch.zeros(4, 2, dtype=torch.bfloat16)}, "scales", "for torch.float32 rows", "DTYPE"),
    ("finalize", {"skip1": torch.zeros(4, 6).bfloat16()}, "skip1", "the dtype of the rows", "DTYPE"),
    ("finalize", BIAS | {"bias": torch.zeros(3, 6).bfloat16()}, "bias", "the dtype of the rows", "DTYPE"),
    ("finalize", BIAS | {"export_for_source_row": torch.zeros(4, 2, dtype=torch.int64)}, "export_for_source_row",
     "int32", "DTYPE"),
]


@pytest.mark.parametrize("name", list(LEGAL))
def test_the_table_starts_from_legal_calls(name):
    operator, arguments = LEGAL[name]
    operator(**arguments)
    if name == "finalize":
        operator(**arguments | BIAS)


@pytest.mark.parametrize(
    ("name", "change", "argument", "fragment", "rule"), REFUSED,
    ids=[f"{row[0]}-{row[2]}-{i}" for i, row in enumerate(REFUSED)])
def test_refused(name, change, argument, fragment, rule):
    operator, arguments = LEGAL[name]
    with pytest.raises(ContractError) as error:
        operator(**arguments | change)
    assert (error.value.argument, error.value.rule) == (argument, rule)
    assert fragment in str(error.value)


def test_out_of_range_ids_point_to_the_gallery():
    with pytest.raises(ContractError, match="SB-08 in the bug gallery"):
        INIT(torch.zeros(1, 2), i32([-1, 0]), expert_num=2, active_expert_range=[0, 2])


def test_paper_profile_keeps_relations_only():
    with profile("paper"):
        _, ids, _ = GATING(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 1, k_group=1, group_count=4, group_select_mode=1)
        assert ids.tolist() == [[3]]
        INIT(torch.zeros(1, 2), torch.tensor([[0, 1]]), expert_num=2, active_expert_range=[0, 2])
        with pytest.raises(ContractError):
            INIT(torch.zeros(2, 2), torch.tensor([[0, 1]]), expert_num=2, active_expert_range=[0, 2])


def test_device_profile_refuses_float64():
    with profile("device"):
        GATING(torch.zeros(1, 8), 2)
        with pytest.raises(ContractError, match="float64"):
            GATING(torch.zeros(1, 8, dtype=torch.float64), 2)

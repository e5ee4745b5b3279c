"""The MoE operators by hand, and together: they must make up a MoE layer, whichever way the rows go.

Each of them alone against a naive version: tests/operators.
"""
import pytest
import torch
from torch import Tensor

from operators.moe_gating import naive_gating
from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS

load()
GATING, SOFTMAX, SOFTMAX_V2 = (OPERATORS[name] for name in (
    "npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k_softmax_v2"))
INIT_V1, INIT, FINALIZE = (OPERATORS[name] for name in (
    "npu_moe_init_routing", "npu_moe_init_routing_v2", "npu_moe_finalize_routing"))
PERMUTE, UNPERMUTE = OPERATORS["npu_moe_token_permute"], OPERATORS["npu_moe_token_unpermute"]


def drawn(seed: int):
    return torch.Generator().manual_seed(seed)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- gating


def test_bias_takes_part_in_the_choice_only():
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, ids, _ = GATING(x, 2, bias=torch.tensor([-5.0, 0.0, 0.0, 5.0]), norm_type=1)
    assert ids.tolist() == [[3, 1]]
    s = x.sigmoid()[0]
    torch.testing.assert_close(weights[0], s[[3, 1]] / (s[3] + s[1]))


def test_negative_bias_cannot_bring_back_a_dropped_group():
    """With 0 instead of -inf for dropped groups, their experts would beat the kept group's negative scores."""
    x, bias = torch.zeros(1, 6), torch.tensor([-2.0, -2.0, -2.0, -3.0, -3.0, -3.0])
    _, ids, _ = GATING(x, 3, bias=bias, k_group=1, group_count=2, norm_type=1)
    assert ids.tolist() == [[0, 1, 2]]


def test_all_experts_tie():
    _, ids, _ = GATING(torch.zeros(2, 64), 4, k_group=2, group_count=8, group_select_mode=1, norm_type=1)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_softmax_weights_are_not_renormalised_and_keep_eps_out():
    weights, _, _ = GATING(torch.zeros(1, 8), 2, eps=1.0)
    torch.testing.assert_close(weights, torch.full((1, 2), 0.125))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gating_output_dtypes(dtype):
    x = torch.randn(3, 8, generator=drawn(0)).to(dtype)
    for results in (GATING(x, 2), SOFTMAX_V2(x, k=2, output_softmax=True)):
        assert [result.dtype for result in results] == [dtype, torch.int32, torch.float32]
    assert [result.dtype for result in SOFTMAX(x, k=2)] == [dtype, torch.int32, torch.int32]


def test_a_table_chooses_and_the_logits_weigh():
    x, table = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), i32([2, 1], [0, 2])
    weights, ids, _ = GATING(x, 2, input_ids=i32(1, 0), tid2eid=table, bias=torch.tensor([9.0, 0.0, 0.0]), norm_type=1)
    assert ids.tolist() == [[0, 2], [2, 1]]
    s = x[0].sigmoid()
    torch.testing.assert_close(weights, torch.stack([s[[0, 2]] / s[[0, 2]].sum(), s[[2, 1]] / s[[2, 1]].sum()]))


def test_fp16_logits_that_round_to_one_score_tie():
    x = torch.tensor([[0.0, 2**-13, -9.0]], dtype=torch.float16)
    assert SOFTMAX(x, k=1)[1].item() == 0 and SOFTMAX(x.float(), k=1)[1].item() == 1


def test_finished_rows_keep_their_weights_and_lose_their_expert():
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for operator in (SOFTMAX, SOFTMAX_V2):
        weights, ids, _ = operator(x, k=1, finished=torch.tensor([True, False]))
        assert ids.tolist() == [[2], [0]] and weights[0] == weights[1]


def test_all_scores_where_shape_inference_is_wrong_about_them():
    """torch_npu 2.13's Meta kernel forgets an axis of three, and takes renorm=None for 1.  Its host code does not."""
    x = torch.randn(2, 3, 4, generator=drawn(1))
    torch.testing.assert_close(SOFTMAX_V2(x, k=1, output_softmax=True)[2], x.softmax(-1))
    torch.testing.assert_close(SOFTMAX_V2(x[0], k=1, renorm=None, output_softmax=True)[2], x[0].softmax(-1))


# ---- rows to experts and back


def test_quantised_rows_bring_their_step():
    x, ids = torch.tensor([[1.27, -0.5], [0.0, 0.0]]), i32([0], [0])
    mine = dict(expert_num=1, active_expert_range=[0, 1])
    rows, _, _, step = INIT(x, ids, quant_mode=1, **mine)
    assert rows.tolist() == [[127, -50], [0, 0]] and rows.dtype == torch.int8
    torch.testing.assert_close(step, torch.tensor([0.01, 0.0]))
    rows, _, _, step = INIT(x, ids, quant_mode=0, scale=torch.tensor([100.0]), offset=torch.tensor([3.0]), **mine)
    assert rows.tolist() == [[127, -47], [3, 3]] and step.shape == ()  # 130 does not fit


def test_a_full_expert_drops_its_last_tokens():
    x, ids = torch.tensor([[1.0], [2.0], [3.0]]), i32([1], [1], [1])
    rows, row_idx, counts, _ = INIT(x, ids, expert_num=2, active_expert_range=[0, 2], drop_pad_mode=1,
                                    expert_capacity=2, expert_tokens_num_type=1, expert_tokens_num_flag=True)
    assert rows.flatten().tolist() == [0, 0, 1, 2] and row_idx.tolist() == [2, 3, -1] and counts.tolist() == [0, 3]
    back = FINALIZE(rows * 10, None, None, None, torch.ones(3, 1), row_idx, None, 3)
    assert back.flatten().tolist() == [10, 20, 0]


def test_finalize_sums_bf16_rows_in_fp32_and_takes_fp32_scales():
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    row_idx = torch.arange(3, dtype=torch.int32)
    out = FINALIZE(rows, None, None, None, torch.ones(1, 3), row_idx, None, 2)
    assert out.dtype == torch.bfloat16 and out.item() == 258


def test_a_wrong_drop_pad_mode_mixes_up_tokens():
    rows, scales = torch.arange(4.0).view(4, 1), torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    row_idx = torch.arange(4, dtype=torch.int32)
    assert FINALIZE(rows, None, None, None, scales, row_idx, None, 2).tolist() == [[10.0], [3200.0]]
    assert FINALIZE(rows, None, None, None, scales, row_idx, None, 0).tolist() == [[20.0], [3100.0]]


def test_the_order_of_rows_is_not_the_way_back():
    """The trap of moe_permute.py: right for one batch, wrong for the next."""
    for experts, by_mistake in (((1, 0, 2), [0, 1, 2]), ((2, 0, 1, 0), [3, 0, 2, 1])):
        tokens, ids = torch.arange(len(experts)).float()[:, None], i32(*experts)
        permuted, way_back = PERMUTE(tokens, ids)
        order = ids.argsort(stable=True).int()
        assert UNPERMUTE(permuted, way_back).equal(tokens)
        assert UNPERMUTE(permuted, order).flatten().tolist() == by_mistake


def test_open_points_admit_what_a_kernel_does():
    rows, probs = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    for name, index in (("unpermute-fewer-rows", i32(0, 3, 1, 2)), ("unpermute-repeated-rows", i32(0, 0, 1, 1))):
        given = rows if name == "unpermute-fewer-rows" else rows.repeat(2, 1)
        with pytest.raises(ContractError, match=name):
            UNPERMUTE(given, index, probs)
        with assume(name):
            expected = [1, 2] if name == "unpermute-fewer-rows" else [1, 4]
            assert UNPERMUTE(given, index, probs).flatten().tolist() == expected
    call = dict(expert_num=2, active_expert_range=[0, 2])
    with pytest.raises(ContractError, match="SB-08"):
        INIT(rows, i32([-1], [1]), **call)
    with assume("moe-expert-minus-one"):
        expanded, row_idx, *_ = INIT(rows, i32([-1], [1]), **call)
    assert row_idx.tolist() == [-1, 0] and expanded[0] == 2 and expanded[1].isnan()


def test_paper_profile_keeps_relations_only():
    with profile("paper"):
        _, ids, _ = GATING(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 1, k_group=1, group_count=4, group_select_mode=1)
        assert ids.tolist() == [[3]]
        INIT(torch.zeros(1, 2), torch.tensor([[0, 1]]), expert_num=2, active_expert_range=[0, 2])
        with pytest.raises(ContractError):
            INIT(torch.zeros(2, 2), torch.tensor([[0, 1]]), expert_num=2, active_expert_range=[0, 2])


# ---- all together


def experts_by_loop(x: Tensor, W: Tensor, counts: Tensor) -> Tensor:
    """Row r times the matrix of its expert; rows of nobody stay as unwritten as they are."""
    out, at = torch.full((len(x), W.shape[2]), float("nan"), dtype=x.dtype), 0
    for expert, count in enumerate(counts.tolist()):
        out[at : at + count] = x[at : at + count] @ W[expert]
        at += count
    return out


def combined(x, weights, ids, W, local=None):
    """Sort, experts, combine; ``local``: only these experts' share."""
    first, end = local or (0, len(W))
    expanded, row_idx, counts, _ = INIT(x, ids, expert_num=len(W), active_expert_range=[first, end],
                                        expert_tokens_num_type=1, expert_tokens_num_flag=True)
    answers = experts_by_loop(expanded, W[first:end], counts)
    elsewhere = (row_idx < 0).view(ids.shape)
    return FINALIZE(answers, None, None, None, weights.masked_fill(elsewhere, 0), row_idx.clamp(min=0), ids, 2)


def by_columns(x, weights, ids, W):
    """With the first version of the sort, which counts pairs column by column."""
    T, K = ids.shape
    row_idx = torch.arange(T * K, dtype=torch.int32).view(K, T).T
    expanded, row_of, experts = INIT_V1(x, row_idx, ids, T)
    answers = experts_by_loop(expanded, W, experts.bincount(minlength=len(W)))
    return FINALIZE(answers, None, None, None, weights, row_of, None, 0)


def by_capacity(x, weights, ids, W):
    """With room for every token at every expert."""
    expanded, row_idx, *_ = INIT(x, ids, expert_num=len(W), active_expert_range=[0, len(W)], drop_pad_mode=1,
                                 expert_capacity=len(x))
    return FINALIZE(expanded @ W, None, None, None, weights, row_idx, None, 3)


def by_permutation(x, weights, ids, W):
    permuted, sorted_indices = PERMUTE(x, ids)
    answers = experts_by_loop(permuted, W, ids.flatten().bincount(minlength=len(W)))
    return UNPERMUTE(answers, sorted_indices, weights.to(x.dtype))


def some_layer(**groups):
    """Tokens, router weights, experts, and what a loop over tokens makes of them."""
    T, H, E, k, g = 12, 8, 16, 3, drawn(47)
    x, gate, W = (torch.randn(*s, generator=g, dtype=torch.float64) for s in [(T, H), (E, H), (E, H, H)])
    bias = 0.5 * torch.randn(E, generator=g, dtype=torch.float64)
    call = dict(bias=bias, norm_type=1, routed_scaling_factor=1.8, **groups)
    weights, ids, _ = naive_gating(x @ gate.T, k, **call)
    assert (bias < 0).any() and not ids.equal(naive_gating(x @ gate.T, k, **call | {"bias": None})[1])
    expected = torch.stack([sum(w * (x[t] @ W[e]) for w, e in zip(weights[t], ids[t], strict=True)) for t in range(T)])
    return x, GATING(x @ gate.T, k, **call), W, expected


@pytest.mark.parametrize("groups", [
    {}, {"group_count": 4, "k_group": 2, "group_select_mode": 1},
], ids=["plain", "grouped"])
@pytest.mark.parametrize("way", [combined, by_columns, by_capacity, by_permutation])
def test_router_sort_and_combine_are_a_moe_layer(way, groups):
    x, (weights, ids, _), W, expected = some_layer(**groups)
    torch.testing.assert_close(way(x, weights, ids, W), expected)


def test_the_shares_of_two_ranks_add_up():
    x, (weights, ids, _), W, expected = some_layer()
    shares = [combined(x, weights, ids, W, local) for local in [(0, 8), (8, 16)]]
    torch.testing.assert_close(sum(shares), expected)


def test_the_softmax_router_hands_its_row_idx_on():
    x, _, W, _ = some_layer()
    logits = torch.randn(len(x), len(W), generator=drawn(5), dtype=torch.float64)
    weights, ids, row_idx = SOFTMAX(logits, k=3)
    expanded, row_of, experts = INIT_V1(x, row_idx, ids, len(x))
    answers = experts_by_loop(expanded, W, experts.bincount(minlength=len(W)))
    out = FINALIZE(answers, None, None, None, weights, row_of, None, 0)
    torch.testing.assert_close(out, combined(x, weights, ids, W))


def test_padding_rows_get_an_id_outside_the_range_sb08():
    """Five real tokens padded to eight: ten routed pairs, not sixteen, and exact zeros for the padding."""
    T, Tp, K, E, g = 5, 8, 2, 4, drawn(8)
    x, W = torch.randn(Tp, 6, generator=g), torch.randn(E, 6, 6, generator=g)
    weights, ids, _ = GATING(torch.randn(Tp, E, generator=g), K, norm_type=1)
    ids[T:], weights[T:] = E, 0
    expanded, row_idx, counts, _ = INIT(x, ids, expert_num=E + 1, active_expert_range=[0, E], expert_tokens_num_type=1,
                                        expert_tokens_num_flag=True)
    assert counts.sum() == T * K and expanded[T * K :].isnan().all()
    padded = FINALIZE(experts_by_loop(expanded, W, counts), None, None, None, weights, row_idx.clamp(min=0), ids, 2)
    assert padded[T:].eq(0).all()
    expanded, row_idx, counts, _ = INIT(x[:T], ids[:T], expert_num=E, active_expert_range=[0, E],
                                        expert_tokens_num_type=1, expert_tokens_num_flag=True)
    alone = FINALIZE(experts_by_loop(expanded, W, counts), None, None, None, weights[:T], row_idx, ids[:T], 2)
    assert padded[:T].equal(alone)

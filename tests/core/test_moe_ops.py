"""Router, expert sort and combine against loops written from the operator pages, in float64."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trueup.core.ops.moe_gating
import trueup.core.ops.moe_routing  # noqa: F401  both declare their operators
from trueup.core.ops.registry import OPERATORS

GATING = OPERATORS["npu_moe_gating_top_k"]
INIT = OPERATORS["npu_moe_init_routing_v2"]
FINALIZE = OPERATORS["npu_moe_finalize_routing"]
UNWRITTEN = torch.iinfo(torch.int32).max

# ---- the loops


def naive_gating(x, k, bias, k_group, group_count, mode, norm_type, factor, eps):
    """Lists of weights and expert ids, one a token."""
    weights, ids = [], []
    for row in x.tolist():
        if norm_type == 1:
            scores = [1 / (1 + math.exp(-v)) for v in row]
        else:
            total = sum(math.exp(v) for v in row)
            scores = [math.exp(v) / total for v in row]
        choice = [s + b for s, b in zip(scores, bias.tolist(), strict=True)] if bias is not None else scores
        size = len(row) // group_count
        groups = []
        for g in range(group_count):
            best = sorted(choice[g * size : (g + 1) * size], reverse=True)
            groups.append((-(best[0] if mode == 0 else best[0] + best[1]), g))
        kept = {g for _, g in sorted(groups)[:k_group]}
        ranked = sorted((-c, e) for e, c in enumerate(choice) if e // size in kept)
        chosen = [e for _, e in ranked[:k]]
        divisor = sum(scores[e] for e in chosen) + eps if norm_type == 1 else 1
        ids.append(chosen)
        weights.append([scores[e] / divisor * factor for e in chosen])
    return weights, ids


def naive_init_routing(expert_idx, first, end):
    """Pairs (t, j) in the order of the expanded rows, and how many each expert gets."""
    order, counts = [], []
    for expert in range(first, end):
        mine = [(t, j) for t, row in enumerate(expert_idx.tolist()) for j, e in enumerate(row) if e == expert]
        order += mine
        counts.append(len(mine))
    return order, counts


def naive_finalize(rows, skips, bias, scales, row_of, expert_of):
    T, K = scales.shape
    out = torch.zeros(T, rows.shape[1], dtype=torch.float64)
    for t in range(T):
        for skip in skips:
            out[t] += skip[t]
        for j in range(K):
            answer = rows[row_of(t, j)].double()
            if bias is not None:
                answer = answer + bias[expert_of[t, j]]
            out[t] += scales[t, j] * answer
    return out


def drawn(seed: int):
    return torch.Generator().manual_seed(seed)


# ---- gating


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31), T=st.integers(0, 5), group_count=st.integers(1, 4), group_size=st.integers(3, 6),
    mode=st.integers(0, 1), norm_type=st.integers(0, 1), biased=st.booleans(), data=st.data(),
)
def test_gating_is_the_formula(seed, T, group_count, group_size, mode, norm_type, biased, data):
    k_group = data.draw(st.integers(1, group_count))
    k = data.draw(st.integers(1, k_group * group_size))
    E, g = group_count * group_size, drawn(seed)
    # Few distinct values, so that ties are common: the lowest id must win.
    x = torch.tensor([-1.3, 0.2, 0.9], dtype=torch.float64)[torch.randint(3, (T, E), generator=g)]
    bias = torch.tensor([-0.7, 0.0, 0.31], dtype=torch.float64)[torch.randint(3, (E,), generator=g)] if biased else None
    weights, ids, norm_out = GATING(
        x, k, bias=bias, k_group=k_group, group_count=group_count, group_select_mode=mode, norm_type=norm_type,
        out_flag=True, routed_scaling_factor=1.8,
    )
    expected_weights, expected_ids = naive_gating(x, k, bias, k_group, group_count, mode, norm_type, 1.8, 1e-20)
    assert ids.tolist() == expected_ids
    torch.testing.assert_close(weights, torch.tensor(expected_weights, dtype=torch.float64).view(T, k))
    scores = x.sigmoid() if norm_type else x.softmax(-1)
    torch.testing.assert_close(norm_out, scores.float())


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
def test_gating_output_dtypes_and_unwritten_scores(dtype):
    x = torch.randn(3, 8, generator=drawn(0)).to(dtype)
    weights, ids, norm_out = GATING(x, 2, bias=torch.zeros(8, dtype=dtype), norm_type=1)
    assert (weights.dtype, ids.dtype, norm_out.dtype) == (dtype, torch.int32, torch.float32)
    assert norm_out.shape == x.shape and norm_out.isnan().all()
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(3), atol=1e-2, rtol=0)


# ---- init routing


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31), T=st.integers(0, 6), K=st.integers(1, 4), expert_num=st.integers(1, 6),
    count_type=st.integers(0, 1), row_idx_type=st.integers(0, 1), scaled=st.booleans(), data=st.data(),
)
def test_init_routing_is_a_stable_sort(seed, T, K, expert_num, count_type, row_idx_type, scaled, data):
    first = data.draw(st.integers(0, expert_num - 1))
    end = data.draw(st.integers(first + 1, expert_num))
    active_num = data.draw(st.integers(-1, T * K + 2))
    g = drawn(seed)
    x, scale = torch.randn(T, 3, generator=g), torch.rand(T, generator=g) if scaled else None
    expert_idx = torch.randint(expert_num, (T, K), generator=g, dtype=torch.int32)
    expanded, row_idx, counts, expanded_scale = INIT(
        x, expert_idx, scale=scale, active_num=active_num, expert_num=expert_num, active_expert_range=[first, end],
        expert_tokens_num_type=count_type, expert_tokens_num_flag=True, row_idx_type=row_idx_type,
    )
    order, expected_counts = naive_init_routing(expert_idx, first, end)
    size = min(active_num, T * K) if active_num > 0 else T * K
    assert expanded.shape == (size, 3) and row_idx.shape == (T * K,) and expanded_scale.shape == (size,)
    assert (row_idx.dtype, counts.dtype, expanded_scale.dtype) == (torch.int32, torch.int64, torch.float32)
    for r in range(size):
        if r < len(order):
            assert expanded[r].equal(x[order[r][0]])
        else:
            assert expanded[r].isnan().all()
        if r < len(order) and scale is not None:
            assert expanded_scale[r] == scale[order[r][0]]
        else:
            assert expanded_scale[r].isnan()
    pairs = [t * K + j for t, j in order]
    if row_idx_type == 1:
        assert row_idx.tolist() == pairs + [UNWRITTEN] * (T * K - len(pairs))
    else:
        assert row_idx.tolist() == [pairs.index(p) if p in pairs else -1 for p in range(T * K)]
    if count_type == 0:
        expected_counts = [sum(expected_counts[: i + 1]) for i in range(end - first)]
    assert counts.tolist() == expected_counts


def test_counts_are_unwritten_without_the_flag():
    ids = torch.zeros(1, 1, dtype=torch.int32)
    _, _, counts, _ = INIT(torch.ones(1, 2), ids, expert_num=1, active_expert_range=[0, 1])
    assert counts.shape == () and counts == torch.iinfo(torch.int64).max


def test_int8_rows_are_routed_too():
    x = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8)
    expanded, *_ = INIT(x, torch.tensor([[1], [0]], dtype=torch.int32), expert_num=2, active_expert_range=[0, 2])
    assert expanded.tolist() == [[3, 4], [1, -2]] and expanded.dtype == torch.int8


# ---- finalize


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31), T=st.integers(0, 5), K=st.integers(1, 4), mode=st.sampled_from([0, 2]),
    skips=st.integers(0, 2), biased=st.booleans(), scaled=st.booleans(),
)
def test_finalize_is_the_formula(seed, T, K, mode, skips, biased, scaled):
    K = K if scaled else 1
    H, E, g = 3, 5, drawn(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows, scales, bias = normal(T * K, H), normal(T, K) if scaled else None, normal(E, H) if biased else None
    addends = [normal(T, H) for _ in range(skips)]
    row_idx = torch.randperm(T * K, generator=g).to(torch.int32)
    experts = torch.randint(E, (T, K), generator=g, dtype=torch.int32)
    skip1, skip2 = (*addends, None, None)[:2]
    out = FINALIZE(rows, skip1, skip2, bias, scales, row_idx, experts, mode)

    def row_of(t, j):
        return row_idx[j * T + t if mode == 0 else t * K + j]

    ones = torch.ones(T, 1) if scales is None else scales
    torch.testing.assert_close(out, naive_finalize(rows, addends, bias, ones, row_of, experts))


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


# ---- all three together


def experts_by_loop(x: Tensor, W: Tensor, counts: Tensor) -> Tensor:
    """Row r times the matrix of its expert; rows of nobody stay as unwritten as they are."""
    out, at = torch.full((len(x), W.shape[2]), float("nan"), dtype=x.dtype), 0
    for expert, count in enumerate(counts.tolist()):
        out[at : at + count] = x[at : at + count] @ W[expert]
        at += count
    return out


def layer(x, gate, W, bias, k, groups, local=None):
    """The routed part of a MoE layer through the three operators; ``local``: only these experts' share."""
    E = len(W)
    first, end = local or (0, E)
    weights, ids, _ = GATING(x @ gate.T, k, bias=bias, norm_type=1, routed_scaling_factor=1.8, **groups)
    expanded, row_idx, counts, _ = INIT(
        x, ids, expert_num=E, active_expert_range=[first, end], expert_tokens_num_type=1, expert_tokens_num_flag=True)
    answers = experts_by_loop(expanded, W[first:end], counts)
    elsewhere = (row_idx < 0).view(ids.shape)
    return FINALIZE(answers, None, None, None, weights.masked_fill(elsewhere, 0), row_idx.clamp(min=0), ids, 2)


@pytest.mark.parametrize("groups", [
    {}, {"group_count": 4, "k_group": 2, "group_select_mode": 1},
], ids=["plain", "grouped"])
def test_router_sort_and_combine_are_a_moe_layer(groups):
    T, H, E, k, g = 12, 8, 16, 3, drawn(47)
    x, gate, W = (torch.randn(*s, generator=g, dtype=torch.float64) for s in [(T, H), (E, H), (E, H, H)])
    bias = 0.5 * torch.randn(E, generator=g, dtype=torch.float64)
    G, kept = groups.get("group_count", 1), groups.get("k_group", 1)
    expected = torch.zeros(T, H, dtype=torch.float64)
    weights, ids = naive_gating(x @ gate.T, k, bias, kept, G, 1, 1, 1.8, 1e-20)
    for t in range(T):
        for w, e in zip(weights[t], ids[t], strict=True):
            expected[t] += w * (x[t] @ W[e])
    assert (bias < 0).any() and ids != naive_gating(x @ gate.T, k, None, kept, G, 1, 1, 1.8, 1e-20)[1]
    torch.testing.assert_close(layer(x, gate, W, bias, k, groups), expected)
    # Two ranks of eight experts each: their shares add up to the whole.
    shares = [layer(x, gate, W, bias, k, groups, local) for local in [(0, 8), (8, 16)]]
    torch.testing.assert_close(sum(shares), expected)


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

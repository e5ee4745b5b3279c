"""The distribution that is drawn from, and verification that leaves it alone: by exact enumeration."""
import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core import sampling
from trueup.core.sampling import Sampler, SamplingParams, draw, probabilities, verify, verify_greedy

V, K = 4, 2


# Filters.


def filtered(logits, **params):
    return probabilities(torch.tensor([logits], dtype=torch.float64), SamplingParams(temperature=1.0, **params))[0]


def softmax(*logits):
    return torch.tensor(logits, dtype=torch.float64).softmax(-1)


def test_each_filter_keeps_what_it_says():
    p = softmax(2.0, 1.0, 0.0, 1.0)
    assert torch.allclose(filtered([2.0, 1.0, 0.0, 1.0]), p, atol=1e-15)
    assert filtered([2.0, 1.0, 0.0, 1.0], top_k=2).nonzero().flatten().tolist() == [0, 1]  # of equals the lower id
    assert filtered([2.0, 1.0, 0.0, 1.0], top_k=3).tolist() == pytest.approx((p * torch.tensor([1, 1, 0, 1]) /
                                                                             (1 - p[2])).tolist())
    assert filtered([2.0, 1.0, 0.0, 1.0], top_p=float(p[0])).nonzero().flatten().tolist() == [0]
    assert filtered([2.0, 1.0, 0.0, 1.0], top_p=float(p[0]) + 1e-6).nonzero().flatten().tolist() == [0, 1]
    assert filtered([2.0, 1.0, 0.0, 1.0], min_p=float(p[1] / p[0]) - 1e-9).nonzero().flatten().tolist() == [0, 1, 3]
    assert filtered([2.0, 1.0, 0.0, 1.0], min_p=1.0).tolist() == [1, 0, 0, 0]
    cold = probabilities(torch.tensor([[2.0, 1.0, 0.0, 1.0]]), SamplingParams(temperature=0.0))
    assert cold.tolist() == [[1, 0, 0, 0]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0, float("-inf")]), min_size=2, max_size=9),
       st.integers(0, 9), st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.floats(0.2, 3.0))
def test_filters_against_a_loop(logits, top_k, top_p, min_p, temperature):
    logits[0] = max(logits[0], 0.0)  # one finite logit at least
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probabilities(torch.tensor([logits], dtype=torch.float64), params)[0]
    p = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept = order[: top_k or None]
    total, run, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        if run < top_p * total or not nucleus:
            nucleus.append(i)
        run += p[i]
    kept = [i for i in nucleus if p[i] >= min_p * p[order[0]]]
    want = [p[i] / sum(p[j] for j in kept) if i in kept else 0.0 for i in range(len(p))]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("wrong", [dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.1), dict(min_p=-0.1), dict(min_p=1.5)])
def test_filters_out_of_range(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        SamplingParams(**wrong)


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(p, u) for u in (0.0, 0.2499, 0.25, 0.9999999)] == [1, 1, 3, 3]
    assert draw(torch.full((10,), 0.1), 1 - 2**-53) == 9


# Verification, exactly: every draft, and every interval of the uniform numbers on which the outcome cannot change.


def tables(seed):
    """P and Q after every prefix of up to two tokens; some tokens impossible, some certain."""
    generator = torch.Generator().manual_seed(seed)

    def row():
        weights = torch.rand(V, generator=generator, dtype=torch.float64) ** 3
        weights[torch.rand(V, generator=generator) < 0.25] = 0
        weights[torch.randint(V, (1,), generator=generator)] += 0.1
        return weights / weights.sum()

    prefixes = [x for n in range(K + 1) for x in itertools.product(range(V), repeat=n)]
    return {x: row() for x in prefixes}, {x: row() for x in prefixes}


def outcomes(p, q, drafts, verifying):
    """{emitted tokens: probability} of production ``verify``, given the drafts."""
    thresholds = [min(1.0, float(p[i][x] / q[i][x])) for i, x in enumerate(drafts)]
    cuts = {0.0, 1.0}
    more = [(p[i] - q[i]).clamp(min=0) for i in range(len(drafts))]
    for weights in [*more, *p, *(m.softmax(-1) for m in more)]:  # the last: what a planted fault draws from
        if weights.sum() > 0:
            cuts |= set((weights.cumsum(0) / weights.sum()).tolist())
    ends = sorted(c for c in cuts if 0 <= c <= 1)
    found = defaultdict(float)
    for choice in itertools.product((True, False), repeat=len(drafts)):
        weight, uniforms = 1.0, []
        for accept, a in zip(choice, thresholds, strict=True):
            weight *= a if accept else 1 - a
            uniforms.append(a / 2 if accept else (1 + a) / 2)
        if weight == 0:
            continue
        for low, high in itertools.pairwise(ends):
            kept, token = verifying(torch.stack(p), torch.stack(q) if q else p[0][None][:0], drafts,
                                    [*uniforms, (low + high) / 2])
            found[(*drafts[:kept], token)] += weight * (high - low)
    return found


def worst(seed, verifying=verify, certain=False):
    """How far the first two tokens of a round are from the target's distribution."""
    P, Q = tables(seed)
    if certain:
        Q = {x: torch.nn.functional.one_hot(q.argmax(), V).double() for x, q in Q.items()}
    total = defaultdict(float)
    for drafts in itertools.product(range(V), repeat=K):
        chance = float(Q[()][drafts[0]] * Q[drafts[:1]][drafts[1]])
        if chance:
            p, q = [P[drafts[:i]] for i in range(K + 1)], [Q[drafts[:i]] for i in range(K)]
            for emitted, w in outcomes(p, q, drafts, verifying).items():
                total[emitted] += chance * w
    gap = abs(sum(total.values()) - 1)
    for n in range(K + 1):  # emitted tokens that follow n given ones: as if drawn from the target
        for prefix in itertools.product(range(V), repeat=n):
            following = {e: w for e, w in total.items() if len(e) > n and e[:n] == prefix}
            mass = sum(following.values())
            for t in range(V):
                got = sum(w for e, w in following.items() if e[n] == t)
                gap = max(gap, abs(got - mass * float(P[prefix][t])))
    return gap


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_verification_leaves_the_targets_distribution_alone(seed, certain):
    assert worst(seed, certain=certain) < 1e-12


def softmax_of_the_difference(monkeypatch):
    """SB-31: the correction drawn from a softmax of the clipped difference."""
    def wrong(p, uniform):
        return draw(p if abs(float(p.sum()) - 1) < 1e-9 else p.softmax(-1), uniform)
    monkeypatch.setattr(sampling, "draw", wrong)
    return verify


def a_uniform_number_that_is_always_zero(monkeypatch):
    """SB-32: every draft is kept."""
    return lambda p, q, drafts, uniforms: verify(p, q, drafts, [0.0] * len(drafts) + [uniforms[-1]])


def a_draft_distribution_it_was_not_drawn_from(monkeypatch):
    """Another temperature for q than for the draw."""
    return lambda p, q, drafts, uniforms: verify(p, (q + 0.1) / (1 + 0.1 * V), drafts, uniforms)


def the_correction_from_p(monkeypatch):
    """No residual at all."""
    def wrong(p, q, drafts, uniforms):
        kept, token = verify(p, q, drafts, uniforms)
        return kept, token if kept == len(drafts) else draw(p[kept], uniforms[-1])
    return wrong


@pytest.mark.parametrize("fault", [softmax_of_the_difference, a_uniform_number_that_is_always_zero,
                                   a_draft_distribution_it_was_not_drawn_from, the_correction_from_p])
def test_each_planted_fault_is_seen(monkeypatch, fault):
    assert max(worst(seed, fault(monkeypatch)) for seed in range(4)) > 1e-3


def test_sb31_in_the_gallerys_numbers(monkeypatch):
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    found = defaultdict(float)
    for x in range(3):
        for (token, *_), w in outcomes([p, p], [q], (x,), verify).items():
            found[token] += float(q[x]) * w
    assert [found[t] for t in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)
    softmax_of_the_difference(monkeypatch)
    found.clear()
    for x in range(3):
        for (token, *_), w in outcomes([p, p], [q], (x,), verify).items():
            found[token] += float(q[x]) * w
    assert [found[t] for t in range(3)] == pytest.approx([0.321, 0.390, 0.290], abs=1e-3)


def test_sb32_acceptance_is_what_the_distributions_say_and_never_one():
    sampler, rows = Sampler(SamplingParams(temperature=1.0, seed=4)), 20000
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    kept, said = 0, [0, 0, 0]
    for _ in range(rows):
        x, drawn = sampler.draft(q)
        accepted, token = sampler.verify(p.expand(2, 3), drawn[None], (x,))
        kept += accepted
        said[x if accepted else token] += 1
    assert abs(kept / rows - 0.7) < 0.01
    assert [n / rows for n in said] == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


# The fast path.


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5), st.integers(0, 2**16))
def test_greedy_is_verification_of_certainty(k, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(k + 1, 3, generator=generator)
    drafts = torch.randint(3, (k,), generator=generator).tolist()
    q = torch.nn.functional.one_hot(torch.tensor(drafts, dtype=torch.int64), 3).float()
    p = probabilities(logits, SamplingParams())
    for uniform in (0.0, 0.999):
        assert verify_greedy(logits, drafts) == verify(p, q, drafts, [uniform] * (k + 1))


def test_counts_that_disagree_are_refused():
    p = torch.full((3, V), 1 / V)
    with pytest.raises(ValueError, match="3 rows of p, 1 of q and 3 uniforms for 2 drafts; expected 3, 2 and 3"):
        verify(p, p[:1], (0, 1), (0.5, 0.5, 0.5))

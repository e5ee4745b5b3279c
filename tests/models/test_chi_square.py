"""Sampled text with a weak drafter has the target's distribution: a chi-square test on the first two tokens."""
import math
from collections import Counter

import pytest
import torch

from trueup.core import sampling
from trueup.core.engine import Engine, EngineConfig
from trueup.core.sampling import Sampler, SamplingParams, draw, probabilities
from trueup.core.speculation.chain import ChainDrafter
from trueup.models import load_model
from trueup.models.drafters import MtpDraft

NAME, SAMPLES, REJECT = "glm-4.7-flash-nano", 20_000, 1e-3
PROMPT = [40, 41, 300, 301, 302, 17]
PARAMS = dict(temperature=1.0, top_k=6, max_tokens=3, ignore_eos=True)


class Weak(MtpDraft):
    """Drafts from a much flatter distribution than the target's."""

    def logits(self, hidden):
        return 0.3 * super().logits(hidden)


@pytest.fixture(scope="module")
def model():
    return load_model(NAME, dtype="float32", progress=False)


def first_logits(model, prompts):
    """What the target says after each prompt, [B, V]: by plain forwards of a fresh engine."""
    seen = []
    engine = Engine(model, EngineConfig(num_pages=1 + len(prompts), max_requests=len(prompts), buckets=(len(prompts),)))
    logits = model.logits
    try:
        model.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
        for p in prompts:
            engine.add(p, SamplingParams(max_tokens=1))
        engine.step()
    finally:
        model.logits = logits
    return seen[0]


@pytest.fixture(scope="module")
def expected(model):
    """{(first, second): probability}.  The second token is the first that a draft takes part in."""
    params = SamplingParams(**PARAMS)
    first = probabilities(first_logits(model, [PROMPT]).double(), params)[0]
    tokens = first.nonzero().flatten().tolist()
    second = probabilities(first_logits(model, [[*PROMPT, t] for t in tokens]).double(), params)
    return {(a, int(b)): float(first[a] * row[b]) for a, row in zip(tokens, second, strict=True) for b in row.nonzero()}


def sample(model, count):
    engine = Engine(model, EngineConfig(num_pages=33, max_requests=32, buckets=(32,)), ChainDrafter(Weak(model), 1))
    seen, text, kept, rows = Counter(), {}, 0, 0
    for i in range(count):
        text[engine.add(PROMPT, SamplingParams(seed=i, **PARAMS))] = []
    while engine.has_work:
        done = engine.step()
        kept, rows = kept + sum(done.accepted.values()), rows + len(done.accepted)
        for r, tokens in done.tokens.items():
            text[r] += tokens
            if r in done.finished:
                seen[tuple(text.pop(r)[:2])] += 1
    return seen, kept / rows if rows else None


def p_value(seen, expected):
    """Of Pearson's statistic; cells with fewer than 5 expected are pooled."""
    total, cells = sum(seen.values()), []
    rest = [0.0, 0.0]
    for cell in seen.keys() | expected.keys():
        want = total * expected.get(cell, 0.0)
        if want < 5:
            rest = [rest[0] + seen[cell], rest[1] + want]
        else:
            cells.append((seen[cell], want))
    if rest[1] > 0 or rest[0] > 0:
        cells.append((rest[0], max(rest[1], 1e-9)))
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64),
                                         torch.tensor(statistic / 2, dtype=torch.float64)))


def test_the_p_value_is_that_of_the_chi_square_distribution():
    # Two cells, one degree of freedom: P(|normal| > sqrt(statistic)).
    got = p_value(Counter({0: 60, 1: 40}), {0: 0.5, 1: 0.5})
    assert got == pytest.approx(math.erfc(2 / math.sqrt(2)), rel=1e-9)


def test_a_thousand_samples(model, expected):
    seen, _ = sample(model, 1000)
    assert p_value(seen, expected) > REJECT


@pytest.mark.long
def test_speculative_samples_follow_the_target(model, expected):
    seen, acceptance = sample(model, SAMPLES)
    assert sum(seen.values()) == SAMPLES and p_value(seen, expected) > REJECT
    assert 0.2 < acceptance < 0.9  # weak: both ways of ending a draft were taken


def softmax_of_the_difference(monkeypatch):
    """SB-31."""
    monkeypatch.setattr(sampling, "draw", lambda p, u: draw(p if abs(float(p.sum()) - 1) < 1e-4 else p.softmax(-1), u))


def always_accepted(monkeypatch):
    """SB-32: the uniform numbers that decide are 0."""
    verify = sampling.verify
    monkeypatch.setattr(sampling, "verify", lambda p, q, d, u: verify(p, q, d, [0.0] * len(d) + [u[-1]]))


def another_temperature_for_q(monkeypatch):
    """Drawn from one distribution, verified as if from another."""
    draft = Sampler.draft

    def wrong(self, logits):
        token, _ = draft(self, logits)
        return token, probabilities(3 * logits[None], self.params)[0]
    monkeypatch.setattr(Sampler, "draft", wrong)


def filters_left_out_of_q(monkeypatch):
    """q without top_k."""
    draft = Sampler.draft

    def wrong(self, logits):
        token, _ = draft(self, logits)
        return token, logits.softmax(-1)
    monkeypatch.setattr(Sampler, "draft", wrong)


@pytest.mark.long
@pytest.mark.parametrize("fault", [softmax_of_the_difference, always_accepted, another_temperature_for_q,
                                   filters_left_out_of_q])
def test_each_planted_fault_is_rejected(model, expected, monkeypatch, fault):
    fault(monkeypatch)
    seen, _ = sample(model, SAMPLES)
    assert p_value(seen, expected) < REJECT

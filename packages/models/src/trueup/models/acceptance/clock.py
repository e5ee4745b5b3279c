"""Speed with and without drafts at batch 1, beside what a cost model says from the time of single forwards."""
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.core.engine import Engine, EngineConfig
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.speculation.chain import ChainDrafter
from trueup.models.drafters import make_drafter


@dataclass(frozen=True)
class Speed:
    """Ratios to plain decoding, and medians in milliseconds of a forward each.

    ``expected`` = tokens per round * plain / (verify + (k - 1) * draft + learn): what the forwards alone would give.
    """

    achieved: float
    expected: float
    plain: float
    verify: float
    draft: float
    learn: float


def speed(model: Any, spec: str, draft_tokens: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> Speed:
    """One request at a time, plain and speculative by turns; medians."""
    most = max(len(p) for p in prompts) + new_tokens
    config = EngineConfig(num_pages=1 + -(-most // EngineConfig().page_size), max_requests=1, buckets=(1,))
    drafter = make_drafter(spec, model, draft_tokens)
    plain, fast = Engine(model, config), Engine(model, config, drafter)
    ratios, total = [], Acceptance()
    for prompt in prompts:
        a, (b, accepted) = _one(plain, prompt, new_tokens)[0], _one(fast, prompt, new_tokens)
        ratios.append(a / b)
        total += accepted
    seen: dict[str, list[float]] = defaultdict(list)
    if isinstance(drafter, ChainDrafter):
        drafter._forward = _timed(seen, "draft", drafter._forward)  # type: ignore[method-assign]
    tapped = model.forward_tapped  # plain forwards go through it, too
    try:
        model.forward_tapped = _timed(seen, "target", tapped)
        for prompt in prompts[:8]:
            _one(plain, prompt, new_tokens)
            _one(fast, prompt, new_tokens)
    finally:
        model.forward_tapped = tapped
    cost = {name: 1e3 * statistics.median(times) for name, times in seen.items()}
    one, verify = cost["target 1"], cost[f"target {draft_tokens + 1}"]
    draft, learn = cost.get("draft 1", 0.0), cost.get(f"draft {draft_tokens + 1}", 0.0)
    expected = total.tokens_per_round * one / (verify + (draft_tokens - 1) * draft + learn)
    return Speed(statistics.median(ratios), expected, one, verify, draft, learn)


def _one(engine: Engine, prompt: Sequence[int], new_tokens: int) -> tuple[float, Acceptance]:
    """Seconds from the first generated token to the last."""
    engine.add(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    total, begin = Acceptance(), None
    while engine.has_work:
        total.add(engine.step())
        begin = begin or time.perf_counter()
    return time.perf_counter() - (begin or 0.0), total


def _timed(seen: dict[str, list[float]], name: str, call: Callable) -> Callable:
    def wrapped(tokens: Any, *rest: Any) -> Any:
        begin = time.perf_counter()
        out = call(tokens, *rest)
        seen[f"{name} {len(tokens)}"].append(time.perf_counter() - begin)
        return out
    return wrapped

"""Run prompts with a drafter, as it is or with a fault planted, and count."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueup.core.engine import Engine, EngineConfig
from trueup.core.round import Round
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.speculation.chain import ChainDrafter
from trueup.models.acceptance.faults import Fault
from trueup.models.acceptance.inputs import Check, Recorder, check
from trueup.models.drafters import make_drafter


@dataclass(frozen=True)
class Run:
    """What a batch of prompts did: ``text`` is what was generated; ``checks`` is empty unless inputs were recorded."""

    text: list[list[int]]
    acceptance: Acceptance
    checks: list[Check]


def run(model: Any, spec: str, draft_tokens: int, prompts: Sequence[Sequence[int]], new_tokens: int,
        fault: Fault | None = None, record: bool = False) -> Run:
    """Continue ``prompts`` greedily, all in one batch, with a fresh drafter.

    Raises:
        ValueError: as :func:`trueup.models.drafters.make_drafter`, or prompts too long for the model.
    """
    drafter = make_drafter(spec, model, draft_tokens)
    recorder = Recorder(drafter) if record and isinstance(drafter, ChainDrafter) else None
    if fault and isinstance(drafter, ChainDrafter):
        fault.plant(drafter)
    size = EngineConfig().page_size
    need = sum(-(-(len(p) + new_tokens) // size) for p in prompts)
    config = EngineConfig(num_pages=1 + need, max_requests=len(prompts), buckets=(len(prompts),))
    engine = Engine(model, config, drafter)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    text = {engine.add(p, params): list(p) for p in prompts}
    pages: dict[int, tuple[int, ...]] = {}
    done: list[Round] = []
    while engine.has_work:
        if recorder:
            recorder.new_round()
        done.append(engine.step())
        pages |= {r: request.pages for r, request in engine.scheduler.requests.items() if request.pages}
        for r, tokens in done[-1].tokens.items():
            text[r] += tokens
    checks = check(engine, recorder, done, text, pages) if recorder else []
    generated = [ids[len(p) :] for p, ids in zip(prompts, text.values(), strict=True)]
    return Run(generated, Acceptance.of(done), checks)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square difference of two acceptances by depth, over the depths that both have."""
    both = list(zip(a, b, strict=False))
    return (sum((x - y) ** 2 for x, y in both) / len(both)) ** 0.5 if both else float("inf")

"""Speculation in numbers: tokens per round of each drafter, and what that does to the clock.

    python -m benchmarks.acceptance [--specs mtp eagle3 ngram] [--json FILE]

Text: 48 evenly spaced places in held-out files of the nano corpus (this Python's own standard library), 96 tokens
of prompt and 40 new ones, by the engine in batches of 8.  A round is one verification with at least one draft; its
tokens are the drafts kept and the one behind them; sums are pooled.  Rows with little repetition (under 10 % of their
6-grams seen before) are reported apart, because a small model's greedy text falls into loops, and loops are easy to
draft.

The clock: one request at a time, plain and speculative by turns in one process, medians.  Beside the measured ratio
stands what the cost model says from four measured forwards: tokens per round * plain / (verify + drafts + learn).
"""
import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trueup.core.engine import Engine, EngineConfig
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.models import load_model, zoo
from trueup.models.acceptance.clock import speed
from trueup.models.drafters import SPECS, make_drafter
from trueup.models.training.__main__ import encode
from trueup.models.training.corpus import read_corpus
from trueup.models.training.report import LOW_REPETITION, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, ChainResult

NAME = "glm-4.7-flash-nano"
HOT = 0.8


def held_out_text() -> torch.Tensor:
    """Token ids [tokens] of files that no nano model was trained on."""
    return encode(Tokenizer.from_file(str(zoo.path(NAME) / "tokenizer.json")), read_corpus().held_out)


def prompts_of(text: torch.Tensor, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """The prompts of the model's card: what stands at evenly spaced places of ``text`` [tokens]."""
    starts = torch.linspace(0, len(text) - length - 1, PROMPTS).long()
    return [text[a : a + length].tolist() for a in starts]


def measure(model: Any, spec: str, k: int, prompts: list[list[int]], temperature: float) -> dict:
    """Acceptance over all rows, and over those with little repetition."""
    engine = Engine(model, EngineConfig(num_pages=40), make_drafter(spec, model, k))
    ids = [engine.add(p, SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=i, ignore_eos=True))
           for i, p in enumerate(prompts)]
    text: dict[int, list[int]] = {r: [] for r in ids}
    rows: dict[int, Acceptance] = {r: Acceptance() for r in ids}
    total = Acceptance()
    while engine.has_work:
        done = engine.step()
        total.add(done)
        for r, tokens in done.tokens.items():
            text[r] += tokens
        for r, drafts in done.drafted.items():
            rows[r].add_row(len(drafts), done.accepted[r])
    plain, low = [r for r in ids if ChainResult(text[r], []).repetition < LOW_REPETITION], Acceptance()
    for r in plain:
        low += rows[r]
    return {"tokens_per_round": total.tokens_per_round, "rate": total.rate, "by_depth": total.by_depth,
            "conditional": total.conditional, "rounds": total.rows, "low_repetition_rows": len(plain),
            "low_repetition": low.tokens_per_round}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--specs", nargs="+", default=list(SPECS), choices=SPECS)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(NAME, dtype="float32", progress=False)
    prompts, found = prompts_of(held_out_text()), {}
    print(f"{len(prompts)} prompts of {PROMPT_TOKENS}, {NEW_TOKENS} new tokens, chain of {args.draft_tokens}\n")
    print(f"{'drafter':8} {'T':>4} {'tokens/round':>13} {'little repetition':>18}  by depth")
    for spec in args.specs:
        for temperature in (0.0, HOT):
            m = found[f"{spec} {temperature}"] = measure(model, spec, args.draft_tokens, prompts, temperature)
            depth = " ".join(f"{x:.2f}" for x in m["by_depth"])
            print(f"{spec:8} {temperature:4} {m['tokens_per_round']:10.2f} {'':2} {m['low_repetition']:10.2f} "
                  f"({m['low_repetition_rows']} rows)  {depth}", flush=True)
    print(f"\n{'drafter':8} {'speed-up':>9} {'cost model':>11}  milliseconds a forward: plain, verify, draft, learn")
    for spec in args.specs:
        c = speed(model, spec, args.draft_tokens, prompts[::3], NEW_TOKENS)
        found[f"{spec} clock"] = asdict(c)
        times = f"{c.plain:.2f} {c.verify:.2f} {c.draft:.2f} {c.learn:.2f}"
        print(f"{spec:8} {c.achieved:9.2f} {c.expected:11.2f}  {times}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

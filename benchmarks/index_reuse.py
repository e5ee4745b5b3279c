"""What it costs to ask the indexer less often: calls a round, against tokens per round and held-out loss.

    python -m benchmarks.index_reuse [--model NAME_OR_FOLDER] [--json FILE]

Between draft steps: in a chain of 3 each step chooses for itself, or attends to what the last known row chose (frozen),
or to that and the positions drafted since (grown).  Between layers: a layer attends to what one before it chose; in
0 1 1 3 layer 2 takes the choice of layer 1, and layer 3 is the MTP layer.  The model was trained with an indexer in
every layer, each for itself.

Acceptance: the 48 places in held-out text of benchmarks.acceptance, prompts of 96 and of 384 tokens, 40 new ones,
greedy, by the engine in batches of 8; top-k is 64.  Behind +- stands the standard error over rounds; "other" are texts
that differ from those without drafts.  Calls of npu_lightning_indexer are those of one round that drafts, verifies and
learns.  Loss: nats a token over 48 windows of 512 tokens, by the served model, each window in one forward; "far" are
the rows that see more than top-k positions.
"""
import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.acceptance import held_out_text, prompts_of
from trueup.core.attention.choices import DraftReuse, IndexReuse
from trueup.core.cache import Pools
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.ops.capture import capture
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.view import input_ids, materialise
from trueup.models import load_model
from trueup.models.drafters import make_drafter
from trueup.models.glm_moe_dsa import GlmMoeDsa

NAME, SPEC, DRAFTS, NEW_TOKENS = "glm-5-nano", "mtp", 3, 40
PROMPT_TOKENS, WINDOW, WINDOWS = (96, 384), 512, 48
EACH = (0, 1, 2, 3)
POLICIES = {
    "each chooses": IndexReuse(EACH), "drafts frozen": IndexReuse(EACH, DraftReuse.FROZEN),
    "drafts grown": IndexReuse(EACH, DraftReuse.GROWN), "layers 0 1 1 3": IndexReuse((0, 1, 1, 3)),
    "layers 0 0 0 3": IndexReuse((0, 0, 0, 3)),
}
Texts = list[list[int]]


@dataclass(frozen=True)
class Drafted:
    """Prompts under one policy; ``error`` is of the tokens per round."""

    tokens_per_round: float
    error: float
    by_depth: list[float]
    rounds: int
    calls: int
    other: int


def plain(model: GlmMoeDsa, prompts: Texts) -> Texts:
    """Greedy texts without drafts."""
    return _run(Engine(model, _config(prompts)), prompts)[0]


def drafted(model: GlmMoeDsa, prompts: Texts, expected: Texts) -> Drafted:
    """The same with drafts, under the model's present policy."""
    texts, a = _run(Engine(model, _config(prompts), make_drafter(SPEC, model, DRAFTS)), prompts)
    reached = [kept / a.rows for kept in a.kept]  # the share of rounds that kept so many drafts or more
    variance = sum((2 * i + 1) * share for i, share in enumerate(reached)) - sum(reached) ** 2
    other = sum(x != y for x, y in zip(texts, expected, strict=True))
    return Drafted(a.tokens_per_round, (variance / a.rows) ** 0.5, a.by_depth, a.rows, indexer_calls(model, prompts),
                   other)


def indexer_calls(model: GlmMoeDsa, prompts: Texts) -> int:
    """npu_lightning_indexer in one round that drafts, verifies and learns."""
    engine = Engine(model, _config(prompts), make_drafter(SPEC, model, DRAFTS))
    for prompt in prompts[:2]:
        engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    engine.step()
    with capture() as recorded:
        engine.step()
    return Counter(call["operator"] for call in recorded.calls)["npu_lightning_indexer"]


@torch.inference_mode()
def loss(model: GlmMoeDsa, text: torch.Tensor) -> tuple[float, float]:
    """Nats a token: of all rows, and of those that see more than top-k positions."""
    ids = PagePool(1 + WINDOW // 128, 128)
    pools, pages, losses = Pools(model.cache_spec, ids), ids.allocate(WINDOW // 128), []
    for start in torch.linspace(0, len(text) - WINDOW - 1, WINDOWS).long().tolist():
        layout = plan([Work(0, Mode.PREFILL, 0, WINDOW, pages)], page_size=128)
        tokens = input_ids(layout, {0: text[start : start + WINDOW].tolist()}, pools.spec.device).tensor  # [T]
        logits = model.logits(model.forward(tokens, materialise(layout, pools), pools))  # [T, V]
        following = text[start + 1 : start + WINDOW + 1].long()  # [T]
        losses.append(F.cross_entropy(logits.float(), following, reduction="none"))
    assert model.config.indexer
    every = torch.stack(losses)  # [windows, T]
    return every.mean().item(), every[:, model.config.indexer.topk :].mean().item()


def _config(prompts: Texts) -> EngineConfig:
    pages = -(-(len(prompts[0]) + NEW_TOKENS) // 128)
    return EngineConfig(num_pages=1 + 8 * pages, prefill_tokens=1024)


def _run(engine: Engine, prompts: Texts) -> tuple[Texts, Acceptance]:
    ids = [engine.add(p, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)) for p in prompts]
    text: dict[int, list[int]] = {r: [] for r in ids}
    total = Acceptance()
    while engine.has_work:
        done = engine.step()
        total.add(done)
        for r, tokens in done.tokens.items():
            text[r] += tokens
    return [text[r] for r in ids], total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_reuse", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=NAME, metavar="NAME_OR_FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(args.model, dtype="float32", progress=False)
    if not isinstance(model, GlmMoeDsa):
        parser.error(f"{args.model} attends to everything; index reuse is for sparse attention, as in {NAME}")
    text, found = held_out_text(), {}
    print(f"{args.model}, {len(text):,} held-out tokens\n")
    print(f"{'':14} {'prompt':>6} {'tokens/round':>14}  by depth        rounds  other  indexer calls")
    for length in PROMPT_TOKENS:
        prompts, expected = prompts_of(text, length), dict[tuple[int, ...], Texts]()
        for name, policy in POLICIES.items():
            model.reuse = policy
            if policy.source not in expected:
                expected[policy.source] = plain(model, prompts)
            d = drafted(model, prompts, expected[policy.source])
            found[f"{name}, {length}"] = asdict(d)
            depth = " ".join(f"{share:.2f}" for share in d.by_depth)
            print(f"{name:14} {length:6} {d.tokens_per_round:7.2f} +- {d.error:.2f}  {depth:14} {d.rounds:7} "
                  f"{d.other:6} {d.calls:6}", flush=True)
    print(f"\n{'':14} {'loss':>6} {'far':>6}")
    for name, policy in POLICIES.items():
        if policy.drafts is DraftReuse.OWN:  # drafts change no loss
            model.reuse = policy
            every, far = loss(model, text)
            found[f"{name}, loss"] = {"loss": every, "far": far}
            print(f"{name:14} {every:6.3f} {far:6.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What a decoded token costs as its context grows: sparse attention beside dense, in one run.

Two models with the same random weights, where the head geometry is that of GLM-5 (64 heads, nope 192, rope 64, v 256,
latent 512; 32 index heads of 128, top-k 2048).  Reduced so that it runs on a laptop: two layers, hidden 512, query rank
512, 8 experts of 128 of which 2 are chosen.  The sparse one is the dense one with an indexer in each layer.  Nothing is
prefilled: the cache holds random latents and index keys, which both models read.

A step is plan, materialise, forward and logits of one token for each request.  Every round makes every step once, and
once more with the operators timed; figures are medians over the rounds, in float32.  Time is that of the one thread
that computes, which other programs on the machine do not prolong.  Contracts are checked in every call, as always on a
laptop, and count; :class:`trueup.core.audit` is off.

    python -m benchmarks.sparse_decode [--plot FILE.svg [FILE.svg]]
"""
import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.curve import Line, curve
from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.ops.load import load
from trueup.core.ops.registry import name_of
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models.build import model_class
from trueup.models.config import ModelConfig
from trueup.models.glm4_moe_lite import Glm4MoeLite

PAGE = 128
SIZES = dict(
    num_attention_heads=64, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, kv_lora_rank=512,
    index_n_heads=32, index_head_dim=128, rope_theta=8e6,
    # From here on reduced.
    num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=0, hidden_size=512, q_lora_rank=512,
    intermediate_size=1024, moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, vocab_size=1024,
    n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, rms_norm_eps=1e-5, eos_token_id=0,
    max_position_embeddings=2**20, dtype="float32",
)
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
DENSE, TOPK, SMALL = 0, 2048, 512  # top-k by which a model is named; 0: dense
# The three calls that read the cache.
FIA, LI, SFA = "npu_fused_infer_attention_score_v2", "npu_lightning_indexer", "npu_sparse_flash_attention"


class Case(NamedTuple):
    """Requests that decode at the same context, by the model of this top-k."""

    requests: int
    context: int
    topk: int


CASES = (
    *(Case(1, context, topk) for context in CONTEXTS for topk in (DENSE, TOPK)),
    Case(1, CONTEXTS[-1], SMALL),
    *(Case(4, context, topk) for context in CONTEXTS[::2] for topk in (DENSE, TOPK)),
)
WORDS = (
    ("Decode step, one request; a dense step at 1k = 1", "context, tokens", "dense", "sparse, top-k 2048",
     "without indexer calls", "indexer calls alone"),
    ("单请求每步解码的耗时 · 1k 稠密 = 1", "上下文词元数", "稠密", "稀疏 top-k 2048", "扣除索引器调用", "仅索引器调用"),
)


class Cost(NamedTuple):
    """Milliseconds, medians: of a step, and of all its calls of an operator."""

    step: float
    calls: dict[str, float]

    @property
    def without_indexer(self) -> float:
        """Of a step less its npu_lightning_indexer calls."""
        return self.step - self.calls[LI]


def config(topk: int) -> ModelConfig:
    """A small model with GLM-5's attention."""
    kind = dict(model_type="glm_moe_dsa", index_topk=topk) if topk else dict(model_type="glm4_moe_lite")
    return ModelConfig.from_hf(SIZES | kind)


def models(topks: Sequence[int]) -> dict[int, Glm4MoeLite]:
    """A model for each top-k; what they have in common is in memory once."""
    generator, found = torch.Generator().manual_seed(0), {}
    weights: dict[str, Tensor] = {}
    load()
    for topk in topks:
        with torch.device("meta"):
            model = model_class(c := config(topk))(c)
        for name, like in model.state_dict().items():
            if name not in weights:
                noise = torch.randn(like.shape, generator=generator)
                weights[name] = noise * like.shape[-1] ** -0.5 if like.dim() > 1 else 1 + 0.1 * noise
        model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
        found[topk] = model.requires_grad_(False).eval()
    return found


class Bench:
    """Models beside one cache of random content, in which each request has scattered pages of its own."""

    def __init__(self, topks: Sequence[int], requests: int, longest: int) -> None:
        self.models = models(topks)
        each = -(-longest // PAGE)
        self.pools = Pools(self.models[max(topks)].cache_spec, PagePool(1 + requests * each, PAGE))
        generator = torch.Generator().manual_seed(1)
        for pool in (*self.pools.latent, *self.pools.rope, *self.pools.index.values()):
            pool.normal_(generator=generator)
        pages = 1 + torch.randperm(requests * each, generator=generator).view(requests, each)  # [B, pages]
        self.pages = [tuple(row) for row in pages.tolist()]

    @torch.inference_mode()
    def step(self, case: Case) -> Tensor:
        """Logits [B, V] of the tokens that follow."""
        work = [Work(r, Mode.DECODE, case.context - 1, 1, self.pages[r]) for r in range(case.requests)]
        layout, model = plan(work, page_size=PAGE), self.models[case.topk]
        tokens = input_ids(layout, {w.request: [w.request] for w in work}, self.pools.spec.device).tensor  # [Tp]
        return model.logits(model.forward(tokens, materialise(layout, self.pools), self.pools))  # [B, V]


class Stopwatch(TorchDispatchMode):
    """Milliseconds spent in each operator of trueup.  Inside an operator it costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "npu":
            return func(*args, **(kwargs or {}))
        start = thread_time()
        out = func(*args, **(kwargs or {}))
        self.spent[name_of(func)] += 1e3 * (thread_time() - start)
        return out


def measure(bench: Bench, cases: Sequence[Case], rounds: int) -> dict[Case, Cost]:
    """Every case once a round; a first round warms up."""
    steps: dict[Case, list[float]] = {case: [] for case in cases}
    spent: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds + 1):
        for case in cases:
            start = thread_time()
            bench.step(case)
            steps[case].append(1e3 * (thread_time() - start))
            with Stopwatch() as watch:
                bench.step(case)
            spent[case].append(watch.spent)
    return {case: Cost(median(steps[case][1:]),
                       {name: median(times[name] for times in spent[case][1:]) for name in (FIA, LI, SFA)})
            for case in cases}


def table(costs: Mapping[Case, Cost]) -> str:
    """A line for each case, in units of the first: a dense step at the shortest context."""
    unit = next(iter(costs.values())).step
    lines = [f"unit: {unit:.1f} ms, the first step of this table", "",
             "requests  context  top-k    step  without indexer call   FIA   SFA    LI"]
    for case, cost in costs.items():
        calls = "".join(f"{cost.calls[name] / unit:6.2f}" if cost.calls[name] else "     -" for name in (FIA, SFA, LI))
        lines.append(f"{case.requests:8}{case.context:9}{case.topk or 'dense':>7}{cost.step / unit:8.2f}"
                     f"{cost.without_indexer / unit:22.2f}{calls}")
    return "\n".join(lines)


def drawing(costs: Mapping[Case, Cost], words: Sequence[str]) -> str:
    """What a token costs one request, over its context."""
    dense, sparse = ([costs[Case(1, context, topk)] for context in CONTEXTS] for topk in (DENSE, TOPK))
    unit = dense[0].step
    lines = {"#a8421b": [c.step for c in dense], "#0b6a61": [c.step for c in sparse],
             "#3b6fb6": [c.without_indexer for c in sparse], "#6b6f72": [c.calls[LI] for c in sparse]}
    title, across, *labels = words
    return curve(title, across, {context: f"{context // 1024}k" for context in CONTEXTS}, [
        Line(label, [ms / unit for ms in values], colour, dash) for label, (colour, values), dash
        in zip(labels, lines.items(), ("", "", "7 4", "2 4"), strict=True)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_decode", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--plot", type=Path, nargs="+", default=[], metavar="FILE.svg",
                        help="draw the curve of one request, too; in a second file, with Chinese words")
    options = parser.parse_args(arguments)
    if len(options.plot) > len(WORDS):
        parser.error(f"--plot takes at most {len(WORDS)} files")
    torch.set_num_threads(1)
    costs = measure(Bench((DENSE, TOPK, SMALL), requests=4, longest=max(CONTEXTS)), CASES, options.rounds)
    print(table(costs))
    for file, words in zip(options.plot, WORDS, strict=False):
        file.write_text(drawing(costs, words), encoding="utf-8")


if __name__ == "__main__":
    main()

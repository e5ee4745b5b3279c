"""What contracts cost: microseconds for checking one operator call that is legal.

On a laptop every call of ``torch.ops.npu.*`` checks its contract, so a contract has to stay far below the kernel
behind it.  Measured are the operators that the nano model calls in one decode round of 8 requests, with the arguments
that they got there, and the operators that read pages, slots or chosen keys at 64 requests: their contracts read
integers of every request.  Where an operator is called in several shapes, the one with the dearest contract counts.

Columns: the contract alone, and its limit; the operator with its contract, and its kernel without it, called by
turns; the share of the contract in a call.  On one thread, in the profile 'host'.  Medians of the contract, lower
quartiles of whole calls: long ones are interrupted where other programs run.  The limit is 10 microseconds, and what it
takes to look at integers, any of which may be wrong: 15 nanoseconds for each length, slot, page or chosen key, and 3
for each behind the first thousand.

    python -m benchmarks.contract_overhead            ends with 1 if a contract is above its limit
    python -m benchmarks.contract_overhead --no-limit
"""
import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.core.layout import Mode
from trueup.core.ops.contract import Check
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS, name_of
from trueup.core.sampling import SamplingParams
from trueup.core.scheduler import EngineConfig
from trueup.models import LLM

MODEL = "glm-4.7-flash-nano"
LIMIT = 10.0
PAGED = ("npu_fused_infer_attention_score_v2", "npu_kv_rmsnorm_rope_cache")  # of the nano model's


class Call(NamedTuple):
    """An operator, the arguments of one call of it, and how many requests the batch had."""

    name: str
    requests: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Cost(NamedTuple):
    """In microseconds.  ``reading``: what looking at integers may take."""

    name: str
    requests: int
    reading: float
    contract: float
    checked: float
    kernel: float

    @property
    def share(self) -> float:
        """Of a checked call, how much is the contract."""
        return self.contract / self.checked

    def limit(self, limit: float = LIMIT) -> float:
        """What the contract may take."""
        return limit + self.reading


class _Recorder(TorchDispatchMode):
    def __init__(self, requests: int) -> None:
        super().__init__()
        self.requests = requests
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("npu", "atb"):
            self.calls.append(Call(name_of(func), self.requests, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def decode_round(requests: int) -> list[Call]:
    """The nano model's calls in one round in which ``requests`` requests decode."""
    config = EngineConfig(num_pages=2 * requests + 1, max_requests=requests, buckets=(requests,))
    engine = LLM.from_pretrained(MODEL, engine_config=config, progress=False).engine
    for i in range(requests):
        engine.add([1 + (i + j) % 100 for j in range(9 + i % 7)], SamplingParams(max_tokens=64))
    while any(segment.mode is not Mode.DECODE for segment in engine.step().layout.segments):
        pass
    with _Recorder(requests) as recorder:
        engine.step()
    return recorder.calls


def sparse_round(requests: int, K: int = 512) -> list[Call]:
    """One decode step of sparse attention over pages of 128 with ``requests`` requests of up to 900 tokens."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    kv = [100 + 800 * i // requests for i in range(requests)]
    pages = [-(-n // 128) for n in kv]
    table, free = torch.zeros(requests, max(pages), dtype=torch.int32), iter(range(1, 1 + sum(pages)))
    for b, count in enumerate(pages):
        table[b, :count] = torch.tensor([next(free) for _ in range(count)])
    slots = [int(table[b, (n - 1) // 128]) * 128 + (n - 1) % 128 for b, n in enumerate(kv)]
    chosen = torch.full((requests, 1, K), -1, dtype=torch.int32)
    for b, n in enumerate(kv):
        chosen[b, 0, :min(n, K)] = torch.randperm(n, generator=generator)[:K]
    C = 1 + sum(pages)
    latent, rope, index_keys = floats(C, 128, 1, 512), floats(C, 128, 1, 64), floats(C, 128, 1, 128)
    lengths = dict(
        block_table=table, layout_query="TND", sparse_mode=3,
        actual_seq_lengths_query=torch.arange(1, requests + 1, dtype=torch.int32),
    )
    keys = torch.tensor(kv, dtype=torch.int32)
    return [
        Call("npu_lightning_indexer", requests,
             (floats(requests, 8, 128), index_keys, floats(requests, 8)),
             lengths | dict(actual_seq_lengths_key=keys, layout_key="PA_BSND", sparse_count=K)),
        Call("npu_sparse_flash_attention", requests, (floats(requests, 8, 512), latent, latent, chosen, 0.1),
             lengths | dict(actual_seq_lengths_kv=keys, layout_kv="PA_BSND", query_rope=floats(requests, 8, 64),
                            key_rope=rope, attention_mode=2)),
        Call("npu_scatter_nd_update_", requests,
             (index_keys.view(-1, 128), torch.tensor(slots)[:, None], floats(requests, 128)), {}),
        Call("npu_scatter_pa_kv_cache", requests,
             (floats(requests, 1, 512), floats(requests, 1, 64), latent, rope, torch.tensor(slots, dtype=torch.int32)),
             dict(cache_mode="Norm")),
        Call("atb::_npu_reshape_and_cache", requests,
             (floats(requests, 1, 128), floats(requests, 1, 128), index_keys, index_keys.clone(),
              torch.tensor(slots, dtype=torch.int32)), {}),
    ]


def calls() -> list[Call]:
    """All calls that are measured; of those with equal shapes, one."""
    found = decode_round(8) + [call for call in decode_round(64) if call.name in PAGED] + sparse_round(64)
    return list({(call.name, call.requests, _shapes(call)): call for call in found}.values())


def _shapes(call: Call) -> str:
    return repr(torch.utils._pytree.tree_map(lambda x: x.shape if isinstance(x, Tensor) else x, call[2:]))


def cost(call: Call, repetitions: int) -> Cost:
    """Of one call, from so many repetitions."""
    operator = OPERATORS[call.name]
    versions: tuple[Callable[[], Any], ...] = (
        lambda: operator.contract(Check(call.name), *call.args, **call.kwargs),
        lambda: operator(*call.args, **call.kwargs),
        lambda: operator.kernel(*call.args, **call.kwargs),
    )
    alone = [_nanoseconds(versions[0]) for _ in range(repetitions)]
    by_turns = [[_nanoseconds(version) for version in versions[1:]] for _ in range(max(3, repetitions // 10))]
    checked, kernel = (quantiles(times, n=4)[0] for times in zip(*by_turns, strict=True))
    return Cost(call.name, call.requests, _reading(call), median(alone) / 1e3, checked / 1e3, kernel / 1e3)


def _reading(call: Call) -> float:
    """Microseconds allowed for the integers in lists and tensors."""
    leaves = torch.utils._pytree.tree_leaves((call.args, call.kwargs))
    integers = sum(x.numel() for x in leaves if isinstance(x, Tensor) and not x.is_floating_point())
    integers += sum(isinstance(x, int) for x in leaves)
    return 0.015 * min(integers, 1000) + 0.003 * max(integers - 1000, 0)


def _nanoseconds(function: Callable[[], Any]) -> int:
    start = perf_counter_ns()
    function()
    return perf_counter_ns() - start


def measure(repetitions: int) -> list[Cost]:
    """The dearest call of each operator, for 8 and for 64 requests."""
    load()
    with _quiet(), torch.inference_mode():
        costs = [cost(call, repetitions) for call in calls()]
    return list({(c.name, c.requests): c for c in sorted(costs, key=lambda c: c.contract)}.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread, and no collector of garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def table(costs: list[Cost], limit: float = LIMIT) -> str:
    """A line for each operator, the dearest contract last."""
    lines = [f"{'operator':36} requests  contract us   limit    with us  without us   share"]
    for c in sorted(costs, key=lambda c: (c.requests, c.contract)):
        lines.append(f"{c.name:36}{c.requests:9}{c.contract:13.2f}{c.limit(limit):8.0f}{c.checked:11.1f}"
                     f"{c.kernel:12.1f}{c.share:8.1%}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contract_overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3000, help="of each contract; a tenth for whole calls")
    parser.add_argument("--limit", type=float, default=LIMIT, help="microseconds that no contract may exceed")
    parser.add_argument("--no-limit", action="store_true", help="end with 0 whatever was measured")
    options = parser.parse_args(arguments)
    costs = measure(options.repetitions)
    print(table(costs, options.limit))
    above = [c for c in costs if c.contract > c.limit(options.limit)]
    if above and not options.no_limit:
        print(f"\nabove the limit: {', '.join(f'{c.name} ({c.requests})' for c in above)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

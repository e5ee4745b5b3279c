"""The engine loop: requests in, one forward a round, tokens out.

    requests -> schedule -> plan -> Layout -> materialise -> DeviceView -> model -> Rows -> sample -> requests
"""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trueup.core.cache import CacheSpec, Pools
from trueup.core.layout import Layout
from trueup.core.planning import plan
from trueup.core.rows import Kind, Rows
from trueup.core.sampling import SamplingParams
from trueup.core.scheduler import EngineConfig, Scheduler
from trueup.core.view import DeviceView, input_ids, materialise


class Model(Protocol):
    """What the engine needs of a model."""

    @property
    def cache_spec(self) -> CacheSpec: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def forward(self, tokens: Tensor, view: DeviceView, pools: Pools) -> Tensor:
        """Hidden rows [Tp, H] of token ids [Tp]; writes the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] of hidden rows [B, H]."""
        ...


@dataclass(frozen=True)
class Round:
    """What one step planned, wrote and decided, in plain data.

    ``written`` are the positions whose cache rows this round filled, ``tokens`` what each request gained,
    ``finished`` why a request ended: "stop" (an end-of-text token) or "length".
    """

    number: int
    layout: Layout
    written: dict[int, range]
    tokens: dict[int, tuple[int, ...]]
    finished: dict[int, str]


class Engine:
    """Owns the pools and the loop; the scheduler owns the queues, the model its weights."""

    def __init__(self, model: Model, config: EngineConfig | None = None) -> None:
        self.model, self.config = model, config or EngineConfig()
        self.scheduler = Scheduler(self.config, model.max_positions, model.vocab_size)
        self.pages = self.scheduler.pages
        self.pools = Pools(model.cache_spec, self.pages)
        self._rounds = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests)

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt of token ids; returns the request's id.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, or more tokens than positions or pages.
        """
        return self.scheduler.add(prompt, params or SamplingParams())

    def abort(self, request_id: int) -> None:
        """Forget a request and free its pages at once; unknown or finished ids are ignored."""
        self.scheduler.remove(request_id)

    @torch.inference_mode()
    def step(self) -> Round:
        """Run one round.  Without work it plans an idle batch and runs nothing."""
        self._rounds += 1
        work, inputs = self.scheduler.schedule()
        layout = plan(work, page_size=self.config.page_size, buckets=self.config.buckets)
        if not work:
            return Round(self._rounds, layout, {}, {}, {})
        view = materialise(layout, self.pools)
        tokens = input_ids(layout, inputs, self.pools.spec.device)  # [Tp]
        hidden = Rows(Kind.TOKEN, layout, self.model.forward(tokens.tensor, view, self.pools))  # [Tp, H]
        logits = Rows(Kind.REQUEST, layout, self.model.logits(hidden.last().tensor))  # [B, V]
        written = {w.request: range(w.start, w.start + w.length) for w in work}
        return self._commit(layout, written, logits)

    def _commit(self, layout: Layout, written: dict[int, range], logits: Rows) -> Round:
        """Count what is in the cache now, and sample for every request whose prompt is complete."""
        tokens: dict[int, tuple[int, ...]] = {}
        finished: dict[int, str] = {}
        for r, row in logits.by_request().items():
            request = self.scheduler.requests[r]
            request.committed = written[r].stop
            if request.in_prompt:
                continue  # its last row predicts a prompt token, which is known
            token = request.sampler.sample(row)
            request.generated.append(token)
            tokens[r] = (token,)
            if token in self.model.eos_token_ids and not request.params.ignore_eos:
                finished[r] = "stop"
            elif len(request.generated) == request.params.max_tokens:
                finished[r] = "length"
        for r in finished:
            self.scheduler.remove(r)
        return Round(self._rounds, layout, written, tokens, finished)

"""The engine loop: requests in, one round after the other, tokens out.

    requests -> schedule -> draft -> plan -> Layout -> materialise -> DeviceView -> model -> Rows -> verify -> requests
"""
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from trueup.core.cache import Pools
from trueup.core.layout import Layout
from trueup.core.model import Model
from trueup.core.planning import plan
from trueup.core.round import Round
from trueup.core.rows import Kind, Rows
from trueup.core.sampling import SamplingParams
from trueup.core.scheduler import EngineConfig, Scheduler
from trueup.core.speculation.drafter import Drafter
from trueup.core.speculation.turn import learn, propose, settle, with_drafts
from trueup.core.view import input_ids, materialise


class Engine:
    """Owns the pools and the loop; the scheduler owns the queues, the model its weights.

    Args:
        model: the target.
        config: capacities.
        drafter: proposes tokens, see :mod:`trueup.core.speculation`; None: one token a round.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, drafter: Drafter | None = None) -> None:
        self.model, self.config, self.drafter = model, config or EngineConfig(), drafter
        self.scheduler = Scheduler(self.config, model.max_positions, model.vocab_size)
        self.pages = self.scheduler.pages
        self.pools = Pools(model.cache_spec, self.pages)
        self._rounds = 0
        if drafter:
            drafter.bind(self.pools, self.pages, self.config.buckets)

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
        if self.drafter:
            self.drafter.forget(request_id)

    @torch.inference_mode()
    def step(self) -> Round:
        """Run one round: draft, verify in one forward, keep what the target agrees with, let the drafter learn it.

        Without a drafter that is one token a round.  Without work it plans an idle batch and runs nothing.
        """
        self._rounds += 1
        work, inputs = self.scheduler.schedule()
        requests = self.scheduler.requests
        drafts = propose(self.drafter, work, requests)
        work, inputs = with_drafts(work, inputs, drafts)
        layout = plan(work, page_size=self.config.page_size, buckets=self.config.buckets)
        if not work:
            return Round(self._rounds, layout)
        hidden, features = self._target(layout, inputs)  # [Tp, H], [Tp, F]
        logits = Rows(Kind.SCORED, layout, self.model.logits(hidden.scored().tensor))  # [rows, V]
        done = settle(Round(self._rounds, layout), work, logits, drafts, requests, self.model.eos_token_ids)
        for r in done.finished:
            self.abort(r)
        return replace(done, draft_layouts=learn(self.drafter, work, requests, done, features))

    def _target(self, layout: Layout, inputs: Mapping[int, Sequence[int]]) -> tuple[Rows, Rows]:
        """Hidden rows, and what the drafter wants to see of the model."""
        view = materialise(layout, self.pools)
        tokens = input_ids(layout, inputs, self.pools.spec.device).tensor  # [Tp]
        if self.drafter and self.drafter.taps:
            hidden, features = self.model.forward_tapped(tokens, view, self.pools, self.drafter.taps)
        else:
            hidden = features = self.model.forward(tokens, view, self.pools)  # [Tp, H]
        return Rows(Kind.TOKEN, layout, hidden), Rows(Kind.TOKEN, layout, features)

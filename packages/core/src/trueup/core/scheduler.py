"""Which requests run, and on what: queues, pages and chunks.  Integers only, no torch.

The simplest that works: first come, first served; a request's pages are reserved when it is admitted, so a
running request never waits for one; prompts are processed in chunks beside the decoding requests.
"""
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work
from trueup.core.sampling import Sampler, SamplingParams


@dataclass(frozen=True)
class EngineConfig:
    """Capacities.

    Args:
        num_pages: pages in the pool, the dummy page included.
        page_size: tokens a page holds; 128 is what engines use on NPUs, multiples of 16 are legal.
        max_requests: requests that run at once.
        prefill_tokens: prompt tokens processed in one round.
        buckets: request counts that a decode batch is padded to.

    Raises:
        ValueError: capacities that contradict each other.
    """

    num_pages: int = 65
    page_size: int = 128
    max_requests: int = 8
    prefill_tokens: int = 512
    buckets: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.prefill_tokens < 1:
            raise ValueError(f"max_requests is {self.max_requests} and prefill_tokens {self.prefill_tokens}; "
                             "expected at least 1 of each")
        if not self.buckets or max(self.buckets) < self.max_requests:
            raise ValueError(f"buckets {self.buckets} do not reach max_requests={self.max_requests}: a full batch "
                             "would have no padded size")


@dataclass
class Request:
    """A request's progress.  ``committed`` counts its tokens that are in the cache, ``finished`` is why it ended."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sampler: Sampler
    pages: tuple[int, ...] = ()
    committed: int = 0
    generated: list[int] = field(default_factory=list)
    finished: str = ""

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.generated)

    @property
    def in_prompt(self) -> bool:
        return self.committed < len(self.prompt)

    def take(self, tokens: tuple[int, ...], eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Grow by what a round decided, up to the first end-of-text token: what follows it was never said."""
        if not self.params.ignore_eos:
            end = next((i for i, t in enumerate(tokens) if t in eos_token_ids), None)
            if end is not None:
                tokens, self.finished = tokens[: end + 1], "stop"
        self.generated += tokens
        if not self.finished and len(self.generated) == self.params.max_tokens:
            self.finished = "length"
        return tokens

    def next_input(self, budget: int) -> Sequence[int]:
        """The tokens of the next forward: a prompt chunk, or the one token that is not in the cache yet."""
        return self.prompt[self.committed :][:budget] if self.in_prompt else self.generated[-1:]


class Scheduler:
    """Owns the queues and the page ids.

    Args:
        config: capacities.
        max_positions: most tokens of a request, prompt and generated together.
        vocab_size: token ids are below it.
    """

    def __init__(self, config: EngineConfig, max_positions: int, vocab_size: int) -> None:
        self.config, self.max_positions, self.vocab_size = config, max_positions, vocab_size
        self.pages = PagePool(config.num_pages, config.page_size)
        self.requests: dict[int, Request] = {}
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._last_id = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; what can never run is refused here.  See :meth:`trueup.core.engine.Engine.add`."""
        request = Request(tuple(prompt), params, Sampler(params))
        if not request.prompt:
            raise ValueError("the prompt is empty; give at least one token")
        if bad := [t for t in request.prompt if not 0 <= t < self.vocab_size]:
            raise ValueError(f"token id {bad[0]} is outside the vocabulary of {self.vocab_size}")
        asked = f"{len(request.prompt)} prompt tokens and max_tokens={params.max_tokens}"
        if request.most_tokens > self.max_positions:
            raise ValueError(f"{asked} need {request.most_tokens} positions; the model has {self.max_positions}: "
                             "shorten the prompt or lower max_tokens")
        need, have = self.pages.pages_for(request.most_tokens), self.config.num_pages - 1
        if need > have:
            raise ValueError(f"{asked} need {need} pages of {self.config.page_size}; the pool has {have}: "
                             "shorten the prompt, lower max_tokens, or raise num_pages")
        self._last_id += 1
        self.requests[self._last_id] = request
        self._waiting.append(self._last_id)
        return self._last_id

    def remove(self, request_id: int) -> None:
        """Forget a request and give its pages back; unknown ids are ignored."""
        if (request := self.requests.pop(request_id, None)) is None:
            return
        if request_id in self._running:
            self._running.remove(request_id)
            self.pages.release(request.pages)
        else:
            self._waiting.remove(request_id)

    def schedule(self) -> tuple[list[Work], dict[int, Sequence[int]]]:
        """The next forward: each request's work, and its input ids.  Every decoding request takes part."""
        self._admit()
        work, inputs, budget = [], {}, self.config.prefill_tokens
        for r in self._running:
            request = self.requests[r]
            if request.in_prompt and not budget:
                continue
            inputs[r] = request.next_input(budget)
            budget -= len(inputs[r]) if request.in_prompt else 0
            mode = Mode.PREFILL if request.in_prompt else Mode.DECODE
            work.append(Work(r, mode, request.committed, len(inputs[r]), request.pages))
        return work, inputs

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_requests:
            request = self.requests[self._waiting[0]]
            need = self.pages.pages_for(request.most_tokens)
            if need > self.pages.free:
                return  # nobody overtakes
            request.pages = self.pages.allocate(need)
            self._running.append(self._waiting.popleft())

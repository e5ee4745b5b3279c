"""Text in, text out: a model, its tokenizer, and an engine."""
from collections.abc import Iterator, Sequence
from pathlib import Path

from trueup.core.engine import Engine, EngineConfig
from trueup.core.model import Model
from trueup.core.round import Round
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.speculation.drafter import Drafter
from trueup.models import zoo
from trueup.models.build import load_model
from trueup.models.completion import Completion
from trueup.models.drafters import DRAFT_TOKENS, make_drafter
from trueup.models.tokenizer import Tokenizer

CACHE_BYTES = 2**30


class LLM:
    """Prompts that are run at the same time share every forward.

    ``model``, ``tokenizer``, ``engine`` and ``name`` are the parts; the engine is not thread-safe, so one
    thread runs it (:mod:`trueup.server` has a thread of its own for it).  ``acceptance`` counts what became of drafts.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, name: str, engine_config: EngineConfig | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.engine = Engine(model, engine_config or default_engine_config(model), drafter)
        self.acceptance = Acceptance()
        self._running: dict[int, Completion] = {}

    @classmethod
    def from_pretrained(
        cls, name_or_folder: str | Path, device: str | None = None, dtype: str | None = None,
        engine_config: EngineConfig | None = None, *, spec: str | Path | None = None,
        draft_tokens: int = DRAFT_TOKENS, progress: bool = True,
    ) -> "LLM":
        """Load a model of the zoo or a checkpoint folder; see :func:`trueup.models.load_model`.

        ``spec`` and ``draft_tokens`` choose a drafter, see :func:`trueup.models.drafters.make_drafter`.

        Raises:
            ValueError: what was given cannot be loaded.
        """
        folder = zoo.resolve(name_or_folder)
        model = load_model(folder, device=device, dtype=dtype, progress=progress)
        drafter = None if spec is None else make_drafter(spec, model, draft_tokens)
        tokenizer = Tokenizer.from_folder(folder, model.config)
        return cls(model, tokenizer, Path(folder).resolve().name, engine_config, drafter)

    def generate(self, prompts: str | Sequence[str], params: SamplingParams | None = None) -> list[Completion]:
        """Continue every prompt, all of them in one batch.

        Raises:
            ValueError: a prompt that is empty, or too long for the model or the cache; nothing has run then.
        """
        completions = [self.start(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        for _ in self.rounds(completions, params):
            pass
        return completions

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece; pieces are whole characters.

        Raises:
            ValueError: as in :meth:`generate`, when the first piece is asked for.
        """
        completion, sent = self.start(prompt), 0
        for _ in self.rounds([completion], params):
            if piece := completion.text[sent:]:
                sent += len(piece)
                yield piece
        if rest := completion.text[sent:]:  # another iterator ran the last round
            yield rest

    def start(self, prompt: str | list[int]) -> Completion:
        """A completion without tokens yet."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Completion(prompt, ids, self.tokenizer.stream())

    def rounds(self, completions: Sequence[Completion], params: SamplingParams | None = None) -> Iterator[Round]:
        """Run started completions to their end; yields each engine round after they have grown by it.

        A caller that stops early frees the requests' pages by closing the iterator.

        Raises:
            ValueError: as in :meth:`generate`, when the first round is asked for.
        """
        added: list[int] = []
        try:
            for completion in completions:
                added.append(self.engine.add(completion.prompt_ids, params))
                self._running[added[-1]] = completion
            while any(completion.finish_reason is None for completion in completions):
                yield self._step()
        finally:
            for request in added:
                self.engine.abort(request)
                self._running.pop(request, None)

    def _step(self) -> Round:
        """One round, for whoever is running: two iterators may be read by turns."""
        done = self.engine.step()
        self.acceptance.add(done)
        for request, ids in done.tokens.items():
            if request in self._running:
                self._running[request].extend(ids, done.finished.get(request))
        return done


def default_engine_config(model: Model) -> EngineConfig:
    """Pages for eight requests at the model's position limit, but at most 1 GiB of cache, and one page at least."""
    config = EngineConfig()
    wanted = config.max_requests * -(-model.max_positions // config.page_size)
    affordable = CACHE_BYTES // (model.cache_spec.bytes_per_token * config.page_size)
    return EngineConfig(num_pages=1 + max(1, min(wanted, affordable)))

"""The parts of an engine's round around its one forward: whose turn it is to draft, what is kept, what is learned."""
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trueup.core.layout import Layout, Mode
from trueup.core.planning import Work
from trueup.core.round import Round
from trueup.core.rows import Rows
from trueup.core.scheduler import Request
from trueup.core.speculation.drafter import Draft, Drafter, Fed, Turn

Requests = Mapping[int, Request]
Inputs = dict[int, Sequence[int]]


def propose(drafter: Drafter | None, work: Sequence[Work], requests: Requests) -> dict[int, Draft]:
    """Drafts for requests that decode; so many that even if all are kept max_tokens is not passed."""
    if drafter is None:
        return {}
    turns = []
    for w in work:
        request = requests[w.request]
        most = request.params.max_tokens - len(request.generated) - 1
        if w.mode is Mode.DECODE and request.params.speculate and most > 0:
            turns.append(Turn(w.request, request.tokens, w.pages, most, request.sampler))
    return drafter.propose(turns) if turns else {}


def with_drafts(work: Sequence[Work], inputs: Inputs, drafts: Mapping[int, Draft]) -> tuple[list[Work], Inputs]:
    """Decoding becomes verification where there is a draft: the pending token, and the drafts behind it."""
    longer = [replace(w, mode=Mode.VERIFY, length=1 + len(drafts[w.request].tokens)) if w.request in drafts else w
              for w in work]
    return longer, {r: [*ids, *drafts[r].tokens] if r in drafts else ids for r, ids in inputs.items()}


def settle(done: Round, work: Sequence[Work], logits: Rows, drafts: Mapping[int, Draft], requests: Requests,
           eos_token_ids: tuple[int, ...]) -> Round:
    """Sample for every request whose prompt is complete, and count what is in the cache for good; fills ``done``."""
    scored = logits.by_request()  # [rows, V] each
    for w in work:
        r, request = w.request, requests[w.request]
        request.committed = w.start + w.length
        if not request.in_prompt:  # else its last row predicts a prompt token, which is known
            draft = drafts.get(r) or Draft((), scored[r][:0])
            kept, token = request.sampler.verify(scored[r], draft.q, draft.tokens)
            request.committed -= len(draft.tokens) - kept
            done.tokens[r] = request.take((*draft.tokens[:kept], token), eos_token_ids)
            if r in drafts:
                done.drafted[r], done.accepted[r] = draft.tokens, kept
            if request.finished:
                done.finished[r] = request.finished
        done.written[r] = range(w.start, request.committed)
    return done


def learn(drafter: Drafter | None, work: Sequence[Work], requests: Requests, done: Round, features: Rows
          ) -> tuple[Layout, ...]:
    """Show the drafter the rows of this round, and the token after each; returns the drafter's forwards."""
    if drafter is None:
        return ()
    rows, taught = features.by_request(), []
    for w in work:
        request = requests.get(w.request)  # gone if it finished
        if request and request.params.speculate:
            mode = Mode.PREFILL if w.mode is Mode.PREFILL else Mode.DRAFT_EXTEND
            kept = len(done.written[w.request])
            following = [*request.tokens[w.start + 1 : w.start + kept + 1], *[0] * (w.length - kept)]
            taught.append(Fed(w.request, mode, w.start, following, rows[w.request], kept, w.pages))
    drafter.learn(taught)
    layouts = tuple(drafter.layouts)
    drafter.layouts.clear()
    return layouts

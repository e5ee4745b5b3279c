"""Drafting without a model: what followed the last time the same words stood here."""
from collections.abc import Sequence

from trueup.core.cache import Pools
from trueup.core.layout import Layout
from trueup.core.pages import PagePool
from trueup.core.speculation.drafter import Draft, Fed, Turn, certain


class NgramDrafter:
    """Looks up the longest recent n-gram of the request's own text, and proposes what followed it.

    Free of cost, and good where text repeats itself: code, quotations, lists.  Drafts are certain, not drawn.

    Args:
        draft_tokens: most tokens proposed at a time.
        vocab_size: the target's.
        longest: length of the n-grams tried first.
        shortest: and last.

    Raises:
        ValueError: no token to draft, or lengths the wrong way round.

    Source: prompt lookup decoding (vLLM: vllm/v1/spec_decode/ngram_proposer.py).
    """

    taps: tuple[int, ...] | None = None

    def __init__(self, draft_tokens: int, vocab_size: int, longest: int = 4, shortest: int = 1) -> None:
        if draft_tokens < 1 or not 1 <= shortest <= longest:
            raise ValueError(f"draft_tokens={draft_tokens}, n-grams of {shortest} to {longest}; expected at least 1 "
                             "token, and shortest <= longest")
        self.draft_tokens, self.vocab_size = draft_tokens, vocab_size
        self.lengths = range(longest, shortest - 1, -1)
        self.layouts: list[Layout] = []

    def bind(self, target: Pools, pages: PagePool, buckets: Sequence[int]) -> None:
        """Nothing to cache."""

    def propose(self, turns: Sequence[Turn]) -> dict[int, Draft]:
        """Drafts of the requests whose last tokens were seen before."""
        found = {t.request: self.lookup(t.tokens)[: t.most] for t in turns}
        return {r: certain(tokens, self.vocab_size) for r, tokens in found.items() if tokens}

    def lookup(self, text: Sequence[int]) -> list[int]:
        """What followed the latest earlier occurrence of the longest n-gram that ``text`` ends with."""
        text = list(text)
        for n in self.lengths:
            tail = text[len(text) - n :]
            for at in range(len(text) - n - 1, -1, -1):
                if text[at : at + n] == tail:
                    return text[at + n : at + n + self.draft_tokens]
        return []

    def learn(self, fed: Sequence[Fed]) -> None:
        """Nothing to learn: the text is in each turn."""

    def forget(self, request: int) -> None:
        """Nothing is remembered."""

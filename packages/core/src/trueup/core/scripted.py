"""A model whose next token is arithmetic on everything that the cache says, and a drafter that is right on purpose.

Engines are tested with them.  The model stores each token id in the cache and predicts from what it reads back through
the block table, so a wrong slot, page, length or position changes its text.  No weights, any device.
"""
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trueup.core.cache import CacheSpec, Pools
from trueup.core.layout import Layout
from trueup.core.pages import PagePool
from trueup.core.speculation.drafter import Draft, Fed, Turn, certain
from trueup.core.view import DeviceView


class ScriptedModel:
    """next = (sum over the context of token * (position + 1)) mod vocab_size.

    Hidden rows are one-hot [Tp, V], so logits are the hidden rows themselves.
    """

    def __init__(self, vocab_size: int = 97, max_positions: int = 4096, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size, self.max_positions, self.eos_token_ids = vocab_size, max_positions, eos_token_ids
        self.cache_spec = CacheSpec(1, 1, 1, torch.float64, torch.device("cpu"))

    def expected(self, context: list[int], count: int) -> list[int]:
        """The continuation, from the formula alone."""
        text = list(context)
        for _ in range(count):
            text.append(sum(t * (i + 1) for i, t in enumerate(text)) % self.vocab_size)
        return text[len(context) :]

    def forward(self, tokens: Tensor, view: DeviceView, pools: Pools) -> Tensor:
        """Hidden rows [Tp, V] of token ids [Tp]; writes each id to its slot, and reads the context back."""
        hidden = torch.zeros(len(tokens), self.vocab_size)  # [Tp, V]
        for seg in view.segments:
            flat = pools.latent[0].view(-1)  # [pages * P]
            flat[seg.slots] = tokens[seg.rows].double()
            start = seg.rows.start
            for i, (end, kv) in enumerate(zip(seg.q_cum, seg.kv_lens, strict=True)):
                q = seg.segment.q_lens[i]
                pages = pools.latent[0][seg.block_table[i].long()].flatten()[:kv]  # [kv]
                total = (pages * torch.arange(1, kv + 1)).cumsum(0)[kv - q :]  # [q]
                rows = torch.arange(start + end - q, start + end)  # [q]
                hidden[rows, (total % self.vocab_size).long()] = 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] of hidden rows [B, V]: the rows themselves."""
        return hidden


class ScriptedDraftModel:
    """A draft model for :class:`ScriptedModel` that is right whenever everything it is handed is right.

    Of a context t_0, t_1, ... call S_p the sum of t_i * (i + 1) for i up to p, modulo V: the token after p.  The
    target's hidden row at p is S_p, one-hot.  From it and the token at p + 1 follows S_(p+1), the token at p + 2, which
    is also what this model hands to its own next step.  It keeps what it was told in a cache and says something wrong
    where the cache contradicts its input, so a token one off, a wrong position, slot or hidden row, or a row left over
    from rejected drafts all show as lower acceptance.
    """

    taps: tuple[int, ...] | None = ()

    def __init__(self, target: ScriptedModel) -> None:
        self.vocab_size, self.spec = target.vocab_size, target.cache_spec

    def make_pools(self, target: Pools, pages: PagePool) -> Pools:
        """One number a token: the token after it; and S_0 in the rope pool."""
        return Pools(self.spec, pages)

    def fuse(self, features: Tensor) -> Tensor:
        """[Tp, V], as they are."""
        return features

    def forward(self, next_tokens: Tensor, hidden: Tensor, view: DeviceView, pools: Pools) -> Tensor:
        """[Tp, V] one-hot: S_(p+1) where all agrees, another token where not."""
        out = torch.zeros(len(next_tokens), self.vocab_size)  # [Tp, V]
        sums = hidden.argmax(-1)  # [Tp], S_p as it was handed over
        for seg in view.segments:
            pools.latent[0].view(-1)[seg.slots] = next_tokens[seg.rows].double()
            pools.rope[0].view(-1)[seg.slots] = sums[seg.rows].double()
            start = seg.rows.start
            for i, (end, kv) in enumerate(zip(seg.q_cum, seg.kv_lens, strict=True)):
                table = seg.block_table[i].long()
                told, first = pools.latent[0][table].flatten()[:kv], pools.rope[0][table].flatten()[0]  # [kv], S_0
                total = first + torch.cat([told.new_zeros(1), (told * torch.arange(2, kv + 2)).cumsum(0)])  # [kv + 1]
                for row in range(start + end - seg.segment.q_lens[i], start + end):
                    p = int(view.positions[row])
                    agrees = int(total[p]) % self.vocab_size == int(sums[row]) and bool(hidden[row].sum() == 1)
                    out[row, (int(total[p + 1]) + (not agrees)) % self.vocab_size] = 1
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V]: the rows themselves."""
        return hidden


class ScriptedDrafter:
    """Proposes so many right tokens as a script says, then a wrong one: its acceptance is known in advance.

    Args:
        continuation: from a request's tokens and a count to what the target will say, such as
            :meth:`ScriptedModel.expected`; right for greedy requests.
        script: how many of the drafts are right, by round of each request, over and over.
        draft_tokens: drafts a round.
        vocab_size: the target's.

    Raises:
        ValueError: an empty script, or one with more right tokens than drafts.
    """

    taps: tuple[int, ...] | None = None

    def __init__(self, continuation: Callable[[list[int], int], list[int]], script: Sequence[int], draft_tokens: int,
                 vocab_size: int) -> None:
        if not script or not all(0 <= right <= draft_tokens for right in script):
            raise ValueError(f"script {list(script)} for {draft_tokens} drafts a round; expected numbers from 0 to "
                             f"{draft_tokens}, one at least")
        self.continuation, self.script = continuation, tuple(script)
        self.draft_tokens, self.vocab_size = draft_tokens, vocab_size
        self.layouts: list[Layout] = []
        self._rounds: Counter[int] = Counter()

    def bind(self, target: Pools, pages: PagePool, buckets: Sequence[int]) -> None:
        """A script has nothing to cache."""

    def propose(self, turns: Sequence[Turn]) -> dict[int, Draft]:
        """The right continuation up to the script's number, and one id too high behind it."""
        drafts = {}
        for turn in turns:
            right = self.script[self._rounds[turn.request] % len(self.script)]
            self._rounds[turn.request] += 1
            tokens = self.continuation(list(turn.tokens), min(self.draft_tokens, turn.most))
            wrong = [(t + 1) % self.vocab_size for t in tokens]
            drafts[turn.request] = certain(tokens[:right] + wrong[right:], self.vocab_size)
        return drafts

    def learn(self, fed: Sequence[Fed]) -> None:
        """A script has nothing to learn."""

    def forget(self, request: int) -> None:
        """Start the script anew, should the id come back."""
        del self._rounds[request]

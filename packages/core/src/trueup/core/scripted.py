"""A model whose next token is arithmetic on everything that the cache says: engines are tested with it.

It stores each token id in the cache and predicts from what it reads back through the block table, so a wrong
slot, page, length or position changes its text.  No weights, any device.
"""
import torch
from torch import Tensor

from trueup.core.cache import CacheSpec, Pools
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

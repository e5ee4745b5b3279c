"""From logits to tokens: the distribution that is drawn from, one draw, and the check of drafted tokens."""
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    The filters apply in this order, each to what the one before it left: temperature, top_k, top_p, min_p.

    Args:
        max_tokens: most tokens to generate.
        temperature: 0 is greedy, and no filter matters.
        top_k: keep so many of the likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach this sum.
        min_p: keep tokens at least so likely, relative to the likeliest.
        seed: makes a request's text repeatable, alone or in company; None draws one.
        ignore_eos: go on to max_tokens whatever is generated.
        speculate: let the engine's drafter, where it has one, propose tokens.

    Raises:
        ValueError: a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    speculate: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; expected 0 to 1")


def probabilities(logits: Float[Tensor, "T V"], params: SamplingParams) -> Float[Tensor, "T V"]:
    """What a token is drawn from, after temperature and filters; greedy is certainty.  At least fp32.

    Among equals the lower id counts as the likelier one, so that a filter keeps no more than it says.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()  # [T, V]
    if params.temperature == 0:
        return torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)  # [T, V]
    p = (x / params.temperature).softmax(-1)  # [T, V]
    if params.top_k or params.top_p < 1 or params.min_p:
        p = p * _kept(p, params)  # [T, V]
        p = p / p.sum(-1, keepdim=True)  # [T, V]
    return p


def _kept(p: Float[Tensor, "T V"], params: SamplingParams) -> Tensor:
    """Which tokens the filters leave, bool [T, V]; the likeliest always."""
    ordered, ids = p.sort(stable=True, dim=-1, descending=True)  # [T, V], [T, V]
    keep = torch.ones_like(ordered, dtype=torch.bool)  # [T, V]
    if params.top_k:
        keep[:, params.top_k :] = False
    left = ordered * keep  # [T, V]
    if params.top_p < 1:
        before = left.cumsum(-1) - left  # [T, V], the sum of likelier tokens
        keep &= before < params.top_p * left.sum(-1, keepdim=True)
    keep &= ordered >= params.min_p * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, ids, keep)  # [T, V]


def draw(p: Float[Tensor, " V"], uniform: float) -> int:
    """The token at which the cumulative distribution passes ``uniform``, in [0, 1); never one of probability 0."""
    total = p.double().cumsum(-1)  # [V]
    # The sum may end a rounding short of 1; right=True passes over tokens of probability 0.
    place = torch.searchsorted(total, uniform * total[-1:], right=True)
    return int(place) if place < len(p) else int(p.nonzero()[-1])


def verify(p: Float[Tensor, "W V"], q: Float[Tensor, "k V"], drafts: Sequence[int], uniforms: Sequence[float]
           ) -> tuple[int, int]:
    """How many of k drafts are kept, and the token that follows them; W = k + 1.

    Whatever q is, the tokens are distributed as if drawn from p one by one, provided that draft i was drawn from q[i].
    Draft x is kept with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from what p has
    more of than q, max(p - q, 0) divided by its sum (SB-31).  After k kept drafts comes a draw from p's last row, the
    bonus token.

    Args:
        p: the target's distributions: row i follows the i-th of [pending token, drafts...].
        q: what each draft was drawn from, by the same temperature and filters; certainty for one that was not drawn.
        drafts: k token ids.
        uniforms: k + 1 independent numbers in [0, 1): one for each draft, one for the last draw.

    Raises:
        ValueError: rows, drafts and uniforms that are not k + 1, k, k and k + 1.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", section 2.3.
    """
    k = len(drafts)
    if (len(p), len(q), len(uniforms)) != (k + 1, k, k + 1):
        raise ValueError(f"{len(p)} rows of p, {len(q)} of q and {len(uniforms)} uniforms for {k} drafts; expected "
                         f"{k + 1}, {k} and {k + 1}")
    for i, (x, uniform) in enumerate(zip(drafts, uniforms, strict=False)):
        if uniform * q[i, x] < p[i, x]:
            continue
        more = (p[i] - q[i]).clamp(min=0)  # [V]
        # Where p and q differ by rounding alone nothing may be left; then p itself is right.
        return i, draw(more if more.sum() > 0 else p[i], uniforms[k])
    return k, draw(p[k], uniforms[k])


def verify_greedy(logits: Float[Tensor, "W V"], drafts: Sequence[int]) -> tuple[int, int]:
    """What :func:`verify` comes to where p is certain: keep drafts while each is the argmax of the row before it."""
    best: list[int] = logits.argmax(-1).tolist()  # [W]
    kept = next((i for i, x in enumerate(drafts) if x != best[i]), len(drafts))
    return kept, best[kept]


class Sampler:
    """One request's random numbers, on the host, so that company cannot change its text.

    Drafting has a stream of its own: how many tokens a drafter proposes does not change which numbers verify them.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        seed = random.getrandbits(64) if params.seed is None else params.seed
        self._random, self._drafting = random.Random(seed), random.Random(f"draft {seed}")

    def draft(self, logits: Float[Tensor, " V"]) -> tuple[int, Float[Tensor, " V"]]:
        """A proposed token id, and the distribution [V] that it was drawn from."""
        q = probabilities(logits[None], self.params)[0]  # [V]
        return int(q.argmax()) if self.params.temperature == 0 else draw(q, self._drafting.random()), q

    def verify(self, logits: Float[Tensor, "W V"], q: Float[Tensor, "k V"], drafts: Sequence[int]) -> tuple[int, int]:
        """See :func:`verify`; ``logits`` are the target's.  Without drafts this is plain sampling."""
        if self.params.temperature == 0:
            return verify_greedy(logits, drafts)
        uniforms = [self._random.random() for _ in range(len(drafts) + 1)]
        return verify(probabilities(logits, self.params), q, drafts, uniforms)

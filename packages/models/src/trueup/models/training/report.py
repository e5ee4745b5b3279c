"""The nano model's card: measured, not claimed.  ``python -m trueup.models.training card``."""
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.training import ngram, twin
from trueup.models.training.corpus import Corpus
from trueup.models.training.train import evaluate

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DRAFTS = 48, 96, 40, 3
LOW_REPETITION = 0.1  # share of 6-grams that occurred before


@dataclass(frozen=True)
class ChainResult:
    """Greedy chain drafting on one prompt: the text, and how many tokens each round gained (accepted + 1)."""

    text: list[int]
    rounds: list[int]

    @property
    def repetition(self) -> float:
        grams = [tuple(self.text[i : i + 6]) for i in range(len(self.text) - 5)]
        return 1 - len(set(grams)) / len(grams)


@torch.no_grad()
def greedy_text(p: twin.Params, c: ModelConfig, prompts: Tensor, count: int) -> Tensor:
    """[B, T + count] ids: the main model's greedy continuation of prompts [B, T], without a cache."""
    ids = prompts
    for _ in range(count):
        best = twin.head(p, twin.forward(p, c, ids)[:, -1]).argmax(-1, keepdim=True)  # [B, 1]
        ids = torch.cat([ids, best], 1)  # [B, T + 1]
    return ids


@torch.no_grad()
def mtp_drafts(p: twin.Params, c: ModelConfig, ids: Tensor) -> list[Tensor]:
    """[B, T] the MTP layer's drafts of every step on text ids [B, T + 4], from every slot, fed the text."""
    T = ids.shape[1] - DRAFTS - 1
    h = twin.forward(p, c, ids)  # [B, T + 4, H]
    return [twin.head(p, f).argmax(-1) for f in twin.mtp_steps(p, c, h[:, :T], ids, DRAFTS)]  # steps x [B, T]


def chain_rounds(p: twin.Params, c: ModelConfig, ids: Tensor, start: int) -> list[ChainResult]:
    """Rounds of a greedy chain of 3 drafts over texts ids [B, T] that the main model itself wrote after ``start``.

    The text is known, so a round is arithmetic: MTP step s, fed the text, drafts the token s + 1 places on; a
    draft is accepted while all drafts before it are.  Feeding the text instead of the draft is exact, since a
    step is only reached when the drafts before it equal the text.
    """
    return count_rounds(mtp_drafts(p, c, ids), ids, start)


def count_rounds(drafts: list[Tensor], ids: Tensor, start: int) -> list[ChainResult]:
    """Rounds on text ids [B, T + 4] from what every slot drafted for it: steps x [B, T]."""
    T = drafts[0].shape[1]
    right = torch.stack([d == ids[:, s + 1 : s + 1 + T] for s, d in enumerate(drafts, 1)], -1)  # [B, T, steps]
    accepted = right.long().cumprod(-1).sum(-1)  # [B, T]: accepted drafts of a round whose last hidden is at p
    results = []
    for row, text in zip(accepted.tolist(), ids.tolist(), strict=True):
        rounds, at = [], start - 1  # the position of the last hidden; the pending token stands behind it
        while at < start - 1 + NEW_TOKENS:
            rounds.append(row[at] + 1)
            at += rounds[-1]
        results.append(ChainResult(text[start : start + NEW_TOKENS], rounds))
    return results


def own_text(p: twin.Params, c: ModelConfig, held_out: Tensor) -> Tensor:
    """[B, T] what the main model writes greedily after PROMPT_TOKENS of evenly spaced places in ``held_out``."""
    starts = torch.linspace(0, len(held_out) - PROMPT_TOKENS - 1, PROMPTS).long()
    prompts = held_out[starts[:, None] + torch.arange(PROMPT_TOKENS)].long()  # [B, PROMPT_TOKENS]
    # The last round looks a few tokens past the NEW_TOKENS that are counted.
    return greedy_text(p, c, prompts, NEW_TOKENS + DRAFTS + 2)  # [B, T]


def pooled(results: list[ChainResult]) -> float:
    """Tokens per round over all rounds: a pooled ratio, not a mean of ratios."""
    rounds = [r for result in results for r in result.rounds]
    return sum(rounds) / len(rounds)


def measure(params: twin.Params, stored: twin.Params, c: ModelConfig, stream: Tensor, held_out: Tensor,
            without_tests: Tensor) -> dict:
    """Every figure of the card.  ``params`` fp32 as trained, ``stored`` as a reader of the file gets them.

    ``without_tests`` is the part of ``held_out`` from files outside test folders: tests repeat themselves more.
    """
    begin = time.monotonic()
    baseline = ngram.fit(stream.numpy().astype(np.int64), order=5, vocab_size=c.vocab_size)
    kn5 = baseline.loss(held_out.numpy().astype(np.int64))
    fp32 = evaluate(params, c, held_out, T=512)
    bf16 = evaluate({n: v.float() for n, v in stored.items()}, c, held_out, T=512)
    weights = {n: v.float() for n, v in stored.items()}
    chain = chain_rounds(weights, c, own_text(weights, c, held_out), PROMPT_TOKENS)
    plain = [r for r in chain if r.repetition < LOW_REPETITION]
    return {
        "plain_kn5": baseline.loss(without_tests.numpy().astype(np.int64)),
        "plain_loss": evaluate(weights, c, without_tests, T=512)["loss"],
        "kn5_loss": kn5, "loss": fp32["loss"], "stored_loss": bf16["loss"], "top1": fp32["top1"],
        "agree": [bf16[f"agree{d}"] for d in (1, 2, 3)],
        "tokens_per_round": pooled(chain), "rounds": sum(len(r.rounds) for r in chain),
        "low_repetition_rows": len(plain), "low_repetition": pooled(plain) if plain else None,
        "seconds": time.monotonic() - begin,
    }


# ruff: noqa: E501  (table rows of the card)
CARD = """# glm-4.7-flash-nano

A GLM-4.7-Flash-shaped model of {parameters:,} parameters with one trained MTP layer, made for trueup: same
architecture, file format and tensor names as the real one, small enough to live in the repository. It writes
text of the shape of Python, without sense. The point is the machinery, and that acceptance, loss and speed are
real numbers on a laptop.

| | |
|---|---|
| layers | {layers} (first dense, then experts) and one MTP layer, trained jointly, unrolled three steps |
| attention | MLA: {heads} query heads, nope {nope}, rope {rope}, v {v}, latent rank {rank} |
| experts | {experts}, {top_k} a token, and one shared |
| tokenizer | byte-level BPE of its own, {vocab} ids |
| positions | {positions} |
| storage | bf16; the router's correction bias fp32 |

## Figures

Measured by `make model-card` after the training, on {cpu}, {date}, torch {torch}. For the weights as they lie here,
`python -m trueup.models.training measure --model FOLDER` measures the same again.

| figure | value |
|---|---|
| tokens seen in training | {tokens:,} ({minutes:.0f} minutes, {threads}) |
| held-out loss, nats per token | **{loss:.4f}** as trained in fp32; {stored_loss:.4f} from the stored bf16 file (difference {gap:+.4f}) |
| interpolated modified Kneser-Ney 5-gram, fitted on the same training part | {kn5_loss:.4f}: the model is {margin:.3f} nats below |
| the same two on the {plain_files} held-out files that are not tests | {plain_loss:.4f} against {plain_kn5:.4f} |
| top-1 accuracy, held out | {top1:.3f} |
| MTP agreement with the main model, depths 1 / 2 / 3 | {agree[0]:.3f} / {agree[1]:.3f} / {agree[2]:.3f} |
| tokens per round, greedy chain of 3, {new} tokens after each of {prompts} held-out prompts | **{tokens_per_round:.2f}** over {rounds} rounds |
| the same on the {low_repetition_rows} rows with little repetition (under {low:.0%} of 6-grams seen before) | {low_text} |

Loss and agreement: windows of 512 tokens over all held-out text, each with its own context. Greedy text of a
model this small falls into loops, and loops inflate acceptance, hence the last row.

## Corpus

The source of Python {python}'s own standard library, tests included, without tables of encodings and without
third-party packages: {train_files} files, {train_tokens:,} tokens to train on; {held_files} files, {held_tokens:,} tokens
held out (files whose path has a SHA-1 divisible by 40). SHA-256 over names and contents of all files read:
`{sha256}`.
Another Python version gives another corpus: the weights are pinned, not the corpus.

## How it was made

`make train` (resumable; 130 minutes in fp32, unless `--minutes`, `--threads` and `--dtype` say otherwise, as they did
here; `--further` goes on from these weights). Plain PyTorch twin of the served model, Muon for matrices and AdamW for
the rest, seed 47. Loss by tokens seen:

![training and held-out loss](loss.png)

Licence: Apache-2.0 like the rest of trueup. The text it was trained on is under the PSF licence.
"""


def without_tests(texts: dict[str, str]) -> dict[str, str]:
    """Files outside folders of tests, by path."""
    return {name: text for name, text in texts.items() if not {"test", "tests", "idle_test"} & set(name.split("/"))}


def card(figures: dict, state: dict, c: ModelConfig, corpus: Corpus, sizes: tuple[int, int, int], host: dict) -> str:
    """The filled-in text; ``sizes`` = (parameters, training tokens, held-out tokens) available."""
    low = figures["low_repetition"]
    return CARD.format(
        **figures, **host, parameters=sizes[0], train_tokens=sizes[1], held_tokens=sizes[2], tokens=state["tokens"],
        minutes=state["seconds"] / 60, gap=figures["stored_loss"] - figures["loss"],
        margin=figures["kn5_loss"] - figures["loss"], new=NEW_TOKENS, prompts=PROMPTS, low=LOW_REPETITION,
        low_text="none" if low is None else f"{low:.2f}", layers=c.num_hidden_layers, heads=c.num_attention_heads,
        nope=c.qk_nope_head_dim, rope=c.qk_rope_head_dim, v=c.v_head_dim, rank=c.kv_lora_rank,
        experts=c.n_routed_experts, top_k=c.num_experts_per_tok, vocab=c.vocab_size,
        positions=c.max_position_embeddings, train_files=len(corpus.train), held_files=len(corpus.held_out),
        sha256=corpus.sha256, plain_files=len(without_tests(corpus.held_out)),
    )

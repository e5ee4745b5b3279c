"""The EAGLE-3 head's card: measured, not claimed.  ``python -m trueup.models.training eagle-card``."""
import torch
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.training import eagle_twin, report, train, twin
from trueup.models.training.eagle import STEP_WEIGHT, STEPS, evaluate
from trueup.models.training.report import DRAFTS, LOW_REPETITION, NEW_TOKENS, PROMPT_TOKENS, ChainResult, pooled


@torch.no_grad()
def drafts_on(p: twin.Params, e: Eagle3Config, target: twin.Params, c: ModelConfig, ids: Tensor) -> list[Tensor]:
    """[B, T] the drafts of every step on text ids [B, T + 4], from every slot, fed the text."""
    T = ids.shape[1] - DRAFTS - 1
    features, _ = eagle_twin.target_features(target, c, e, ids)  # [B, T + 4, 3H]
    steps = eagle_twin.unroll(p, e, target["model.embed_tokens.weight"], features[:, :T], ids, DRAFTS)
    return [eagle_twin.drafted(p, logits) for logits in steps]  # steps x [B, T]


def agreement(drafts: list[Tensor], ids: Tensor) -> list[float]:
    """Share of drafts equal to the text, by depth, at the slots that draft the NEW_TOKENS."""
    slots = torch.arange(PROMPT_TOKENS - 1, PROMPT_TOKENS - 1 + NEW_TOKENS)  # [NEW_TOKENS]
    return [(d[:, slots] == ids[:, slots + s + 1]).float().mean().item() for s, d in enumerate(drafts, 1)]


def tokens_per_round(chain: list[ChainResult]) -> dict:
    low = [result for result in chain if result.repetition < LOW_REPETITION]
    return {"per_round": pooled(chain), "rounds": sum(len(r.rounds) for r in chain), "low_rows": len(low),
            "low_per_round": pooled(low) if low else None}


@torch.no_grad()
def measure(p: twin.Params, e: Eagle3Config, target: twin.Params, c: ModelConfig, held_out: Tensor) -> dict:
    """Every figure of the card, of the head and of the target's MTP layer on the same text."""
    ids = report.own_text(target, c, held_out)  # [B, T + 4]
    chosen = ids[:, PROMPT_TOKENS : PROMPT_TOKENS + NEW_TOKENS]  # [B, NEW_TOKENS]
    held = train.evaluate(target, c, held_out, T=512)
    figures: dict = {"outside": 1 - p["t2d"][chosen].float().mean().item()}
    for name, drafts, agree in (
        ("head", drafts_on(p, e, target, c, ids), evaluate(p, e, target, c, held_out, T=512)),
        ("mtp", report.mtp_drafts(target, c, ids), [held[f"agree{d}"] for d in range(1, DRAFTS + 1)]),
    ):
        figures[name] = {"agree": agree, "own_agree": agreement(drafts, ids)}
        figures[name] |= tokens_per_round(report.count_rounds(drafts, ids, PROMPT_TOKENS))
    return figures


# ruff: noqa: E501  (table rows of the card)
CARD = """# {name}

An EAGLE-3 draft head of {parameters:,} parameters for {target}, made for trueup: architecture, file format
and tensor names of a published head, small enough to live in the repository. It drafts from three residual streams of
the target, which was frozen while the head was trained. The target has an MTP layer, too, which was trained
together with it; the figures stand side by side.

| | |
|---|---|
| layer | one, Llama-shaped: {heads} query and {kv_heads} key heads of width {head_dim}, MLP {mlp}; hidden {hidden} as the target's |
| input | `fc` over the residual streams entering layers {captured} of the target, joined from low to high, before any norm |
| fed back | the layer's output before `norm` |
| draft vocabulary | {draft_vocab} of {vocab} ids, the most frequent in the training text; `d2t` holds target id minus draft id |
| embedding | the target's own, not in the file |
| storage | bf16, {megabytes:.1f} MB; `d2t` int64, `t2d` bool |

## Why the layer ids are listed downwards

`eagle_aux_hidden_state_layer_ids` is {ids}: the states entering layers {captured}; the last is what leaves the
target's {layers} layers, before `model.norm`. Ids name the *input* of a layer. But sglang reads a list whose first
id is 1 as *outputs*, for targets of this kind, and captures one layer later. So the list does not begin with 1. Its order
means nothing else: states are captured, and joined, while the engine walks up the layers. An engine that looks only
at the inputs of existing layers never meets id {layers}.

## Figures

Measured by `python -m trueup.models.training eagle-card` (`make eagle-card`) after the training, on {cpu}, {date},
torch {torch}, for the stored bf16 weights of head and target, computed in fp32. `python -m trueup.models.training eagle-measure --model TARGET_FOLDER --head FOLDER`
measures the same again.

| figure | this head | the target's MTP layer |
|---|---|---|
| agreement with the target on held-out text, depths 1 / 2 / 3 | {head[agree]} | {mtp[agree]} |
| agreement on the target's own greedy text, depths 1 / 2 / 3 | {head[own_agree]} | {mtp[own_agree]} |
| tokens per round, greedy chain of 3, {new} tokens after each of {prompts} held-out prompts | **{head[per_round]}** over {head[rounds]} rounds | {mtp[per_round]} over {mtp[rounds]} |
| the same on the {head[low_rows]} rows with little repetition (under {low:.0%} of 6-grams seen before) | {head[low_per_round]} | {mtp[low_per_round]} |

A token that the head cannot draft counts as a miss: {outside:.1%} of that greedy text. Held-out text: windows of 512
tokens over all of it, each with its own context. Depth d is step d of the chain, fed the text before it. Greedy text of
a model this small falls into loops, and loops inflate acceptance, hence the last row.

The MTP layer was trained with the target for all of its training, the head afterwards on the frozen target:
compare the two as drafters of this checkpoint, not as methods.

## How it was made

`python -m trueup.models.training eagle` (`make train-eagle`; resumable; 70 minutes in fp32, unless `--minutes`,
`--threads` and `--dtype` say otherwise, as they did here): {minutes:.0f} minutes, {threads};
{tokens:,} tokens seen. Corpus, its split and the tokenizer are the target's (Python {python}; SHA-256 over all
files read `{sha256}`).

Training-time test of {steps} steps (3 in the first 60 % of the time), soft cross-entropy against the target's
distribution over the draft vocabulary, step weights {weight}^s, slots whose best target token lies outside not
counted. Muon for matrices, AdamW for the rest, seed {seed}; their rates were chosen by held-out agreement in runs of 2.5
minutes. `lm_head` started at the target's rows, `fc` at the highest state, and the first query head of each group
at its key head. Agreement is that of a sample of the held-out text:

![training loss and agreement](loss.png)

Licence: Apache-2.0 like the rest of trueup. The text it was trained on is under the PSF licence.
"""


def card(figures: dict, state: dict, e: Eagle3Config, c: ModelConfig, about: dict) -> str:
    """The filled-in text; ``about`` says what this file cannot know: names, sizes, the machine and the corpus."""
    def shown(value) -> str:
        if isinstance(value, list):
            return " / ".join(f"{v:.3f}" for v in value)
        return f"{value:.2f}" if isinstance(value, float) else "none" if value is None else str(value)

    columns = {name: {k: shown(v) for k, v in figures[name].items()} for name in ("head", "mtp")}
    return CARD.format(
        **columns, **about, outside=figures["outside"], tokens=state["tokens"], minutes=state["seconds"] / 60,
        heads=e.num_attention_heads, kv_heads=e.num_key_value_heads, head_dim=e.head_dim, mlp=e.intermediate_size,
        hidden=e.hidden_size, vocab=e.vocab_size, draft_vocab=e.draft_vocab_size,
        captured=", ".join(map(str, e.taps)), layers=c.num_hidden_layers, new=NEW_TOKENS,
        prompts=report.PROMPTS, low=LOW_REPETITION, steps=STEPS, weight=STEP_WEIGHT,
    )

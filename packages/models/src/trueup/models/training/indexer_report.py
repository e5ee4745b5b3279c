"""The sparse model's card: measured, not claimed.  ``python -m trueup.models.training indexer-card``."""
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from trueup.models.config import ModelConfig
from trueup.models.training import twin
from trueup.models.training.indexer import WINDOW, evaluate, learned
from trueup.models.training.indexer_twin import index_scores

COUNTS = (8, 16, 32, 64, 128, 256)  # of positions; the curve is over rows that see more than the largest


class Curves:
    """Dense attention that notes, by layer, what share of it the best k positions of three orders hold.

    The orders: the indexer's scores, the attention's own weights (no choice holds more), and the newest first.
    """

    def __init__(self, p: twin.Params, c: ModelConfig) -> None:
        self.p, self.c = p, c
        self.held: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def __call__(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = x.shape[1]
        weights = ((q * self.c.softmax_scale) @ k.mT + twin.causal_mask(T, q.dtype)).softmax(-1)  # [B, N, T, T]
        mass = weights.mean(1)[:, COUNTS[-1] :]  # [B, rows, T]
        newest = torch.arange(T).where(twin.causal_mask(T, q.dtype) == 0, -1)[COUNTS[-1] :].expand_as(mass)
        orders = {"indexer": index_scores(self.p, self.c, layer, x)[:, COUNTS[-1] :], "best": mass, "newest": newest}
        for name, order in orders.items():
            best = order.topk(COUNTS[-1], -1).indices  # [B, rows, K]
            total = mass.gather(-1, best).cumsum(-1)[..., [count - 1 for count in COUNTS]]  # [B, rows, counts]
            self.held[layer][name].append(total.mean((0, 1)))  # [counts]
        return weights @ v  # [B, N, T, Dv]

    def means(self) -> dict[str, dict[str, list[float]]]:
        """By layer, then order: the share at each of COUNTS."""
        return {str(layer): {name: torch.stack(parts).mean(0).tolist() for name, parts in orders.items()}
                for layer, orders in self.held.items()}


@torch.no_grad()
def recall_curves(p: twin.Params, c: ModelConfig, stream: Tensor, windows: int = 64) -> dict:
    """See :class:`Curves`; over evenly spaced windows of ``stream``."""
    attend = Curves(p, c)
    for at in torch.linspace(0, len(stream) - WINDOW - 2, windows).long().split(8):
        tokens = stream[at[:, None] + torch.arange(WINDOW + 2)].long()  # [B, T + 2]
        h = twin.forward(p, c, tokens[:, :WINDOW], attend=attend)  # [B, T, H]
        twin.mtp_steps(p, c, h, tokens, 1, attend=attend)
    return attend.means()


@torch.no_grad()
def measure(p: twin.Params, base: twin.Params, c: ModelConfig, held_out: Tensor) -> dict:
    """Every figure of the card: ``p`` the sparse model as a reader of its files gets it, ``base`` the dense one.

    Four losses, since two things have changed: the attention, and the weights.
    """
    indexer, _ = learned(p)
    crossed = base | {n: p[n] for n in indexer}  # the dense weights under the trained indexers
    return {
        "dense": evaluate(crossed, c, held_out, dense=True), "untuned": evaluate(crossed, c, held_out),
        "tuned_dense": evaluate(p, c, held_out, dense=True), "sparse": evaluate(p, c, held_out),
        "curves": recall_curves(p, c, held_out),
    }


def plot_recall(curves: dict, c: ModelConfig, path: Path) -> None:
    """One panel a layer: share of the attention held, over how many positions are chosen."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert c.indexer is not None
    figure, panels = plt.subplots(1, len(curves), figsize=(3 * len(curves), 3.2), sharey=True, layout="constrained")
    styles = {"best": (":", "the attention's own best"), "indexer": ("-", "chosen by the indexer"),
              "newest": ("--", "the newest")}
    for panel, (layer, orders) in zip(panels, curves.items(), strict=True):
        for name, (style, label) in styles.items():
            panel.plot(COUNTS, orders[name], style, color="tab:blue" if name == "indexer" else "tab:gray", label=label)
        panel.axvline(c.indexer.topk, color="tab:orange", linewidth=0.8)
        panel.set(title=f"layer {layer}" if int(layer) < c.num_hidden_layers else "MTP layer", xscale="log",
                  xticks=COUNTS, xticklabels=COUNTS, xlabel="positions", ylim=(0, 1.02))
        panel.minorticks_off()
    panels[0].set(ylabel="share of dense attention")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ruff: noqa: E501  (table rows of the card)
CARD = """# {name}

{target} with sparse attention: a lightning indexer in each of its {layers} layers and in the MTP layer, trained here. Architecture, file
format and tensor names of GLM-5. `model.safetensors` holds only what is new or changed ({megabytes:.1f} MB);
`delta.json` names the folder with the rest.

| | |
|---|---|
| indexer | {heads} heads of width {head_dim}, one key a token, rope in interleaved pairs; {indexer_parameters:,} parameters in all |
| chosen positions | {topk} a row |
| changed beside it | the projections `q_a`, `q_b`, `kv_a` and `o` of attention, and the norms of a layer: {tuned_parameters:,} parameters |
| as in {target} | `kv_b`, all MLPs and experts, embedding, head, `eh_proj` |
| storage | bf16 |

## Figures

Measured by `python -m trueup.models.training indexer-card` (`make indexer-card`) after the training, on {cpu}, {date},
torch {torch}, for the stored bf16 weights, computed in fp32, over all held-out text in windows of {window} tokens;
`python -m trueup.models.training indexer-measure --model TARGET_FOLDER` measures the same again.

| held-out loss, nats per token | dense attention | sparse, top-k {topk} | difference |
|---|---|---|---|
| weights of {target} | {dense[loss]:.4f} | {untuned[loss]:.4f} | {untuned_cost:+.2%} |
| weights of this model | {tuned_dense[loss]:.4f} | **{sparse[loss]:.4f}** | {tuned_cost:+.2%} |

So the served model loses {cost:+.2%} against the dense checkpoint it came from. The second row says what sparsity costs
where the weights are the same: the sparse stage is also a little more training, on the text that the dense model was trained on.

| share of dense attention (mean of heads) that the chosen {topk} positions hold | {layer_names} |
|---|{rules}|
| at this window, over rows that see more than {topk} | {recalls} |

Other orders of the same positions, over rows that see more than {most}: the {topk} newest hold {newest}, the {topk} that the
attention itself weighs most, which no choice can beat, {best}, the indexer's {indexer}.

![share of attention held, by layer](recall.png)

## How it was made

`python -m trueup.models.training indexer` (`make train-indexer`; resumable; {default_minutes:.0f} minutes, unless `--minutes`, `--threads` and
`--dtype` say otherwise): {minutes:.0f} minutes, {threads}; {tokens:,} tokens seen, in windows of {window}. Corpus, its split and
the tokenizer are the target's (Python {python}; SHA-256 over all files read `{sha256}`).

Two stages, as in DeepSeek-V3.2, section 2.1.1. For the first {warm_up:.0%} of the time attention is dense and everything else is frozen;
each indexer learns the distribution of its layer's attention, averaged over heads (KL divergence). Then attention is sparse; the
indexers learn that distribution over the positions they chose, from inputs without gradient, and the projections named above
learn the next token and, in the MTP layer, the main model's next distribution. Muon for the indexers' matrices, AdamW for
the rest, seed {seed}. Held-out figures of a sample, over the training; the loss of the first stage, left of the line, is
that of sparse attention with what the indexers know so far:

![held-out loss and share of attention held](loss.png)

Licence: Apache-2.0 like the rest of trueup. The text it was trained on is under the PSF licence.
"""


def card(figures: dict, state: dict, c: ModelConfig, about: dict) -> str:
    """The filled-in text; ``about`` says what this file cannot know: names, sizes, the machine and the corpus."""
    i = c.indexer
    assert i is not None
    layers = [str(layer) for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers)]
    at = COUNTS.index(i.topk)
    shares = {order: " / ".join(f"{figures['curves'][layer][order][at]:.3f}" for layer in layers)
              for order in ("newest", "best", "indexer")}
    losses = {name: figures[name]["loss"] for name in ("dense", "untuned", "tuned_dense", "sparse")}
    return CARD.format(
        **figures, **about, **shares, layers=c.num_hidden_layers, heads=i.heads, head_dim=i.head_dim, topk=i.topk,
        window=WINDOW, most=COUNTS[-1], minutes=state["seconds"] / 60, tokens=state["tokens"],
        untuned_cost=losses["untuned"] / losses["dense"] - 1, cost=losses["sparse"] / losses["dense"] - 1,
        tuned_cost=losses["sparse"] / losses["tuned_dense"] - 1,
        layer_names=" | ".join("MTP" if int(n) >= c.num_hidden_layers else f"layer {n}" for n in layers),
        rules="|".join("---" for _ in layers),
        recalls=" | ".join(f"{figures['sparse'][f'recall{layer}']:.3f}" for layer in layers),
    )

"""What the comparisons with transformers share: a model on either side, of the same weights; requests fed to ours."""
import torch

from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models import load_model

PAGES = 32
# Of the logit scale; the library's own cached and uncached runs differ by a third of it.
TOLERANCE = 3e-5


@torch.no_grad()
def draw_weights(oracle):
    """Default initialisation makes tiny models nearly constant, which hides bugs."""
    for name, value in [*oracle.named_parameters(), *oracle.named_buffers()]:
        if "correction_bias" in name or "norm.bias" in name:
            value.normal_(std=0.3)
        elif "norm" in name:
            value.normal_(1.0, 0.1)
        elif value.ndim >= 2:
            value.normal_(std=1.5 * value.shape[-1] ** -0.5)


def library_model(model_class, config, seed=0):
    """A random model of the library, in its plainest numerics."""
    torch.manual_seed(seed)
    oracle = model_class(config).eval()
    oracle.set_experts_implementation("eager")
    draw_weights(oracle)
    return oracle


def ours(oracle, folder):
    """Our model with the library's weights, through the files that the library writes."""
    oracle.save_pretrained(folder, max_shard_size="500KB")  # sharded, with an index
    return load_model(folder, dtype="float32", progress=False)


class Batch:
    """Requests of one test and the pools they live in; ``feed`` runs one forward.

    ``sequences`` begin with the token ids of a request.
    """

    def __init__(self, model, sequences, buckets=(8,)):
        self.model, self.ids, self.buckets = model, [s[0] for s in sequences], buckets
        pool = PagePool(PAGES, 128)
        self.pools = Pools(model.cache_spec, pool)
        self.pages = [pool.allocate(pool.pages_for(len(ids))) for ids in self.ids]
        self.done = [0] * len(self.ids)
        self.logits = [[] for _ in self.ids]

    @torch.inference_mode()
    def feed(self, lengths, mode, rows=None):
        """Run ``lengths[r]`` further tokens of each request r; zero leaves it out.  ``mode``: of all, or of each."""
        modes = mode if isinstance(mode, list) else [mode] * len(lengths)
        work = [Work(r, modes[r], self.done[r], n, self.pages[r]) for r, n in enumerate(lengths) if n]
        layout = plan(work, page_size=128, buckets=self.buckets, rows=rows)
        tokens = {w.request: self.ids[w.request][w.start : w.start + w.length] for w in work}
        hidden = self.model.forward(
            input_ids(layout, tokens, torch.device("cpu")).tensor, materialise(layout, self.pools), self.pools
        )
        logits = self.model.logits(hidden)
        for w in work:
            rows = layout.token_rows[w.request]
            self.logits[w.request].append(logits[rows.start : rows.stop])
            self.done[w.request] += w.length

    def in_uneven_chunks(self):
        """The whole of each request as prompts, behind prefixes, with three rows of no request."""
        for size in (1, 3, 60, 9, 128):
            lengths = [min(size + r, left) for r, left in enumerate(self.left())]
            if any(lengths):
                self.feed(lengths, Mode.PREFILL, rows=sum(lengths) + 3)

    def to_the_end(self, tail, most, mode):
        """All but up to ``tail`` tokens as a prompt, the rest ``most`` at a time; short requests leave early."""
        self.feed([max(1, left - tail) for left in self.left()], Mode.PREFILL)
        while any(self.left()):
            self.feed([min(most, left) for left in self.left()], mode)

    def left(self):
        return [len(ids) - done for ids, done in zip(self.ids, self.done, strict=True)]

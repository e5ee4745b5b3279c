"""Sparse models of the library, and what their indexers chose beside what ours chose.

A choice is not a number that can be off by a little: where two keys have all but equal scores, rounding decides, and
what follows differs by far more than rounding.  So choices are compared first, row by row.  A row may differ only in
positions whose scores are that near (NEAR); it is counted, and its request is compared up to it.
"""
from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from oracle.batch import TOLERANCE, Batch
from trueup.core.layout import Mode
from trueup.models.indexer import Indexer

TOPK = 8
NEAR = 1e-5  # of the largest score of a row
RARE = 1e-3  # of the rows: those where rounding may decide

COMMON = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, n_shared_experts=1,
    num_experts_per_tok=2, n_routed_experts=16, q_lora_rank=48, kv_lora_rank=512, qk_rope_head_dim=64,
    max_position_embeddings=2048, first_k_dense_replace=1, num_nextn_predict_layers=0, routed_scaling_factor=2.5,
    index_head_dim=128, index_topk=TOPK, bos_token_id=0, eos_token_id=1, pad_token_id=None,
)
TINY = dict(num_attention_heads=5, num_key_value_heads=5, qk_nope_head_dim=64, v_head_dim=128, index_n_heads=16)


def glm(layers, indexers=None, **sizes):
    """(class, config); ``indexers``: 'full' or 'shared' by layer."""
    return GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**{
        **COMMON, "num_hidden_layers": layers, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "indexer_types": indexers or ["full"] * layers,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1), **(sizes or TINY)})


def deepseek(layers, **sizes):
    """Expert groups, yarn, and halves instead of pairs in the indexer's rope."""
    return DeepseekV32ForCausalLM, DeepseekV32Config(**{
        **COMMON, "num_hidden_layers": layers, "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}, **(sizes or TINY)})


class Indexed:
    """One run of one of the library's indexers: what it read, and the positions [T, k] that it chose."""

    def __init__(self, module, args, chosen):
        (x, q_rank, tables), self.module, self.chosen = args[:3], module, chosen[0]
        self.x, self.q_rank, self.cos, self.sin = (t[0].double() for t in (x, q_rank, *tables))

    def scores(self, t):
        """[t + 1] float64: of what row t may see, by the published formula."""
        m = self.module
        q = (self.q_rank[t : t + 1] @ m.wq_b.weight.double().T).view(1, m.n_heads, -1)  # [1, Ni, Di]
        k, norm = self.x[: t + 1] @ m.wk.weight.double().T, m.k_norm  # [t+1, Di]
        k = torch.nn.functional.layer_norm(k, k.shape[1:], norm.weight.double(), norm.bias.double(), norm.eps)
        w = self.x[t] @ m.weights_proj.weight.double().T  # [Ni]
        q, k = self._turned(q, slice(t, t + 1))[0], self._turned(k[:, None], slice(t + 1))[:, 0]
        return w @ (q @ k.T).relu()  # [t+1]

    def _turned(self, x, rows):
        """[rows, N, Di], with the first members of all pairs in front of the second ones."""
        half = self.cos.shape[-1] // 2
        cos, sin = (table[rows, None, :half] for table in (self.cos, self.sin))
        turning, still = x[..., : 2 * half], x[..., 2 * half :]
        pairs = type(self.module).__name__ == "GlmMoeDsaIndexer"
        a, b = (turning[..., 0::2], turning[..., 1::2]) if pairs else turning.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, still], -1)


@contextmanager
def indexing(oracle):
    """Collects an :class:`Indexed` of each indexer that runs, by layer."""
    seen = {}
    hooks = [module.register_forward_hook(lambda m, args, out: seen.update({m.layer_idx: Indexed(m, args, out)}))
             for name, module in oracle.named_modules() if name.endswith("indexer")]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def run(oracle, lengths, seed=1):
    """(ids, logits [T, V], Indexed by layer) of random requests, each alone and without a cache."""
    generator, done = torch.Generator().manual_seed(seed), []
    for length in lengths:
        ids = torch.randint(2, oracle.config.vocab_size, (length,), generator=generator)
        with indexing(oracle) as seen:
            done.append((ids.tolist(), oracle(ids[None]).logits[0], seen))
    return done


class SparseBatch(Batch):
    """A :class:`Batch` that remembers what our indexers chose: parts of [T, 1, K], by request and layer."""

    def __init__(self, model, sequences, buckets=(8,)):
        super().__init__(model, sequences, buckets)
        self.chosen = [{} for _ in self.ids]

    def feed(self, lengths, mode, rows=None):
        real, seen = Indexer.choose, []

        def choose(indexer, *args):
            seen.append((indexer.layer, real(indexer, *args)))
            return seen[-1][1]

        with patch.object(Indexer, "choose", choose):
            super().feed(lengths, mode, rows)
        for layer, chosen in seen:
            for request, positions in chosen.by_request().items():
                self.chosen[request].setdefault(layer, []).append(positions)


def feed_side_by_side(batch):
    """Decoding, a prompt in pieces and verification in one forward, over and over: three segments."""
    kinds = [((Mode.DECODE, 1), (Mode.PREFILL, 7), (Mode.VERIFY, 3))[r % 3] for r in range(len(batch.ids))]
    batch.feed([0 if mode is Mode.PREFILL else max(1, left - 9)
                for (mode, _), left in zip(kinds, batch.left(), strict=True)], Mode.PREFILL)
    while any(batch.left()):
        batch.feed([min(size, left) for (_, size), left in zip(kinds, batch.left(), strict=True)],
                   [mode for mode, _ in kinds])


def attended(positions, T):
    """[T, T] bool from [T, k] positions: what each row attends to."""
    marked = torch.zeros(T, T + 1, dtype=torch.bool)
    marked.scatter_(1, positions.long() % (T + 1), True)  # -1 becomes the last column
    return marked[:, :T].tril()  # the library lists hidden positions too, where a row sees fewer than k


def first_tie(chosen, indexed):
    """(the first row that chose otherwise, how many did), each of them among keys of all but equal scores."""
    end, ties = min(len(i.chosen) for i in indexed.values()), 0
    for layer in sorted(indexed):
        T = len(indexed[layer].chosen)
        theirs, ours = attended(indexed[layer].chosen, T), attended(torch.cat(chosen[layer])[:, 0], T)
        assert torch.equal(ours.sum(1), torch.arange(1, T + 1).clamp(max=TOPK))  # as many as there are, each once
        for t in (theirs != ours)[:end].any(1).nonzero().flatten().tolist():
            scores = indexed[layer].scores(t)
            gaps = scores[(theirs & ~ours)[t, : t + 1]][:, None] - scores[(ours & ~theirs)[t, : t + 1]]
            assert gaps.abs().max() <= NEAR * scores.abs().max(), f"layer {layer}, row {t}: not a tie"
            end, ties = min(end, t), ties + 1  # what follows may differ for that reason
    return end, ties


def assert_equal(batch, sequences):
    """The choices, and the logits up to where rounding decided."""
    rows, ties, worst = 0, 0, 0.0
    for parts, chosen, (ids, expected, indexed) in zip(batch.logits, batch.chosen, sequences, strict=True):
        end, tied = first_tie(chosen, indexed)
        got = torch.cat(parts)
        assert got.shape == expected.shape
        off = (got - expected)[:end].abs().max() / expected.abs().max() if end else 0.0
        rows, ties, worst = rows + len(ids) * len(indexed), ties + tied, max(worst, float(off))
    assert worst <= TOLERANCE
    assert ties <= RARE * rows

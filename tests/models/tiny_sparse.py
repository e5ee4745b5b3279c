"""A sparse model of the smallest sizes that every contract admits, with random weights, and how to run it."""
import torch

from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.ops.load import load
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models.build import model_class
from trueup.models.config import ModelConfig

TOPK = 8
COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "num_attention_heads": 5, "q_lora_rank": 48, "kv_lora_rank": 512,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 2048,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "num_hidden_layers": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "index_n_heads": 16, "index_head_dim": 128, "index_topk": TOPK, "eos_token_id": 1, "dtype": "float32",
}
KINDS = {
    "glm": {"model_type": "glm_moe_dsa", "indexer_types": ["full", "full", "shared"]},
    "deepseek": {"model_type": "deepseek_v32", "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64}},
}


def tiny(kind="glm", **more):
    """Weights of a size at which every part matters."""
    load()
    config = ModelConfig.from_hf({**COMMON, **KINDS[kind], **more})
    model = model_class(config)(config).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(7)
    for name, value in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            value.normal_(1.0, 0.1, generator=generator)
        elif value.ndim == 1:  # biases
            value.normal_(std=0.3, generator=generator)
        else:
            inner = value.shape[-2] if value.ndim == 3 and "w_uk" not in name else value.shape[-1]
            value.normal_(std=1.5 * inner ** -0.5, generator=generator)
    return model


def random_ids(length, seed=0):
    return torch.randint(2, COMMON["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Requests:
    """Requests that live in one cache; ``feed`` runs the target and its MTP layer over their next tokens."""

    def __init__(self, model, ids, buckets=()):
        """``ids``: of each request, one more than is ever fed, which the MTP layer pairs with the last."""
        self.model, self.ids, self.buckets = model, ids, buckets
        pool = PagePool(32, 16)
        self.pools, self.pages = Pools(model.cache_spec, pool), [pool.allocate(pool.pages_for(len(i))) for i in ids]
        self.done = [0] * len(ids)

    def plan(self, lengths, mode):
        """The layout of a forward over ``lengths[r]`` more tokens of each request; zero leaves one out."""
        work = [Work(r, mode, self.done[r], n, self.pages[r]) for r, n in enumerate(lengths) if n]
        return plan(work, page_size=16, buckets=self.buckets)

    @torch.inference_mode()
    def run(self, layout, view=None):
        """(hidden, MTP hidden), each [Tp, H], of one forward; ``view`` in place of that of ``layout``."""
        view = view or materialise(layout, self.pools)
        tokens, following = (input_ids(layout, {
            r: self.ids[r][self.done[r] + ahead :][: len(rows)] for r, rows in layout.token_rows.items()
        }, self.pools.spec.device).tensor for ahead in (0, 1))
        hidden = self.model.forward(tokens, view, self.pools)
        drafted = self.model.forward_mtp(following, hidden, view, self.pools)
        for r, rows in layout.token_rows.items():
            self.done[r] += len(rows)
        return hidden, drafted

    def feed(self, lengths, mode):
        """Logits of both, of the real rows, [rows, V] each."""
        layout = self.plan(lengths, mode)
        rows = [row for of_request in layout.token_rows.values() for row in of_request]
        return [self.model.logits(hidden[rows]) for hidden in self.run(layout)]


def logits(model, lengths=(60, 5, 33)):
    """[rows, V]: a prompt that is short at first and goes on behind its prefix, then decoding, then verification."""
    requests = Requests(model, [random_ids(n + 1, seed) for seed, n in enumerate(lengths)], buckets=(4,))
    out = []
    for most in (6, 40):
        prompts = [max(1, n - 8) - done for n, done in zip(lengths, requests.done, strict=True)]
        if any(prompts):
            out += requests.feed([min(most, left) for left in prompts], Mode.PREFILL)
    for mode, most in ((Mode.DECODE, 1), (Mode.DECODE, 1), (Mode.VERIFY, 3), (Mode.VERIFY, 3)):
        out += requests.feed([min(most, n - d) for n, d in zip(lengths, requests.done, strict=True)], mode)
    return torch.cat(out)


def off(wrong, right):
    """The largest difference, of the scale."""
    return float((wrong - right).abs().max() / right.abs().max())

"""Checkpoint folders of published kinds in the smallest sizes that every contract admits, with random weights."""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work, plan
from trueup.core.view import input_ids, materialise
from trueup.models.checkpoint import expected_tensors

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 16,
    "num_experts_per_tok": 2, "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 48,
    "qk_nope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "eos_token_id": 1, "pad_token_id": None,
}
INDEXER = {"index_n_heads": 16, "index_topk": 8}


def raw_config(name, **more):
    """A published config.json, its sizes replaced."""
    raw = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    return raw | SIZES | (INDEXER if "index_topk" in raw else {}) | more


def random_tensors(config):
    """Every tensor by its published name, the MTP layer's copies among them, in float32."""
    generator = torch.Generator().manual_seed(3)

    def value(name, shape):
        if len(shape) == 1:
            centre, spread = (1.0, 0.1) if "norm" in name and name.endswith("weight") else (0.0, 0.3)
            return centre + spread * torch.randn(shape, generator=generator)
        return 1.5 * shape[-1] ** -0.5 * torch.randn(shape, generator=generator)
    return {name: value(name, tensor.shape) for name, tensor in expected_tensors(config).items()}


def write(folder, raw, tensors):
    """A folder with config.json and one safetensors file; returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


@torch.inference_mode()
def logits(model, length=30):
    """[T, V] each, of the model and of its MTP layer: a prompt of several times top-k."""
    pages = PagePool(4, 16)
    pools, held = Pools(model.cache_spec, pages), pages.allocate(2)
    ids = torch.randint(2, 96, (length + 1,), generator=torch.Generator().manual_seed(5)).tolist()
    layout = plan([Work(0, Mode.PREFILL, 0, length, held)], page_size=16)
    view = materialise(layout, pools)
    tokens, following = (input_ids(layout, {0: ids[at : at + length]}, pools.spec.device).tensor for at in (0, 1))
    hidden = model.forward(tokens, view, pools)
    return model.logits(hidden), model.logits(model.forward_mtp(following, hidden, view, pools))

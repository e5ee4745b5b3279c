"""expected_tensors and the models themselves against the published totals."""
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from trueup.models.build import model_class
from trueup.models.checkpoint import expected_tensors, fused_tensors
from trueup.models.config import ModelConfig


class Totals(NamedTuple):
    """Elements: of the main model, of the MTP layer, and of that without the two copies of main tensors."""

    main: int
    mtp: int
    mtp_alone: int


TOTALS = {
    "glm-4.7-flash": Totals(29_943_393_920, 1_278_094_656, 643_706_176),
    "glm-5": Totals(743_911_218_432, 11_856_086_016, 9_952_920_576),
    "glm-5.2": Totals(743_377_019_904, 11_856_086_016, 9_952_920_576),  # published without the copies
    "deepseek-v3.2": Totals(671_877_944_064, 13_477_385_728, 11_624_027_648),
}


def published(name: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((Path(__file__).parent / f"{name}.json").read_text()))


CONFIG, SPARSE = published("glm-4.7-flash"), published("glm-5.2")


@pytest.mark.parametrize("name", TOTALS)
def test_totals_of_the_files(name):
    config = published(name)
    at, main, mtp = f"model.layers.{config.num_hidden_layers}.", [], []
    for tensor, t in expected_tensors(config).items():
        (mtp if tensor.startswith(at) else main).append(t)
    alone = [t.numel for t in mtp if not t.optional]
    assert Totals(sum(t.numel for t in main), sum(t.numel for t in mtp), sum(alone)) == TOTALS[name]


@pytest.mark.parametrize("name", TOTALS)
def test_totals_of_the_model(name):
    """Built without memory; it keeps no copies."""
    config = published(name)
    with torch.device("meta"):
        model = model_class(config)(config)
    mtp = sum(p.numel() for p in model.mtp.parameters())
    assert mtp == TOTALS[name].mtp_alone
    assert sum(p.numel() for p in model.parameters()) - mtp == TOTALS[name].main


def test_numbers_of_tensors():
    assert len(expected_tensors(CONFIG)) == 9_703
    mtp = [t for name, t in expected_tensors(SPARSE).items() if name.startswith("model.layers.78.")]
    assert sum(not t.optional for t in mtp) == 791


def test_only_the_mtp_layers_two_duplicates_are_optional():
    optional = {name: t.shape for name, t in expected_tensors(CONFIG).items() if t.optional}
    assert optional == {
        "model.layers.47.shared_head.head.weight": (154880, 2048),
        "model.layers.47.embed_tokens.weight": (154880, 2048),
    }


def test_layer_kinds():
    tensors = expected_tensors(CONFIG)
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (10240, 2048)
    assert "model.layers.0.mlp.gate.weight" not in tensors
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (64,)
    assert tensors["model.layers.47.mlp.experts.63.down_proj.weight"].shape == (2048, 1536)
    assert tensors["model.layers.46.self_attn.kv_b_proj.weight"].shape == (8960, 512)


def test_an_indexer_only_where_the_config_lists_one():
    tensors, at = expected_tensors(SPARSE), "self_attn.indexer."
    owners = {name.partition(at)[0] for name in tensors if at in name}
    assert owners == {f"model.layers.{layer}." for layer in (0, 1, *range(2, 78, 4), 78)}
    first = {name.partition(at)[2]: t.shape for name, t in tensors.items() if name.startswith("model.layers.0." + at)}
    assert first == {
        "wq_b.weight": (4096, 2048),
        "wk.weight": (128, 6144),
        "k_norm.weight": (128,),
        "k_norm.bias": (128,),
        "weights_proj.weight": (32, 6144),
    }
    assert not any(at in name for name in expected_tensors(CONFIG))


def test_fused_tensors_stand_for_all_experts():
    fused, tensors = fused_tensors(CONFIG), expected_tensors(CONFIG)
    assert fused["model.layers.1.mlp.experts.gate_up_proj"].shape == (64, 3072, 2048)
    assert fused["model.layers.1.mlp.experts.down_proj"].shape == (64, 2048, 1536)
    parts = [name for f in fused.values() for name in f.parts]
    assert len(fused) == 2 * 47 and sorted(parts) == sorted(name for name in tensors if ".experts." in name)
    for f in fused.values():
        assert len({tensors[name].shape for name in f.parts}) == 1
        assert sum(tensors[name].numel for name in f.parts) == f.numel

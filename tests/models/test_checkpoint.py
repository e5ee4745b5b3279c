"""expected_tensors against the published totals of GLM-4.7-Flash."""
import json
from pathlib import Path

from trueup.models.checkpoint import expected_tensors, fused_tensors
from trueup.models.config import ModelConfig

CONFIG = ModelConfig.from_hf(json.loads((Path(__file__).parent / "glm-4.7-flash.json").read_text()))


def test_published_totals():
    tensors = expected_tensors(CONFIG)
    assert len(tensors) == 9_703
    assert sum(t.numel for t in tensors.values()) == 31_221_488_576
    mtp = {name: t for name, t in tensors.items() if name.startswith("model.layers.47.")}
    assert sum(t.numel for t in tensors.values()) - sum(t.numel for t in mtp.values()) == 29_943_393_920
    assert sum(t.numel for t in mtp.values()) == 1_278_094_656
    assert sum(t.numel for t in mtp.values() if not t.optional) == 643_706_176


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


def test_fused_tensors_stand_for_all_experts():
    fused, tensors = fused_tensors(CONFIG), expected_tensors(CONFIG)
    assert fused["model.layers.1.mlp.experts.gate_up_proj"].shape == (64, 3072, 2048)
    assert fused["model.layers.1.mlp.experts.down_proj"].shape == (64, 2048, 1536)
    parts = [name for f in fused.values() for name in f.parts]
    assert len(fused) == 2 * 47 and sorted(parts) == sorted(name for name in tensors if ".experts." in name)
    for f in fused.values():
        assert len({tensors[name].shape for name in f.parts}) == 1
        assert sum(tensors[name].numel for name in f.parts) == f.numel

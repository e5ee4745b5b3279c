"""ModelConfig: what a published config.json says, and how a wrong one is refused.

Indexers, yarn and fp8: test_sparse_config.py.
"""
import copy
import dataclasses
import json
import logging
from pathlib import Path

import pytest

from trueup.models.config import ModelConfig

PUBLISHED = json.loads((Path(__file__).parent / "glm-4.7-flash.json").read_text())


def changed(**keys) -> dict:
    """The published config with some keys replaced; ``...`` takes a key away."""
    return {key: value for key, value in (PUBLISHED | keys).items() if value is not ...}


def test_every_field_of_the_published_config():
    config = ModelConfig.from_hf(PUBLISHED)
    assert dataclasses.asdict(config) == {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 202752,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_theta": 1e6,
        "yarn": None,
        "indexer": None,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "scoring_func": "sigmoid",
        "moe_layers": (False,) + (True,) * 47,
        "rms_norm_eps": 1e-5,
        "lora_norm_eps": 1e-6,
        "eos_token_ids": (154820, 154827, 154829),
        "pad_token_id": 154820,
        "dtype": "bfloat16",
        "fp8_block": None,
    }
    assert config.softmax_scale == 1 / 16


def test_reading_leaves_the_raw_config_alone_and_the_result_is_frozen():
    """SB-30: target and draft, read in either order, see one and the same complete config."""
    raw = copy.deepcopy(PUBLISHED)
    target, draft = ModelConfig.from_hf(raw), ModelConfig.from_hf(raw)
    assert raw == PUBLISHED
    assert target == draft and hash(target) == hash(draft)
    assert target.moe_layers[target.num_hidden_layers :] == (True,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.scoring_func = "softmax"


def test_the_published_config_has_no_unknown_key(caplog):
    with caplog.at_level(logging.INFO, "trueup"):
        ModelConfig.from_hf(PUBLISHED)
        assert caplog.messages == []
        ModelConfig.from_hf(changed(zebra=1, aardvark=None))
    assert caplog.messages == ["config.json: keys without meaning here, ignored: aardvark, zebra"]


@pytest.mark.parametrize("keys, theta", [
    ({"rope_theta": 5e5}, 5e5),
    ({"rope_theta": ..., "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"}}, 8e6),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 8e6}}, 8e6),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": None, "rope_type": None}}, 5e5),
    ({"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}}, 8e6),
    ({"partial_rotary_factor": ..., "rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": 1}}, 8e6),
])
def test_rope_keys_of_both_generations(keys, theta):
    config = ModelConfig.from_hf(changed(**keys))
    assert config.rope_theta == theta and isinstance(config.rope_theta, float)


def test_permitted_defaults():
    absent = ("scoring_func", "n_shared_experts", "attention_bias", "rope_interleave", "moe_layer_freq", "pad_token_id")
    config = ModelConfig.from_hf(changed(**dict.fromkeys(absent, ...)))
    assert (config.scoring_func, config.n_shared_experts, config.pad_token_id) == ("sigmoid", 1, None)
    written = {"scoring_func": "sigmoid", "moe_layer_freq": 1, "rope_interleave": True}
    assert ModelConfig.from_hf(changed(**written)) == ModelConfig.from_hf(PUBLISHED)


def test_dtype_has_two_names_and_the_newer_wins():
    assert ModelConfig.from_hf(changed(dtype=..., torch_dtype="float16")).dtype == "float16"
    assert ModelConfig.from_hf(changed(dtype="float32", torch_dtype="float16")).dtype == "float32"
    assert ModelConfig.from_hf(changed(dtype=...)).dtype == "bfloat16"


def test_one_eos_id_or_a_list():
    assert ModelConfig.from_hf(changed(eos_token_id=7)).eos_token_ids == (7,)


def test_lora_norm_eps_is_the_callers_choice():
    assert ModelConfig.from_hf(PUBLISHED, lora_norm_eps=1e-5).lora_norm_eps == 1e-5


def test_dense_layers_by_count_or_by_list():
    by_count = changed(num_hidden_layers=4, first_k_dense_replace=2)
    by_list = changed(num_hidden_layers=4, first_k_dense_replace=...,
                      mlp_layer_types=["dense", "dense", "sparse", "sparse"])
    both = by_list | {"first_k_dense_replace": 2}
    for raw in (by_count, by_list, both):
        assert ModelConfig.from_hf(raw).moe_layers == (False, False, True, True, True)
    # A list can say what a count cannot; the MTP layer has experts all the same.
    mixed = by_list | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
    assert ModelConfig.from_hf(mixed).moe_layers == (True, False, True, False, True)
    with pytest.raises(ValueError, match="contradicts first_k_dense_replace=1"):
        ModelConfig.from_hf(by_list | {"first_k_dense_replace": 1})


NEEDED = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_nextn_predict_layers",
    "max_position_embeddings", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "rope_theta", "intermediate_size", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
    "first_k_dense_replace", "rms_norm_eps", "eos_token_id",
)


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("absent", [..., None])
def test_a_missing_key_is_named(key, absent):
    with pytest.raises(ValueError, match=rf"config.json: .*\b{key}\b"):
        ModelConfig.from_hf(changed(**{key: absent}))


def test_a_missing_mtp_count_says_what_to_write():
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers is missing.*write 0"):
        ModelConfig.from_hf(changed(num_nextn_predict_layers=...))


@pytest.mark.parametrize("key, value", [
    ("hidden_size", "2048"), ("hidden_size", 2048.0), ("hidden_size", True), ("hidden_size", 0), ("hidden_size", [1]),
    ("num_nextn_predict_layers", -1), ("first_k_dense_replace", "1"), ("n_shared_experts", 0),
    ("rms_norm_eps", "1e-5"), ("rms_norm_eps", float("nan")), ("routed_scaling_factor", []), ("rope_theta", 0),
    ("rope_parameters", "default"), ("rope_scaling", [1]), ("norm_topk_prob", 1), ("mlp_layer_types", "dense"),
    ("mlp_layer_types", ["dense"]), ("mlp_layer_types", [[]] * 47), ("eos_token_id", "2"), ("eos_token_id", [1, None]),
    ("eos_token_id", []), ("pad_token_id", "0"), ("dtype", "fp32"), ("dtype", ["bfloat16"]), ("qk_rope_head_dim", 63),
])
def test_a_wrong_value_is_named_with_its_key(key, value):
    with pytest.raises(ValueError, match=rf"config.json: {key} is .*(expected|only)"):
        ModelConfig.from_hf(changed(**{key: value}))


@pytest.mark.parametrize("keys, message", [
    ({"model_type": "glm4_moe"},
     "model_type is 'glm4_moe'; this release reads 'glm4_moe_lite', 'glm_moe_dsa', 'deepseek_v32'"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False; only True"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
    ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16'; only 'float32'"),
    ({"mlp_bias": True}, "mlp_bias is True; only False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True; only False"),
    ({"rope_interleave": False}, "rope_interleave is False; only True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"type": "linear", "factor": 40}}, "rope type is 'linear'; only 'default' and 'yarn'"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type is 'dynamic'"),
    ({"n_group": 3}, "n_routed_experts=64, n_group=3"),
    ({"n_group": 4, "topk_group": 5}, "topk_group=5"),
    ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65; expected at most 64"),
    ({"n_group": 16, "topk_group": 1, "num_experts_per_tok": 5}, "expected at most 4"),
])
def test_what_is_not_built_or_contradicts_itself_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(changed(**keys))


def test_from_folder_reads_and_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json there"):
        ModelConfig.from_folder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_hf(PUBLISHED)
    assert ModelConfig.from_folder(str(tmp_path), lora_norm_eps=1e-5).lora_norm_eps == 1e-5
    for text, message in ((b'{"vocab_size": ', "not valid JSON"), (b"\xff", "not valid JSON"),
                          (b"[1]", "expected a JSON object, got list"), (b"{}", "model_type is missing")):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=message) as caught:
            ModelConfig.from_folder(tmp_path)
        assert str(file) in str(caught.value)

"""ModelConfig of GLM-5, GLM-5.2 and DeepSeek-V3.2 as published; indexers and yarn.  fp8: test_fp8.py."""
import dataclasses
import json
import logging
from pathlib import Path

import pytest

from trueup.core.attention.choices import DraftReuse
from trueup.models.config import ModelConfig

HERE, NAMES = Path(__file__).parent, ("glm-5", "glm-5.2", "deepseek-v3.2")
PUBLISHED = {name: json.loads((HERE / f"{name}.json").read_text()) for name in NAMES}
GLM_5, GLM_52, DEEPSEEK = PUBLISHED.values()
LAYERS = 78
LISTED = [0, 1, *range(2, LAYERS, 4)]  # the layers of GLM-5.2 that have an indexer


def read(published: dict, **keys) -> ModelConfig:
    """The published config with some keys replaced; ``...`` takes a key away."""
    return ModelConfig.from_hf({key: value for key, value in (published | keys).items() if value is not ...})


def refusal(published: dict, **keys) -> str:
    with pytest.raises(ValueError) as caught:
        read(published, **keys)
    assert str(caught.value).startswith("config.json: ")
    return str(caught.value)


def full_layers(config: ModelConfig) -> list[int]:
    """Main layers that have an indexer; the MTP layer's is asserted, as it always has one."""
    *main, mtp = config.indexer.full
    assert mtp and len(main) == config.num_hidden_layers
    return [layer for layer, full in enumerate(main) if full]


def test_every_field_of_glm_5():
    config = ModelConfig.from_hf(GLM_5)
    assert dataclasses.asdict(config) == {
        "model_type": "glm_moe_dsa",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 202752,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_theta": 1e6,
        "yarn": None,
        "indexer": {
            "heads": 32,
            "head_dim": 128,
            "topk": 2048,
            "rope_interleave": True,
            "full": (True,) * 79,
            "share_between_drafts": False,
        },
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "moe_layers": (False,) * 3 + (True,) * 76,
        "rms_norm_eps": 1e-5,
        "lora_norm_eps": 1e-6,
        "eos_token_ids": (154820, 154827, 154829),
        "pad_token_id": 154820,
        "dtype": "bfloat16",
        "fp8_block": None,
    }
    assert config.softmax_scale == 0.0625


def test_glm_52_is_glm_5_with_longer_positions_and_fewer_indexers():
    old, new = dataclasses.asdict(ModelConfig.from_hf(GLM_5)), dataclasses.asdict(ModelConfig.from_hf(GLM_52))
    indexer = new["indexer"]
    assert new == old | {"max_position_embeddings": 1048576, "rope_theta": 8e6, "indexer": indexer}
    assert indexer == old["indexer"] | {"share_between_drafts": True, "full": indexer["full"]}
    assert len(LISTED) == 21 and full_layers(ModelConfig.from_hf(GLM_52)) == LISTED
    assert LISTED[:5] == [0, 1, 2, 6, 10] and LISTED[-1] == 74


def test_every_field_of_deepseek():
    config = ModelConfig.from_hf(DEEPSEEK)
    assert dataclasses.asdict(config) == {
        "model_type": "deepseek_v32",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 1e4,
        "yarn": {
            "factor": 40.0,
            "original_positions": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "indexer": {
            "heads": 64,
            "head_dim": 128,
            "topk": 2048,
            "rope_interleave": False,
            "full": (True,) * 62,
            "share_between_drafts": False,
        },
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "moe_layers": (False,) * 3 + (True,) * 59,
        "rms_norm_eps": 1e-6,
        "lora_norm_eps": 1e-6,
        "eos_token_ids": (1,),
        "pad_token_id": None,
        "dtype": "bfloat16",
        "fp8_block": (128, 128),
    }
    assert round(config.softmax_scale, 6) == 0.135234
    assert config.yarn.corrections(config.qk_rope_head_dim, config.rope_theta) == (10, 23)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_have_no_unknown_key(name, caplog):
    with caplog.at_level(logging.INFO, "trueup"):
        ModelConfig.from_hf(PUBLISHED[name])
        assert caplog.messages == []
        read(PUBLISHED[name], zebra=1)
    assert caplog.messages == ["config.json: keys without meaning here, ignored: zebra"]


# Indexers


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("key", ["index_n_heads", "index_head_dim", "index_topk"])
def test_a_missing_size_of_the_indexer_is_named(name, key):
    assert f"{key} is missing" in refusal(PUBLISHED[name], **{key: ...})


def test_a_dense_model_reads_none_of_them(caplog):
    dense = json.loads((HERE / "glm-4.7-flash.json").read_text())
    with caplog.at_level(logging.INFO, "trueup"):
        assert read(dense, index_topk=2048).indexer is None
    assert caplog.messages == ["config.json: keys without meaning here, ignored: index_topk"]


@pytest.mark.parametrize("key, value", [
    ("index_topk", 0), ("index_n_heads", "32"), ("index_head_dim", 128.0), ("indexer_rope_interleave", 1),
    ("index_share_for_mtp_iteration", "no"), ("index_topk_freq", -1), ("index_topk_freq", "4"),
    ("index_skip_topk_offset", -1),
])
def test_a_wrong_value_is_named_with_its_key(key, value):
    assert f"{key} is {value!r}; expected" in refusal(GLM_5, **{key: value})


def test_an_indexer_narrower_than_its_rope_is_refused():
    assert "index_head_dim is 32; expected at least qk_rope_head_dim=64" in refusal(GLM_5, index_head_dim=32)


def test_the_pairs_that_its_rope_turns():
    """The file's word counts; without it, what each class of transformers does."""
    for published, by_default in ((GLM_5, True), (DEEPSEEK, False)):
        assert read(published, indexer_rope_interleave=...).indexer.rope_interleave is by_default
        for said in (True, False):
            assert read(published, indexer_rope_interleave=said).indexer.rope_interleave is said


def by_list(full) -> list[str]:
    return ["full" if layer in full else "shared" for layer in range(LAYERS)]


PATTERN = "".join(kind[0].upper() for kind in by_list(LISTED))


FULL_LAYERS = [
    ({}, range(LAYERS)),
    ({"indexer_types": by_list(LISTED)}, LISTED),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, LISTED),
    ({"index_topk_pattern": PATTERN}, LISTED),
    ({"index_topk_pattern": by_list(LISTED)}, LISTED),
    # The offset is 2 where it is not given, and no layer shares with a frequency of 1 or 0.
    ({"index_topk_freq": 4}, [0, 1, *range(5, LAYERS, 4)]),
    ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, range(0, LAYERS, 3)),
    ({"index_topk_freq": 1, "index_skip_topk_offset": 9}, range(LAYERS)),
    ({"index_topk_freq": 0, "index_skip_topk_offset": 9}, range(LAYERS)),
    ({"index_skip_topk_offset": 0}, range(LAYERS)),
    # A list wins over a pattern, a pattern over the rule.
    ({"indexer_types": by_list([0, 7]), "index_topk_pattern": PATTERN, "index_topk_freq": 4}, [0, 7]),
    ({"index_topk_pattern": "F" + "S" * 77, "index_topk_freq": 4}, [0]),
]


@pytest.mark.parametrize("keys, full", FULL_LAYERS)
def test_which_layers_have_an_indexer(keys, full):
    assert full_layers(read(GLM_5, **keys)) == list(full)


@pytest.mark.parametrize("keys, full", FULL_LAYERS)
def test_transformers_reads_the_same(keys, full):
    transformers = pytest.importorskip("transformers")
    kinds = transformers.GlmMoeDsaConfig(**GLM_5 | keys).indexer_types
    assert [layer for layer, kind in enumerate(kinds) if kind == "full"] == list(full)


def test_the_others_attend_to_what_the_nearest_before_them_chose():
    reuse = ModelConfig.from_hf(GLM_52).indexer.reuse
    assert reuse.source == tuple(max(full for full in [*LISTED, 78] if full <= layer) for layer in range(79))
    assert reuse.drafts is DraftReuse.GROWN
    assert ModelConfig.from_hf(GLM_5).indexer.reuse.source == tuple(range(79))
    assert ModelConfig.from_hf(GLM_5).indexer.reuse.drafts is DraftReuse.OWN


EXPECTED = f"expected 'full' or 'shared' (in a pattern: F or S) for each of {LAYERS} layers"


@pytest.mark.parametrize("keys, message", [
    ({"indexer_types": ["full"] * 77}, EXPECTED),
    ({"indexer_types": ["full"] * 79}, EXPECTED),
    ({"indexer_types": []}, f"indexer_types is []; {EXPECTED}"),
    ({"indexer_types": ["full", "own"] + ["full"] * 76}, EXPECTED),
    ({"indexer_types": [["full"]] * 78}, EXPECTED),
    ({"indexer_types": "full"}, f"indexer_types is 'full'; {EXPECTED}"),
    ({"indexer_types": {"0": "full"}}, EXPECTED),
    ({"index_topk_pattern": "FS"}, f"index_topk_pattern is 'FS'; {EXPECTED}"),
    ({"index_topk_pattern": "f" * 78}, f"index_topk_pattern is '{'f' * 78}'; {EXPECTED}"),
    ({"index_topk_pattern": 4}, f"index_topk_pattern is 4; {EXPECTED}"),
    ({"indexer_types": by_list([1])}, "by indexer_types layer 0 is 'shared'; expected 'full'"),
    ({"index_topk_pattern": "S" + "F" * 77}, "by index_topk_pattern layer 0 is 'shared'; expected 'full'"),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 0},
     "by index_topk_freq=4 and index_skip_topk_offset=0 layer 0 is 'shared'"),
])
def test_a_list_that_does_not_fit_is_refused(keys, message):
    assert message in refusal(GLM_5, **keys)


# Yarn


YARN = DEEPSEEK["rope_scaling"]


def test_both_generations_of_keys_say_the_same_yarn():
    new = {"rope_type": "yarn", "rope_theta": 10000} | {key: v for key, v in YARN.items() if key != "type"}
    config = ModelConfig.from_hf(DEEPSEEK)
    assert read(DEEPSEEK, rope_parameters=new, rope_scaling=..., rope_theta=...) == config
    assert read(DEEPSEEK, rope_parameters=new, rope_scaling=YARN | {"factor": 2}) == config
    assert read(DEEPSEEK, rope_parameters={"rope_theta": 10000}) == config
    assert read(DEEPSEEK, rope_scaling=None).yarn is None
    assert read(DEEPSEEK, rope_scaling=YARN | {"truncate": True, "attention_factor": None}) == config


@pytest.mark.parametrize("key", sorted(YARN.keys() - {"type"}))
def test_a_missing_part_of_yarn_is_named(key):
    message = refusal(DEEPSEEK, rope_scaling={k: v for k, v in YARN.items() if k != key})
    assert f"rope type is 'yarn', but {key} is missing" in message
    assert f"{key} is 0; expected a number above 0" in refusal(DEEPSEEK, rope_scaling=YARN | {key: 0})


@pytest.mark.parametrize("key, value", [("attention_factor", 1.0), ("truncate", False)])
def test_a_switch_of_yarn_that_is_not_built_is_refused(key, value):
    message = refusal(DEEPSEEK, rope_scaling=YARN | {key: value})
    assert f"{key} is {value!r} beside rope type 'yarn'; that is not built" in message

"""load_weights on synthetic checkpoints and on one that transformers wrote.  fp8: test_fp8.py."""
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import tiny_checkpoint
from trueup.models import load_model
from trueup.models.checkpoint import expected_tensors
from trueup.models.config import ModelConfig
from trueup.models.loader import load_weights

PUBLISHED = json.loads((Path(__file__).parent / "glm-4.7-flash.json").read_text())
TINY = ModelConfig.from_hf(PUBLISHED | {
    "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 3, "q_lora_rank": 6,
    "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 7, "intermediate_size": 10,
    "moe_intermediate_size": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
})
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
MTP_COPIES = {"model.layers.3.shared_head.head.weight", "model.layers.3.embed_tokens.weight"}


class Receiver:
    """The least a model has to be: named parameters, and a function that fills each."""

    def __init__(self, config: ModelConfig, dtype=torch.float32) -> None:
        required = {name: t.shape for name, t in expected_tensors(config).items() if not t.optional}
        self.parameters = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in required.items()}

    def receivers(self):
        return {name: parameter.copy_ for name, parameter in self.parameters.items()}

    def holds(self, tensors: dict) -> bool:
        return all(torch.equal(p, tensors[name].to(p.dtype)) for name, p in self.parameters.items())

    def untouched(self) -> bool:
        return all(p.isnan().all() for p in self.parameters.values())


def random_tensors(config: ModelConfig, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator).to(dtype) for name, t in expected_tensors(config).items()}


def write_shards(folder: Path, tensors: dict, files: int = 3) -> dict[str, str]:
    """Deal the tensors to so many files; returns the index's weight map."""
    shards = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    weight_map = {name: shards[i % files] for i, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: t for name, t in tensors.items() if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def fuse(tensors: dict, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Per-expert tensors to the fused spelling."""
    fused = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer, moe in enumerate(config.moe_layers):
        if moe:
            at = f"model.layers.{layer}.mlp.experts."
            each = [
                [tensors[f"{at}{e}.{which}_proj.weight"] for which in ("gate", "up", "down")]
                for e in range(config.n_routed_experts)
            ]
            fused[at + "gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])  # [E, 2I, H]
            fused[at + "down_proj"] = torch.stack([down for _, _, down in each])  # [E, H, I]
    return fused


def refusal(folder: Path, config: ModelConfig = TINY) -> str:
    """The message of the ValueError, which must come before anything is copied."""
    model = Receiver(config)
    with pytest.raises(ValueError) as caught:
        load_weights(model.receivers(), folder, config, progress=False)
    assert model.untouched()
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_file_of_any_float_dtype(tmp_path, dtype):
    tensors = random_tensors(TINY, dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Receiver(TINY)
    load_weights(model.receivers(), tmp_path, TINY, progress=False)
    assert model.holds(tensors)


@pytest.mark.parametrize("spelling", ["per expert", "fused"])
@pytest.mark.parametrize("copies", ["with MTP copies", "without"])
def test_shards_in_both_spellings(tmp_path, spelling, copies):
    tensors = random_tensors(TINY)
    kept = {name: t for name, t in tensors.items() if copies != "without" or name not in MTP_COPIES}
    write_shards(tmp_path, fuse(kept, TINY) if spelling == "fused" else kept)
    model = Receiver(TINY)
    load_weights(model.receivers(), str(tmp_path), TINY, progress=False)
    assert model.holds(tensors)


def test_shards_mixing_both_spellings(tmp_path):
    tensors = random_tensors(TINY)
    mixed = {n: t for n, t in tensors.items() if not n.startswith("model.layers.1.mlp.experts.")}
    mixed |= {n: t for n, t in fuse(tensors, TINY).items() if n.startswith("model.layers.1.mlp.experts.")}
    write_shards(tmp_path, mixed)
    model = Receiver(TINY)
    load_weights(model.receivers(), tmp_path, TINY, progress=False)
    assert model.holds(tensors)


def test_parameters_with_gradients_are_filled_without_recording(tmp_path):
    tensors = random_tensors(TINY)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Receiver(TINY)
    for parameter in model.parameters.values():
        parameter.requires_grad_()
    load_weights(model.receivers(), tmp_path, TINY, progress=False)
    assert model.holds(tensors) and all(p.grad_fn is None for p in model.parameters.values())


def test_progress_goes_to_stderr_and_can_be_off(tmp_path, capfd):
    save_file(random_tensors(TINY), tmp_path / "model.safetensors")
    load_weights(Receiver(TINY).receivers(), tmp_path, TINY)
    out, err = capfd.readouterr()
    assert out == "" and f"loading {tmp_path.name}" in err and "100%" in err
    load_weights(Receiver(TINY).receivers(), tmp_path, TINY, progress=False)
    assert capfd.readouterr() == ("", "")


def test_all_differences_are_in_one_error(tmp_path):
    tensors = random_tensors(TINY)
    del tensors["model.norm.weight"], tensors[EXPERT]
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 8)
    tensors["lm_head.weight"] = torch.zeros(8, 24)
    tensors["model.embed_tokens.weight"] = torch.zeros(24, 8, dtype=torch.int8)
    write_shards(tmp_path, tensors)
    message = refusal(tmp_path)
    assert f"2 missing: model.norm.weight, {EXPERT}\n" in message
    assert "1 unexpected: model.layers.0.mlp.gate.weight\n" in message
    assert "1 of another shape: lm_head.weight is [8, 24], expected [24, 8]\n" in message
    unread = "1 of a dtype that is not read (only BF16, F16, F32, F64, F8_E4M3 are): model.embed_tokens.weight is I8"
    assert unread in message


def test_long_lists_are_cut_with_a_count(tmp_path):
    save_file({f"extra.{i:02}": torch.zeros(1) for i in range(13)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    required = sum(not t.optional for t in expected_tensors(TINY).values())
    assert f"{required} missing: " in message and f"... and {required - 10} more" in message
    assert "13 unexpected: extra.00, " in message and "extra.09, ... and 3 more" in message
    assert "extra.10" not in message


def test_an_optional_copy_of_another_shape_is_refused(tmp_path):
    tensors = random_tensors(TINY) | {"model.layers.3.embed_tokens.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.layers.3.embed_tokens.weight is [3], expected [24, 8]" in refusal(tmp_path)


def test_fused_tensors_are_checked_like_the_others(tmp_path):
    tensors = fuse(random_tensors(TINY), TINY)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].mT.contiguous()
    del tensors["model.layers.2.mlp.experts.down_proj"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert f"{name} is [4, 8, 6], expected [4, 6, 8]" in message
    assert "4 missing: model.layers.2.mlp.experts.0.down_proj.weight" in message


def test_an_expert_in_both_spellings_is_refused(tmp_path):
    tensors = random_tensors(TINY)
    save_file(fuse(tensors, TINY) | {EXPERT: tensors[EXPERT]}, tmp_path / "model.safetensors")
    assert f"1 given twice, one by one and fused: {EXPERT}" in refusal(tmp_path)


def test_an_absent_or_surplus_mtp_layer_is_explained(tmp_path):
    no_mtp = replace(TINY, num_nextn_predict_layers=0, moe_layers=TINY.moe_layers[:-1])
    save_file(random_tensors(no_mtp), tmp_path / "model.safetensors")
    assert "set num_nextn_predict_layers to 0" in refusal(tmp_path)
    load_weights(Receiver(no_mtp).receivers(), tmp_path, no_mtp, progress=False)
    save_file(random_tensors(TINY), tmp_path / "model.safetensors")
    message = refusal(tmp_path, no_mtp)
    assert "asks for no MTP layer" in message and "unexpected: model.layers.3." in message


def test_one_lost_mtp_tensor_is_not_taken_for_an_absent_layer(tmp_path):
    tensors = random_tensors(TINY)
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert "1 missing: model.layers.3.eh_proj.weight" in message and "num_nextn_predict_layers" not in message


def test_the_mtp_layers_copies_make_no_difference(tmp_path):
    """GLM-5 is published with copies of embedding and head in its MTP layer, GLM-5.2 without."""
    raw = tiny_checkpoint.raw_config("glm-5")
    tensors = tiny_checkpoint.random_tensors(ModelConfig.from_hf(raw))
    copies = {"model.layers.2.shared_head.head.weight", "model.layers.2.embed_tokens.weight"}
    assert copies <= tensors.keys()
    without = {name: t for name, t in tensors.items() if name not in copies}
    folders = [tiny_checkpoint.write(tmp_path / str(len(held)), raw, held) for held in (tensors, without)]
    (main, mtp), again = (tiny_checkpoint.logits(load_model(f, dtype="float32", progress=False)) for f in folders)
    assert torch.equal(main, again[0]) and torch.equal(mtp, again[1])
    assert mtp.isfinite().all() and mtp.std() > 0.1 and not torch.equal(main, mtp)


def test_a_model_that_does_not_take_every_tensor_is_refused(tmp_path):
    save_file(random_tensors(TINY), tmp_path / "model.safetensors")
    model = Receiver(TINY)
    del model.parameters["model.norm.weight"]
    with pytest.raises(ValueError, match=r"no receiver for model\.norm\.weight"):
        load_weights(model.receivers(), tmp_path, TINY, progress=False)
    assert model.untouched()


def test_a_truncated_file_is_named(tmp_path):
    weight_map = write_shards(tmp_path, random_tensors(TINY))
    shard = tmp_path / weight_map[EXPERT]
    whole = shard.read_bytes()
    for part in (whole[:-1], whole[:20], b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"):
        shard.write_bytes(part)
        message = refusal(tmp_path)
        assert message.startswith(f"{shard}: not a whole safetensors file") and "Download it again" in message


def test_an_absent_shard_is_named(tmp_path):
    weight_map = write_shards(tmp_path, random_tensors(TINY))
    shard = weight_map[EXPERT]
    (tmp_path / shard).unlink()
    lost = sum(file == shard for file in weight_map.values())
    assert f"names 1 of 3 files that are not there ({shard}), with {lost} tensors; download" in refusal(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path):
    weight_map = write_shards(tmp_path, random_tensors(TINY))
    right, *others = sorted(set(weight_map.values()), key=lambda file: file != weight_map[EXPERT])
    write_index(tmp_path, weight_map | {EXPERT: others[0]})
    message = refusal(tmp_path)
    assert f"index.json: 1 of {len(weight_map)} tensors are not where it says" in message
    assert f"{EXPERT}: {others[0]} by the index, found in {right}" in message

    write_index(tmp_path, weight_map | {"model.extra": right})
    assert f"model.extra: {right} by the index, found in no file" in refusal(tmp_path)

    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != EXPERT})
    assert f"{EXPERT}: nothing by the index, found in {right}" in refusal(tmp_path)


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": "."}}',
])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "index.json: " in refusal(tmp_path)


def test_a_folder_without_safetensors_says_what_it_found(tmp_path):
    assert "neither model.safetensors nor model.safetensors.index.json there. Expected" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "found pytorch_model.bin" in refusal(tmp_path)


def test_checkpoint_written_by_transformers(tmp_path):
    """Per expert as save_pretrained writes it, and fused as the library holds it in memory."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_attention_heads": 5, "num_key_value_heads": 5, "n_shared_experts": 1, "n_routed_experts": 16,
        "num_experts_per_tok": 2, "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 512, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.8, "rope_theta": 1e6,
    }
    library = transformers.Glm4MoeLiteForCausalLM(transformers.Glm4MoeLiteConfig(**sizes))
    library.save_pretrained(tmp_path, max_shard_size="500KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 5
    config = ModelConfig.from_folder(tmp_path)
    assert config.num_nextn_predict_layers == 0 and config.rope_theta == 1e6
    model = Receiver(config)
    load_weights(model.receivers(), tmp_path, config, progress=False)
    assert model.holds({name: t for shard in shards for name, t in load_file(shard).items()})

    state = library.state_dict()
    assert "model.layers.1.mlp.experts.gate_up_proj" in state
    (folder := tmp_path / "fused").mkdir()
    save_file(state, folder / "model.safetensors")
    fused = Receiver(config)
    load_weights(fused.receivers(), folder, config, progress=False)
    assert fused.holds(model.parameters)

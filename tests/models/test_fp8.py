"""Weights in fp8 blocks: the arithmetic, what a config says of them, whole checkpoints, and what is refused."""
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.tiny_checkpoint import logits, random_tensors, raw_config, write
from trueup.models import load_model
from trueup.models.checkpoint import expected_tensors
from trueup.models.config import ModelConfig
from trueup.models.fp8 import dequantise, scale_shape
from trueup.models.loader import load_weights

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
NAME = "model.layers.1.self_attn.q_b_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def blocks(shape, block):
    """Slices of every block, and its place among the scales."""
    for i in range(math.ceil(shape[0] / block[0])):
        for j in range(math.ceil(shape[1] / block[1])):
            yield (i, j), (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(fp8 matrix, float32 scales): the largest number of a block becomes the largest of fp8."""
    places = list(blocks(weight.shape, block))
    scale = torch.empty([last + 1 for last in places[-1][0]])
    quantised = torch.empty(weight.shape)
    for at, cut in places:
        scale[at] = weight[cut].abs().max() / LARGEST
        quantised[cut] = weight[cut] / scale[at]
    return quantised.to(FP8), scale


def naive(matrix: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Block by block in float64."""
    whole = torch.full(matrix.shape, torch.nan, dtype=torch.float64)
    for at, cut in blocks(matrix.shape, block):
        whole[cut] = matrix[cut].double() * scale[at].double()
    return whole


@pytest.mark.parametrize("shape, block", [
    ((8, 6), (4, 3)), ((9, 6), (4, 3)), ((8, 7), (4, 3)), ((11, 8), (4, 3)), ((3, 2), (4, 3)), ((1, 1), (1, 1)),
    ((576, 192), (128, 128)),  # kv_a_proj_with_mqa: four and a half blocks
])
def test_every_block_is_multiplied_by_its_scale(shape, block):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp()
    matrix, scale = quantise(weight, block)
    assert scale.shape == scale_shape(shape, block) and len(scale.unique()) == scale.numel()
    got = dequantise(matrix, scale, block)
    # A product of 4 and 24 significant bits, rounded once.
    assert got.dtype == torch.float32 and torch.equal(got, naive(matrix, scale, block).float())
    assert (got - weight).abs().max() <= weight.abs().max() / 16


# The config


RAW = raw_config("deepseek-v3.2")
CONFIG = ModelConfig.from_hf(RAW)
GIVEN = RAW["quantization_config"]


def with_config(given, name="deepseek-v3.2") -> ModelConfig:
    return ModelConfig.from_hf(raw_config(name, quantization_config=given))


def test_blocks_of_any_size_and_scales_of_any_format():
    assert CONFIG.fp8_block == (128, 128) and with_config(GIVEN, "glm-5").fp8_block == (128, 128)
    assert with_config(GIVEN | {"weight_block_size": [64, 1]}).fp8_block == (64, 1)
    assert with_config({k: v for k, v in GIVEN.items() if k != "scale_fmt"}) == CONFIG
    assert with_config(None).fp8_block is None


@pytest.mark.parametrize("given", [
    "fp8", {}, {"quant_method": "fp8"}, GIVEN | {"weight_block_size": None}, GIVEN | {"weight_block_size": [128]},
    GIVEN | {"weight_block_size": [128, 0]}, GIVEN | {"weight_block_size": 128}, GIVEN | {"quant_method": "awq"},
    GIVEN | {"fmt": "e5m2"}, GIVEN | {"activation_scheme": "static"},
])
def test_another_quantisation_is_refused(given):
    with pytest.raises(ValueError) as caught:
        with_config(given)
    message = str(caught.value)
    assert f"quantization_config is {given!r}; only fp8 e4m3 in blocks" in message and "or the bf16 ones" in message


# Whole checkpoints


BLOCK = (128, 128)
# What the published files keep in bf16 or float32.
UNQUANTISED = ("embed_tokens", "head", "norm", "mlp.gate.", "weights_proj")


def in_fp8(tensors: dict[str, Tensor], block=BLOCK) -> dict[str, Tensor]:
    """A published checkpoint's mixture: most matrices in fp8 with their scales, the rest as it is."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if any(word in name for word in UNQUANTISED):
            out[name] = tensor
        else:
            out[name], out[name + "_scale_inv"] = quantise(tensor, block)
    return out


def dequantised(stored: dict[str, Tensor], block=BLOCK) -> dict[str, Tensor]:
    return {
        name: naive(t, stored[name + "_scale_inv"], block).float() if t.dtype == FP8 else t
        for name, t in stored.items() if not name.endswith("_scale_inv")
    }


@pytest.fixture(scope="module")
def stored():
    return in_fp8(random_tensors(CONFIG))


def test_the_mixture_is_that_of_the_published_files(stored):
    quantised = {name for name, t in stored.items() if t.dtype == FP8}
    assert {NAME, EXPERT, "model.layers.2.self_attn.indexer.wk.weight"} <= quantised
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 1)
    assert all(len(stored[name].shape) == 2 for name in quantised) and len(quantised) > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_the_one_of_the_dequantised_file(stored, tmp_path, dtype):
    plain = {name: t.to(getattr(torch, dtype)) for name, t in dequantised(stored).items()}
    kept = {name: t if t.dtype == FP8 or name.endswith("_scale_inv") else plain[name] for name, t in stored.items()}
    folders = write(tmp_path / "fp8", RAW, kept), write(tmp_path / "plain", RAW, plain)
    fp8, expected = (logits(load_model(folder, dtype=dtype, progress=False)) for folder in folders)
    for got, want in zip(fp8, expected, strict=True):
        assert torch.equal(got, want) and want.isfinite().all() and want.std() > 0.1


class Receiver:
    """The least a model has to be: named parameters, and a function that fills each."""

    def __init__(self) -> None:
        required = {name: t.shape for name, t in expected_tensors(CONFIG).items() if not t.optional}
        self.parameters = {name: torch.full(shape, torch.nan) for name, shape in required.items()}

    def load(self, folder, config=CONFIG) -> None:
        load_weights({name: p.copy_ for name, p in self.parameters.items()}, folder, config, progress=False)


def test_scales_may_lie_in_another_shard(stored, tmp_path):
    write(tmp_path, RAW, {})
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"{'scales' if name.endswith('_scale_inv') else 'weights'}.safetensors" for name in stored}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in stored.items() if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model, right = Receiver(), dequantised(stored)
    model.load(tmp_path)
    assert all(torch.equal(p, right[name]) for name, p in model.parameters.items())


def test_other_blocks_than_square_ones(tmp_path):
    block = (40, 24)
    stored = in_fp8(random_tensors(CONFIG), block)
    model, right = Receiver(), dequantised(stored, block)
    model.load(write(tmp_path, RAW, stored), replace(CONFIG, fp8_block=block))
    assert all(torch.equal(p, right[name]) for name, p in model.parameters.items())


def test_a_config_of_fp8_takes_a_file_without(tmp_path):
    tensors, model = random_tensors(CONFIG), Receiver()
    model.load(write(tmp_path, RAW, tensors))
    assert all(torch.equal(p, tensors[name]) for name, p in model.parameters.items())


# What is refused


def refusal(folder, tensors, config=CONFIG) -> list[str]:
    """The lines of the ValueError, which must come before anything is copied."""
    write(folder, RAW, tensors)
    model = Receiver()
    with pytest.raises(ValueError) as caught:
        model.load(folder, config)
    assert all(p.isnan().all() for p in model.parameters.values())
    first, *lines = str(caught.value).split("\n  ")
    assert first == f"{folder}: the tensors are not those of its config.json"
    return lines


def test_a_weight_without_its_scales(stored, tmp_path):
    tensors = {name: t for name, t in stored.items() if name != NAME + "_scale_inv"}
    assert refusal(tmp_path, tensors) == [
        f"1 in fp8 without their scales (X.weight_scale_inv beside X.weight): {NAME}"]


def test_scales_without_their_weight(stored, tmp_path):
    assert refusal(tmp_path, {name: t for name, t in stored.items() if name != NAME}) == [
        f"1 missing: {NAME}", f"1 scales without their weight: {NAME}_scale_inv"]


def test_scales_of_a_weight_that_is_not_in_fp8(stored, tmp_path):
    tensors = stored | {NAME: dequantised(stored)[NAME].bfloat16()}
    assert refusal(tmp_path, tensors) == [
        f"1 scales of a weight that is not in fp8: {NAME}_scale_inv (the weight is BF16)"]


def test_scales_of_another_shape(stored, tmp_path):
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert refusal(tmp_path, stored | {f"{kv_a}_scale_inv": torch.ones(4, 1)}) == [
        f"1 scales of another shape than one for each 128 x 128 block: {kv_a}_scale_inv is [4, 1], expected [5, 1]"]
    lines = refusal(tmp_path, stored, replace(CONFIG, fp8_block=(64, 128)))
    assert len(lines) == 1 and "one for each 64 x 128 block: " in lines[0] and "... and " in lines[0]


def test_fp8_in_a_checkpoint_whose_config_says_nothing_of_it(stored, tmp_path):
    (line,) = refusal(tmp_path, stored, replace(CONFIG, fp8_block=None))
    assert "in fp8, but config.json says no block size" in line and "weight_block_size" in line


def test_fp8_that_is_no_matrix(stored, tmp_path):
    norm = "model.norm.weight"
    lines = refusal(tmp_path, stored | {norm: stored[norm].to(FP8), norm + "_scale_inv": torch.ones(1)})
    assert lines == [f"1 in fp8 and no matrix (experts are read one by one): {norm}"]


def test_another_fp8(stored, tmp_path):
    lines = refusal(tmp_path, stored | {NAME: stored[NAME].float().to(torch.float8_e5m2)})
    assert lines == [
        f"1 of a dtype that is not read (only BF16, F16, F32, F64, F8_E4M3 are): {NAME} is F8_E5M2",
        f"1 scales of a weight that is not in fp8: {NAME}_scale_inv (the weight is F8_E5M2)"]


def test_scales_of_a_dtype_that_is_not_read(stored, tmp_path):
    scale = NAME + "_scale_inv"
    (line,) = refusal(tmp_path, stored | {scale: stored[scale].to(torch.int32)})
    assert f"not read (only BF16, F16, F32, F64, F8_E4M3 are): {scale} is I32" in line


def test_all_faults_are_in_one_error(stored, tmp_path):
    tensors = stored | {NAME: torch.zeros(3, 5).to(FP8), "model.extra.weight": torch.zeros(1)}
    del tensors[EXPERT + "_scale_inv"], tensors["model.norm.weight"]
    starts = ("1 missing: model.norm", "1 unexpected: model.extra", "1 of another shape: ", "1 in fp8 without",
              "1 scales of another shape")
    lines = refusal(tmp_path, tensors)
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts))

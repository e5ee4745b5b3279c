"""Rope, plain and stretched, against transformers' own function, and the figures of DeepSeek-V3.2."""
import math
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

from trueup.core.layers.rope import rope_cos_sin
from trueup.core.layers.yarn import Yarn

DEEPSEEK = Yarn(factor=40.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
WIDTH, THETA = 64, 1e4
CASES = {
    "deepseek": DEEPSEEK,
    "another size of the tables": replace(DEEPSEEK, mscale_all_dim=0.7),
    "trained on little": replace(DEEPSEEK, original_positions=64),
    "other turns": replace(DEEPSEEK, factor=4.0, beta_fast=8.0, beta_slow=2.0),
    "all pairs at one place": replace(DEEPSEEK, original_positions=6, factor=3.0),
}
PLAIN = {"none": None}


def library(yarn):
    """(frequencies [Dr/2], size of the tables); of None the plain rope's."""
    if yarn is None:
        config = GlmMoeDsaConfig(qk_rope_head_dim=WIDTH, rope_parameters={"rope_type": "default", "rope_theta": THETA})
        return GlmMoeDsaRotaryEmbedding(config).inv_freq, 1.0
    names = {"original_positions": "original_max_position_embeddings"}
    scaling = {names.get(name, name): value for name, value in vars(yarn).items()}
    config = DeepseekV32Config(
        qk_rope_head_dim=WIDTH, rope_theta=THETA, rope_scaling={"type": "yarn", **scaling},
        max_position_embeddings=int(yarn.original_positions * yarn.factor))
    return ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")


def test_the_figures_of_deepseek():
    assert DEEPSEEK.corrections(WIDTH, THETA) == (10, 23)
    assert DEEPSEEK.attention_factor == pytest.approx((0.1 * math.log(40) + 1) ** 2) == pytest.approx(1.8738, abs=1e-4)
    assert DEEPSEEK.table_factor == 1.0


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_the_librarys(name):
    expected, size = library(CASES[name])
    lengths = THETA ** (torch.arange(0, WIDTH, 2) / WIDTH)  # [Dr/2]
    found = CASES[name].frequencies(lengths, THETA)
    assert ((found - expected) / expected).abs().max() <= 1e-6
    assert CASES[name].table_factor == pytest.approx(size)


@pytest.mark.parametrize("name", CASES | PLAIN)
def test_tables_are_the_librarys_to_the_last_bit(name):
    """At the end of the context, too: position times a frequency that is off by its last bit is off by 5e-4 there."""
    yarn = (CASES | PLAIN)[name]
    expected, size = library(yarn)
    positions = torch.arange(0, 40 * 4096, 997)
    cos, sin = rope_cos_sin(positions, WIDTH, THETA, torch.float32, yarn)
    angle = positions.float()[:, None] * expected  # [T, Dr/2]
    angle = torch.cat([angle, angle], -1)  # [T, Dr]
    assert torch.equal(cos[:, 0, 0], angle.cos() * size) and torch.equal(sin[:, 0, 0], angle.sin() * size)


def test_fast_pairs_keep_their_frequency_and_slow_ones_lose_the_factor():
    lengths = THETA ** (torch.arange(0, WIDTH, 2) / WIDTH)  # [Dr/2]
    slowed = DEEPSEEK.frequencies(lengths, THETA) * lengths  # [Dr/2]
    low, high = DEEPSEEK.corrections(WIDTH, THETA)
    assert torch.allclose(slowed[: low + 1], torch.tensor(1.0)) and torch.allclose(slowed[high:], torch.tensor(1 / 40))
    assert (slowed[low : high + 1].diff() < 0).all()


def test_without_stretching_nothing_changes():
    plain = replace(DEEPSEEK, factor=1.0)
    assert plain.attention_factor == plain.table_factor == 1.0
    positions = torch.arange(50)
    tables = (rope_cos_sin(positions, WIDTH, THETA, torch.float32, yarn)[0] for yarn in (plain, None))
    assert torch.allclose(*tables, atol=1e-5)

"""Logits against transformers 5.24, which nobody here wrote: same weights, same ids, fp32.

Two geometries: the smallest that every operator's contract admits (5 heads, TND prompts), and the real
GLM-4.7-Flash heads (20 heads, nope 192, v 256: BSND prompts) with few layers.
"""
import pytest
import torch
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

from oracle.batch import TOLERANCE, Batch, library_model, ours
from trueup.core.engine import Engine, EngineConfig
from trueup.core.layout import Mode
from trueup.core.sampling import SamplingParams

COMMON = dict(
    vocab_size=512, intermediate_size=128, moe_intermediate_size=32, n_shared_experts=1, num_experts_per_tok=2,
    kv_lora_rank=512, qk_rope_head_dim=64, max_position_embeddings=512, first_k_dense_replace=1,
    num_nextn_predict_layers=0, routed_scaling_factor=1.8, n_group=1, topk_group=1, rms_norm_eps=1e-5,
    rope_theta=1e6, rope_scaling=None, partial_rotary_factor=1.0, bos_token_id=0, eos_token_id=1, pad_token_id=None,
)
GEOMETRIES = {
    "tiny": dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=48,
                 qk_nope_head_dim=64, v_head_dim=128, n_routed_experts=16),
    "real heads": dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=20, num_key_value_heads=20,
                       q_lora_rank=96, qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=8),
    "groups": dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=48,
                   qk_nope_head_dim=64, v_head_dim=128, n_routed_experts=16, n_group=4, topk_group=2),
}
LENGTHS = (131, 1, 40, 128, 17)  # around a page, and the shortest


@pytest.fixture(scope="module", params=GEOMETRIES)
def pair(request, tmp_path_factory):
    """(the library's model, ours loaded from the folder that it wrote)."""
    oracle = library_model(Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(**{**COMMON, **GEOMETRIES[request.param]}))
    return oracle, ours(oracle, tmp_path_factory.mktemp(request.param.replace(" ", "_")))


@pytest.fixture(scope="module")
def sequences(pair):
    """(ids, the library's logits) of five sequences."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, 512, (n,), generator=generator) for n in LENGTHS]
    with torch.no_grad():
        return [(i.tolist(), pair[0](i[None]).logits[0]) for i in ids]


def assert_equal(batch, sequences):
    for parts, (_, expected) in zip(batch.logits, sequences, strict=True):
        got, scale = torch.cat(parts), expected.abs().max()
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= TOLERANCE * scale


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_prefill_in_one_shot(pair, sequences, count):
    batch = Batch(pair[1], sequences[:count])
    batch.feed(batch.left(), Mode.PREFILL)
    assert_equal(batch, sequences[:count])


@pytest.mark.parametrize("count", [1, 5])
def test_prefill_in_uneven_chunks(pair, sequences, count):
    batch = Batch(pair[1], sequences[:count])
    batch.in_uneven_chunks()
    assert batch.left() == [0] * count
    assert_equal(batch, sequences[:count])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_step_by_step_decoding_padded_to_eight(pair, sequences, count):
    """All but up to 12 tokens as a prompt, the rest one by one; short requests leave the batch early."""
    batch = Batch(pair[1], sequences[:count])
    batch.to_the_end(tail=12, most=1, mode=Mode.DECODE)
    assert_equal(batch, sequences[:count])


def test_verify_rows_equal_the_library_too(pair, sequences):
    """Several query rows a request in the absorbed form, as speculation asks."""
    batch = Batch(pair[1], sequences)
    batch.to_the_end(tail=9, most=4, mode=Mode.VERIFY)
    assert_equal(batch, sequences)


def test_greedy_text_of_64_tokens(pair, sequences):
    oracle, model = pair
    engine = Engine(model, EngineConfig(num_pages=16, prefill_tokens=50))
    prompts = [ids[:20] for ids, _ in sequences if len(ids) > 20]
    ids = [engine.add(p, SamplingParams(max_tokens=64, ignore_eos=True)) for p in prompts]
    text = {i: [] for i in ids}
    while engine.has_work:
        for i, tokens in engine.step().tokens.items():
            text[i] += tokens
    for i, prompt in zip(ids, prompts, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + text[i]])).logits[0, len(prompt) - 1 : -1]
        for step, (row, token) in enumerate(zip(logits, text[i], strict=True)):
            tie = (row.max() - row[token]) <= 1e-5 * row.abs().max()
            assert tie, f"token {step}: {token} is not the library's choice {int(row.argmax())}"

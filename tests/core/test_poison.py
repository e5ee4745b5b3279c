"""Poison: what stands in padded rows and heads, and in the dummy page, must not move a real row by one bit.

NaN first, because it survives arithmetic; then 1e30, because NaN is sometimes filtered.
"""
import pytest
import torch

from trueup.core.attention import absorbed
from trueup.core.ops.contract import profile
from trueup.core.ops.load import load

load()
npu = torch.ops.npu
REAL, PADDED, H, E, K = 5, 8, 64, 8, 2
generator = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=generator)


GAMMA, COS, SIN = random(H), random(PADDED, 1, 1, 64), random(PADDED, 1, 1, 64)
WEIGHT, HEADS = random(E, H, 32), random(4, 16, 32)
EXPERTS = torch.randint(0, E, (PADDED, K), generator=generator, dtype=torch.int32)
COUNTS = torch.tensor([2, 0, 1, 2, 0, 0, 0, 3])


def kv_write(x):
    """The cache rows of real tokens, and the returned rows; padded rows go to slots of page 0."""
    rope, latent = torch.zeros(3, 16, 1, 64), torch.zeros(3, 16, 1, 512)
    slots = torch.tensor([16, 17, 40, 41, 42, 0, 1, 2])
    kv = x.repeat(1, 9)[:, None, None]  # [Tp, 1, 1, 576]
    _, _, r, c = npu.npu_kv_rmsnorm_rope_cache(
        kv, random(512).abs(), COS, SIN, slots, rope, latent, cache_mode="PA", is_output_kv=True
    )
    caches = [pool[1:].flatten(0, 2)[None].expand(PADDED, -1, -1) for pool in (latent, rope)]
    return [r, c, *caches]


# name: rows x [Tp, H] to a list of tensors whose first axis is the rows.
CALLS = {
    "npu_rms_norm": lambda x: npu.npu_rms_norm(x, GAMMA, 1e-5),
    "npu_add_rms_norm": lambda x: npu.npu_add_rms_norm(x, x * 2, GAMMA, 1e-5),
    "npu_swiglu": lambda x: [npu.npu_swiglu(x)],
    "npu_interleave_rope": lambda x: [npu.npu_interleave_rope(x[:, None, None].contiguous(), COS, SIN)],
    "npu_kv_rmsnorm_rope_cache": kv_write,
    "npu_moe_gating_top_k": lambda x: npu.npu_moe_gating_top_k(
        x[:, :E].contiguous(), K, bias=GAMMA[:E], norm_type=1, group_select_mode=1, routed_scaling_factor=1.8
    )[:2],
    "npu_grouped_matmul": lambda x: npu.npu_grouped_matmul(
        [x], [WEIGHT], group_list=COUNTS, split_item=2, group_type=0, group_list_type=1
    ),
    "npu_moe_finalize_routing": lambda x: [
        npu.npu_moe_finalize_routing(
            x.repeat_interleave(K, 0), x, None, None, torch.ones(PADDED, K),
            torch.arange(PADDED * K, dtype=torch.int32), None, drop_pad_mode=2,
        )
    ],
    "npu_transpose_batchmatmul": lambda x: [
        npu.npu_transpose_batchmatmul(
            x.view(PADDED, 4, 16), HEADS, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
    ],
}


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("name", CALLS)
def test_padded_rows_do_not_reach_real_rows(name, poison):
    call, x = CALLS[name], random(PADDED, H)
    state = generator.get_state()
    clean = call(x)
    x = x.clone()
    x[REAL:] = poison
    generator.set_state(state)
    for a, b in zip(clean, call(x), strict=True):
        assert torch.equal(a[:REAL], b[:REAL])
        assert torch.isfinite(a[:REAL]).all()


def attend(heads, latent_pool, rope_pool, pages=((1, 2), (3, 0)), kv_lens=(20, 9)):
    """Absorbed attention of two requests, one decode row each; ``heads`` [2, N, 512 + 64]."""
    return npu.npu_fused_infer_attention_score_v2(
        heads[..., :512].contiguous(), latent_pool, latent_pool, query_rope=heads[..., 512:].contiguous(),
        key_rope=rope_pool, actual_seq_qlen=[1, 2], actual_seq_kvlen=list(kv_lens), block_size=16,
        block_table=torch.tensor(pages, dtype=torch.int32), num_query_heads=heads.shape[1], num_key_value_heads=1,
        softmax_scale=0.1, input_layout="TND_NTD",
    )[0]  # [N, 2, 512]


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_page_tails_and_the_dummy_page_do_not_reach_attention(poison):
    latent, rope, q = random(4, 16, 512), random(4, 16, 64), random(2, 8, 576)
    clean = attend(q, latent, rope)
    for pool in (latent, rope):
        pool[0] = poison  # the dummy page, which pads request 1's block table row
        pool[2, 4:] = poison  # request 0 holds 20 tokens: 16 and 4
        pool[3, 9:] = poison
    assert torch.equal(clean, attend(q, latent, rope))


@pytest.mark.parametrize("poison", [float("nan"), 1e30, 0.0])
def test_sb06_padded_heads_do_not_reach_real_heads(poison):
    """20 heads as 32: whatever stands in the other 12, the first 20 are equal bit for bit, and to the unpadded."""
    latent, rope, q = random(4, 16, 512), random(4, 16, 64), random(2, 20, 576)
    padded = torch.cat([q, torch.full((2, 12, 576), poison)], 1)
    zeros = torch.cat([absorbed.pad_heads(q[..., :512]), absorbed.pad_heads(q[..., 512:])], -1)
    assert torch.equal(attend(padded, latent, rope)[:20], attend(zeros, latent, rope)[:20])
    with profile("paper"):  # under it 20 heads may stay 20
        assert torch.allclose(attend(q, latent, rope), attend(zeros, latent, rope)[:20], atol=1e-6)


def test_sb06_heads_are_padded_with_zeros_to_a_power_of_two():
    counts = [absorbed.padded_heads(n) for n in (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 64, 65)]
    assert counts == [1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 128]
    padded = absorbed.pad_heads(random(3, 5, 8))
    assert padded.shape == (3, 8, 8) and not padded[:, 5:].any()

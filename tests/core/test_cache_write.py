"""npu_kv_rmsnorm_rope_cache against loops in float64, and what the gallery says of cache writers."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops.cache import scatter  # noqa: F401  (declares the operators)
from trueup.core.ops.contract import Check, ContractError, profile
from trueup.core.ops.mla import kv_rmsnorm_rope_cache  # noqa: F401
from trueup.core.ops.registry import OPERATORS

FUSED, SCATTER = OPERATORS["npu_kv_rmsnorm_rope_cache"], OPERATORS["npu_scatter_pa_kv_cache"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
FLOATS = st.sampled_from([torch.float32, torch.bfloat16])


def naive_rows(kv, gamma, cos, sin, epsilon):
    """(latent, rope) of every row of kv, in float64."""
    R, D, latents, ropes = len(gamma), cos.shape[3], [], []
    for b in range(kv.shape[0]):
        for s in range(kv.shape[2]):
            row, t = kv[b, 0, s].tolist(), 0 if cos.shape[2] == 1 else s
            c, z = cos[b, 0, t].tolist(), sin[b, 0, t].tolist()
            rstd = 1 / math.sqrt(sum(v * v for v in row[:R]) / R + epsilon)
            latents.append([v * rstd * g for v, g in zip(row[:R], gamma.tolist(), strict=True)])
            even, odd, h = row[R::2], row[R + 1::2], D // 2
            ropes.append([even[i] * c[i] - odd[i] * z[i] for i in range(h)]
                         + [odd[i] * c[h + i] + even[i] * z[h + i] for i in range(h)])
    return torch.tensor(latents, dtype=torch.float64), torch.tensor(ropes, dtype=torch.float64)


def check_cache(cache, slots, rows, dtype):
    """Every slot of a cache that was 7 everywhere holds one of the rows sent to it, or still 7."""
    for slot, got in enumerate(cache.flatten(0, 1).flatten(1).double()):
        sent = [rows[t] for t, where in enumerate(slots) if where == slot] or [torch.full_like(got, 7)]
        assert any(torch.allclose(got, want, TOLERANCE[dtype], TOLERANCE[dtype]) for want in sent), slot


@st.composite
def slots_for(draw, T, block_num, block_size, others):
    """T slots: distinct ones outside page 0, any number in page 0, and ``others``."""
    real = draw(st.permutations(range(block_size, block_num * block_size)))
    kinds = draw(st.lists(st.sampled_from(["real", "page 0", *others]), min_size=T, max_size=T))
    return [{"real": real[t], "page 0": t % block_size}.get(kind, kind) for t, kind in enumerate(kinds)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 5), st.sampled_from([2, 4]), st.booleans(), st.booleans(),
       FLOATS, st.integers(0, 2**16), st.data())
def test_fused(B, S, R, D, one_table, is_output_kv, dtype, seed, data):
    torch.manual_seed(seed)
    kv, gamma = torch.randn(B, 1, S, R + D).to(dtype), torch.randn(R).to(dtype)
    cos, sin = torch.randn(2, B, 1, 1 if one_table else S, D).to(dtype)
    slots = data.draw(slots_for(B * S, 4, 3, [-1, -7]))
    k_cache, ckv_cache = torch.full((4, 3, 1, D), 7.0, dtype=dtype), torch.full((4, 3, 1, R), 7.0, dtype=dtype)
    with profile("paper"):
        first, second, k_rope, c_kv = FUSED(kv, gamma, cos, sin, torch.tensor(slots), k_cache, ckv_cache,
                                            cache_mode="PA", epsilon=1e-3, is_output_kv=is_output_kv)
    assert first is k_cache and second is ckv_cache
    latent, rope = naive_rows(*(t.double() for t in (kv, gamma, cos, sin)), 1e-3)
    check_cache(k_cache, slots, rope, dtype)
    check_cache(ckv_cache, slots, latent, dtype)
    for got, want, width in ((k_rope, rope, D), (c_kv, latent, R)):
        assert got.shape == (B, 1, S, width) and got.dtype == dtype
        want = want.reshape(got.shape) if is_output_kv else torch.full(got.shape, math.nan, dtype=torch.float64)
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def mla_call(dtype=torch.bfloat16, T=4, pages=3, page_size=16, R=512, D=64):
    """A legal call of the fused operator."""
    return {
        "kv": torch.randn(T, 1, 1, R + D).to(dtype), "gamma": torch.randn(R).to(dtype),
        "cos": torch.randn(T, 1, 1, D).to(dtype), "sin": torch.randn(T, 1, 1, D).to(dtype),
        "index": torch.arange(page_size, page_size + T),
        "k_cache": torch.zeros(pages, page_size, 1, D, dtype=dtype),
        "ckv_cache": torch.zeros(pages, page_size, 1, R, dtype=dtype), "cache_mode": "PA_BNSD",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_path_equals_plain_path(dtype):
    """One fused call, or rms_norm + interleave_rope + scatter_pa_kv_cache: the same caches."""
    call = mla_call(dtype, T=20)
    FUSED(**call)
    kv, rope_cache, latent_cache = call["kv"], call["k_cache"], call["ckv_cache"]
    plain_rope, plain_latent = torch.zeros_like(rope_cache), torch.zeros_like(latent_cache)
    latent, _ = OPERATORS["npu_rms_norm"](kv[:, 0, :, :512], call["gamma"], 1e-5)
    rope = OPERATORS["npu_interleave_rope"](kv[..., 512:], call["cos"], call["sin"])
    SCATTER(latent, rope[:, 0], plain_latent, plain_rope, call["index"], cache_mode="Norm")
    torch.testing.assert_close(latent_cache, plain_latent)
    torch.testing.assert_close(rope_cache, plain_rope)
    assert latent_cache[1:].flatten(0, 1)[:20].abs().amax(-1).gt(0).all()


def test_sb05_kv_padded_to_four_rows_tables_of_three():
    call = mla_call(T=4, R=8, D=4)
    with profile("paper"):
        for name in ("cos", "sin", "index"):
            with pytest.raises(ContractError, match=rf"{name} is 3 rows.*\n.*4 rows, as kv") as error:
                FUSED(**call | {name: call[name][:3]})
            assert error.value.case == "SB-05"
        three = {name: call[name][:3] for name in ("kv", "cos", "sin", "index")}
        FUSED(**call | three)
    written = call["ckv_cache"].flatten(0, 1).ne(0).any(-1).any(-1)
    assert written.nonzero().flatten().tolist() == [16, 17, 18]


def test_sb09_padding_rows_leave_the_last_slot_alone():
    """5 pages of 4 slots, 3 real rows and 5 rows at slot -1; slot 19 holds the value 7."""
    call = mla_call(T=8, pages=5, page_size=4, R=8, D=4)
    call["index"] = torch.tensor([0, 5, 10] + [-1] * 5)
    for cache in (call["k_cache"], call["ckv_cache"]):
        cache.flatten(0, 1)[19] = 7
    with profile("paper"):
        FUSED(**call)
        for cache in (call["k_cache"], call["ckv_cache"]):
            changed = cache.flatten(0, 1).ne(0).any(-1).any(-1).nonzero().flatten().tolist()
            assert cache.flatten(0, 1)[19].eq(7).all() and changed == [0, 5, 10, 19]
        with pytest.raises(ContractError, match=r"slot -1 in row 3\n.*>= 0") as error:
            SCATTER(torch.zeros(8, 1, 8), torch.zeros(8, 1, 4), call["ckv_cache"], call["k_cache"], call["index"],
                    cache_mode="Norm")
    assert error.value.case == "SB-09"


def test_sb25_a_pool_that_32_bits_cannot_address():
    call = mla_call()
    narrow, contract = call | {"index": call["index"].int()}, FUSED.contract
    with pytest.raises(ContractError) as error:
        FUSED(**narrow)
    assert (error.value.rule, error.value.case) == ("DTYPE", "SB-25")
    large = {name: torch.empty(2**15, 128, 1, width, device="meta", dtype=torch.bfloat16)
             for name, width in (("k_cache", 64), ("ckv_cache", 512))}  # 2^31 elements; no memory
    with profile("paper"):
        FUSED(**narrow)
        with pytest.raises(ContractError) as error:
            contract(Check("npu_kv_rmsnorm_rope_cache"), **narrow | large)
    assert (error.value.rule, error.value.case) == ("RELATION", "SB-25")
    contract(Check("npu_kv_rmsnorm_rope_cache"), **call | large)


def test_sb25_32_bit_slots_reach_64_bit_offsets():
    page = 2**18  # starts at element 2^31; memory that nobody touches is not taken
    cache, slot = torch.empty(page + 1, 16, 1, 512, dtype=torch.int8), torch.tensor([page * 16 + 3], dtype=torch.int32)
    key, value = torch.full((1, 1, 512), 5, dtype=torch.int8), torch.ones(1, 1, 1, dtype=torch.int8)
    SCATTER(key, value, cache, torch.empty(page + 1, 16, 1, 1, dtype=torch.int8), slot, cache_mode="Norm")
    assert cache[page, 3].eq(5).all()

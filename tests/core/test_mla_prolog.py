"""npu_mla_prolog: what random calls against a float64 version cannot show (those are in tests/operators)."""
from random import Random

import pytest
import torch

from operators.case import copied, floats
from operators.case_mla_prolog_calls import combined, prolog_v2, tokens
from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.load import load
from trueup.core.ops.registry import OPERATORS

load()
V2, V3 = OPERATORS["npu_mla_prolog_v2"], OPERATORS["npu_mla_prolog_v3"]


def small(T=3, N=5, D=6, R=8, Dr=4, H=16, Hcq=12):
    """Numbers that fit on a page, in fp32; 5 heads are no power of two."""
    r = Random(1)

    def rand(*sizes):
        return floats(r, *sizes, dtype=torch.float32)

    return dict(
        token_x=rand(T, H), weight_dq=rand(H, Hcq), weight_uq_qr=rand(Hcq, N * (D + Dr)), weight_uk=rand(N, D, R),
        weight_dkv_kr=rand(H, R + Dr), rmsnorm_gamma_cq=rand(Hcq), rmsnorm_gamma_ckv=rand(R), rope_sin=rand(T, Dr),
        rope_cos=rand(T, Dr), kv_cache=torch.zeros(3, 4, 1, R), kr_cache=torch.zeros(3, 4, 1, Dr),
        cache_index=torch.tensor([4, 11, 6]))


def test_one_call_equals_the_operators_it_fuses():
    call, npu = small(), torch.ops.npu
    x, cos, sin = call["token_x"], call["rope_cos"][:, None, None], call["rope_sin"][:, None, None]
    with profile("paper"):
        query, query_rope, _, norm, _ = V3(**call, query_norm_flag=True)
        plain, _ = npu.npu_rms_norm(x @ call["weight_dq"], call["rmsnorm_gamma_cq"], 1e-5)
        heads = (plain @ call["weight_uq_qr"]).view(3, 5, 10)
        kv_cache, kr_cache = torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 4)
        latent_rope = (x @ call["weight_dkv_kr"]).view(3, 1, 1, 12)
        npu.npu_kv_rmsnorm_rope_cache(latent_rope, call["rmsnorm_gamma_ckv"], cos, sin, call["cache_index"], kr_cache,
                                      kv_cache, cache_mode="PA_BNSD")
        torch.testing.assert_close(norm, plain)
        torch.testing.assert_close(query, npu.npu_transpose_batchmatmul(heads[..., :6], call["weight_uk"],
                                                                        perm_x1=[1, 0, 2]))
        torch.testing.assert_close(query_rope, npu.npu_interleave_rope(heads[..., 6:, None].transpose(2, 3), cos, sin)
                                   .squeeze(2))
    torch.testing.assert_close(call["kv_cache"], kv_cache)
    torch.testing.assert_close(call["kr_cache"], kr_cache)
    assert kv_cache.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [4, 6, 11]


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("cache_mode", ["PA_BSND", "BSND", "TND"])
def test_rows_that_hold_latent_rope_and_scales(cache_mode, alpha):
    """kv_cache_quant_mode 3 against kv_cache_quant_mode 0 of the same call in fp32, which rounds nothing."""
    call = copied(combined(Random(3)), torch.float32) | dict(k_nope_clip_alpha=torch.tensor([alpha]))
    if cache_mode != "PA_BSND":
        call |= dict(cache_mode=cache_mode, cache_index=None)
        rows = (1, 3) if cache_mode == "BSND" else (3,)
        for name in ("token_x", "rope_sin", "rope_cos"):
            call[name] = call[name].view(*rows, -1)
        call["kv_cache"] = torch.zeros(*rows, 1, 656, dtype=torch.int8)
    plain = call | dict(kv_cache_quant_mode=0, ckvkr_repo_mode=0, quant_scale_repo_mode=0, k_nope_clip_alpha=None,
                        kv_cache=torch.zeros(*call["kv_cache"].shape[:-1], 512),
                        kr_cache=torch.zeros(*call["kv_cache"].shape[:-1], 64))
    results, same = V3(**call), V3(**plain)
    for one, other in zip(results[:2], same[:2], strict=True):
        assert torch.equal(one, other)
    places = [16, 40, 3] if cache_mode == "PA_BSND" else [0, 1, 2]
    bytes_ = call["kv_cache"].view(-1, 656)
    latents, ropes = plain["kv_cache"].view(-1, 512), plain["kr_cache"].view(-1, 64)
    for place in places:
        row, latent = bytes_[place], latents[place]
        assert torch.equal(row[512:640].view(torch.bfloat16), ropes[place].bfloat16())
        scales = row[640:].view(torch.float32)
        for tile in range(4):
            columns = slice(tile * 128, (tile + 1) * 128)
            limit = latent[columns].abs().max() * alpha
            assert scales[tile] == limit / 127
            assert torch.equal(row[columns], (latent[columns].clamp(-limit, limit) / scales[tile]).round().char())
    untouched = sorted(set(range(len(bytes_))) - set(places))
    assert not bytes_[untouched].any()


def test_older_versions_return_the_caches_they_wrote():
    call = prolog_v2(Random(0), (0, 0), "PA_BSND", True, (3,))
    for name, results in (("npu_mla_prolog", 4), ("npu_mla_prolog_v2", 5)):
        returned = OPERATORS[name](**call)
        assert len(returned) == results
        assert returned[2] is call["kv_cache"] and returned[3] is call["kr_cache"]


def test_a_negative_index_is_refused_or_left_out():
    call = tokens(Random(0)) | dict(cache_index=torch.tensor([16, -1, 3]))
    before = call["kv_cache"].clone()
    with pytest.raises(ContractError, match="slot -1") as error:
        V3(**call)
    assert error.value.open_point == "prolog-minus-one"
    with assume("prolog-minus-one"):
        V3(**call)
    changed = (call["kv_cache"] != before).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
    assert changed.tolist() == [3, 16]


def test_rows_of_zeros_stay_zeros_in_int8():
    """Padded rows: the scale of a row without a value is 0, and 0 / 0 must not spread."""
    call = prolog_v2(Random(0), (2, 0), "PA_BSND", True, (3,))
    call["token_x"][1] = 0
    query, query_rope, *_ = V2(**call)
    assert not query[1].any() and not query_rope[1].any()
    assert query[0].any() and not query.isnan().any()

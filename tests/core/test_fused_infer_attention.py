"""npu_fused_infer_attention_score_v2 against the formula, against poison, and against the bug gallery.

The oracle knows one request at a time and goes row by row, head by head, in float64.
"""
import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import fused_infer_attention as fia
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS

op = OPERATORS["npu_fused_infer_attention_score_v2"]
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALE = 0.3
few = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**16)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def formula(query, key, value, causal, scale=SCALE):
    """One request: out [q, N, Dv] and lse [q, N]; query and key hold their rope parts at the end."""
    query, key, value = query.double(), key.double(), value.double()
    (rows, heads, _), keys = query.shape, len(key)
    out, lse = torch.zeros(rows, heads, value.shape[-1]), torch.full((rows, heads), math.inf)
    for i in range(rows):
        for n in range(heads):
            g = n * key.shape[1] // heads
            seen = [j for j in range(keys) if not causal or j <= i + keys - rows]
            scores = [scale * float(query[i, n] @ key[j, g]) for j in seen]
            if not scores:
                continue
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            lse[i, n] = top + math.log(sum(weights))
            out[i, n] = sum(w / sum(weights) * value[j, g] for w, j in zip(weights, seen, strict=True))
    return out, lse


def close(got, want, dtype=torch.float32):
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def mode(causal):
    return {"sparse_mode": 3, "atten_mask": MASK} if causal else {"sparse_mode": 0}


@st.composite
def lengths(draw, longest=9, requests=4):
    """(q, kv) of each request; q <= kv, or no keys at all; a request may have no rows."""
    kv = draw(st.lists(st.integers(0, longest), min_size=1, max_size=requests))
    return [(draw(st.integers(0, min(n, 5) or 2)), n) for n in kv]


class Paged:
    """A pool of pages whose unwritten rows hold ``junk``, and tables whose unused entries name no page."""

    def __init__(self, kv_lens, block_size=4, latent=8, rope=4, dtype=torch.float32, junk=math.nan, axes=3):
        columns = max(1, -(-max(kv_lens) // block_size)) + 1
        pages = 1 + sum(-(-n // block_size) for n in kv_lens)
        self.latent = torch.full((pages, block_size, latent), junk, dtype=dtype)
        self.rope = torch.full((pages, block_size, rope), junk, dtype=dtype)
        self.table = torch.full((len(kv_lens), columns), 10**6, dtype=torch.int32)
        self.kv = [(randn(n, latent, dtype=dtype), randn(n, rope, dtype=dtype)) for n in kv_lens]
        free = iter((torch.randperm(pages - 1) + 1).tolist())
        for row, (latent_rows, rope_rows) in enumerate(self.kv):
            for position in range(len(latent_rows)):
                if position % block_size == 0:
                    self.table[row, position // block_size] = next(free)
                page = self.table[row, position // block_size]
                self.latent[page, position % block_size] = latent_rows[position]
                self.rope[page, position % block_size] = rope_rows[position]
        if axes == 4:
            self.latent, self.rope = self.latent[:, None], self.rope[:, None]

    def __call__(self, query, query_rope, q_lens, kv_lens=None, causal=True, layout="TND", **more):
        arguments = {
            "query_rope": query_rope, "key_rope": self.rope, "actual_seq_qlen": list(accumulate(q_lens)),
            "actual_seq_kvlen": [len(c) for c, _ in self.kv] if kv_lens is None else kv_lens,
            "block_table": self.table, "block_size": self.latent.shape[-2], "num_query_heads": query.shape[1],
            "num_key_value_heads": 1, "softmax_scale": SCALE, "input_layout": layout, **mode(causal)}
        value = more.pop("value", self.latent)
        return op(query, self.latent, value, **{**arguments, **more})


# ---- the formula, over ragged lengths


@few
@given(lengths(), st.booleans(), st.sampled_from([(1, 1), (3, 3), (4, 2)]), st.booleans(), dtypes, seeds)
def test_packed(pairs, causal, heads, rope, dtype, seed):
    torch.manual_seed(seed)
    (N, G), (q_lens, kv_lens) = heads, zip(*pairs, strict=True)
    q, qr = randn(sum(q_lens), N, 6, dtype=dtype), randn(sum(q_lens), N, 2, dtype=dtype)
    k, kr, v = (randn(sum(kv_lens), G, D, dtype=dtype) for D in (6, 2, 5))
    if rope and q.numel() and k.numel():
        parts = {"query_rope": qr, "key_rope": kr}
    else:
        q, k, parts = torch.cat([q, qr], -1), torch.cat([k, kr], -1), {}
        qr, kr = qr[..., :0], kr[..., :0]
    with profile("paper"):
        out, lse = op(q, k, v, actual_seq_qlen=list(accumulate(q_lens)), actual_seq_kvlen=list(accumulate(kv_lens)),
                      num_query_heads=N, num_key_value_heads=G, softmax_scale=SCALE, input_layout="TND",
                      return_softmax_lse=True, **parts, **mode(causal))
    assert out.dtype == dtype and out.shape == (sum(q_lens), N, 5)
    assert lse.dtype == torch.float32 and lse.shape == (sum(q_lens), N, 1)
    q, k = torch.cat([q, qr], -1).split(q_lens), torch.cat([k, kr], -1).split(kv_lens)
    wanted = [formula(*request, causal) for request in zip(q, k, v.split(kv_lens), strict=True)]
    close(out, torch.cat([w[0] for w in wanted]), dtype)
    close(lse[..., 0], torch.cat([w[1] for w in wanted]))


@few
@given(lengths(longest=14), st.booleans(), st.sampled_from([3, 4]), st.sampled_from(["TND", "TND_NTD"]),
       st.sampled_from([fia.GATHERED_ELEMENTS, 150]), dtypes, seeds)
def test_paged(pairs, causal, axes, layout, gathered, dtype, seed):
    torch.manual_seed(seed)
    q_lens, kv_lens = zip(*pairs, strict=True)
    q_lens, kv_lens = (*q_lens, 1), (*kv_lens, 3)  # absorbed MLA takes no empty tensor
    pool = Paged(kv_lens, dtype=dtype, axes=axes)
    q, qr = randn(sum(q_lens), 3, 8, dtype=dtype), randn(sum(q_lens), 3, 4, dtype=dtype)
    with profile("paper"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fia, "GATHERED_ELEMENTS", gathered)
        out, lse = pool(q, qr, q_lens, causal=causal, layout=layout, return_softmax_lse=True)
    out = out if layout == "TND" else out.transpose(0, 1)
    assert out.dtype == dtype and out.shape == q.shape and lse.shape == (sum(q_lens), 3, 1)
    wanted = [formula(rows, torch.cat(kv, -1)[:, None], kv[0][:, None], causal)
              for rows, kv in zip(torch.cat([q, qr], -1).split(q_lens), pool.kv, strict=True)]
    close(out, torch.cat([w[0] for w in wanted]), dtype)
    close(lse[..., 0], torch.cat([w[1] for w in wanted]))


@few
@given(lengths(), st.booleans(), st.sampled_from(["each", "one", "none"]), st.sampled_from([(1, 1), (4, 2)]), dtypes,
       seeds)
def test_batched(pairs, causal, given_as, heads, dtype, seed):
    torch.manual_seed(seed)
    (N, G), (q_lens, kv_lens) = heads, zip(*pairs, strict=True)
    B, S, Skv = len(pairs), max(q_lens), max(max(q_lens), *kv_lens)
    if given_as != "each":
        q_lens, kv_lens = (S,) * B, (Skv,) * B
    q, k, v = randn(B, S, N, 16, dtype=dtype), randn(B, Skv, G, 16, dtype=dtype), randn(B, Skv, G, 16, dtype=dtype)
    for b, n in enumerate(kv_lens):
        k[b, n:] = v[b, n:] = math.nan
    given_lengths = {"each": (q_lens, kv_lens), "one": (q_lens[:1], kv_lens[:1]), "none": (None, None)}[given_as]
    out, lse = op(q, k, v, actual_seq_qlen=given_lengths[0], actual_seq_kvlen=given_lengths[1], num_query_heads=N,
                  num_key_value_heads=G, softmax_scale=SCALE, input_layout="BSND", return_softmax_lse=True,
                  **mode(causal))
    assert out.dtype == dtype and out.shape == q.shape and lse.shape == (B, N, S, 1)
    for b, (n, n_kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
        wanted = formula(q[b, :n], k[b, :n_kv], v[b, :n_kv], causal)
        close(out[b, :n], wanted[0], dtype)
        close(lse[b, :, :n, 0].T, wanted[1])
        assert out[b, n:].isnan().all() and lse[b, :, n:].isnan().all(), "rows past the length are unwritten"


@pytest.mark.parametrize("causal", [False, True])
def test_long_prompt_is_cut_into_blocks(causal):
    T, kv = 2 * fia.ROWS_PER_BLOCK + 1, 2 * fia.ROWS_PER_BLOCK + 40
    q, k, v = randn(T, 1, 64), randn(kv, 1, 64), randn(kv, 1, 64)
    out, lse = op(q, k, v, actual_seq_qlen=[T], actual_seq_kvlen=[kv], num_query_heads=1, softmax_scale=0.125,
                  input_layout="TND", return_softmax_lse=True, **mode(causal))
    wanted = formula(q, k, v, causal, 0.125)
    close(out, wanted[0])
    close(lse[..., 0], wanted[1])


def test_fp64_is_computed_in_fp64():
    q, k, v = (torch.randn(3, 2, 64, dtype=torch.float64) for _ in range(3))
    out, _ = op(q, k, v, actual_seq_qlen=[3], actual_seq_kvlen=[3], num_query_heads=2, softmax_scale=SCALE,
                input_layout="TND")
    scores = torch.einsum("qnd,knd->nqk", q, k) * SCALE  # [N, T, T]
    torch.testing.assert_close(out, torch.einsum("nqk,knd->qnd", scores.softmax(-1), v), atol=1e-13, rtol=1e-13)


def test_lse_is_empty_unless_asked_for():
    q = randn(2, 3, 4, 16)
    out, lse = op(q, q, q, num_query_heads=4, softmax_scale=SCALE, input_layout="BSND")
    assert out.shape == q.shape and lse.shape == (0,)


def test_requests_are_gathered_together_as_far_as_their_padded_copy_fits(monkeypatch):
    monkeypatch.setattr(fia, "GATHERED_ELEMENTS", 40)
    spans = [(0, 1), (1, 1), (2, 0), (2, 1), (3, 2), (5, 1), (6, 1), (7, 1)]
    assert list(fia._batches(spans, [2, 10, 99, 10, 2, 30, 2, 2], 2)) == [[0, 1], [3, 4], [5], [6, 7]]


def test_paged_values_may_differ_from_the_keys():
    pool = Paged((5, 3))
    q, qr = randn(2, 2, 8), randn(2, 2, 4)
    with profile("paper"):
        once, _ = pool(q, qr, (1, 1))
        twice, _ = pool(q, qr, (1, 1), value=2 * pool.latent)
    close(twice, 2 * once)


# ---- poison: what nobody may read


@pytest.mark.parametrize("junk", [math.nan, 1e30])
@pytest.mark.parametrize("causal", [False, True])
def test_junk_in_page_tails_dummy_page_and_padded_heads_moves_no_bit(junk, causal):
    def run(filler):
        torch.manual_seed(3)
        pool = Paged((5, 9, 1), junk=filler)
        pool.table[2] = 0  # a padded request on the dummy page
        q, qr = randn(5, 8, 8), randn(5, 8, 4)
        q[:, 5:], qr[:, 5:], q[4], qr[4] = filler, filler, filler, filler
        with profile("paper"):
            out, lse = pool(q, qr, (2, 2, 1), causal=causal, return_softmax_lse=True)
        return out[:4, :5], lse[:4, :5]

    for clean, dirty in zip(run(0.0), run(junk), strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


@pytest.mark.parametrize("junk", [math.nan, 1e30])
def test_junk_in_other_packed_requests_moves_no_bit(junk):
    def run(filler):
        torch.manual_seed(4)
        q, k, v = randn(6, 2, 64), randn(9, 2, 64), randn(9, 2, 64)
        q[4:], k[5:], v[5:] = filler, filler, filler
        return op(q, k, v, actual_seq_qlen=[4, 6], actual_seq_kvlen=[5, 9], num_query_heads=2, softmax_scale=SCALE,
                  input_layout="TND", **mode(True))[0][:4]

    assert torch.equal(run(0.0), run(junk))


# ---- the bug gallery, at operator level


def test_sb03_padded_rows_belong_to_a_request_of_their_own():
    pool = Paged((6, 9, 3))
    q, qr = randn(8, 2, 8), randn(8, 2, 4)
    with profile("paper"):
        real, _ = pool(q[:5], qr[:5], (3, 2), (6, 9), block_table=pool.table[:2])
        with pytest.raises(ContractError, match=r"queryT\(8\) .* the last element of actual_seq_qlen\(5\)") as refusal:
            pool(q, qr, (3, 2), (6, 9), block_table=pool.table[:2])
        covered, _ = pool(q, qr, (3, 2, 3), (6, 9, 3))
        raised, _ = pool(q, qr, (3, 5), (6, 9), block_table=pool.table[:2])
    assert refusal.value.case == "SB-03"
    close(covered[:5], real)
    close(raised[:3], real[:3])
    # The operator cannot see this one: the last entry is raised to 8, so request 1's rows move up its keys.
    assert (raised[3:5] - real[3:]).abs().max() > 1e-2


@pytest.mark.parametrize("busy", [3, 4])
@pytest.mark.parametrize("capacity", [4, 5])
def test_sb04_buffers_have_room_for_the_virtual_request(busy, capacity):
    kv_lens = (7, 3, 5, 2)[:busy]
    pool = Paged(kv_lens)
    q, qr = randn(8, 2, 8), randn(8, 2, 4)
    lens_buffer = [*kv_lens, *[0] * 5][:capacity]
    table_buffer = torch.zeros(capacity, pool.table.shape[1], dtype=torch.int32)
    table_buffer[:busy] = pool.table
    requests = busy + 1
    q_lens = [1] * busy + [8 - busy]

    def run(kv_lens, table):
        return pool(q, qr, q_lens, kv_lens, block_table=table)[0]

    with profile("paper"):
        if capacity < requests:  # slicing past the end returns fewer rows and says nothing
            for kv, rows in ((lens_buffer[:requests], pool.table), ([*kv_lens, 0], table_buffer[:requests])):
                with pytest.raises(ContractError) as refusal:
                    run(kv, rows)
                assert refusal.value.case == "SB-04"
            return
        out = run(lens_buffer[:requests], table_buffer[:requests])
        alone = pool(q[:busy], qr[:busy], [1] * busy)[0]
    close(out[:busy], alone)
    assert (out[busy:] == 0).all()


def test_sb06_padded_heads_do_not_reach_real_ones():
    torch.manual_seed(6)
    pool = Paged((3, 6, 2))
    q, qr = randn(3, 5, 8), randn(3, 5, 4)

    def padded(filler):
        tail, tail_rope = torch.full((3, 3, 8), filler), torch.full((3, 3, 4), filler)
        return pool(torch.cat([q, tail], 1), torch.cat([qr, tail_rope], 1), (1, 1, 1))[0]

    with profile("paper"):
        zeros = padded(0.0)
        assert zeros.isfinite().all(), "zero heads see a uniform softmax"
        for filler in (math.nan, 1e30):
            assert torch.equal(padded(filler)[:, :5], zeros[:, :5])
        close(zeros[:, :5], pool(q, qr, (1, 1, 1))[0])

    pool = Paged((3, 6, 2), block_size=16, latent=512, rope=64)
    with pytest.raises(ContractError, match=r"num_query_heads is 5(.|\n)*pad the heads with zeros to 8") as refusal:
        pool(randn(3, 5, 512), randn(3, 5, 64), (1, 1, 1))
    assert refusal.value.case == "SB-06"


@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_sb22_a_chunk_sees_the_keys_up_to_its_own_end(chunk):
    prompt, block_size = 10, 4
    full = Paged((prompt,), block_size)
    q, qr = randn(prompt, 2, 8), randn(prompt, 2, 4)
    growing = Paged((prompt,), block_size)  # same table and sizes; filled as the chunks arrive
    growing.table = full.table

    def prefill(key_length_of):
        growing.latent.fill_(math.nan)
        growing.rope.fill_(math.nan)
        outputs = []
        for start in range(0, prompt, chunk):
            end = min(prompt, start + chunk)
            for position in range(start, end):
                page, row = full.table[0, position // block_size], position % block_size
                growing.latent[page, row], growing.rope[page, row] = full.latent[page, row], full.rope[page, row]
            outputs.append(growing(q[start:end], qr[start:end], (end - start,), [key_length_of(end)])[0])
        return torch.cat(outputs)

    with profile("paper"):
        close(prefill(lambda end: end), full(q, qr, (prompt,))[0])
        assert prefill(lambda end: prompt).isnan().any(), "the fault: the whole prompt as the length of every chunk"


@pytest.mark.parametrize("rows", [1, 3])
def test_sb27_absorbed_and_expanded_attention_agree(rows):
    torch.manual_seed(27)
    R, N, nope, rope, v_dim, latent_scale, kv = 8, 2, 4, 2, 4, 1.7, 6
    w_uk, w_uv = randn(N, nope, R), randn(N, R, v_dim)
    q, qr = randn(rows, N, nope), randn(rows, N, rope)
    pool = Paged((kv,), latent=R, rope=rope)  # the cache holds latents without their scale
    latent, k_rope = pool.kv[0]

    scaled = latent_scale * latent  # [S, R]
    keys, values = torch.einsum("sr,ndr->snd", scaled, w_uk), torch.einsum("sr,nrv->snv", scaled, w_uv)
    absorbed_q = latent_scale * torch.einsum("tnd,ndr->tnr", q, w_uk)  # [T, N, R]
    with profile("paper"):
        expanded, _ = op(q, keys, values, query_rope=qr, key_rope=k_rope[:, None].expand(-1, N, -1),
                         actual_seq_qlen=[rows], actual_seq_kvlen=[kv], num_query_heads=N, softmax_scale=SCALE,
                         input_layout="TND", **mode(True))
        latent_out, _ = pool(absorbed_q, qr, (rows,))
    one_sided = torch.einsum("tnr,nrv->tnv", latent_out, w_uv)  # [T, N, v]; the scale on the query side only
    close(latent_scale * one_sided, expanded)
    assert (one_sided - expanded).abs().max() > 1e-2, "the fault must show"

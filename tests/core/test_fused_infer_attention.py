"""npu_fused_infer_attention_score_v2 where random device calls do not reach: long rows, small sizes, junk, the gallery.

tests/operators compares the operator with a second version of itself on random calls of every form.  The oracle here
knows one request at a time and goes row by row, head by head, in float64.
"""
import math
from itertools import accumulate

import pytest
import torch

from trueup.core.ops.attention import fused_infer_attention  # noqa: F401  declares the operator
from trueup.core.ops.attention.fused_infer_attention import blocks
from trueup.core.ops.contract import ContractError, assume, profile
from trueup.core.ops.registry import OPERATORS

op = OPERATORS["npu_fused_infer_attention_score_v2"]
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
SCALE = 0.3


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def formula(query, key, value, sees, scale=SCALE, bias=0.0):
    """One request: out [q, N, Dv] and lse [q, N]; ``sees`` [q, kv], ``bias`` [N, q, kv]."""
    query, key, value = query.double(), key.double(), value.double()
    rows, heads, _ = query.shape
    bias = torch.zeros(heads, rows, len(key)) + bias
    out, lse = torch.zeros(rows, heads, value.shape[-1]), torch.full((rows, heads), math.inf)
    for i in range(rows):
        seen = sees[i].nonzero()[:, 0]
        for n in range(heads):
            g = n * key.shape[1] // heads
            scores = scale * key[seen, g] @ query[i, n] + bias[n, i, seen]
            if len(seen):
                weights = (scores - scores.max()).exp()
                lse[i, n] = scores.max() + weights.sum().log()
                out[i, n] = weights / weights.sum() @ value[seen, g]
    return out, lse


def band(rows, keys, before=math.inf, after=0):
    """[rows, keys]: what rows see that end together with the keys."""
    return torch.tensor([[i + keys - rows - before <= j <= i + keys - rows + after for j in range(keys)]
                         for i in range(rows)]).view(rows, keys)


def close(got, want):
    torch.testing.assert_close(got.float(), want.float(), atol=1e-5, rtol=1e-5)


def mode(causal):
    return {"sparse_mode": 3, "atten_mask": MASK} if causal else {"sparse_mode": 0, "atten_mask": None}


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


# ---- long prompts, which are cut into blocks


LENGTHS = (2 * blocks.ROWS_PER_BLOCK + 1, 2 * blocks.ROWS_PER_BLOCK + 40)  # of the query and of the keys


@pytest.mark.parametrize("how", ["full", "causal", "band", "mask", "mask and tokens", "shift"])
def test_long_prompt_is_cut_into_blocks(how):
    T, kv = LENGTHS
    torch.manual_seed(T)
    q, k, v = randn(1, T, 1, 64), randn(1, kv, 1, 64), randn(1, kv, 1, 64)
    hides = torch.rand(T, kv) > 0.7
    hides[:, 3] = False
    shift = randn(1, 1, T, kv)
    row, key = torch.arange(T)[:, None], torch.arange(kv)
    from_the_left = (key <= row + 9) & (key >= row - 200)
    arguments, sees = {
        "full": ({}, torch.ones(T, kv)),
        "causal": (mode(True), band(T, kv)),
        "band": ({"sparse_mode": 4, "atten_mask": MASK, "pre_tokens": 50, "next_tokens": 7}, band(T, kv, 50, 7)),
        "mask": ({"sparse_mode": 1, "atten_mask": hides}, ~hides),
        "mask and tokens": ({"atten_mask": hides, "pre_tokens": 200, "next_tokens": 9}, ~hides & from_the_left),
        "shift": ({"pse_shift": shift}, torch.ones(T, kv)),
    }[how]
    out, lse = op(q, k, v, num_query_heads=1, softmax_scale=0.125, input_layout="BSND", return_softmax_lse=True,
                  **arguments)
    wanted = formula(q[0], k[0], v[0], sees, 0.125, shift[0] if how == "shift" else 0.0)
    close(out[0], wanted[0])
    close(lse[0, :, :, 0].T, wanted[1])


def test_a_window_does_not_read_what_left_it():
    """Pages behind a sliding window may have been given away."""
    pool = Paged((14, 9))
    q, qr = randn(4, 2, 8), randn(4, 2, 4)
    window = {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0, "return_softmax_lse": True}
    with profile("paper"):
        clean = pool(q, qr, (2, 2), **window)
        for row, kv in enumerate((14, 9)):
            for position in range(kv - 5):  # the first of two rows starts at kv - 2 - 3
                page = pool.table[row, position // 4]
                pool.latent[page, position % 4] = pool.rope[page, position % 4] = math.nan
        for a, b in zip(clean, pool(q, qr, (2, 2), **window), strict=True):
            assert a.isfinite().all() and torch.equal(a, b)


def test_fp64_is_computed_in_fp64():
    q, k, v = (torch.randn(3, 2, 64, dtype=torch.float64) for _ in range(3))
    out, _ = op(q, k, v, actual_seq_qlen=[3], actual_seq_kvlen=[3], num_query_heads=2, softmax_scale=SCALE,
                input_layout="TND")
    scores = torch.einsum("qnd,knd->nqk", q, k) * SCALE  # [N, T, T]
    torch.testing.assert_close(out, torch.einsum("nqk,knd->qnd", scores.softmax(-1), v), atol=1e-13, rtol=1e-13)


# ---- pages


@pytest.mark.parametrize("gathered", [blocks.GATHERED_ELEMENTS, 150])
@pytest.mark.parametrize("arguments", [mode(False), mode(True), {"sparse_mode": 4, "atten_mask": MASK, "pre_tokens": 2,
                                                                 "next_tokens": 0}])
def test_requests_are_gathered_together_as_far_as_their_padded_copy_fits(gathered, arguments, monkeypatch):
    monkeypatch.setattr(blocks, "GATHERED_ELEMENTS", gathered)
    q_lens, kv_lens = (1, 3, 0, 2, 1), (4, 9, 5, 14, 3)
    pool = Paged(kv_lens)
    q, qr = randn(sum(q_lens), 3, 8), randn(sum(q_lens), 3, 4)
    with profile("paper"):
        out, lse = pool(q, qr, q_lens, return_softmax_lse=True, **arguments)
    limits = {0: (math.inf, math.inf), 3: (math.inf, 0), 4: (2, 0)}[arguments["sparse_mode"]]
    wanted = [formula(rows, torch.cat(kv, -1)[:, None], kv[0][:, None], band(len(rows), len(kv[0]), *limits))
              for rows, kv in zip(torch.cat([q, qr], -1).split(q_lens), pool.kv, strict=True)]
    close(out, torch.cat([w[0] for w in wanted]))
    close(lse[..., 0], torch.cat([w[1] for w in wanted]))


def test_which_requests_are_gathered_together(monkeypatch):
    monkeypatch.setattr(blocks, "GATHERED_ELEMENTS", 40)
    spans = [(0, 1), (1, 1), (2, 0), (2, 1), (3, 2), (5, 1), (6, 1), (7, 1)]
    lengths = [2, 10, 99, 10, 2, 30, 2, 2]
    assert list(blocks._batches(spans, lengths, 2, True)) == [[0, 1], [3, 4], [5], [6, 7]]
    lengths = [2, 2, 0, 2, 0, 2, 2, 0]  # a request that gets no block ends one: rows of a block are adjacent
    spans[2] = (2, 1)
    assert list(blocks._batches(spans, lengths, 1, False)) == [[0, 1], [3], [5, 6]]


def test_paged_values_may_differ_from_the_keys():
    pool = Paged((5, 3))
    q, qr = randn(2, 2, 8), randn(2, 2, 4)
    with profile("paper"):
        once, _ = pool(q, qr, (1, 1))
        twice, _ = pool(q, qr, (1, 1), value=2 * pool.latent)
    close(twice, 2 * once)


# ---- open points: what the kernel answers on the safe side, and where the other is assumed


def test_no_keys_counts_as_unwritten_until_it_is_assumed_to_give_zeros():
    pool = Paged((3, 0, 5))
    q, qr = randn(4, 2, 8), randn(4, 2, 4)
    with profile("paper"):
        out, lse = pool(q, qr, (1, 2, 1), causal=False, return_softmax_lse=True)
        with assume("fia-no-keys"):
            zeroed, inf = pool(q, qr, (1, 2, 1), causal=False, return_softmax_lse=True)
    assert out[1:3].isnan().all() and lse[1:3].isnan().all()
    assert (zeroed[1:3] == 0).all() and (inf[1:3] == math.inf).all()
    for rows in (slice(0, 1), slice(3, 4)):
        close(out[rows], zeroed[rows])
        close(lse[rows], inf[rows])


def test_no_keys_at_all_is_documented_to_give_zeros():
    q, k = randn(2, 3, 4, 16), randn(2, 0, 4, 16)
    out, lse = op(q, k, k, num_query_heads=4, softmax_scale=SCALE, input_layout="BSND", return_softmax_lse=True)
    assert (out == 0).all() and (lse == math.inf).all()


def test_rows_that_see_nothing():
    q, k = randn(1, 3, 1, 16), randn(1, 2, 1, 16)
    call = dict(num_query_heads=1, softmax_scale=SCALE, input_layout="BSND", return_softmax_lse=True)
    hides = torch.tensor([[True, True], [False, True], [False, False]])
    for arguments, sees, point in (
        (mode(True), band(3, 2), "fia-more-rows-than-keys"),
        ({"sparse_mode": 1, "atten_mask": hides}, ~hides, "fia-masked-row"),
        ({"sparse_mode": 4, "atten_mask": MASK, "next_tokens": 0}, band(3, 2), "fia-masked-row"),
    ):
        with pytest.raises(ContractError) as refusal:
            op(q, k, k, **call, **arguments)
        assert refusal.value.open_point == point
        wanted = formula(q[0], k[0], k[0], sees)
        with assume(point):
            answers = [op(q, k, k, **call, **arguments)]
        if point == "fia-masked-row":
            answers.append(op(q, k, k, **call, **arguments, inner_precise=2))
        for out, lse in answers:
            close(out[0], wanted[0])
            close(lse[0, :, :, 0].T, wanted[1])
            assert (out[0, 0] == 0).all() and lse[0, 0, 0] == math.inf


def test_rows_behind_the_last_request_are_unwritten():
    q, k = randn(5, 2, 64), randn(4, 2, 64)
    call = dict(actual_seq_kvlen=[2, 3], num_query_heads=2, softmax_scale=SCALE, input_layout="TND")
    with assume("fia-short-sum"):
        out, _ = op(q, k, k, actual_seq_qlen=[2, 4], **call)
    wanted, _ = op(q[:4], k[:3], k[:3], actual_seq_qlen=[2, 4], **call)
    assert out[4].isnan().all()
    close(out[:4], wanted)


def test_the_lse_beside_a_sink_is_without_it():
    q, k, sink = randn(3, 2, 64), randn(4, 2, 64), randn(2)
    call = dict(actual_seq_qlen=[3], actual_seq_kvlen=[4], num_query_heads=2, softmax_scale=SCALE, input_layout="TND",
                return_softmax_lse=True)
    plain, lse = op(q, k, k, **call)
    with assume("fia-sink-lse"):
        sunk, same = op(q, k, k, **call, learnable_sink=sink)
    close(same, lse)
    close(sunk, plain * (lse - torch.logaddexp(lse, sink[:, None])).exp())


@pytest.mark.parametrize(("point", "arguments"), [
    ("fia-mla-heads", {"N": 20}), ("fia-packed-latent", {"packed": True}), ("fia-bnsd-nbsd", {"layout": "BNSD_NBSD"}),
])
def test_forms_that_may_not_work_are_computed_where_they_are_assumed_to(point, arguments):
    N, layout = arguments.get("N", 4), arguments.get("layout", "TND" if "packed" in arguments else "BSND")
    q, qr, k, kr = randn(2, N, 512), randn(2, N, 64), randn(2, 3, 512), randn(2, 3, 64)
    wanted = torch.stack([formula(torch.cat([q, qr], -1)[b, None], torch.cat([k, kr], -1)[b, :, None], k[b, :, None],
                                  torch.ones(1, 3), 0.05)[0][0] for b in range(2)])  # [B, N, D]
    lengths = {}
    if layout == "TND":
        key, key_rope = k.view(6, 1, 512), kr.view(6, 1, 64)
        lengths = {"actual_seq_qlen": [1, 2], "actual_seq_kvlen": [3, 6]}
    elif layout == "BSND":
        q, qr, key, key_rope = q[:, None], qr[:, None], k[:, :, None], kr[:, :, None]
    else:
        q, qr, key, key_rope = q[:, :, None], qr[:, :, None], k[:, None], kr[:, None]

    def run():
        return op(q, key, key, query_rope=qr, key_rope=key_rope, num_query_heads=N, num_key_value_heads=1,
                  softmax_scale=0.05, input_layout=layout, **lengths)[0]

    with pytest.raises(ContractError) as refusal:
        run()
    assert refusal.value.open_point == point and f"assume({point!r})" in str(refusal.value)
    with assume(point):
        out = run()
    close({"TND": lambda: out, "BSND": lambda: out[:, 0], "BNSD_NBSD": lambda: out[:, :, 0].transpose(0, 1)}[layout](),
          wanted)


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
    assert out[busy:].isnan().all(), "the virtual request has no keys: what it gets is an open point"


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

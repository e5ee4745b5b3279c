"""npu_sparse_flash_attention and npu_kv_quant_sparse_flash_attention."""
from math import ceil
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half, ints
from operators.case_sparse_requests import (
    LAYOUTS,
    UNWRITTEN,
    Batch,
    P,
    int32,
    random_batch,
    request_rules,
    requests,
    strided,
    visible,
)

R, DR, RECORD, TILE = 512, 64, 656, 128
SCALE = 0.05


def sparse(r: Random, batch: Batch | None = None, **more) -> Call:
    batch = batch or random_batch(r)
    N, K, dtype = r.choice((1, 2, 8)), r.choice((1, 4, 8, 50)), half(r)
    s, mode = more.get("sparse_block_size", r.choice((1, 1, 2, 8))), more.get("sparse_mode", r.choice((0, 3)))
    key, key_rope = (floats(r, *batch.key_lead, width, dtype=dtype) for width in (R, DR))
    return dict(
        query=floats(r, *batch.query_lead, N, R, dtype=dtype), key=key, value=key,
        sparse_indices=batch.indices(r, K, mode, s), scale_value=SCALE,
        query_rope=floats(r, *batch.query_lead, N, DR, dtype=dtype), key_rope=key_rope, sparse_mode=mode,
        sparse_block_size=s, attention_mode=2, return_softmax_lse=batch.layout_kv != "PA_BSND" and r.random() < 0.5,
    ) | batch.call("kv") | more


def naive_sparse(query, key, value, sparse_indices, scale_value, *, block_table=None, actual_seq_lengths_query=None,
                 actual_seq_lengths_kv=None, query_rope=None, key_rope=None, sparse_block_size=1, layout_query="BSND",
                 layout_kv="BSND", sparse_mode=3, attention_mode=0, return_softmax_lse=False):
    q = torch.cat([query, query_rope], -1).flatten(0, -3).double()
    k = torch.cat([key, key_rope], -1).flatten(0, -2).double()
    heads, width = q.shape[1], key.shape[-1]
    out, top, total = (q.new_zeros(len(q), heads, n) for n in (width, 1, 1))
    batch = requests(query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table, layout_query, layout_kv)
    for rows, keys in batch:
        for i, t in enumerate(rows):
            seen = visible(len(rows), len(keys), i, sparse_mode)
            chosen: list[int] = []
            for entry in sparse_indices.flatten(0, -2)[t].tolist()[:max(0, ceil(seen / sparse_block_size))]:
                if entry == -1:
                    break
                first = entry * sparse_block_size
                chosen += [keys[p] for p in range(first, min(first + sparse_block_size, seen))]
            if chosen:
                scores = scale_value * (q[t] @ k[chosen].T)  # [N, chosen]
                top[t] = scores.amax(1, keepdim=True)
                weights = (scores - top[t]).exp()
                total[t] = weights.sum(1, keepdim=True)
                out[t] = weights @ k[chosen, :width] / total[t]
    if layout_query == "TND":
        for x in (out, top, total):
            x[batch[-1][0][-1] + 1 if batch[-1][0] else int(actual_seq_lengths_query[-1]):] = float("nan")
    out = out.view(*query.shape[:-1], width)
    if not return_softmax_lse:
        return out, torch.empty(0), torch.empty(0)
    axis = 1 if layout_query == "BSND" else 0
    return out, *(x.view(query.shape[:-1]).unsqueeze(axis) for x in (top, total))


def records(r: Random, *lead: int) -> torch.Tensor:
    """Keys of 512 int8, 64 bfloat16 and 4 float32.

    All cases hold bfloat16: what a record holds cannot be seen once the queries are float64.
    """
    rope = floats(r, *lead, DR).view(torch.int8)
    scales = (floats(r, *lead, R // TILE, dtype=torch.float32) / 100).view(torch.int8)
    return torch.cat([ints(r, -128, 128, *lead, R, dtype=torch.int8), rope, scales], -1)


def quantised(r: Random, batch: Batch | None = None, **more) -> Call:
    batch = batch or random_batch(r)
    N, K = r.choice((1, 2, 8)), r.choice((1, 4, 8, 50))
    s, mode = more.get("sparse_block_size", r.choice((1, 1, 2, 16))), more.get("sparse_mode", r.choice((0, 3)))
    key = records(r, *batch.key_lead)
    return dict(
        query=floats(r, *batch.query_lead, N, R + DR), key=key, value=key, sparse_indices=batch.indices(r, K, mode, s),
        scale_value=SCALE, key_quant_mode=2, value_quant_mode=2, attention_mode=2, sparse_mode=mode,
        sparse_block_size=s,
    ) | batch.call("kv") | more


def naive_quantised(query, key, value, sparse_indices, scale_value, key_quant_mode, value_quant_mode, *,
                    rope_head_dim=64, tile_size=128, **rest):
    latent = query.shape[-1] - rope_head_dim
    end = latent + 2 * rope_head_dim
    scales = key[..., end:].clone().view(torch.float32).double().repeat_interleave(tile_size, -1)
    rope = key[..., latent:end].clone().view(torch.bfloat16).double()
    whole = key[..., :latent].double() * scales
    out, _, _ = naive_sparse(query[..., :latent], whole, whole, sparse_indices, scale_value, key_rope=rope,
                             query_rope=query[..., latent:], **rest)
    return out


def fixed(make, layouts: tuple[str, str] = LAYOUTS[0], **more):
    """Two requests of 2 and 3 rows, in one layout, for what is to be changed."""
    return lambda r: make(r, Batch(r, layouts, [2, 3], [20, 30]), **{"sparse_block_size": 1, "sparse_mode": 3} | more)


def with_row(call: Call, row: list[int]) -> Call:
    """Row 1, the last of the first request, sees 20 keys; rows are as wide as ``row``."""
    indices = torch.full((5, 1, len(row)), -1, dtype=torch.int32)
    indices[1, 0] = int32(row)
    return {"sparse_indices": indices}


def shared_rules(make) -> list[Wrong]:
    """What both operators refuse."""
    paged, packed, batched = (fixed(make, layouts) for layouts in (LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]))
    wide = [*range(19, -1, -1), *[-1] * 80]  # rows too many to be looked at one by one

    def wrong(name, change, level, message, of=paged):
        return Wrong(name, change, level, message, of)

    return [
        *request_rules(paged, packed, batched, "kv"),
        wrong("an index row missing", lambda c: {"sparse_indices": c["sparse_indices"][:-1]}, "RELATION",
              "(?s)sparse_indices is 4 rows.*5 rows.*pad_topk.*SB-02"),
        wrong("an index row too many", lambda c: {"sparse_indices": torch.cat([c["sparse_indices"]] * 2)[:6]},
              "RELATION",
              "(?s)sparse_indices is 6 rows.*5 rows.*SB-02"),
        wrong("index rows without a head", lambda c: {"sparse_indices": c["sparse_indices"].squeeze(1)},
              "RELATION", "5 rows"),
        wrong("no entries", lambda c: {"sparse_indices": c["sparse_indices"][..., :0]},
              "RELATION", "at least one entry"),
        wrong("int64 indices", lambda c: {"sparse_indices": c["sparse_indices"].long()}, "DTYPE", "int32"),
        wrong("strided indices", strided("sparse_indices"), "SIZE", "sparse_indices is not contiguous"),
        wrong("a slot instead of a place", lambda c: with_row(c, [-2, -1]), "RELATION", r"sparse_indices\[1\] is -2"),
        wrong("an unwritten row", lambda c: with_row(c, [UNWRITTEN] * 4), "RELATION", "which no indexer writes"),
        wrong("a hole", lambda c: with_row(c, [3, -1, 4, -1]),
              "RELATION", "(?s)-1 in entry 1 and choices behind it.*SB-29"),
        wrong("front padding", lambda c: with_row(c, [-1, -1, 4, 5]),
              "RELATION", "-1 in entry 0 and choices behind it"),
        wrong("a key twice", lambda c: with_row(c, [3, 4, 3, -1]), "RELATION", "3 more than once"),
        wrong("a key that is not read", lambda c: with_row(c, [*range(20, 40), 7]),
              "RELATION", "7 behind the first 20 entries"),
        wrong("a hole among many", lambda c: with_row(c, [-1, *wide[:-1]]), "RELATION", "-1 in entry 0"),
        wrong("a key twice among many", lambda c: with_row(c, [*wide[:19], 19, *wide[20:]]),
              "RELATION", "19 more than once"),
        wrong("a late key among many", lambda c: with_row(c, [25, *wide[:-1]]),
              "RELATION", "0 behind the first 20 entries"),
        wrong("a slot among many", lambda c: with_row(c, [*wide[:20], -7, *wide[21:]]), "RELATION", "-7"),
        wrong("an unwritten entry among many", lambda c: with_row(c, [*wide[:19], UNWRITTEN, *wide[20:]]),
              "RELATION", "no indexer"),
        wrong("sparse_block_size 0", lambda c: {"sparse_block_size": 0},
              "RELATION", "how many keys an entry stands for"),
        wrong("sparse_block_size 3", lambda c: {"sparse_block_size": 3}, "SIZE", "a power of two"),
        wrong("attention_mode left at 0", lambda c: {"attention_mode": 0}, "RELATION", "the default 0 is refused"),
        wrong("value narrower", lambda c: {"value": c["value"][..., :-1]}, "RELATION", "the shape of key"),
        wrong("value of another dtype", lambda c: {"value": c["value"].double()}, "DTYPE", "value is .*\n.*key's"),
        wrong("other values", lambda c: {"value": c["value"].roll(1, 0)}, "RELATION", "one latent for both"),
        wrong("3 heads", lambda c: {name: torch.cat([c[name][:, :1]] * 3, 1) for name in c if name.startswith("query")},
              "SIZE", "(?s)query is 3 heads.*SB-06"),
        wrong("query in fp32", lambda c: {"query": c["query"].float()}, "DTYPE", "float16 or bfloat16"),
    ]


CASES = {
    "npu_sparse_flash_attention": Case(sparse, naive_sparse, [
        *shared_rules(sparse),
        Wrong("sinks", lambda c: {"sinks": torch.zeros(c["query"].shape[-2])},
              "RELATION", "only Ascend 950 has sinks", fixed(sparse)),
        Wrong("no rope", lambda c: {"query_rope": None, "key_rope": None}, "RELATION", "the rope parts", fixed(sparse)),
        Wrong("no key_rope", lambda c: {"key_rope": None}, "RELATION", "key_rope is None", fixed(sparse)),
        Wrong("rows of query_rope", lambda c: {"query_rope": c["query_rope"][1:]},
              "RELATION", "and a width, as query", fixed(sparse)),
        Wrong("pages of key_rope", lambda c: {"key_rope": c["key_rope"][1:]},
              "RELATION", "as key, and the width", fixed(sparse)),
        Wrong("width of key", lambda c: {"key": c["key"][..., 1:].contiguous()},
              "RELATION", "last axis 512, as query", fixed(sparse)),
        Wrong("latent of 256", lambda c: {n: c[n][..., :256].contiguous() for n in ("query", "key", "value")}, "SIZE",
              "last axes 512 and 64", fixed(sparse)),
        Wrong("rope of 32", lambda c: {n: c[n][..., :32].contiguous() for n in ("query_rope", "key_rope")}, "SIZE",
              "last axes 512 and 64", fixed(sparse)),
        Wrong("key_rope of another dtype", lambda c: {"key_rope": c["key_rope"].double()},
              "DTYPE", "key_rope is", fixed(sparse)),
        Wrong("query_rope from a split", lambda c: {"query_rope": torch.cat([c["query_rope"]] * 2, -1)[..., :DR]},
              "SIZE",
              "query_rope is not contiguous", fixed(sparse)),
        Wrong("no value", lambda c: {"value": None}, "SIZE", "only CANN 9.2.0 and later", fixed(sparse)),
        Wrong("softmax over pages", lambda c: {"return_softmax_lse": True},
              "SIZE", "False where layout_kv is 'PA_BSND'", fixed(sparse)),
        Wrong("sparse_block_size 256", lambda c: {"sparse_block_size": 256}, "SIZE", "from 1 to 128", fixed(sparse)),
        Wrong("sparse blocks across pages", lambda c: {"sparse_block_size": 32},
              "SIZE", f"a divisor of the {P} keys", fixed(sparse)),
    ]),
    "npu_kv_quant_sparse_flash_attention": Case(quantised, naive_quantised, [
        *shared_rules(quantised),
        Wrong("key_quant_mode", lambda c: {"key_quant_mode": 0},
              "RELATION", "one scale for each tile", fixed(quantised)),
        Wrong("value_quant_mode", lambda c: {"value_quant_mode": 1},
              "RELATION", "one scale for each tile", fixed(quantised)),
        Wrong("scales apart", lambda c: {"quant_scale_repo_mode": 0},
              "RELATION", "the scales are in the records", fixed(quantised)),
        Wrong("scales given", lambda c: {"key_dequant_scale": torch.ones(4)},
              "RELATION", "key_dequant_scale is", fixed(quantised)),
        Wrong("value scales given", lambda c: {"value_dequant_scale": torch.ones(4)},
              "RELATION", "in the records", fixed(quantised)),
        Wrong("hifloat8", lambda c: {"key_dtype": 290}, "RELATION", "not built", fixed(quantised)),
        Wrong("float8 keys", lambda c: {n: c[n].view(torch.float8_e4m3fn) for n in ("key", "value")},
              "RELATION", "int8", fixed(quantised)),
        Wrong("tiles of 100", lambda c: {"tile_size": 100}, "RELATION", "tile_size divides R", fixed(quantised)),
        Wrong("records without scales", lambda c: {n: c[n][..., :-16].contiguous() for n in ("key", "value")},
              "RELATION",
              "which is 656 bytes", fixed(quantised)),
        Wrong("latent of 256", lambda c: {"query": c["query"][..., :256 + DR].contiguous()} |
              {n: c[n][..., :256 + 2 * DR + 8].contiguous() for n in ("key", "value")}, "SIZE", "last axis 512",
              fixed(quantised)),
        Wrong("sparse_block_size 32", lambda c: {"sparse_block_size": 32}, "SIZE", "from 1 to 16", fixed(quantised)),
    ], wide=2**-8),
}

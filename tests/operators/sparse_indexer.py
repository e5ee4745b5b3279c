"""npu_lightning_indexer and npu_quant_lightning_indexer.

Queries, keys and weights are small whole numbers and powers of two: every score is exact in fp32, so equal scores are
equal everywhere, and there are many of them.
"""
from random import Random

import torch

from operators.case import Call, Case, Wrong, half, ints
from operators.case_sparse_requests import (
    LAYOUTS,
    UNWRITTEN,
    Batch,
    int32,
    random_batch,
    request_rules,
    requests,
    strided,
    visible,
)

D = 128


def small(r: Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return ints(r, -1, 2, *shape).to(dtype)


def powers(r: Random, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (2.0 ** ints(r, -3, 2, *shape)).to(dtype)


def indexer(r: Random, batch: Batch | None = None, **more) -> Call:
    batch, dtype, N = batch or random_batch(r), half(r), r.choice((1, 3, 8))
    return dict(
        query=small(r, *batch.query_lead, N, D, dtype=dtype), key=small(r, *batch.key_lead, D, dtype=dtype),
        weights=small(r, *batch.query_lead, N, dtype=dtype) * powers(r, *batch.query_lead, N, dtype=dtype),
        sparse_count=r.choice((1, 4, 8, 64)), sparse_mode=r.choice((0, 3)),
        return_value=batch.layout_kv != "PA_BSND" and r.random() < 0.5,
    ) | batch.call("key") | more


def naive_indexer(query, key, weights, *, actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None,
                  layout_query="BSND", layout_key="BSND", sparse_count=2048, sparse_mode=3, return_value=False):
    q, k, w = query.flatten(0, -3).double(), key.flatten(0, -2).double(), weights.flatten(0, -2).double()
    indices = torch.full((len(q), sparse_count), -1, dtype=torch.int32)
    values = torch.full((len(q), sparse_count), float("-inf"), dtype=torch.float64)
    if layout_query == "TND":
        indices[actual_seq_lengths_query[-1]:], values[actual_seq_lengths_query[-1]:] = UNWRITTEN, float("nan")
    for rows, keys in requests(query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table, layout_query,
                               layout_key):
        for i, t in enumerate(rows):
            seen = keys[:max(0, visible(len(rows), len(keys), i, sparse_mode))]
            scores = (w[t][:, None] * (q[t] @ k[seen].T).clamp(min=0)).sum(0).tolist()
            best = sorted(range(len(seen)), key=lambda j: (-scores[j], j))[:sparse_count]
            indices[t, :len(best)] = int32(best)
            values[t, :len(best)] = torch.tensor([scores[j] for j in best], dtype=torch.float64)
    shape = (*query.shape[:-2], 1, sparse_count)
    return indices.view(shape), values.view(shape) if return_value else torch.empty(0)


def quantised(r: Random, batch: Batch | None = None, **more) -> Call:
    batch, N = batch or random_batch(r), r.choice((1, 3, 8))
    return dict(
        query=ints(r, -9, 10, *batch.query_lead, N, D, dtype=torch.int8),
        key=ints(r, -9, 10, *batch.key_lead, D, dtype=torch.int8), weights=powers(r, *batch.query_lead, N),
        query_dequant_scale=powers(r, *batch.query_lead, N), key_dequant_scale=powers(r, *batch.key_lead),
        query_quant_mode=0, key_quant_mode=0, sparse_count=r.choice((1, 4, 8, 64)), sparse_mode=r.choice((0, 3)),
    ) | batch.call("key") | more


def naive_quantised(query, key, weights, query_dequant_scale, key_dequant_scale, query_quant_mode, key_quant_mode,
                    **rest):
    return naive_indexer(query.double() * query_dequant_scale[..., None], key.double() * key_dequant_scale[..., None],
                         weights, **rest)[0]


def fixed(make, layouts: tuple[str, str] = LAYOUTS[0], **more):
    """Two requests of 2 and 3 rows, in one layout, for what is to be changed."""
    return lambda r: make(r, Batch(r, layouts, [2, 3], [20, 30]), **more)


def shared_rules(make) -> list[Wrong]:
    """What both operators refuse."""
    paged = fixed(make)

    def wrong(name, change, level, message):
        return Wrong(name, change, level, message, paged)

    return [
        *request_rules(paged, fixed(make, LAYOUTS[2]), fixed(make, LAYOUTS[3]), "key"),
        wrong("rows of weights", lambda c: {"weights": c["weights"][1:]}, "RELATION", "a number for each row and head"),
        wrong("width of key", lambda c: {"key": c["key"][..., 1:].contiguous()}, "RELATION", "last axis 128, as query"),
        wrong("nothing to choose", lambda c: {"sparse_count": 0}, "RELATION", "at least 1"),
        wrong("2500 to choose", lambda c: {"sparse_count": 2500}, "SIZE", "1 to 2048"),
        wrong("width 64", lambda c: {n: c[n][..., :64].contiguous() for n in ("query", "key")},
              "SIZE", "last axis 128"),
        wrong("80 heads", lambda c: {n: torch.cat([c[n][:, :1]] * 80, 1) for n in c
                                     if n in ("query", "weights", "query_dequant_scale")}, "SIZE", "at most 64 heads"),
        wrong("strided weights", strided("weights"), "SIZE",
              "weights is not contiguous"),
    ]


CASES = {
    "npu_lightning_indexer": Case(indexer, naive_indexer, [
        *shared_rules(indexer),
        Wrong("10240 to choose", lambda c: {"sparse_count": 10240}, "SIZE", "up to 8192", fixed(indexer)),
        Wrong("fp32", lambda c: {"query": c["query"].float(), "key": c["key"].float()},
              "DTYPE", "float16 or bfloat16", fixed(indexer)),
        Wrong("key of another dtype", lambda c: {"key": c["key"].double()},
              "DTYPE", "key is .*\n.*query's", fixed(indexer)),
        Wrong("weights in fp64", lambda c: {"weights": c["weights"].double()}, "DTYPE", "or float32", fixed(indexer)),
        Wrong("values over pages", lambda c: {"return_value": True},
              "SIZE", "False where layout_key is", fixed(indexer)),
    ]),
    "npu_quant_lightning_indexer": Case(quantised, naive_quantised, [
        *shared_rules(quantised),
        Wrong("3072 to choose", lambda c: {"sparse_count": 3072}, "SIZE", "1 to 2048", fixed(quantised)),
        Wrong("query_quant_mode", lambda c: {"query_quant_mode": 1},
              "RELATION", "a scale for each token", fixed(quantised)),
        Wrong("key_quant_mode", lambda c: {"key_quant_mode": 1},
              "RELATION", "a scale for each token", fixed(quantised)),
        Wrong("dtype named", lambda c: {"query_dtype": 1}, "RELATION", "not built", fixed(quantised)),
        Wrong("query in bf16", lambda c: {"query": c["query"].bfloat16()},
              "RELATION", "query is .*\n.*int8", fixed(quantised)),
        Wrong("key in bf16", lambda c: {"key": c["key"].bfloat16()}, "RELATION", "key is .*\n.*int8", fixed(quantised)),
        Wrong("rows of query scales", lambda c: {"query_dequant_scale": c["query_dequant_scale"][1:]}, "RELATION",
              "a scale for each row", fixed(quantised)),
        Wrong("pages of key scales", lambda c: {"key_dequant_scale": c["key_dequant_scale"][1:]}, "RELATION",
              "a scale for each key", fixed(quantised)),
        Wrong("weights in bf16", lambda c: {"weights": c["weights"].bfloat16()}, "DTYPE", "float16", fixed(quantised)),
        Wrong("query scales in fp32", lambda c: {"query_dequant_scale": c["query_dequant_scale"].float()},
              "DTYPE", "weights'",
              fixed(quantised)),
        Wrong("key scales in fp32", lambda c: {"key_dequant_scale": c["key_dequant_scale"].float()},
              "DTYPE", "weights'",
              fixed(quantised)),
        Wrong("strided key scales", strided("key_dequant_scale"),
              "SIZE", "key_dequant_scale is not contiguous", fixed(quantised)),
        Wrong("product too large",
              lambda c: {n: torch.full_like(c[n], 300) for n in ("weights", "query_dequant_scale")}, "SIZE",
              "products that float16 can hold", fixed(quantised)),
    ]),
}

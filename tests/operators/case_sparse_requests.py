"""Requests for the four sparse-attention operators: random ones in every layout, and how a naive version finds them."""
from collections.abc import Callable
from math import ceil
from random import Random
from typing import Any

import torch
from torch import Tensor

from operators.case import Call, Wrong

LAYOUTS = (("TND", "PA_BSND"), ("BSND", "PA_BSND"), ("TND", "TND"), ("BSND", "BSND"))
P = 16  # keys of a page
UNWRITTEN = 2**31 - 1


class Batch:
    """Query rows and keys of each of some requests, and the arguments that say so."""

    def __init__(self, r: Random, layouts: tuple[str, str], q: list[int], kv: list[int], past: int = 0) -> None:
        self.layout_query, self.layout_kv = layouts
        self.q, self.kv, B = q, kv, len(q)
        self.arguments: dict[str, Any] = {}
        if self.layout_query == "TND":
            self.query_lead: tuple[int, ...] = (max(1, sum(q) + past),)
            self.q_lengths = ends(q)
        else:
            self.query_lead = (B, max(1, *q) + past)
            self.q_lengths = None if past == 0 and len(set(q)) == 1 and q[0] else int32(q)
        if self.layout_kv == "TND":
            self.key_lead: tuple[int, ...] = (max(1, sum(kv) + past), 1)
            self.kv_lengths = ends(kv)
        elif self.layout_kv == "BSND":
            self.key_lead = (B, max(1, *kv) + past, 1)
            self.kv_lengths = None if past == 0 and len(set(kv)) == 1 and kv[0] else int32(kv)
        else:
            self.key_lead = (sum(ceil(n / P) for n in kv) + 2, P, 1)
            self.kv_lengths = int32(kv)
            self.arguments["block_table"] = self.table(r)

    def table(self, r: Random) -> Tensor:
        """Pages in any order; behind them entries that name no page, and nobody may read."""
        free = r.sample(range(self.key_lead[0]), self.key_lead[0])
        table = torch.full((len(self.kv), max(1, *(ceil(n / P) for n in self.kv)) + 1), 10**6, dtype=torch.int32)
        for b, n in enumerate(self.kv):
            for column in range(ceil(n / P)):
                table[b, column] = free.pop()
        return table

    def call(self, side: str, **more: Any) -> dict[str, Any]:
        """The arguments that all four operators have; ``side`` is 'kv' or 'key'."""
        lengths = {"actual_seq_lengths_query": self.q_lengths, f"actual_seq_lengths_{side}": self.kv_lengths}
        layouts = {"layout_query": self.layout_query, f"layout_{side}": self.layout_kv}
        return {**layouts, **lengths, **self.arguments, **more}

    def indices(self, r: Random, K: int, sparse_mode: int, s: int) -> Tensor:
        """Choices such as an indexer could make; unwritten memory in rows that belong to no request."""
        rows = torch.full((torch.Size(self.query_lead).numel(), K), UNWRITTEN, dtype=torch.int32)
        for b, (q, kv) in enumerate(zip(self.q, self.kv, strict=True)):
            first = sum(self.q[:b]) if self.layout_query == "TND" else b * self.query_lead[1]
            for i in range(q):
                seen = max(0, ceil(visible(q, kv, i, sparse_mode) / s))
                chosen = r.sample(range(seen), r.randint(0, min(K, seen)))
                later = r.sample(range(seen, seen + 9), r.randint(0, min(2, K - len(chosen))))
                row = chosen + later
                if len(row) <= seen:
                    r.shuffle(row)
                rows[first + i] = int32(row + [-1] * (K - len(row)))
        return rows.view(*self.query_lead, 1, K)


def random_batch(r: Random, layouts: tuple[str, str] | None = None) -> Batch:
    q = [r.choice((0, 1, 1, 2, 5)) for _ in range(r.randint(1, 3))]
    if r.random() < 0.4:
        q = [r.randint(1, 4)] * len(q)
    kv = [r.choice((0, 1, n, P, n + P, r.randint(1, 40))) for n in q]
    return Batch(r, layouts or r.choice(LAYOUTS), q, kv, past=r.choice((0, 0, 2)))


def requests(query: Tensor, key: Tensor, q_lengths: Tensor | None, kv_lengths: Tensor | None,
             block_table: Tensor | None, layout_query: str, layout_kv: str) -> list[tuple[list[int], list[int]]]:
    """For each request its query rows and its keys, as rows of the flattened query and key."""
    q = spans(q_lengths, layout_query, query)
    if layout_kv != "PA_BSND":
        return list(zip(q, spans(kv_lengths, layout_kv, key), strict=True))
    size = key.shape[1]
    return [(rows, [int(block_table[b, p // size]) * size + p % size for p in range(n)])
            for b, (rows, n) in enumerate(zip(q, kv_lengths.tolist(), strict=True))]


def spans(lengths: Tensor | None, layout: str, tensor: Tensor) -> list[list[int]]:
    if layout == "TND":
        bounds = [0, *lengths.tolist()]
        return [list(range(bounds[b], bounds[b + 1])) for b in range(len(lengths))]
    B, S = tensor.shape[:2]
    return [list(range(b * S, b * S + (S if lengths is None else int(lengths[b])))) for b in range(B)]


def visible(q: int, kv: int, i: int, sparse_mode: int) -> int:
    """How many keys row i of a request sees."""
    return kv if sparse_mode == 0 else kv - q + i + 1


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ends(lengths: list[int]) -> Tensor:
    return int32(lengths).cumsum(0).int()


def strided(name: str) -> Callable[[Call], Call]:
    """The same numbers, two places apart."""
    return lambda c: {name: torch.stack([c[name], c[name]], -1)[..., 0]}


def request_rules(paged: Callable[[Random], Call], packed: Callable[[Random], Call], batched: Callable[[Random], Call],
                  side: str) -> list[Wrong]:
    """What all four operators refuse of their requests; the calls have two of 2 and 3 rows, with 20 and 30 keys."""
    layout, query_lengths, key_lengths = f"layout_{side}", "actual_seq_lengths_query", f"actual_seq_lengths_{side}"

    def wrong(name: str, change: Callable[[Call], Call], level: str, message: str, of: Callable = paged) -> Wrong:
        return Wrong(name, change, level, message, of)

    def lengths(name: str, *values: int) -> Callable[[Call], Call]:
        return lambda c: {name: int32([*values])}

    def given(name: str, value: Any) -> Callable[[Call], Call]:
        return lambda c: {name: value}

    return [
        wrong("layout of queries", given("layout_query", "BNSD"), "RELATION", "layout_query is 'BNSD'"),
        wrong("layout of keys", given(layout, "PA_NZ"), "RELATION", f"{layout} is 'PA_NZ'"),
        wrong("layouts differ", given(layout, "BSND"), "RELATION", "'TND', as layout_query, or 'PA_BSND'"),
        wrong("axes of query", lambda c: {"query": c["query"][None]}, "RELATION", "the 3 axes of layout TND"),
        wrong("axes of key", lambda c: {"key": c["key"].squeeze(2)}, "RELATION", "all heads share one key head"),
        wrong("two key heads", lambda c: {"key": torch.cat([c["key"]] * 2, 2)}, "RELATION", "one key head"),
        wrong("requests of key", lambda c: {"key": c["key"][:1]},
              "RELATION", "key is 1 requests.*\n.*2 requests", batched),
        wrong("sparse_mode 4", given("sparse_mode", 4), "RELATION", "sparse_mode is 4"),
        wrong("a window", given("pre_tokens", 128), "RELATION", "there is no window"),
        wrong("a window ahead", given("next_tokens", 0), "RELATION", "there is no window"),
        wrong("no rows", lambda c: {"query": c["query"][:0], query_lengths: int32([0, 0])}, "SIZE", "no empty axis"),
        wrong("no keys", lambda c: {"key": c["key"][:0]}, "SIZE", "no empty axis"),
        wrong("strided query", strided("query"), "SIZE", "query is not contiguous"),
        wrong("strided key", strided("key"), "SIZE", "key is not contiguous"),
        wrong("no query lengths", given(query_lengths, None), "RELATION", "the end offset of each request"),
        wrong("no key lengths", given(key_lengths, None), "RELATION", "a length for each of 2 requests", packed),
        wrong("no key lengths over pages", given(key_lengths, None), "RELATION", "a length for each of 2 requests"),
        wrong("a query length too many", lengths(query_lengths, 2, 5, 5), "RELATION",
              f"(?s){key_lengths} is 2 lengths.*3 lengths, one for each request.*SB-01"),
        wrong("a query length too many in a batch", lengths(query_lengths, 2, 3, 3), "RELATION",
              f"(?s){query_lengths} is 3 lengths.*2 lengths", batched),
        wrong("int64 query lengths", lambda c: {query_lengths: c[query_lengths].long()}, "DTYPE", "int32"),
        wrong("int64 query lengths in a batch", lambda c: {query_lengths: c[query_lengths].long()},
              "DTYPE", "int32", batched),
        wrong("int64 key lengths", lambda c: {key_lengths: c[key_lengths].long()}, "DTYPE", "int32"),
        wrong("query ends decrease", lengths(query_lengths, 3, 2), "RELATION", "never decreasing"),
        wrong("key ends decrease", lengths(key_lengths, 30, 20), "RELATION", "never decreasing", packed),
        wrong("query rows missing", lengths(query_lengths, 2, 6), "RELATION", "6 in its last element"),
        wrong("keys missing", lengths(key_lengths, 20, 51), "RELATION", "51 in its last element", packed),
        wrong("too many rows in a request", lengths(query_lengths, 2, 4), "RELATION", "from 0 to 3", batched),
        wrong("too many keys in a request", lengths(key_lengths, 20, 31), "RELATION", "from 0 to 30", batched),
        wrong("cumulative over pages", lengths(key_lengths, 20, 50), "RELATION", "not cumulative"),
        wrong("no block table", given("block_table", None), "RELATION", "the pages of each request"),
        wrong("block table beside packed keys", given("block_table", int32([0, 1])[:, None]),
              "RELATION", "None, unless", packed),
        wrong("block table a row short", lambda c: {"block_table": c["block_table"][:1]}, "RELATION",
              "block_table is 1 rows.*\n.*2 rows"),
        wrong("int64 block table", lambda c: {"block_table": c["block_table"].long()}, "DTYPE", "int32"),
        wrong("strided block table", strided("block_table"), "SIZE", "block_table is not contiguous"),
        wrong("a page that is not there", lambda c: {"block_table": c["block_table"] - 10}, "RELATION",
              r"block_table\[0, 0\] is -"),
        wrong("pages of 15", lambda c: {name: x[:, :15].contiguous() for name, x in c.items()
                                        if name.startswith(("key", "value")) and isinstance(x, Tensor)}, "SIZE",
              "P a multiple of 16"),
    ]

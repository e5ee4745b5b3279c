"""Dense attention (FIA) once more: request by request and row by row, in the words of the operator's pages.

Takes the arguments of version 2; :data:`V1` renames them for version 1.
"""
import math

import torch
from torch import Tensor

from operators.case import unwritten
from trueup.core.ops.contract import OPEN_POINTS, assumed

FOREVER = 2147483647  # the default of pre_tokens and next_tokens

# What version 1 calls the arguments of version 2.
V1 = {
    "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads", "softmax_scale": "scale", "return_softmax_lse": "softmax_lse_flag",
    "quant_scale_out": "quant_scale2",
}
V2 = {old: new for new, old in V1.items()}


def naive_v2(query, key, value, *, input_layout="BSH", **named):
    if input_layout != "NSD":
        return attention(query, key, value, input_layout=input_layout, **named)
    out, lse = attention(query[None], key[None], value[None], input_layout="BNSD", **named)
    return out[0], lse


def naive_v1(query, key, value, **named):
    return naive_v2(query, key, value, **{V2.get(name, name): x for name, x in named.items()})


def attention(query, key, value, *, query_rope=None, key_rope=None, pse_shift=None, atten_mask=None,
              actual_seq_qlen=None, actual_seq_kvlen=None, block_table=None, learnable_sink=None, num_query_heads=1,
              num_key_value_heads=0, softmax_scale=1.0, pre_tokens=FOREVER, next_tokens=FOREVER, input_layout="BSH",
              sparse_mode=0, block_size=0, inner_precise=0, return_softmax_lse=False):
    reads, _, writes = input_layout.partition("_")
    N, G = num_query_heads, num_key_value_heads or num_query_heads
    packed, paged = "T" in reads, block_table is not None
    q_lens = lengths(query, reads, actual_seq_qlen, query=True)
    if paged and len(actual_seq_kvlen) == 1:
        kv_lens = actual_seq_kvlen * len(q_lens)
    elif paged:
        kv_lens = actual_seq_kvlen[:len(q_lens)]
    else:
        kv_lens = lengths(key, reads, actual_seq_kvlen)

    def queries(x):
        return requests(x, reads, N, q_lens)

    def keys(x):
        if not paged:
            return requests(x, reads, G, kv_lens)
        return [from_pages(x, ids, n, G) for ids, n in zip(block_table.tolist(), kv_lens, strict=True)]

    Q, K, V = queries(query), keys(key), keys(value)
    if query_rope is not None:  # scores of both parts add up, as if they stood side by side
        Q = [torch.cat(parts, -1) for parts in zip(Q, queries(query_rope), strict=True)]
        K = [torch.cat(parts, -1) for parts in zip(K, keys(key_rope), strict=True)]

    if sparse_mode == 0 and atten_mask is None:
        pre_tokens = next_tokens = FOREVER
    # A lone query row has no mode: pages say that sparse_mode, pre_tokens and next_tokens are without effect.
    lone = not packed and query_rope is None and shape_of(query, reads)[1] == 1
    outs, lses = [], []
    for b, (q, k, v) in enumerate(zip(Q, K, V, strict=True)):
        out, lse = v.new_zeros(len(q), N, v.shape[-1]), v.new_full((len(q), N), math.inf)
        if not len(k) and key.numel() and not assumed(OPEN_POINTS["fia-no-keys"]):
            out, lse = unwritten(out.shape), unwritten(lse.shape)
        for i in range(len(q)):
            seen = visible(i, len(q), len(k), sparse_mode, pre_tokens, next_tokens, lone)
            seen &= ~hidden(atten_mask, b, i, q_lens, len(k), sparse_mode, lone)
            if not seen.any():
                continue  # zeros, and +inf
            heads = q[i].view(G, N // G, -1)  # neighbours share a key head
            scores = softmax_scale * torch.einsum("gnd,kgd->gnk", heads, k).flatten(0, 1)
            if pse_shift is not None:
                scores += pse_shift[b % len(pse_shift), :, i, :len(k)]
            scores = scores[:, seen]
            most = scores.max(1).values
            weights = (scores - most[:, None]).exp()
            total = weights.sum(1)
            lse[i] = most + total.log()
            if learnable_sink is not None:
                total = total + (learnable_sink - most).exp()
            weights = (weights / total[:, None]).view(G, N // G, -1)
            out[i] = torch.einsum("gnk,kgd->gnd", weights, v[seen]).flatten(0, 1)
        outs.append(out)
        lses.append(lse)
    out = together(outs, query, reads, writes or reads)
    if not return_softmax_lse:
        return out, unwritten((0,))
    lse = together(lses, query, reads, "TND" if packed else "BNSD")
    return out, lse.unsqueeze(-1)


def shape_of(x, layout):
    """(requests, rows of each) of a batched tensor."""
    return x.shape[0], x.shape[2 if layout == "BNSD" else 1]


def lengths(x, layout, given, query=False):
    """Rows of each request: lists are end offsets where requests are packed, and lengths elsewhere."""
    if "T" in layout:
        return [end - start for start, end in zip([0, *given], given, strict=False)]
    B, S = shape_of(x, layout)
    if given is None or (query and S == 1):  # the list is without effect for single rows
        return [S] * B
    return given * B if len(given) == 1 else given[:B]


def requests(x, layout, heads, lens):
    """The [rows, heads, D] of each request."""
    if "T" in layout:
        x = x.transpose(0, 1) if layout == "NTD" else x
        return list(x.split([*lens, len(x) - sum(lens)]))[:-1]
    if layout == "BSH":
        x = x.unflatten(2, (heads, x.shape[2] // heads))
    elif layout == "BNSD":
        x = x.transpose(1, 2)
    return [x[b, :n] for b, n in enumerate(lens)]


def from_pages(pool, ids, n, heads):
    """The [n, heads, D] that one row of a block table points to."""
    if pool.dim() == 3:  # pages, rows, heads * D
        pool = pool.unflatten(2, (heads, -1))
    elif pool.dim() == 4:  # pages, heads, rows, D
        pool = pool.transpose(1, 2)
    else:  # pages, heads, D / 16, rows, 16
        pool = pool.permute(0, 3, 1, 2, 4).flatten(3)
    P = pool.shape[1]
    pages = [pool[ids[start // P]] for start in range(0, n, P)]
    return torch.cat([pool[:0].flatten(0, 1), *pages])[:n]


def visible(i, q_len, kv_len, mode, pre_tokens, next_tokens, lone) -> Tensor:
    """Which keys the mode itself shows row i."""
    j = torch.arange(kv_len)
    last = i + kv_len - q_len  # the key that stands beside row i when both end together
    if lone or mode in (1, 9):
        return j >= 0
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= last
    at = last if mode == 4 else i
    return (at - pre_tokens <= j) & (j <= at + next_tokens)


def hidden(mask, b, i, q_lens, kv_len, mode, lone) -> Tensor:
    """Which keys the mask takes from row i of request b; modes 2 to 4 only say once more what the mode says."""
    nothing = torch.zeros(kv_len, dtype=torch.bool)
    if mask is None or mode in (2, 3, 4):
        return nothing
    if mode == 9:  # a square for each request, over its last keys
        n = q_lens[b]
        if mask.dim() == 1:
            start = sum(length * length for length in q_lens[:b])
            mask = mask[start:start + n * n].view(n, n)
        else:
            mask = mask[b]
        if kv_len:
            nothing[kv_len - n:] = mask[i, :n].bool()
        return nothing
    if mask.dim() == 2:  # (B, Skv) for single rows, else (S, Skv)
        row = mask[b if lone else i]
    elif mask.dim() == 3:
        row = mask[0, i]
    else:
        row = mask[b % len(mask), 0, i]
    return row[:kv_len].bool()


def together(parts, query, reads, layout):
    """One tensor of what was computed for each request; rows past a request's length are unwritten."""
    if "T" in reads:
        left = query.shape[reads.index("T")] - sum(map(len, parts))
        x = torch.cat([*parts, unwritten((left, *parts[0].shape[1:]))])
        return x.transpose(0, 1) if layout == "NTD" else x
    B, S = shape_of(query, reads)
    x = unwritten((B, S, *parts[0].shape[1:]))
    for b, part in enumerate(parts):
        x[b, :len(part)] = part
    if layout == "BSH":
        return x.flatten(2)
    return {"BSND": x, "BNSD": x.transpose(1, 2), "NBSD": x.movedim(2, 0)}[layout]

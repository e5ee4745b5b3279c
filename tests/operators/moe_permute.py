"""npu_moe_token_permute and npu_moe_token_unpermute."""
from random import Random

import torch

from operators.case import Call, Case, Wrong, floats, half, ints


def some_float(r: Random) -> torch.dtype:
    return r.choice((half(r), torch.float32))


def permute(r: Random) -> Call:
    T, K = r.randint(0, 6), r.randint(1, 4)
    shape = r.choice(((T, K), (T,)))
    pairs = T * K if len(shape) == 2 else T
    call = dict(tokens=floats(r, T, r.randint(1, 5), dtype=some_float(r)),
                indices=ints(r, 0, 5, *shape, dtype=r.choice((torch.int32, torch.int64))))
    return call | r.choice(({}, {"num_out_tokens": r.choice((None, r.randint(-pairs, pairs + 2)))}))


def naive_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    pairs = sorted((e, p) for p, e in enumerate(indices.flatten().tolist()))
    K = indices.shape[1] if indices.dim() == 2 else 1
    row_of = torch.zeros(len(pairs), dtype=torch.int32)
    for row, (_, p) in enumerate(pairs):
        row_of[p] = row
    kept = pairs[:num_out_tokens] if num_out_tokens else pairs
    return tokens[[p // K for _, p in kept]], row_of


def unpermute(r: Random) -> Call:
    T, K = r.randint(0, 6), r.randint(1, 4)
    call: Call = {}
    if r.random() < 0.8:
        call["probs"] = floats(r, T, K, dtype=some_float(r)) * ints(r, 0, 4, T, K).clamp(max=1)  # some of them 0
    else:
        K = 1
    call["permuted_tokens"] = floats(r, T * K, r.randint(1, 5), dtype=some_float(r))
    call["sorted_indices"] = torch.tensor(r.sample(range(T * K), T * K), dtype=torch.int32)
    if "probs" in call:  # what nobody gives weight to may be anything
        idle = call["sorted_indices"].view(T, K)[call["probs"] == 0].long()
        call["permuted_tokens"][idle] = float("nan")
    return call


def naive_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    K = 1 if probs is None else probs.shape[1]
    out = permuted_tokens.new_zeros(len(sorted_indices) // K, permuted_tokens.shape[1])
    for p, row in enumerate(sorted_indices.tolist()):
        t, j = divmod(p, K)
        if probs is None or probs[t, j] != 0:
            out[t] += permuted_tokens[row] * (1 if probs is None else probs[t, j])
    return out


def four_tokens(r: Random) -> Call:
    return dict(tokens=floats(r, 4, 6), indices=ints(r, 0, 3, 4, 2))


def eight_pairs(r: Random) -> Call:
    return dict(permuted_tokens=floats(r, 8, 6), probs=floats(r, 4, 2),
                sorted_indices=torch.tensor(r.sample(range(8), 8), dtype=torch.int32))


def to(**arguments):
    return lambda c: arguments


PERMUTE_IS_WRONG = [
    Wrong("three axes", lambda c: {"tokens": c["tokens"][None]}, "RELATION", "one row a token", four_tokens),
    Wrong("fewer tokens", lambda c: {"indices": c["indices"][:3]}, "RELATION", r"\[4, K\] or \[4\]", four_tokens),
    Wrong("float experts", lambda c: {"indices": c["indices"].float()}, "RELATION", "int32 or int64", four_tokens),
    Wrong("fewer rows than none", to(num_out_tokens=-9), "RELATION", "at least -8", four_tokens),
    Wrong("padded", to(padded_mode=True), "RELATION", "no device does", four_tokens),
    Wrong("expert -1", lambda c: {"indices": c["indices"] - 3}, "RELATION", "sort wrongly(.*\n)*.*SB-08", four_tokens),
    Wrong("expert 2^24 - 1", lambda c: {"indices": c["indices"] + 2**24 - 1}, "RELATION", "sort wrongly", four_tokens),
    Wrong("513 choices", lambda c: {"indices": c["indices"].repeat(1, 257)}, "SIZE", "K at most 512", four_tokens),
    Wrong("int8", lambda c: {"tokens": c["tokens"].to(torch.int8)}, "DTYPE", "float16, bfloat16 or", four_tokens),
    Wrong("fp64", lambda c: {"tokens": c["tokens"].double()}, "DTYPE", "float16, bfloat16 or", four_tokens),
]
UNPERMUTE_IS_WRONG = [
    Wrong("three axes", lambda c: {"permuted_tokens": c["permuted_tokens"][None]}, "RELATION", "one row a pair",
          eight_pairs),
    Wrong("index with two axes", lambda c: {"sorted_indices": c["sorted_indices"].view(4, 2)}, "RELATION",
          "one entry a pair", eight_pairs),
    Wrong("float index", lambda c: {"sorted_indices": c["sorted_indices"].float()}, "RELATION", "numbers of rows",
          eight_pairs),
    Wrong("flat weights", lambda c: {"probs": c["probs"].flatten()}, "RELATION", "one weight a pair", eight_pairs),
    Wrong("fewer weights", lambda c: {"probs": c["probs"][:3]}, "RELATION", r"\[6\]: 3 tokens, 2 choices", eight_pairs),
    Wrong("padded", to(padded_mode=True), "RELATION", "no device does", eight_pairs),
    Wrong("a shape", to(restore_shape=[4, 6]), "RELATION", "belongs to padded_mode", eight_pairs),
    Wrong("past the pairs", lambda c: {"sorted_indices": c["sorted_indices"] + 1}, "RELATION", "rows 0 to 7",
          eight_pairs),
    Wrong("-1", lambda c: {"sorted_indices": c["sorted_indices"] - 1}, "RELATION", "rows 0 to 7", eight_pairs),
    Wrong("a row twice", lambda c: {"sorted_indices": c["sorted_indices"] // 2}, "RELATION",
          "each row once(.*\n)*.*unpermute-repeated-rows", eight_pairs),
    Wrong("more rows", lambda c: {"permuted_tokens": c["permuted_tokens"].repeat(2, 1)}, "RELATION", r"\[8, H\]",
          eight_pairs),
    Wrong("fewer rows", lambda c: {"permuted_tokens": c["permuted_tokens"][:7]}, "RELATION",
          r"\[8, H\](.*\n)*.*unpermute-fewer-rows", eight_pairs),
    Wrong("513 choices", to(probs=torch.ones(1, 513).bfloat16(), permuted_tokens=torch.ones(513, 2).bfloat16(),
                            sorted_indices=torch.arange(513, dtype=torch.int32)), "SIZE", "K at most 512", eight_pairs),
    Wrong("int8", lambda c: {"permuted_tokens": c["permuted_tokens"].to(torch.int8)}, "DTYPE", "permuted_tokens is",
          eight_pairs),
    Wrong("fp64 weights", lambda c: {"probs": c["probs"].double()}, "DTYPE", "probs is", eight_pairs),
    Wrong("int64 index", lambda c: {"sorted_indices": c["sorted_indices"].long()}, "DTYPE", "int32", eight_pairs),
]

CASES = {
    "npu_moe_token_permute": Case(permute, naive_permute, PERMUTE_IS_WRONG),
    "npu_moe_token_unpermute": Case(unpermute, naive_unpermute, UNPERMUTE_IS_WRONG),
}

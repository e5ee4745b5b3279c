"""Rows to experts and back, in two operators that know nothing but an order.

    permuted, sorted_indices = npu_moe_token_permute(tokens, expert_idx)
    ... the experts, row by row ...
    tokens = npu_moe_token_unpermute(answers, sorted_indices, probs)

The trap is which way ``sorted_indices`` leads.  Sorting gives ``order``: row r of the result is the pair order[r], the
(order[r] // K)-th token.  ``sorted_indices`` is its inverse: pair p = t*K + j went to row sorted_indices[p].  Both are
permutations of the same numbers, and for a few tokens often the same one, so taking one for the other runs, and is
right in small tests.  (A test of op-plugin returns the wrong one from its own reference function.)
"""
import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.indices import leaves, repeats, span
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PERMUTE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_token_permute.md"
UNPERMUTE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_token_unpermute.md"
MOST_PAIRS = MOST_EXPERTS = 16777215
MOST_CHOICES = 512
FEWER_ROWS = open_point(
    "unpermute-fewer-rows",
    "npu_moe_token_unpermute with fewer rows than pairs, as npu_moe_token_permute makes them with num_out_tokens: a "
    "kernel of A2 and A3 counts a row that is not there as zeros, the page wants one row a pair.",
    "refused; otherwise such a row counts as zeros")
REPEATED_ROWS = open_point(
    "unpermute-repeated-rows",
    "npu_moe_token_unpermute with one row named twice, as where the -1 of another operator were made positive: a "
    "kernel of A2 and A3 reads it twice, the page wants each row once.",
    "refused; otherwise it is read twice")


def _permute_contract(check: Check, tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None,
                      padded_mode: bool = False) -> None:
    if tokens.ndim != 2:
        check.fail(RELATION, "tokens", describe(tokens), "[T, H]: one row a token", PERMUTE)
    if indices.ndim not in (1, 2) or len(indices) != len(tokens):
        check.fail(RELATION, "indices", describe(indices),
                   f"[{len(tokens)}, K] or [{len(tokens)}], as many rows as tokens {describe(tokens, 'T, H')}", PERMUTE)
    if indices.dtype not in (torch.int32, torch.int64):
        check.fail(RELATION, "indices", describe(indices), "int32 or int64", PERMUTE)
    pairs = indices.numel()
    if num_out_tokens is not None and num_out_tokens < -pairs:
        check.fail(RELATION, "num_out_tokens", num_out_tokens,
                   f"a number of rows, 0 for all {pairs}, or at least {-pairs} for so many fewer", PERMUTE)
    if padded_mode:
        check.fail(RELATION, "padded_mode", padded_mode, "False: no device does the other", PERMUTE)
    if leaves(indices, MOST_EXPERTS):
        check.fail(RELATION, "indices", span(indices), f"expert ids 0 to {MOST_EXPERTS - 1}: others sort wrongly",
                   PERMUTE, "SB-08")
    if pairs >= MOST_PAIRS:
        check.fail(SIZE, "indices", describe(indices), f"fewer than {MOST_PAIRS} pairs", PERMUTE)
    if indices.ndim == 2 and indices.shape[1] > MOST_CHOICES:
        check.fail(SIZE, "indices", describe(indices, "T, K"), f"K at most {MOST_CHOICES}", PERMUTE)
    if tokens.dtype != torch.float32 and tokens.dtype not in float_dtypes(check):
        check.fail(DTYPE, "tokens", describe(tokens, "T, H"), "float16, bfloat16 or float32", PERMUTE)


@reference("npu_moe_token_permute", _permute_contract,
           "tokens [T H], indices [T K] -> permuted [S H], sorted_indices [T*K] where S = T*K")
def npu_moe_token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None,
                          padded_mode: bool = False) -> tuple[Tensor, Tensor]:
    """Copy each token's row once for every expert it goes to, ordered by expert, then by token.

    Args:
        tokens: rows [T, H]; fp16, bf16 or fp32.
        indices: experts of each token [T, K] or [T] int32 or int64.
        num_out_tokens: rows to keep, from the first on; None or 0 for all T*K, -n for all but n.
        padded_mode: False.

    Returns:
        permuted [S, H], S = T*K, or what ``num_out_tokens`` leaves; sorted_indices [T*K] int32, always in full: at
        t*K + j the row that this pair went to, or would have.

    Source: torch_npu docs: npu_moe_token_permute.
    """
    pairs, wanted = indices.numel(), num_out_tokens or 0
    size = min(wanted, pairs) if wanted > 0 else pairs + wanted
    order = indices.flatten().argsort(stable=True)  # [T*K] pair of each row
    sorted_indices = torch.empty_like(order, dtype=torch.int32)  # [T*K] row of each pair
    sorted_indices[order] = torch.arange(pairs, dtype=torch.int32, device=order.device)  # [T*K]
    token = order[:size] // (pairs // max(len(tokens), 1) or 1)  # [S]
    return tokens.index_select(0, token), sorted_indices


def _unpermute_contract(check: Check, permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None,
                        padded_mode: bool = False, restore_shape: list[int] | None = None) -> None:
    rows, row_idx = permuted_tokens, sorted_indices
    if rows.ndim != 2:
        check.fail(RELATION, "permuted_tokens", describe(rows), "[T*K, H]: one row a pair", UNPERMUTE)
    if row_idx.ndim != 1:
        check.fail(RELATION, "sorted_indices", describe(row_idx), "[T*K]: one entry a pair", UNPERMUTE)
    if row_idx.dtype not in (torch.int32, torch.int64):
        check.fail(RELATION, "sorted_indices", describe(row_idx), "int32: numbers of rows", UNPERMUTE)
    if probs is not None and (probs.ndim != 2 or not probs.shape[1]):
        check.fail(RELATION, "probs", describe(probs), "[T, K], K >= 1: one weight a pair", UNPERMUTE)
    if probs is not None and probs.numel() != len(row_idx):
        check.fail(RELATION, "sorted_indices", describe(row_idx, "T*K"),
                   f"[{probs.numel()}]: {len(probs)} tokens, {probs.shape[1]} choices each, as in probs; without "
                   "probs K is 1", UNPERMUTE)
    if padded_mode:
        check.fail(RELATION, "padded_mode", padded_mode, "False: no device does the other", UNPERMUTE)
    if restore_shape is not None:
        check.fail(RELATION, "restore_shape", restore_shape, "None: it belongs to padded_mode", UNPERMUTE)
    if leaves(row_idx, len(row_idx)):
        check.fail(RELATION, "sorted_indices", span(row_idx), f"rows 0 to {len(row_idx) - 1} (T*K)", UNPERMUTE)
    elif repeats(row_idx):
        check.fail(RELATION, "sorted_indices", "one row twice",
                   "each row once, as npu_moe_token_permute returns them", UNPERMUTE, unless=REPEATED_ROWS)
    if len(rows) > len(row_idx):
        check.fail(RELATION, "permuted_tokens", describe(rows, "T*K, H"),
                   f"[{len(row_idx)}, H]: one row an entry of sorted_indices", UNPERMUTE)
    if len(rows) < len(row_idx):
        check.fail(RELATION, "permuted_tokens", describe(rows, "T*K, H"),
                   f"[{len(row_idx)}, H]: one row an entry of sorted_indices", UNPERMUTE, unless=FEWER_ROWS)
    if probs is not None and probs.shape[1] > MOST_CHOICES:
        check.fail(SIZE, "probs", describe(probs, "T, K"), f"K at most {MOST_CHOICES}", UNPERMUTE)
    for name, numbers in (("permuted_tokens", rows), ("probs", probs)):
        if numbers is not None and numbers.dtype != torch.float32 and numbers.dtype not in float_dtypes(check):
            check.fail(DTYPE, name, describe(numbers), "float16, bfloat16 or float32", UNPERMUTE)
    if row_idx.dtype != torch.int32:
        check.fail(DTYPE, "sorted_indices", describe(row_idx, "T*K"), "int32", UNPERMUTE)


@reference("npu_moe_token_unpermute", _unpermute_contract,
           "permuted_tokens [S H], sorted_indices [T*K], probs [T K] -> tokens [T H] where S = T*K")
def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None,
                            padded_mode: bool = False, restore_shape: list[int] | None = None) -> Tensor:
    """Sum each token's K rows: ``out[t] = sum_j probs[t, j] * permuted_tokens[sorted_indices[t*K + j]]``.

    A row whose weight is 0 is not read, so it may hold anything, NaN too (npu_moe_finalize_routing reads it).

    Args:
        permuted_tokens: [T*K, H]; fp16, bf16 or fp32.
        sorted_indices: [T*K] int32, each of 0 to T*K - 1 once.  ``assume("unpermute-fewer-rows")`` admits fewer rows
            and ``assume("unpermute-repeated-rows")`` entries that name one twice.
        probs: weights [T, K]; fp16, bf16 or fp32, whatever the rows are.  Ones if None, and then K is 1.
        padded_mode, restore_shape: False and None.

    Returns:
        [T, H] in the rows' dtype, summed in fp32.

    Source: torch_npu docs: npu_moe_token_unpermute; which rows are read, from its kernel
    (ops-transformer: moe/moe_token_unpermute/op_kernel/moe_token_unpermute.h).
    """
    acc = accumulator(permuted_tokens.dtype)
    T, K = (len(sorted_indices), 1) if probs is None else probs.shape
    rows, row_idx = permuted_tokens, sorted_indices.view(T, K).T  # [T*K, H], [K, T]
    if len(rows) < T * K:
        rows = torch.cat([rows, rows.new_zeros(T * K - len(rows), rows.shape[1])])  # [T*K, H]
    out = torch.zeros((T, rows.shape[1]), dtype=acc, device=rows.device)  # [T, H]
    idle = probs == 0 if probs is not None and not probs.all() else None  # [T, K]
    for j in range(K):
        part = rows.index_select(0, row_idx[j]).to(acc)  # [T, H]
        if idle is not None:
            part = part.masked_fill(idle[:, j, None], 0)  # [T, H]
        out += part if probs is None else part * probs[:, j, None]  # [T, H]
    return out.to(rows.dtype)  # [T, H]

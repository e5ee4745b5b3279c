"""Rows out of a paged cache.  Three shapes hold the same rows, G heads of width D, on C pages of P rows:

========  ================  ==========================================================================
BnBsH     [C, P, G*D]       a row's heads side by side
BnNBsD    [C, G, P, D]      a head's rows side by side; with one head the same memory as BnBsH
NZ        [C, G, D/16, P, 16]  tiles of 16 columns: what the cube unit reads; physically dense, not FRACTAL_NZ
========  ================  ==========================================================================
"""
from torch import Tensor


def gather(pool: Tensor, ids: Tensor, keys: int, heads: int) -> Tensor:
    """The first ``keys`` rows of each request's pages, copied: [B, keys, G, D].

    A page is chosen by its id on an axis of its own, so no offset into the pool is ever computed in 32 bits (SB-25 in
    the bug gallery).

    Args:
        ids: [B, columns], pages of each request, enough of them.
    """
    B, columns = ids.shape
    pages = pool.index_select(0, ids.flatten())  # [B * columns, one page]
    P = pool.shape[1 if pool.dim() == 3 else -2]
    if pool.dim() == 3 or (pool.dim() == 4 and heads == 1):
        width = pool.shape[-1] // heads if pool.dim() == 3 else pool.shape[-1]
        return pages.view(B, columns * P, heads, width)[:, :keys]  # [B, keys, G, D]
    rows = pages.transpose(1, 2) if pool.dim() == 4 else pages.permute(0, 3, 1, 2, 4).flatten(3)  # [B*columns, P, G, D]
    return rows.reshape(B, columns * P, heads, rows.shape[3])[:, :keys]  # [B, keys, G, D]

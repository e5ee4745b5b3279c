"""Which tokens may be sampled: a filter on logits."""
import math

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, open_point
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/.../torch_npu-npu_top_k_top_p.md"
KERNEL = "ops-nn: index/apply_top_k_top_p_with_sorted/docs/aclnnApplyTopKTopP.md"
MAX_K = 1024

K_RANGE = open_point(
    "top-k-range", "npu_top_k_top_p: k of 0 or less, of V or more, or above 1024? The kernel's page takes them (no "
    "filter by k for the first two), op-plugin's page does not.", "1 <= k <= V and k <= 1024")


def _contract(check: Check, logits: torch.Tensor, p: torch.Tensor | None = None,
              k: torch.Tensor | None = None) -> None:
    if logits.dim() != 2:
        check.fail(RELATION, "logits", describe(logits), "2 axes (B, V)", PAGE)
    if p is None and k is None:
        check.fail(RELATION, "p, k", "both None", "at least one of them", KERNEL)
    if logits.dtype not in (*float_dtypes(check), torch.float32):
        check.fail(DTYPE, "logits", describe(logits), "float16, bfloat16 or float32", PAGE)
    B, V = logits.shape
    if p is not None:
        if p.shape != (B,):
            check.fail(RELATION, "p", describe(p), f"[{B}] (B): one for each row of logits", PAGE)
        if p.dtype != logits.dtype:
            check.fail(DTYPE, "p", describe(p), f"logits' {logits.dtype}", PAGE)
        if not all(0.0 <= value <= 1.0 for value in p.tolist()):
            check.fail(RELATION, "p", p.tolist(), "from 0 to 1", PAGE)
    if k is not None:
        if k.shape != (B,):
            check.fail(RELATION, "k", describe(k), f"[{B}] (B): one for each row of logits", PAGE)
        if k.dtype != torch.int32:
            check.fail(RELATION, "k", describe(k), "int32: the device reads 4 bytes for each row", PAGE)
        values = k.tolist()
        if values and not 1 <= min(values) <= max(values) <= V:
            check.fail(RELATION, "k", values, f"from 1 to V = {V}", PAGE, unless=K_RANGE)
        if values and max(values) > MAX_K:
            check.fail(SIZE, "k", values, f"up to {MAX_K}", PAGE, unless=K_RANGE)


@reference("npu_top_k_top_p", _contract, "logits [B V], p [B], k [B] -> out [B V]")
def npu_top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None = None,
                    k: torch.Tensor | None = None) -> torch.Tensor:
    """Row by row: keep the k largest logits, then the fewest of them whose probability reaches p; the rest is -inf.

    Logits that equal the k-th largest stay, so more than k may.  Then p: in ascending stable order, those go whose
    probabilities add up to 1 - p or less; of equal logits the ones on the left go first.  The last one always stays.
    Nothing is sampled.

    Args:
        logits: (B, V), fp16, bf16 or fp32; may be strided.
        p: (B,), logits' dtype, from 0 to 1; None leaves this filter out.
        k: (B,) int32, from 1 to V and up to 1024; None leaves this filter out, but torch_npu 2.13.0 cannot trace such
            a call.  At least one of both is given.

    Returns:
        (B, V) in logits' dtype.

    Source: torch_npu docs: npu_top_k_top_p; ops-nn: index/apply_top_k_top_p_with_sorted/docs/aclnnApplyTopKTopP.md.
    """
    V = logits.shape[1]
    ascending, order = logits.sort(dim=-1, stable=True)  # [B, V], [B, V]
    if k is not None:
        off = (k <= 0) | (k >= V)  # [B]
        threshold = ascending.gather(1, torch.where(off, 0, V - k.long())[:, None])  # [B, 1]
        ascending = ascending.masked_fill(ascending < threshold, -math.inf)  # [B, V]
    if p is not None:
        wide = accumulator(logits.dtype)
        below = ascending.softmax(-1, dtype=wide).cumsum_(-1)  # [B, V]
        dropped = below <= 1 - p.to(wide)[:, None]  # [B, V]
        dropped[:, -1:] = False
        ascending = ascending.masked_fill(dropped, -math.inf)  # [B, V]
    return torch.empty_like(ascending).scatter_(1, order, ascending)  # [B, V]

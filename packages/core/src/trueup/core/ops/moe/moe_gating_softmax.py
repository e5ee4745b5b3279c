"""The router of older models: softmax over all experts, then the K best of them."""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.moe.moe_gating import best
from trueup.core.ops.registry import accumulator, float_dtypes, reference

PAGE = "op-plugin: docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_gating_top_k_softmax.md"
HOST = "op-plugin: op_plugin/ops/opapi/MoeGatingTopKSoftmaxV2KernelNpuOpApi.cpp"
MOST_CHOICES = 1024


def _gating_contract(check: Check, x: Tensor, k: int, finished: Tensor | None) -> None:
    """The rules that both versions share."""
    if x.ndim not in (2, 3):
        check.fail(RELATION, "x", describe(x), "[T, E] or [B, T, E]: one row of logits a token", PAGE)
    E = x.shape[-1]
    if finished is not None and finished.shape != x.shape[:-1]:
        check.fail(RELATION, "finished", describe(finished), f"{list(x.shape[:-1])}, one flag a row of x", PAGE)
    if not 1 <= k <= E:
        check.fail(RELATION, "k", k, f"1 to {E} (E of x)", PAGE)
    if k > MOST_CHOICES:
        check.fail(SIZE, "k", k, f"at most {MOST_CHOICES}", PAGE)
    if x.dtype != torch.float32 and x.dtype not in float_dtypes(check):
        check.fail(DTYPE, "x", describe(x), "float16, bfloat16 or float32", PAGE)
    if finished is not None and finished.dtype != torch.bool:
        check.fail(DTYPE, "finished", describe(finished), "bool", PAGE)


def _softmax_contract(check: Check, x: Tensor, finished: Tensor | None = None, k: int = 1) -> None:
    _gating_contract(check, x, k, finished)


def _softmax_v2_contract(check: Check, x: Tensor, *, k: int = 1, finished: Tensor | None = None,
                         renorm: int | None = 0, output_softmax: bool | None = False) -> None:
    _gating_contract(check, x, k, finished)
    if renorm not in (None, 0, 1):
        check.fail(RELATION, "renorm", renorm, "0 (softmax, then the best) or 1 (the best, then softmax of them)", HOST)


def _rows(call: Mapping[str, Any]) -> str:
    return "B T" if call["x"] is not None and call["x"].dim() == 3 else "T"


def _softmax_axes(call: Mapping[str, Any]) -> str:
    rows = _rows(call)
    return (f"x [{rows} E], finished [{rows}] -> weights [{rows} K], expert_idx [{rows} K], row_idx [{rows} K]")


def _softmax_v2_axes(call: Mapping[str, Any]) -> str:
    rows = _rows(call)
    scores = f"[{rows} E]" if call["output_softmax"] and not call["renorm"] else "[0]"
    return f"x [{rows} E], finished [{rows}] -> weights [{rows} K], expert_idx [{rows} K], scores {scores}"


THREE_AXES = {"x": torch.empty(1, 1, 1, device="meta")}


@reference("npu_moe_gating_top_k_softmax", _softmax_contract, _softmax_axes, ({}, THREE_AXES))
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None,
                                 k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The K largest of softmax(x), as they are: they do not add up to 1.

    Among equals the expert with the lower id comes first; with fp16 what is equal after rounding to fp16.

    Args:
        x: logits [T, E] or [B, T, E]; fp16, bf16 or fp32.
        finished: bool [T] or [B, T]; a row where it is true gets the id E, which is no expert.  Its weights stay.
        k: experts a token, 1 to E.

    Returns:
        weights [T, K] in x's dtype; expert ids [T, K] int32, best first; row_idx [T, K] int32, j*T + t at (t, j), for
        npu_moe_init_routing.  With three axes [B, T, K], and B*T in the place of T.

    Source: torch_npu docs: npu_moe_gating_top_k_softmax; its test
    (op-plugin: test/test_custom_ops/test_npu_moe_gating_top_k_softmax.py).
    """
    scores = x.to(accumulator(x.dtype)).softmax(-1)  # [T, E]
    if x.dtype == torch.float16:
        scores = scores.half()  # [T, E]
    expert_idx = best(scores, k)  # [T, K]
    weights = scores.gather(-1, expert_idx).to(x.dtype)  # [T, K]
    rows = x.shape[:-1].numel()
    row_idx = torch.arange(rows * k, dtype=torch.int32, device=x.device).view(k, rows).T  # [T, K]
    return weights, _with_finished(expert_idx, finished, x.shape[-1]), row_idx.reshape(expert_idx.shape)


@reference("npu_moe_gating_top_k_softmax_v2", _softmax_v2_contract, _softmax_v2_axes,
           ({}, {"output_softmax": True}, THREE_AXES))
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The K largest of softmax(x), or, with ``renorm``, the softmax of the K largest of x, which adds up to 1.

    The third result is not that of the first version: there is no row_idx.

    Args:
        x: logits [T, E] or [B, T, E]; fp16, bf16 or fp32.
        k: experts a token, 1 to E.
        finished: bool [T] or [B, T]; a row where it is true gets the id E, which is no expert.  Its weights stay.
        renorm: 0 or 1.
        output_softmax: return softmax(x) too; of no effect with ``renorm``.

    Returns:
        weights [T, K] in x's dtype; expert ids [T, K] int32, best first, among equals the lower id first; scores
        [T, E] fp32, or [0] where not asked for.  With three axes [B, T, ...] all of them (torch_npu 2.13's shape
        inference has the scores as [B, T] there; its host code has not).

    Source: torch_npu docs: npu_moe_gating_top_k_softmax_v2; its test
    (op-plugin: test/test_custom_ops/test_npu_moe_gating_top_k_softmax_v2.py).
    """
    wide = x.to(accumulator(x.dtype))  # [T, E]
    if renorm:
        expert_idx = best(wide, k)  # [T, K]
        weights = wide.gather(-1, expert_idx).softmax(-1)  # [T, K]
    else:
        scores = wide.softmax(-1)  # [T, E]
        expert_idx = best(scores, k)  # [T, K]
        weights = scores.gather(-1, expert_idx)  # [T, K]
    asked = output_softmax and not renorm
    third = scores.float() if asked else torch.empty(0, device=x.device)  # [T, E] or [0]
    return weights.to(x.dtype), _with_finished(expert_idx, finished, x.shape[-1]), third


def _with_finished(expert_idx: Tensor, finished: Tensor | None, E: int) -> Tensor:
    ids = expert_idx.to(torch.int32)  # [T, K]
    return ids if finished is None else ids.masked_fill(finished.bool()[..., None], E)  # [T, K]

"""The 2048 x 2048 mask of causal attention: one constant tensor, whatever the lengths are.

1 (True) marks what is excluded, so a sound mask is strictly upper triangular.  A device reads tiles of it and never
looks at it as a whole: with a wrong content the answer is wrong and there is no error.
"""
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe

DOC = "torch_npu docs: npu_fused_infer_attention_score_v2"
CALLER = "vllm-ascend: vllm_ascend/attention/attention_mask.py"
RECIPE = "torch.ones(2048, 2048, dtype=torch.bool).triu(1)"


def check_causal_mask(check: Check, mask: Tensor | None) -> None:
    """Refuse an ``atten_mask`` that is not [2048, 2048] with 1 strictly above the diagonal (leading 1 axes allowed)."""
    if mask is None:
        check.fail(RELATION, "atten_mask", None, f"{RECIPE}: causal modes read it", DOC)
        return
    side = mask.shape[-1] if mask.dim() else 1
    if mask.shape not in ((side, side), (1, side, side), (1, 1, side, side)):
        check.fail(RELATION, "atten_mask", describe(mask), "[2048, 2048], or the same with one or two leading 1", DOC)
    if side != 2048:
        check.fail(SIZE, "atten_mask", describe(mask), "[2048, 2048], whatever the lengths are", DOC)
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        check.fail(DTYPE, "atten_mask", describe(mask), "bool, int8 or uint8", DOC)
    if not mask.is_contiguous():
        check.fail(SIZE, "atten_mask", f"not contiguous: {describe(mask)}", "a contiguous tensor", DOC)
    if fault := _fault(mask):
        check.fail(RELATION, "atten_mask", fault, f"1 (excluded) strictly above the diagonal, 0 elsewhere: {RECIPE}",
                   CALLER)


_sound: dict[tuple[Any, ...], tuple[int, Tensor]] = {}


def _fault(mask: Tensor) -> str | None:
    """What is wrong with the content; compared once per tensor and version of it.

    ``_sound`` holds the tensors, so that their addresses cannot be given to others.  A tensor made in inference
    mode has no version: what is written to it later goes unseen.
    """
    place = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device)
    version = 0 if mask.is_inference() else mask._version
    known = _sound.get(place)
    if known is not None and known[0] == version:
        return None
    content = mask.flatten(0, -2)  # [side, side]
    ones = torch.ones_like(content)  # [side, side]
    if not torch.equal(content, ones.triu(1)):
        if torch.equal(content, ones.tril(0)):
            return "inverted: it marks what is visible"
        if torch.equal(content, ones.triu(0)):
            return "one diagonal too low: it hides each row from itself"
        return f"not causal: {describe(mask)}"
    if len(_sound) >= 8:
        _sound.clear()
    _sound[place] = (version, mask)
    return None

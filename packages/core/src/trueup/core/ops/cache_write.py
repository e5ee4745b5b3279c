"""Writes of new rows into paged caches, by slot.

A slot is ``page * block_size + offset``.  Both operators leave the slots unchecked on a device: a wrong one
overwrites foreign rows, and of two rows with one slot an arbitrary one stays.  Here they are checked.
"""
from typing import Any

import torch

from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe, one_or
from trueup.core.ops.norm import normalise
from trueup.core.ops.registry import float_dtypes, poison, reference, refuse_unbuilt
from trueup.core.ops.rope import rotate_pairs

FUSED_PAGE = "op-plugin: docs/.../torch_npu-npu_kv_rmsnorm_rope_cache.md"
FUSED_TILING = "ops-transformer: posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_base_tiling.cpp"
SCATTER_PAGE = "op-plugin: docs/.../torch_npu-npu_scatter_pa_kv_cache.md"
INT32_MAX = 2**31 - 1


def _check_slots(check: Check, argument: str, slots: list[int], cache: torch.Tensor, source: str) -> None:
    """Slots lie inside the cache, and no two rows share one.

    Page 0 is exempt from the second rule: by the convention of this project it is the dummy page, whose
    contents nobody reads, and all padded rows of a batch may land there.
    """
    block_num, block_size = cache.shape[:2]
    if slots and max(slots) >= block_num * block_size:
        check.fail(RELATION, argument, f"slot {max(slots)}",
                   f"slots below {block_num * block_size} = {block_num} pages of {block_size}: the device does not "
                   "look and writes into foreign memory", source)
    real = [slot for slot in slots if slot >= block_size]
    if len(set(real)) != len(real):
        twice = next(slot for slot in real if real.count(slot) > 1)
        rows = [row for row, slot in enumerate(slots) if slot == twice]
        check.fail(RELATION, argument, f"slot {twice} in rows {rows}",
                   "a slot of its own for each row, outside page 0: which row stays is not defined; send padded rows "
                   "to the dummy page 0", source)


def _check_caches(check: Check, caches: dict[str, torch.Tensor], heads: int, widths: tuple[int, int], advice: str,
                  source: str) -> None:
    """Both caches are dense (block_num, block_size, heads, width) with the same pages."""
    first = next(iter(caches.values()))
    for (name, cache), width in zip(caches.items(), widths, strict=True):
        if cache.dim() != 4 or cache.shape[2:] != (heads, width) or cache.shape[:2] != first.shape[:2]:
            check.fail(RELATION, name, describe(cache, "block_num, block_size, N, D"),
                       f"4 axes, N = {heads} and D = {width} as the rows to be written, both caches with the same "
                       f"pages: {advice}", source, "SB-26")
        if not cache.is_contiguous():
            check.fail(RELATION, name, f"strided, {describe(cache)}",
                       "a contiguous tensor: a write to a hidden copy would be lost", source)


def _write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows into their slots, in place.  int64 slots: slot times width passes 2^31 in large pools (SB-25)."""
    flat = cache.view(-1, *cache.shape[2:])  # [slots, N, D]
    flat.index_copy_(0, slots, rows.to(cache.dtype))  # [T, N, D]


def _kv_rmsnorm_rope_cache_contract(check: Check, kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor,
                                    sin: torch.Tensor, index: torch.Tensor, k_cache: torch.Tensor,
                                    ckv_cache: torch.Tensor, *, epsilon: float = 1e-5, cache_mode: str = "Norm",
                                    is_output_kv: bool = False, **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if cache_mode not in ("PA", "PA_BNSD"):
        check.fail(RELATION, "cache_mode", repr(cache_mode),
                   "'PA' or 'PA_BNSD' (the same thing): other forms are not built yet; the default is 'Norm'",
                   FUSED_PAGE)
    if kv.dim() != 4 or kv.shape[1] != 1 or gamma.dim() != 1:
        check.fail(RELATION, "kv", f"{describe(kv)} with gamma {list(gamma.shape)}",
                   "(B, 1, S, R + D) with gamma (R,): give decode rows as B, with S = 1", FUSED_TILING)
    B, _, S, width = kv.shape
    _check_rows(check, kv, cos, sin, index)
    R, D = gamma.shape[0], cos.shape[3]
    if width != R + D or D % 2:
        check.fail(RELATION, "kv", describe(kv, "B, 1, S, R + D"),
                   f"R + D = {R} + {D}, the widths of gamma and cos, D even", FUSED_PAGE)
    _check_caches(check, {"k_cache": k_cache, "ckv_cache": ckv_cache}, 1, (D, R),
                  "k_cache is the rope cache and comes first, ckv_cache is the latent cache", FUSED_PAGE)
    if index.dtype != torch.int64:
        # A small pool survives 32-bit indices, so there it is only a wrong dtype.
        small = index.dtype == torch.int32 and max(k_cache.numel(), ckv_cache.numel()) <= INT32_MAX
        check.fail(DTYPE if small else RELATION, "index", describe(index),
                   "int64: call .long(); offsets of large pools do not fit into 32 bits", FUSED_PAGE, "SB-25")
    _check_slots(check, "index", index.tolist(), k_cache, FUSED_PAGE)
    if not B * S:
        check.fail(SIZE, "kv", describe(kv), "at least one row: skip the call where there are none", FUSED_TILING)
    if (R, D) != (512, 64):
        check.fail(SIZE, "kv", describe(kv, "B, 1, S, R + D"), f"R = 512 and D = 64, not {R} and {D}", FUSED_PAGE)
    if k_cache.shape[1] % 16:
        check.fail(SIZE, "k_cache", describe(k_cache), "a block_size that is a multiple of 16", FUSED_TILING)
    if kv.dtype not in float_dtypes(check):
        check.fail(DTYPE, "kv", describe(kv), "float16 or bfloat16", FUSED_PAGE)
    for argument, tensor in (("gamma", gamma), ("cos", cos), ("sin", sin), ("k_cache", k_cache),
                             ("ckv_cache", ckv_cache)):
        if tensor.dtype != kv.dtype:
            check.fail(DTYPE, argument, describe(tensor), f"kv's {kv.dtype}", FUSED_PAGE)


def _check_rows(check: Check, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: torch.Tensor) -> None:
    """kv, cos, sin and index describe the same rows."""
    B, _, S, _ = kv.shape
    together = "cut or pad kv, cos, sin and index together, before this call"
    for argument, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 4 or table.shape[:2] != (B, 1) or table.shape[2] not in (1, S):
            check.fail(RELATION, argument, f"{table.shape[0]} rows, {describe(table, 'B, 1, S, D')}",
                       f"{B} rows, as kv {list(kv.shape)} has, and S = {one_or(S)}: {together}", FUSED_TILING, "SB-05")
    if cos.shape != sin.shape:
        check.fail(RELATION, "sin", describe(sin), f"the shape of cos, {list(cos.shape)}", FUSED_TILING)
    if index.shape != (B * S,):
        check.fail(RELATION, "index", f"{index.numel()} rows, {describe(index)}",
                   f"{B * S} rows, as kv {list(kv.shape)} has, on one axis: {together}", FUSED_TILING, "SB-05")


@reference("npu_kv_rmsnorm_rope_cache", _kv_rmsnorm_rope_cache_contract)
def npu_kv_rmsnorm_rope_cache(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                              index: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor, *,
                              epsilon: float = 1e-5, is_output_kv: bool = False,
                              **rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of the latent, rotation of the rope part, and both written to their caches, in place.

    The rope part goes through npu_interleave_rope: it is read as pairs and stored regrouped.  Rows with a
    negative index are computed but not written.  Duplicate slots are refused outside page 0, the dummy page.

    The page also asks for block_num >= ceil(S / block_size) * B.  With one token for each B, as servers call it,
    that would be a page for each token.  The host check on a device does not have this rule; neither has ours.

    Args:
        kv: (B, 1, S, R + D), latent before rope; R = 512, D = 64; fp16 or bf16.
        gamma: (R,).
        cos, sin: (B, 1, S, D) or (B, 1, 1, D).
        index: (B * S,) int64, slots in the whole pool.  int32 is refused as DTYPE, and as RELATION (never off)
            once a cache has more than 2^31 - 1 elements.
        k_cache: the **rope** cache (block_num, block_size, 1, D); block_size a multiple of 16.
        ckv_cache: the latent cache (block_num, block_size, 1, R).
        cache_mode: "PA" or "PA_BNSD".

    Returns:
        (k_cache, ckv_cache, k_rope, c_kv): the two input tensors themselves, then (B, 1, S, D) and (B, 1, S, R),
        which are written only where ``is_output_kv`` (poisoned here otherwise).

    Source: torch_npu docs: npu_kv_rmsnorm_rope_cache; negative indices from its test
    (op-plugin: test/test_custom_ops/test_npu_kv_rms_norm_rope_cache.py).
    """
    R = gamma.shape[0]
    latent, _ = normalise(kv[..., :R], gamma, epsilon)  # [B, 1, S, R]
    rope = rotate_pairs(kv[..., R:], cos, sin)  # [B, 1, S, D]
    latent, rope = latent.to(kv.dtype), rope.to(kv.dtype)  # [B, 1, S, R], [B, 1, S, D]

    slots = index.long()  # [T]
    rope_rows, latent_rows = rope.view(-1, 1, rope.shape[3]), latent.view(-1, 1, R)  # [T, 1, D], [T, 1, R]
    written = slots >= 0  # [T]
    if not written.all():
        # Before any arithmetic: -1 would otherwise mean the last slot of the pool (SB-09).
        slots, rope_rows, latent_rows = slots[written], rope_rows[written], latent_rows[written]  # [T', ...]
    _write(k_cache, slots, rope_rows)
    _write(ckv_cache, slots, latent_rows)
    if not is_output_kv:
        rope = poison(rope.shape, rope.dtype, rope.device)  # [B, 1, S, D]
        latent = poison(latent.shape, latent.dtype, latent.device)  # [B, 1, S, R]
    return k_cache, ckv_cache, rope, latent


def _scatter_pa_kv_cache_contract(check: Check, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor,
                                  value_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
                                  cache_mode: str | None = "PA_NZ", **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if cache_mode not in ("Norm", None):
        check.fail(RELATION, "cache_mode", repr(cache_mode),
                   "'Norm' (or None), for caches (block_num, block_size, N, D): other forms are not built yet; the "
                   "default is 'PA_NZ'", SCATTER_PAGE)
    if key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
        check.fail(RELATION, "value", f"{describe(value)} with key {list(key.shape)}",
                   "(T, N, Dv) with key (T, N, Dk): the same rows and heads", SCATTER_PAGE)
    T, N, _ = key.shape
    if slot_mapping.shape != (T,):
        check.fail(RELATION, "slot_mapping", f"{slot_mapping.numel()} rows, {describe(slot_mapping)}",
                   f"{T} rows, as key {list(key.shape)} has, on one axis: cut or pad them together", SCATTER_PAGE,
                   "SB-05")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        check.fail(RELATION, "slot_mapping", describe(slot_mapping), "int32 or int64", SCATTER_PAGE)
    _check_caches(check, {"key_cache": key_cache, "value_cache": value_cache}, N, (key.shape[2], value.shape[2]),
                  "take the shapes of a cache from the module that writes it", SCATTER_PAGE)
    slots = slot_mapping.tolist()
    if slots and min(slots) < 0:
        check.fail(RELATION, "slot_mapping", f"slot {min(slots)} in row {slots.index(min(slots))}",
                   "slots >= 0: documents only allow >= 0, although a device test skips negative ones; send padded "
                   "rows to the dummy page 0", SCATTER_PAGE, "SB-09")
    _check_slots(check, "slot_mapping", slots, key_cache, SCATTER_PAGE)
    if not (key.is_contiguous() and value.is_contiguous()):
        check.fail(SIZE, "key, value", f"strided, {describe(key)} and {describe(value)}",
                   "contiguous tensors: call .contiguous()", SCATTER_PAGE)
    if key.dtype not in (*float_dtypes(check), torch.int8):
        check.fail(DTYPE, "key", describe(key), "float16, bfloat16 or int8", SCATTER_PAGE)
    for argument, tensor in (("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.dtype != key.dtype:
            check.fail(DTYPE, argument, describe(tensor), f"key's {key.dtype}", SCATTER_PAGE)


@reference("npu_scatter_pa_kv_cache", _scatter_pa_kv_cache_contract)
def npu_scatter_pa_kv_cache(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor,
                            value_cache: torch.Tensor, slot_mapping: torch.Tensor, **rest: Any) -> None:
    """cache[slot_mapping[t]] = row t, for both caches, in place.

    For MLA the pair is the latent (T, 1, 512) and the rotated rope part (T, 1, 64).  Duplicate slots are refused
    outside page 0, the dummy page; negative slots are refused, unlike in npu_kv_rmsnorm_rope_cache.

    Args:
        key, value: (T, N, Dk) and (T, N, Dv), contiguous, one dtype: fp16, bf16 or int8.
        key_cache, value_cache: (block_num, block_size, N, Dk) and (..., Dv), contiguous, the same dtype.
        slot_mapping: (T,) int32 or int64, slots in the whole pool; offsets are computed in int64.
        cache_mode: "Norm" (or None).  The default "PA_NZ" is another memory layout, not built yet.

    Source: torch_npu docs: npu_scatter_pa_kv_cache.
    """
    slots = slot_mapping.long()  # [T]
    _write(key_cache, slots, key)
    _write(value_cache, slots, value)

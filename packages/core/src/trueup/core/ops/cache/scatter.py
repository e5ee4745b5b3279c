"""Writes of new key and value rows into paged caches, by slot.

    "Norm":   cache (block_num, block_size, N, D): a row stands together
    "PA_NZ":  cache (block_num, N*D/C0, block_size, C0): a row stands in pieces of C0 values (32 bytes), and the same
              piece of neighbouring rows stands together, which is how the matrix unit reads it
"""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.cache.format import FRACTAL_NZ, format_of, npu_format_cast
from trueup.core.ops.cache.slots import check_caches, check_slots, tile_width, write_slots
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, assumed, describe, open_point
from trueup.core.ops.registry import float_dtypes, reference, refuse_unbuilt

SCATTER_PAGE = "op-plugin: docs/.../torch_npu-npu_scatter_pa_kv_cache.md"
SCATTER_ACLNN = "ops-transformer: attention/scatter_pa_kv_cache/docs/aclnnScatterPaKvCache.md"
ATB_TEST = "op-plugin: test/test_custom_ops/test_atb_reshape_and_cache.py"
UINT16_MAX = 65535
MINUS_ONE = open_point(
    "scatter-minus-one",
    "A slot of -1 in npu_scatter_pa_kv_cache, npu_scatter_nd_update_ and _npu_reshape_and_cache: documents only allow "
    "slots >= 0, tests of two of them leave such rows out.",
    "refused; otherwise such a row is left out")
MIXED_DTYPES = open_point(
    "scatter-mixed-dtypes",
    "npu_scatter_pa_kv_cache in PA_NZ with an int8 key beside a 16-bit value: the page of torch_npu wants one dtype, "
    "that of the kernel below allows two.",
    "refused")


def _check_rows(check: Check, key: Tensor, value: Tensor, slots: Tensor, name: str, source: str) -> None:
    """key, value and slots describe the same rows."""
    if key.dim() != 3 or value.dim() != 3 or key.shape[:2] != value.shape[:2]:
        check.fail(RELATION, "value", f"{describe(value)} with key {list(key.shape)}",
                   "(T, N, Dv) with key (T, N, Dk): the same rows and heads", source)
    T = key.shape[0]
    if slots.shape != (T,):
        check.fail(RELATION, name, f"{slots.numel()} rows, {describe(slots)}",
                   f"{T} rows, as key {list(key.shape)} has, on one axis: cut or pad them together", source, "SB-05")
    if slots.dtype not in (torch.int32, torch.int64):
        check.fail(RELATION, name, describe(slots), "int32 or int64", source)
    if not T:
        check.fail(SIZE, "key", describe(key), "at least one row: skip the call where there are none", SCATTER_ACLNN)
    for argument, tensor in (("key", key), ("value", value), (name, slots)):
        if not tensor.is_contiguous():
            check.fail(SIZE, argument, f"strided, {describe(tensor)}", "a contiguous tensor: call .contiguous()",
                       source)


def _check_tiled_caches(check: Check, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                        source: str) -> None:
    """Both caches are dense (block_num, N*D/C0, block_size, C0) with the same pages."""
    for argument, rows, cache in (("key_cache", key, key_cache), ("value_cache", value, value_cache)):
        width = rows.shape[1] * rows.shape[2]
        if (cache.dim() != 4 or cache.shape[1] * cache.shape[3] != width
                or cache.shape[0::2] != key_cache.shape[0::2]):
            check.fail(RELATION, argument, describe(cache, "block_num, N*D/C0, block_size, C0"),
                       f"4 axes, N*D/C0 times C0 the {width} values of a row {list(rows.shape)}, both caches with the "
                       "same pages: (block_num, block_size, N, D) is another form", source, "SB-26")
        if not cache.is_contiguous():
            check.fail(RELATION, argument, f"strided, {describe(cache)}",
                       "a contiguous tensor: a write to a hidden copy would be lost", source)
        C0 = tile_width(rows.dtype)
        if cache.shape[3] != C0:
            check.fail(SIZE, argument, describe(cache, "block_num, N*D/C0, block_size, C0"),
                       f"C0 = {C0}: 32 bytes of {rows.dtype}", source)
    for argument, rows in (("key", key), ("value", value)):
        if rows.shape[2] % tile_width(rows.dtype):
            check.fail(SIZE, argument, describe(rows, "T, N, D"),
                       f"D a multiple of {tile_width(rows.dtype)}: a head fills whole tiles", SCATTER_ACLNN)
    if key_cache.shape[2] >= UINT16_MAX:
        check.fail(SIZE, "key_cache", describe(key_cache), f"a block_size below {UINT16_MAX}", SCATTER_ACLNN)


def _check_places(check: Check, name: str, slots: Tensor, pages: Tensor, source: str) -> None:
    """Slots inside the caches; ``pages`` has block_num and block_size as its first axes."""
    places = slots.tolist()
    if places and min(places) < 0:
        check.fail(RELATION, name, f"slot {min(places)} in row {places.index(min(places))}",
                   "slots >= 0: documents only allow >= 0, although device tests skip negative ones; send padded "
                   "rows to the dummy page 0", source, "SB-09", unless=MINUS_ONE)
    check_slots(check, name, places, pages, source)


def _write(cache: Tensor, slots: Tensor, rows: Tensor, tiled: bool) -> None:
    """Rows into their slots, in place."""
    if assumed(MINUS_ONE):
        slots, rows = slots[slots >= 0], rows[slots >= 0]  # [T'], [T', N, D]
    if not tiled:
        write_slots(cache, slots.long(), rows)
        return
    _, pieces, P, C0 = cache.shape
    page, offset = slots.long() // P, slots.long() % P  # [T], [T]
    cache[page, :, offset] = rows.reshape(-1, pieces, C0)  # [T, N*D/C0, C0]


def _check_dtypes(check: Check, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                  source: str) -> None:
    """Rows are of 16 or 8 bits, and each cache has the dtype of its rows."""
    for argument, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in (*float_dtypes(check), torch.int8):
            check.fail(DTYPE, argument, describe(tensor), "float16, bfloat16 or int8", source)
    for argument, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        if cache.dtype != rows.dtype:
            check.fail(DTYPE, argument, describe(cache), f"{rows.dtype}, as its rows", source)


def _scatter_pa_kv_cache_contract(check: Check, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                                  slot_mapping: Tensor, *, cache_mode: str | None = "PA_NZ", **rest: Any) -> None:
    refuse_unbuilt(check, rest)
    if cache_mode not in ("Norm", None, "PA_NZ"):
        check.fail(RELATION, "cache_mode", repr(cache_mode),
                   "'Norm' (or None), for caches (block_num, block_size, N, D), or 'PA_NZ' (the default), for caches "
                   "(block_num, N*D/C0, block_size, C0)", SCATTER_PAGE)
    _check_rows(check, key, value, slot_mapping, "slot_mapping", SCATTER_PAGE)
    if cache_mode == "PA_NZ":
        _check_tiled_caches(check, key, value, key_cache, value_cache, SCATTER_PAGE)
        pages = key_cache.transpose(1, 2)
    else:
        check_caches(check, {"key_cache": key_cache, "value_cache": value_cache}, key.shape[1],
                     (key.shape[2], value.shape[2]),
                     "take the shapes of a cache from the module that writes it; the default cache_mode, 'PA_NZ', is "
                     "for tiled ones", SCATTER_PAGE)
        pages = key_cache
    _check_places(check, "slot_mapping", slot_mapping, pages, SCATTER_PAGE)
    _check_dtypes(check, key, value, key_cache, value_cache, SCATTER_PAGE)
    if value.dtype != key.dtype and cache_mode == "PA_NZ":
        check.fail(DTYPE, "value", describe(value), f"key's {key.dtype}", SCATTER_PAGE, unless=MIXED_DTYPES)
    if value.dtype != key.dtype and cache_mode != "PA_NZ":
        check.fail(DTYPE, "value", describe(value), f"key's {key.dtype}", SCATTER_PAGE)


def _caches(tiled: bool, call: Mapping[str, Any], mark: str = "!") -> str:
    if not tiled:
        return f"key_cache{mark} [pages P N Dk], value_cache{mark} [pages P N Dv]"
    Ck, Cv = (tile_width(call[name].dtype) for name in ("key", "value"))
    return f"key_cache{mark} [pages Dk_tiles P {Ck}], value_cache{mark} [pages Dv_tiles P {Cv}]"


def _scatter_axes(call: Mapping[str, Any]) -> str:
    return ("key [T N Dk], value [T N Dv], " + _caches(call["cache_mode"] == "PA_NZ", call)
            + ", slot_mapping [T] ->")


def _functional_axes(call: Mapping[str, Any]) -> str:
    caches = _caches(call["cache_mode"] == "PA_NZ", call, mark="")
    return f"key [T N Dk], value [T N Dv], {caches}, slot_mapping [T] -> {caches}"


ROWS = {name: torch.empty(0, 1, 16, dtype=torch.bfloat16, device="meta") for name in ("key", "value")}
FORMS = ({"cache_mode": "Norm"} | ROWS, {"cache_mode": "PA_NZ"} | ROWS)


@reference("npu_scatter_pa_kv_cache", _scatter_pa_kv_cache_contract, _scatter_axes, FORMS)
def npu_scatter_pa_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                            slot_mapping: Tensor, *, cache_mode: str | None = "PA_NZ", **rest: Any) -> None:
    """cache[slot_mapping[t]] = row t, for both caches, in place.

    For MLA the pair is the latent (T, 1, 512) and the rotated rope part (T, 1, 64).  Duplicate slots are refused
    outside page 0, the dummy page.  Negative slots are refused, unlike in npu_kv_rmsnorm_rope_cache;
    ``assume("scatter-minus-one")`` admits them, and their rows are left out.

    The default ``cache_mode`` is for tiled caches.  Their shape says how they are tiled: whether they were also cast to
    FRACTAL_NZ, as the page's example does, changes no byte where block_size is a multiple of 16, and is not looked at.

    Args:
        key, value: (T, N, Dk) and (T, N, Dv), T >= 1, contiguous, one dtype: fp16, bf16 or int8.
        key_cache, value_cache: contiguous, the same dtype: (block_num, block_size, N, Dk) and (..., Dv) with "Norm"
            or None; (block_num, N*Dk/C0, block_size, C0) and (..., N*Dv/C0, ...) with "PA_NZ", C0 = 16, int8 32.
        slot_mapping: (T,) int32 or int64, slots in the whole pool; offsets are computed in int64.
        compress_lens, compress_seq_offsets, seq_lens: for compressed caches, on Ascend 950; not built.
        cache_mode: "Norm", None (the same) or "PA_NZ".

    Source: torch_npu docs: npu_scatter_pa_kv_cache.
    """
    _write(key_cache, slot_mapping, key, cache_mode == "PA_NZ")
    _write(value_cache, slot_mapping, value, cache_mode == "PA_NZ")


@reference("npu_scatter_pa_kv_cache_functional", _scatter_pa_kv_cache_contract, _functional_axes, FORMS)
def npu_scatter_pa_kv_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Copies of both caches after :func:`npu_scatter_pa_kv_cache`; the arguments are the same.

    For graph compilers, which want no writes into arguments.  It copies whole caches: nothing for a serving loop.

    Returns:
        (key_cache, value_cache), new tensors.

    Source: torch_npu docs: npu_scatter_pa_kv_cache; op-plugin: op_plugin/ops/opapi/ScatterPaKvCacheNpuOpApi.cpp.
    """
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, **rest)
    return key_cache, value_cache


def _reshape_and_cache_contract(check: Check, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                                slot_indices: Tensor) -> None:
    _check_rows(check, key, value, slot_indices, "slot_indices", ATB_TEST)
    tiled = format_of(key_cache) == FRACTAL_NZ
    if (format_of(value_cache) == FRACTAL_NZ) != tiled:
        check.fail(RELATION, "value_cache", f"{'ND' if tiled else 'FRACTAL_NZ'}, {describe(value_cache)}",
                   "the memory format of key_cache: cast both to FRACTAL_NZ (29), or none", ATB_TEST)
    if tiled:
        _check_tiled_caches(check, key, value, key_cache, value_cache, ATB_TEST)
        pages = key_cache.transpose(1, 2)
    else:
        check_caches(check, {"key_cache": key_cache, "value_cache": value_cache}, key.shape[1],
                     (key.shape[2], value.shape[2]),
                     "take the shapes of a cache from the module that writes it, and cast a tiled one with "
                     "npu_format_cast to 29: here the memory format tells them apart", ATB_TEST)
        pages = key_cache
    _check_places(check, "slot_indices", slot_indices, pages, ATB_TEST)
    if slot_indices.dtype != torch.int32:
        check.fail(DTYPE, "slot_indices", describe(slot_indices),
                   "int32: call .int(); npu_scatter_pa_kv_cache takes both", ATB_TEST)
    _check_dtypes(check, key, value, key_cache, value_cache, ATB_TEST)
    if value.dtype != key.dtype and not tiled:
        check.fail(DTYPE, "value", describe(value), f"key's {key.dtype}: only tiled caches may differ", ATB_TEST)


def _reshape_and_cache_axes(call: Mapping[str, Any]) -> str:
    cache = call["key_cache"]
    tiled = isinstance(cache, Tensor) and format_of(cache) == FRACTAL_NZ
    return f"key [T N Dk], value [T N Dv], {_caches(tiled, call)}, slot_indices [T] ->"


TILED = {"key_cache": npu_format_cast(torch.empty(1, 1, 16, 16, device="meta"), FRACTAL_NZ)}


@reference("atb::_npu_reshape_and_cache", _reshape_and_cache_contract, _reshape_and_cache_axes, ({}, ROWS | TILED))
def npu_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
                          slot_indices: Tensor) -> None:
    """cache[slot_indices[t]] = row t, for both caches, in place: npu_scatter_pa_kv_cache of the ATB library.

    Called as ``torch_npu._npu_reshape_and_cache``.  It has no argument for the form of the caches: those cast to
    FRACTAL_NZ (:func:`~trueup.core.ops.cache.format.npu_format_cast`) are tiled, others are not.

    Args:
        key, value: (T, N, Dk) and (T, N, Dv), T >= 1, contiguous; fp16, bf16 or int8, one dtype unless tiled.
        key_cache, value_cache: contiguous, in the dtype of their rows: ND (block_num, block_size, N, Dk) and
            (..., Dv); or both FRACTAL_NZ (block_num, N*Dk/C0, block_size, C0), C0 = 16, int8 32.
        slot_indices: (T,) int32 only.  Duplicates and negative ones as in npu_scatter_pa_kv_cache.

    Source: op-plugin: op_plugin/ops/atb/ReshapeAndCachAtb.cpp and test/test_custom_ops/test_atb_reshape_and_cache.py.
    """
    tiled = format_of(key_cache) == FRACTAL_NZ
    _write(key_cache, slot_indices, key, tiled)
    _write(value_cache, slot_indices, value, tiled)

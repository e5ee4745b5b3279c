"""Dense attention over packed, batched or paged keys: ``npu_fused_infer_attention_score`` (FIA), versions 1 and 2.

One operator covers dense prefill, grouped decoding, and both forms of MLA (multi-head latent attention).  The versions
differ in names, and in two features: learnable sinks and the tree mask of speculation (sparse_mode 9) are in version 2
only.  trueup calls version 2; its names are the ones that graph updates use on newer CANN, and an update that names an
argument of the other version is ignored without a word: stale lengths are used.

The way of a call: *arguments* (two sets of names become one), *contract*, then *kernel*, which makes rows of every
*layout*, cuts them into *blocks* with what *masks* says each row sees, and writes rows back.

Source: op-plugin: docs/.../torch_npu-npu_fused_infer_attention_score.md and ..._v2.md.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention import axes
from trueup.core.ops.attention.fused_infer_attention.arguments import V1, V2, Call, v1, v2
from trueup.core.ops.attention.fused_infer_attention.contract import contract_v1, contract_v2
from trueup.core.ops.attention.fused_infer_attention.contract_out import (
    check_infer_output,
    check_out,
    refuse_low_bit,
    workspace_size,
)
from trueup.core.ops.attention.fused_infer_attention.kernel import attention, attention_into
from trueup.core.ops.attention.fused_infer_attention.layouts import LAYOUTS, output_shapes, value_width
from trueup.core.ops.contract import Check
from trueup.core.ops.registry import poison, reference

_V1, _V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
_MEMORY = {"out": [torch.empty(0, device="meta"), torch.empty(0, device="meta")]}


@reference(_V2, contract_v2, axes.axes_v2, axes.FORMS_V2)
def npu_fused_infer_attention_score_v2(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """softmax(scale * (Q K^T + Q_rope K_rope^T) + pse_shift) V per request and head, and the log of its denominator.

    Shapes, by ``input_layout`` (T, Tkv: the rows of all requests, one after the other; G key heads; H = N*D):

    =======================  ===============  =======================  ==================  ==============
    layout                   query            key, value               out                 lse
    =======================  ===============  =======================  ==================  ==============
    BSH                      [B, S, N*D]      [B, Skv, G*D]            [B, S, N*Dv]        [B, N, S, 1]
    BSND                     [B, S, N, D]     [B, Skv, G, D]           [B, S, N, Dv]       [B, N, S, 1]
    BNSD                     [B, N, S, D]     [B, G, Skv, D]           [B, N, S, Dv]       [B, N, S, 1]
    TND                      [T, N, D]        [Tkv, G, D]              [T, N, Dv]          [T, N, 1]
    NTD                      [N, T, D]        [G, Tkv, D]              [N, T, Dv]          [T, N, 1]
    X_BNSD, X_BSND, ...      as X             as X                     as named            as X
    BSH_NBSD, ..._NBSD       as BSH, ...      as BSH, ...              [N, B, S, Dv]       refused
    =======================  ===============  =======================  ==================  ==============

    Args:
        query_rope, key_rope: the rope parts of MLA, in the shapes of query and key but for their width of 64.
        block_table: [B, columns] int32: keys are paged.  Cache shapes: see pages.py.
        actual_seq_qlen, actual_seq_kvlen: end offsets in packed layouts (keys that are paged: lengths); elsewhere
            lengths, one for each request or one for all.  None: all rows.  See lengths.py.
        softmax_scale: not derived from a width.
        sparse_mode: 0 every key, or all that ``atten_mask`` leaves; 1 the mask alone; 2 causal from the first key; 3
            causal up to the last; 4 a band up to the last; 9 a tree, mask over the last keys.  See masks.py.
        atten_mask: 1 hides a key.  In modes 2, 3 and 4 always the same 2048 x 2048 tensor.
        pre_tokens, next_tokens: of modes 4 and, with a mask, 0: keys before and behind a row's own.
        pse_shift: [B or 1, N, S, Skv], added to scaled scores.
        learnable_sink: [N] bfloat16, scores that take weight and give no value.
        inner_precise: 2 and 3 make zeros of rows that see no key.

    Returns:
        (out, lse): out in the query's dtype; lse fp32, natural log, of shape (0,) unless asked for.  A row that sees no
        key gets zeros, and an lse of +inf.  Left unwritten by a device, so NaN here: rows past a request's length, and
        (open point fia-no-keys) rows of a request without keys, unless the key tensor is empty as a whole.

    Raises:
        ContractError: the call breaks a rule of contract.py, or is of a form that is not built: quantised, left-padded,
            with a shared prefix.
    """
    return attention(v2(query, key, value, **rest))


@reference(_V1, contract_v1, axes.axes_v1, axes.FORMS_V1)
def npu_fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score_v2 under its older names, without ``learnable_sink`` and the tree mask.

    ``actual_seq_lengths``, ``actual_seq_lengths_kv``, ``num_heads``, ``scale`` and ``softmax_lse_flag`` are version 2's
    ``actual_seq_qlen``, ``actual_seq_kvlen``, ``num_query_heads``, ``softmax_scale`` and ``return_softmax_lse``.
    """
    return attention(v1(query, key, value, **rest))


# With the results in memory of the caller, for graphs.


def _out_contract_v2(check: Check, query: Tensor, key: Tensor, value: Tensor, *, out: Sequence[Tensor],
                     workspace: Tensor | None = None, **rest: Any) -> None:
    contract_v2(check, query, key, value, **rest)
    check_out(check, V2, v2(query, key, value, **rest), workspace, out)


def _out_contract_v1(check: Check, query: Tensor, key: Tensor, value: Tensor, *, out: Sequence[Tensor],
                     workspace: Tensor | None = None, **rest: Any) -> None:
    contract_v1(check, query, key, value, **rest)
    check_out(check, V1, v1(query, key, value, **rest), workspace, out)


@reference(f"{_V2}.out", _out_contract_v2, axes.axes_v2_out, tuple(form | _MEMORY for form in axes.FORMS_V2))
def npu_fused_infer_attention_score_v2_out(query: Tensor, key: Tensor, value: Tensor, *, out: Sequence[Tensor],
                                           workspace: Tensor | None = None, **rest: Any) -> tuple[Tensor, Tensor]:
    """The operator with results in given memory, which a captured graph can write to again.

    Args:
        out: [attention_out, softmax_lse], of exactly the shapes and dtypes of the functional form; where the lse is not
            wanted, any tensor of one element, which is left alone.  Rows that a device leaves unwritten keep their
            content.
        workspace: what ``_npu_fused_infer_attention_score_v2_get_max_workspace`` returned for these shapes, or None.

    Returns:
        The two tensors of ``out``.
    """
    attention_into(v2(query, key, value, **rest), *out)
    return out[0], out[1]


@reference(f"{_V1}.out", _out_contract_v1, axes.axes_v1_out, tuple(form | _MEMORY for form in axes.FORMS_V1))
def npu_fused_infer_attention_score_out(query: Tensor, key: Tensor, value: Tensor, *, out: Sequence[Tensor],
                                        workspace: Tensor | None = None, **rest: Any) -> tuple[Tensor, Tensor]:
    """The same for version 1."""
    attention_into(v1(query, key, value, **rest), *out)
    return out[0], out[1]


def _workspace(call: Call) -> Tensor:
    return poison((workspace_size(call),), call.query.dtype, call.query.device)


@reference(f"_{_V2}_get_max_workspace", contract_v2, axes.axes_v2_workspace, axes.FORMS_V2)
def _npu_fused_infer_attention_score_v2_get_max_workspace(query: Tensor, key: Tensor, value: Tensor, **rest: Any
                                                          ) -> Tensor:
    """Memory for the ``.out`` form: one axis, the query's dtype, as many elements as a device wants bytes.

    The number is a function of the shapes alone, so one tensor serves every replay of a graph.  Which function is the
    device's affair: here it is 8 for each row and head.  A device skips the checks of data, this does not.
    """
    return _workspace(v2(query, key, value, **rest))


@reference(f"_{_V1}_get_max_workspace", contract_v1, axes.axes_v1_workspace, axes.FORMS_V1)
def _npu_fused_infer_attention_score_get_max_workspace(query: Tensor, key: Tensor, value: Tensor, **rest: Any
                                                       ) -> Tensor:
    """The same for version 1."""
    return _workspace(v1(query, key, value, **rest))


# Shape inference, as operators.


def _shapes_contract_v2(check: Check, query: Tensor, value: Tensor, *, query_dtype: int | None = None,
                        value_dtype: int | None = None, input_layout: str = "BSH",
                        quant_scale_out: Tensor | None = None, block_table: Tensor | None = None,
                        num_query_heads: int = 1, num_key_value_heads: int = 0, return_softmax_lse: bool = False,
                        query_rope: Tensor | None = None, out_dtype: int | None = None) -> None:
    refuse_low_bit(check, query_dtype, value_dtype, out_dtype)
    check_infer_output(check, V2, query, value, input_layout, num_query_heads, num_key_value_heads, block_table)


def _shapes_contract_v1(check: Check, query: Tensor, value: Tensor, *, input_layout: str = "BSH",
                        quant_scale2: Tensor | None = None, block_table: Tensor | None = None, num_heads: int = 1,
                        num_key_value_heads: int = 0, softmax_lse_flag: bool = False,
                        query_rope: Tensor | None = None) -> None:
    check_infer_output(check, V1, query, value, input_layout, num_heads, num_key_value_heads, block_table)


def _infer(query: Tensor, value: Tensor, name: str, quantised: bool, paged: bool, heads: int, key_heads: int,
           want_lse: bool, query_rope: Tensor | None) -> tuple[Tensor, Tensor]:
    layout = LAYOUTS[name]
    width = value_width(layout, value, key_heads or heads, paged)
    shape, lse_shape = output_shapes(layout, query, heads, width, want_lse)
    dtype = query.dtype
    if quantised:
        dtype = torch.int8
    elif dtype == torch.int8:
        dtype = torch.float16 if query_rope is None else query_rope.dtype
    return poison(shape, dtype, query.device), poison(lse_shape, torch.float32, query.device)


@reference(f"_{_V2}_infer_output", _shapes_contract_v2, axes.axes_v2_shapes, axes.FORMS_V2)
def _npu_fused_infer_attention_score_v2_infer_output(
    query: Tensor, value: Tensor, *, input_layout: str = "BSH", quant_scale_out: Tensor | None = None,
    block_table: Tensor | None = None, num_query_heads: int = 1, num_key_value_heads: int = 0,
    return_softmax_lse: bool = False, query_rope: Tensor | None = None, **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Unwritten tensors in the shapes and dtypes that the operator would return: int8 where its output is quantised."""
    return _infer(query, value, input_layout, quant_scale_out is not None, block_table is not None, num_query_heads,
                  num_key_value_heads, return_softmax_lse, query_rope)


@reference(f"_{_V1}_infer_output", _shapes_contract_v1, axes.axes_v1_shapes, axes.FORMS_V1)
def _npu_fused_infer_attention_score_infer_output(
    query: Tensor, value: Tensor, *, input_layout: str = "BSH", quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None, num_heads: int = 1, num_key_value_heads: int = 0, softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for version 1."""
    return _infer(query, value, input_layout, quant_scale2 is not None, block_table is not None, num_heads,
                  num_key_value_heads, softmax_lse_flag, query_rope)

"""The rules of what stands around the operator for graphs: outputs and workspace of the caller, shape inference."""
from collections.abc import Sequence

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import Call, Names
from trueup.core.ops.attention.fused_infer_attention.layouts import LAYOUTS, output_shapes, value_width
from trueup.core.ops.contract import DTYPE, RELATION, SIZE, Check, describe
from trueup.core.ops.registry import float_dtypes

HOST = "op-plugin: op_plugin/ops/opapi/FusedInferAttentionScoreKernelNpuOpApi.cpp"
META = "torch_npu 2.13.0: op_plugin/meta/_meta_registrations.py"
CALLER = "vllm-ascend: vllm_ascend/attention/attention_v1.py"


def workspace_size(call: Call) -> int:
    """Elements of the workspace of a call: here a maximum and a sum, fp32, of every row and head, in bytes.

    What a device wants is its own affair; this is a function of the shapes, and of nothing else, as its is.
    """
    layout = LAYOUTS[call.input_layout]
    return 8 * layout.requests(call.query) * layout.rows(call.query) * call.num_query_heads


def check_out(check: Check, names: Names, call: Call, workspace: Tensor | None, out: Sequence[Tensor]) -> None:
    """Of a call that was checked."""
    layout, want_lse = LAYOUTS[call.input_layout], call.return_softmax_lse
    width = value_width(layout, call.value, call.key_heads, call.block_table is not None)
    shape, lse_shape = output_shapes(layout, call.query, call.num_query_heads, width, want_lse)
    if len(out) != 2:
        check.fail(RELATION, "out", f"{len(out)} tensors", "2: attention_out and softmax_lse", names["page"])
    attention_out, lse = out
    if attention_out.shape != shape:
        check.fail(RELATION, "out[0]", describe(attention_out), f"{list(shape)}, the shape of the output", HOST)
    if want_lse and lse.shape != lse_shape:
        check.fail(RELATION, "out[1]", describe(lse), f"{list(lse_shape)}, the shape of the lse", HOST)
    if not want_lse and (lse.dim() != 1 or lse.numel() > 1):
        check.fail(RELATION, "out[1]", describe(lse), f"one element, or none, where {names['lse']} is False", CALLER)
    if attention_out.dtype != call.query.dtype:
        check.fail(DTYPE, "out[0]", attention_out.dtype, f"{call.query.dtype}, as query", HOST)
    if lse.dtype != torch.float32:
        check.fail(DTYPE, "out[1]", lse.dtype, "float32", HOST)
    for name, tensor in (("out[0]", attention_out), ("out[1]", lse)):
        if not tensor.is_contiguous():
            check.fail(SIZE, name, f"not contiguous: {describe(tensor)}", "a contiguous tensor", HOST)
    if workspace is None:
        return
    if workspace.dim() != 1 or workspace.numel() < workspace_size(call):
        check.fail(RELATION, "workspace", describe(workspace), f"one axis of at least {workspace_size(call)} elements: "
                   "what get_max_workspace returns for this call", HOST)
    if workspace.dtype != call.query.dtype:
        check.fail(DTYPE, "workspace", workspace.dtype, f"{call.query.dtype}, as query", HOST)


def refuse_low_bit(check: Check, query_dtype: int | None, value_dtype: int | None, out_dtype: int | None) -> None:
    """The numbers of types that torch has no name for."""
    for name, number in (("query_dtype", query_dtype), ("value_dtype", value_dtype), ("out_dtype", out_dtype)):
        if number is not None:
            check.fail(RELATION, name, number, "None: low-bit types are not built yet", META)


def check_infer_output(check: Check, names: Names, query: Tensor, value: Tensor, input_layout: str, heads: int,
                       key_heads: int, block_table: Tensor | None) -> None:
    """What shapes follow from; the operator's own rules come with its call."""
    layout = LAYOUTS.get(input_layout)
    if layout is None:
        check.fail(RELATION, "input_layout", f"{input_layout!r}, which does not exist", "a layout of the operator",
                   META)
        return
    if query.dtype not in (*float_dtypes(check), torch.int8):
        check.fail(DTYPE, "query", query.dtype, "float16, bfloat16 or int8", META)
    if query.dim() != len(layout.query):
        check.fail(RELATION, "query", describe(query), f"{len(layout.query)} axes in layout {input_layout}", META)
    if heads < 1 or (query.shape[2] % heads if layout.query == "BSH" else query.shape[layout.head_axis] != heads):
        check.fail(RELATION, names["heads"], heads, f"the heads of query {describe(query)}", META)
    if key_heads < 0:
        check.fail(RELATION, "num_key_value_heads", key_heads, "the heads of value, or 0: as many as the query's", META)
    if block_table is not None:
        if value.dim() not in (3, 4, 5):
            check.fail(RELATION, "value", describe(value), "3, 4 or 5 axes beside a block_table", META)
    elif value.dim() != query.dim():
        check.fail(RELATION, "value", describe(value), f"{query.dim()} axes, as query", META)

"""The two versions of the operator as one: what a call says, whichever names it says it with.

Everything behind this file reads a :class:`Call`.  Its fields have the names of version 2; :data:`V1` and :data:`V2`
are for messages, which must speak of the arguments that the caller wrote.
"""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

FOREVER = 2147483647  # the default of pre_tokens and next_tokens: no limit

V1 = {
    "q_lens": "actual_seq_lengths", "kv_lens": "actual_seq_lengths_kv", "heads": "num_heads", "scale": "scale",
    "lse": "softmax_lse_flag", "page": "torch_npu docs: npu_fused_infer_attention_score",
}
V2 = {
    "q_lens": "actual_seq_qlen", "kv_lens": "actual_seq_kvlen", "heads": "num_query_heads", "scale": "softmax_scale",
    "lse": "return_softmax_lse", "page": "torch_npu docs: npu_fused_infer_attention_score_v2",
}
Names = Mapping[str, str]


class Call(NamedTuple):
    """A call of either version.  ``rest``: arguments of forms that are not built."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    pse_shift: Tensor | None
    atten_mask: Tensor | None
    actual_seq_qlen: Sequence[int] | None
    actual_seq_kvlen: Sequence[int] | None
    block_table: Tensor | None
    learnable_sink: Tensor | None
    num_query_heads: int
    num_key_value_heads: int
    softmax_scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    sparse_mode: int
    block_size: int
    inner_precise: int
    return_softmax_lse: bool
    rest: dict[str, Any]

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_query_heads


def v2(query: Tensor, key: Tensor, value: Tensor, *, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
       pse_shift: Tensor | None = None, atten_mask: Tensor | None = None, actual_seq_qlen: Sequence[int] | None = None,
       actual_seq_kvlen: Sequence[int] | None = None, block_table: Tensor | None = None,
       learnable_sink: Tensor | None = None, num_query_heads: int = 1, num_key_value_heads: int = 0,
       softmax_scale: float = 1.0, pre_tokens: int = FOREVER, next_tokens: int = FOREVER, input_layout: str = "BSH",
       sparse_mode: int = 0, block_size: int = 0, inner_precise: int = 0, return_softmax_lse: bool = False,
       **rest: Any) -> Call:
    """A call of ``npu_fused_infer_attention_score_v2``; parameters are its schema's, with their defaults."""
    return Call._make((
        query, key, value, query_rope, key_rope, pse_shift, atten_mask, actual_seq_qlen, actual_seq_kvlen, block_table,
        learnable_sink, num_query_heads, num_key_value_heads, softmax_scale, pre_tokens, next_tokens, input_layout,
        sparse_mode, block_size, inner_precise, return_softmax_lse, rest))


def v1(query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None,
       atten_mask: Tensor | None = None, actual_seq_lengths: Sequence[int] | None = None,
       actual_seq_lengths_kv: Sequence[int] | None = None, block_table: Tensor | None = None,
       query_rope: Tensor | None = None, key_rope: Tensor | None = None, num_heads: int = 1, scale: float = 1.0,
       pre_tokens: int = FOREVER, next_tokens: int = FOREVER, input_layout: str = "BSH", num_key_value_heads: int = 0,
       sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0, softmax_lse_flag: bool = False,
       **rest: Any) -> Call:
    """A call of ``npu_fused_infer_attention_score``; parameters are its schema's, with their defaults."""
    return Call._make((
        query, key, value, query_rope, key_rope, pse_shift, atten_mask, actual_seq_lengths, actual_seq_lengths_kv,
        block_table, None, num_heads, num_key_value_heads, scale, pre_tokens, next_tokens, input_layout, sparse_mode,
        block_size, inner_precise, softmax_lse_flag, rest))

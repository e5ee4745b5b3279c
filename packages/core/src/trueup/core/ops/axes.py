"""The axes of every tensor that goes into an operator or comes out of it, by letter.

They are declared here, beside the schemas, because a size does not say what it counts: 64 may be a rope width, a
number of heads, or the rows of a batch.  :mod:`trueup.core.ledger` reads them.

A signature reads like a call: ``kv [T 1 1 R+Dr], k_cache! [pages P 1 Dr] -> rope [T 1 1 Dr]``.  An axis is a letter,
a word, a number, or a sum or product of them (``R+Dr``, ``T*K``, ``2I``); within one call a letter has one size.
``!`` marks what is written in place, which schemas do not always say, and ``~`` a result that the operator leaves
unwritten in this form.  Behind ``where``: sizes that follow from others.

Letters of this project: T token rows, B requests, N query heads, G key heads, K top-k, E experts, P page size, H
hidden, I inner width of an MLP, R latent rank, D head width (Dn nope, Dr rope, Dv value), S rows sorted by expert (in
attention: key rows).  ``width``, Din and Dout stand for whatever a caller's weights are wide: a ledger replaces them.
"""
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

Axes = tuple[str, ...]


class Signature(NamedTuple):
    """The axes of one form of an operator.  Keys of ``inputs`` are the schema's argument names."""

    inputs: dict[str, Axes]
    outputs: tuple[tuple[str, Axes], ...]
    written: frozenset[str]
    unwritten: frozenset[str]
    sizes: dict[str, str]  # letter to the expression that it equals


def signature(operator: str, arguments: Mapping[str, Any]) -> Signature | None:
    """The axes of one call; None for an operator that is not declared.

    Args:
        operator: its name, without ``npu::``.
        arguments: by schema name, defaults included; some operators have several forms.
    """
    form = FORMS.get(operator)
    if form is None:
        return None
    return parse(form if isinstance(form, str) else form(arguments))


@cache
def parse(text: str) -> Signature:
    """Read the notation of this file.

    >>> parse("x [T 2I], cache! [pages P] -> y [T I] where S = T*K").outputs
    (('y', ('T', 'I')),)
    """
    text, _, where = text.partition(" where ")
    takes, _, returns = text.partition("->")
    inputs, outputs = _operands(takes), _operands(returns)
    written, unwritten = (frozenset(name for name, m, _ in inputs + outputs if m == mark) for mark in "!~")
    sizes = dict(equation.replace(" ", "").split("=") for equation in where.split(",") if equation)
    return Signature({name: axes for name, _, axes in inputs}, tuple((name, axes) for name, _, axes in outputs),
                     written, unwritten, sizes)


def _operands(text: str) -> list[tuple[str, str, Axes]]:
    return [(name, mark, tuple(axes.split())) for name, mark, axes in re.findall(r"(\w+)([!~]?) \[([^\]]*)\]", text)]


def _transpose_batchmatmul(call: Mapping[str, Any]) -> str:
    swapped = list(call["perm_x1"] or ()) == [1, 0, 2]
    return f"input [{'T N' if swapped else 'N T'} Din], weight [N Din Dout] -> y [T N Dout]"


def _kv_rmsnorm_rope_cache(call: Mapping[str, Any]) -> str:
    left = "" if call["is_output_kv"] else "~"
    caches = "k_cache! [pages P 1 Dr], ckv_cache! [pages P 1 R]"
    return (f"kv [T 1 1 R+Dr], gamma [R], cos [T 1 1 Dr], sin [T 1 1 Dr], index [T], {caches} "
            f"-> {caches}, k_rope{left} [T 1 1 Dr], c_kv{left} [T 1 1 R]")


def _attention_update(call: Mapping[str, Any]) -> str:
    return f"lse [T*N], local_out [T*N Dv] -> out [T*N Dv], lse_m{'' if call['update_type'] else '~'} [T*N]"


def _gating_top_k(call: Mapping[str, Any]) -> str:
    return ("x [T E], bias [E] -> weights [T K], expert_idx [T K], "
            f"scores{'' if call['out_flag'] else '~'} [T E]")


def _init_routing(call: Mapping[str, Any]) -> str:
    counts = "counts [E]" if call["expert_tokens_num_flag"] else "counts~ []"
    scale = "expanded_scale~" if call["scale"] is None else "expanded_scale"
    return (f"x [T H], expert_idx [T K], scale [T] -> expanded_x [S H], expanded_row_idx [T*K], {counts}, "
            f"{scale} [S] where S = T*K")


def _fused_infer_attention(call: Mapping[str, Any]) -> str:
    want_lse, layout = call["return_softmax_lse"], call["input_layout"]
    lengths = "atten_mask [2048 2048], actual_seq_qlen [B], actual_seq_kvlen [B]"
    if layout == "BSND":
        return (f"query [B q N D], key [B S G D], value [B S G D], {lengths} "
                f"-> out [B q N D], {'lse [B N q 1]' if want_lse else 'lse~ [0]'}")
    lse = "lse [T N 1]" if want_lse else "lse~ [0]"
    if call["block_table"] is None:
        return (f"query [T N D], key [S G D], value [S G Dv], query_rope [T N Dr], key_rope [S G Dr], {lengths} "
                f"-> out [T N Dv], {lse}")
    page = "pages P" if call["key"].dim() == 3 else "pages 1 P"
    return (f"query [T N R], key [{page} R], value [{page} R], query_rope [T N Dr], key_rope [{page} Dr], {lengths}, "
            f"block_table [B max_pages] -> out [{'N T' if layout == 'TND_NTD' else 'T N'} R], {lse}")


FORMS: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "npu_rms_norm": "input [T width], gamma [width] -> y [T width], rstd [T 1]",
    "npu_add_rms_norm": "x1 [T width], x2 [T width], gamma [width] -> y [T width], rstd [T 1], x [T width]",
    "npu_swiglu": "input [T 2I] -> y [T I]",
    # Decode rows stand on the batch axis, one position each.
    "npu_interleave_rope": "x [T N 1 Dr], cos [T 1 1 Dr], sin [T 1 1 Dr] -> y [T N 1 Dr]",
    "npu_kv_rmsnorm_rope_cache": _kv_rmsnorm_rope_cache,
    "npu_scatter_pa_kv_cache":
        "key [T N Dk], value [T N Dv], key_cache! [pages P N Dk], value_cache! [pages P N Dv], slot_mapping [T] ->",
    "npu_attention_update": _attention_update,
    "npu_fused_infer_attention_score_v2": _fused_infer_attention,
    "npu_moe_gating_top_k": _gating_top_k,
    "npu_moe_init_routing_v2": _init_routing,
    "npu_grouped_matmul": "x [S Din], weight [E Din Dout], group_list [E] -> y [S Dout]",
    "npu_moe_finalize_routing":
        "expanded_permuted_rows [S H], skip1 [T H], skip2 [T H], bias [E H], scales [T K], "
        "expanded_src_to_dst_row [T*K], export_for_source_row [T K] -> out [T H] where S = T*K",
    "npu_transpose_batchmatmul": _transpose_batchmatmul,
}

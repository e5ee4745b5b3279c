"""Which head widths, head counts and sizes each layout takes.

Three families share the layouts: *absorbed* MLA (rope apart, D = 512: one latent serves all heads), *expanded* MLA
(rope apart, D = 128), and everything without rope.
"""
from trueup.core.ops.attention.fused_infer_attention.arguments import Call, Names
from trueup.core.ops.attention.fused_infer_attention.contract_keys import V4
from trueup.core.ops.attention.fused_infer_attention.contract_lengths import TILING
from trueup.core.ops.attention.fused_infer_attention.layouts import Layout
from trueup.core.ops.attention.fused_infer_attention.points import MLA_HEADS, NSD, PACKED_LATENT, SINGLE_ROW_NBSD
from trueup.core.ops.contract import RELATION, SIZE, Check, describe

ABSORBED = ("BSH", "BSND", "BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND", "TND_NTD")
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # of absorbed MLA
MOST_ROWS = 16  # of one request in absorbed MLA
V5 = "ops-transformer: aclnnFusedInferAttentionScoreV5.md"


def absorbed(call: Call, D: int) -> bool:
    """Whether rope stands apart and the queries are in latent space."""
    return call.query_rope is not None and D == 512


def check_widths(check: Check, names: Names, call: Call, layout: Layout, D: int, Dv: int, rows: int) -> None:
    """``D`` and ``Dv``: widths of a head of the query and of the value.  ``rows``: the most of one request."""
    if not layout.packed:
        _check_batches(check, names, call, layout, rows)
    elif layout.rows(call.query) > 1048576:
        check.fail(SIZE, "query", describe(call.query), "at most 1048576 rows", V4)
    if D == 512 and call.query_rope is not None:
        _check_absorbed(check, names, call, layout, Dv, rows)
        return
    if call.input_layout in ("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"):
        check.fail(SIZE, "input_layout", repr(call.input_layout), "another layout: this one takes absorbed MLA only, "
                   "which is rope beside D = 512", TILING)
    if call.input_layout == "NSD":
        check.fail(SIZE, "input_layout", "'NSD'", "BNSD with one request", V5, unless=NSD)
    if call.num_query_heads > 64 * call.key_heads:
        check.fail(SIZE, "num_key_value_heads", call.key_heads, f"at most 64 query heads for each; there are "
                   f"{call.num_query_heads}", names["page"])
    if call.query_rope is not None:
        if (D, Dv) != (128, 128):
            check.fail(SIZE, "query", f"D = {D} with values of {Dv}", "128 and 128 beside rope, or 512 and 512",
                       names["page"])
    elif layout.packed:
        _check_packed(check, names, call, D, Dv)
    else:
        _check_batched(check, names, call, D, Dv)


def _check_batches(check: Check, names: Names, call: Call, layout: Layout, rows: int) -> None:
    query = call.query
    if "B" in layout.query and query.shape[0] > 65536:
        check.fail(SIZE, "query", describe(query), "at most 65536 requests", names["page"])
    if rows > 20971520:
        check.fail(SIZE, "query", describe(query), "at most 20971520 rows of a request", names["page"])
    if call.input_layout == "BNSD_BSND" and rows == 1:
        check.fail(SIZE, "query", describe(query), "several query rows of each request in layout BNSD_BSND; with one, "
                   "layout BSND reads the same memory", names["page"])
    if layout.out == "NBSD" and rows == 1:
        check.fail(SIZE, "query", describe(query), f"2 to 16 query rows of each request in layout {call.input_layout}",
                   names["page"], unless=SINGLE_ROW_NBSD)


def _check_absorbed(check: Check, names: Names, call: Call, layout: Layout, Dv: int, rows: int) -> None:
    N = call.num_query_heads
    if call.input_layout not in ABSORBED:
        check.fail(SIZE, "input_layout", repr(call.input_layout), "BSH, BSND, BNSD, BSH_NBSD, BSND_NBSD, BNSD_NBSD, "
                   "TND or TND_NTD for absorbed MLA (rope beside D = 512)", names["page"])
    if call.key_heads != 1:
        check.fail(RELATION, "num_key_value_heads", call.key_heads, "1: the heads of absorbed MLA share one latent",
                   names["page"])
    if Dv != 512:
        check.fail(SIZE, "value", f"heads {Dv} wide", "512, the latent, as query and key", names["page"])
    if N not in HEADS:
        larger = next((heads for heads in HEADS if heads >= N), None)
        advice = f": pad the heads with zeros to {larger} and slice the result" if larger else ""
        check.fail(SIZE, names["heads"], N, "1, 2, 4, 8, 16, 32, 64 or 128 when D is 512" + advice, TILING, "SB-06",
                   MLA_HEADS)
    if rows > MOST_ROWS:
        check.fail(SIZE, "query", f"{rows} rows in one request", f"at most {MOST_ROWS} when D is 512", V4)
    if layout.packed and call.block_table is None:
        check.fail(SIZE, "block_table", None, "pages, for packed queries with D = 512", V4, unless=PACKED_LATENT)
    if call.return_softmax_lse and "_" in call.input_layout:
        check.fail(SIZE, names["lse"], True, f"False in layout {call.input_layout} with D = 512; {layout.query} "
                   "returns it", TILING)


def _check_packed(check: Check, names: Names, call: Call, D: int, Dv: int) -> None:
    """TND, NTD and NTD_TND without rope."""
    known = ((128, 128), (192, 128)) if call.input_layout == "NTD_TND" else ((64, 64), (128, 128), (192, 128))
    if (D, Dv) not in known and (call.input_layout != "TND" or (D, Dv) != (192, 192)):
        check.fail(SIZE, "query", f"D = {D} with values of {Dv}", "128/128 or 192/128, outside NTD_TND also 64/64, in "
                   "TND also 192/192; for D = 256 call once per request in layout BSND", "vllm-ascend: issue 8045")
    if Dv == 192 and (call.num_query_heads != call.key_heads or call.block_table is not None):
        check.fail(SIZE, "value", f"heads {Dv} wide", "128, or as many key heads as query heads, and no pages",
                   names["page"])


def _check_batched(check: Check, names: Names, call: Call, D: int, Dv: int) -> None:
    """Layouts with an axis of requests, and NSD, without rope."""
    if D % 16 or D > 512:
        check.fail(SIZE, "query", f"heads {D} wide", "D a multiple of 16, at most 512", names["page"])
    if call.input_layout in ("BSH_BNSD", "BSND_BNSD"):
        if (D, Dv) not in ((64, 64), (128, 128), (192, 128)):
            check.fail(SIZE, "query", f"D = {D} with values of {Dv}", f"64/64, 128/128 or 192/128 in layout "
                       f"{call.input_layout}", V5)
    elif Dv != D:
        check.fail(SIZE, "value", f"heads {Dv} wide", f"{D}, as query and key", names["page"])

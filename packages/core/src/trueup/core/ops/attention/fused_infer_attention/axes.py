"""The axes of every tensor of a call, by letter (notation: ops/axes.py), and the forms that a sheet lists."""
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.core.ops.attention.fused_infer_attention.arguments import V1, V2, Names
from trueup.core.ops.attention.fused_infer_attention.layouts import LAYOUTS

# {w}: the width of a head.  q: query rows of a request in a tensor that is not packed.
_QUERY = {"BSH": "B q N*{w}", "BSND": "B q N {w}", "BNSD": "B N q {w}", "NBSD": "N B q {w}", "TND": "T N {w}",
          "NTD": "N T {w}", "NSD": "N q {w}"}
_KEY = {"BSH": "B S G*{w}", "BSND": "B S G {w}", "BNSD": "B G S {w}", "TND": "S G {w}", "NTD": "G S {w}",
        "NSD": "G S {w}"}
_PAGES = {3: "pages P G*{w}", 4: "pages G P {w}", 5: "pages G tiles_{w} P 16"}
_LATENT_PAGES = {3: "pages P {w}", 4: "pages 1 P {w}", 5: "pages 1 tiles_{w} P 16"}
_MASK = {1: "squares", 2: "mask_rows mask_keys", 3: "{b} mask_rows mask_keys", 4: "{b} 1 mask_rows mask_keys"}


def axes_v1(call: Mapping[str, Any]) -> str:
    return f"{_inputs(V1, call)} -> {_outputs(V1, call)}"


def axes_v2(call: Mapping[str, Any]) -> str:
    return f"{_inputs(V2, call)} -> {_outputs(V2, call)}"


def axes_v1_out(call: Mapping[str, Any]) -> str:
    return f"{_inputs(V1, call)}, {_memory(V1, call)} -> {_outputs(V1, call)}"


def axes_v2_out(call: Mapping[str, Any]) -> str:
    return f"{_inputs(V2, call)}, {_memory(V2, call)} -> {_outputs(V2, call)}"


def axes_v1_workspace(call: Mapping[str, Any]) -> str:
    return f"{_inputs(V1, call)} -> workspace [workspace]"


def axes_v2_workspace(call: Mapping[str, Any]) -> str:
    return f"{_inputs(V2, call)} -> workspace [workspace]"


def axes_v1_shapes(call: Mapping[str, Any]) -> str:
    return f"{_rows(call)}, value [{_keys(call, 'value')}] -> {_outputs(V1, call)}"


def axes_v2_shapes(call: Mapping[str, Any]) -> str:
    return f"{_rows(call)}, value [{_keys(call, 'value')}] -> {_outputs(V2, call)}"


def _inputs(names: Names, call: Mapping[str, Any]) -> str:
    mask, shift = call["atten_mask"], call["pse_shift"]
    takes = [_rows(call), *(f"{name} [{_keys(call, name)}]" for name in ("key", "value", "key_rope")),
             "learnable_sink [N]", "block_table [B max_pages]",
             _lengths(names, "q_lens", call), _lengths(names, "kv_lens", call)]
    if mask is not None and call["sparse_mode"] in (2, 3, 4):
        takes.append(f"atten_mask [{'1 ' * (mask.dim() - 2)}2048 2048]")
    elif mask is not None:
        takes.append(f"atten_mask [{_MASK.get(mask.dim(), '').format(b=_requests(mask))}]")
    if shift is not None:
        takes.append(f"pse_shift [{_requests(shift)} N shift_rows shift_keys]")
    return ", ".join(takes if names is V2 else [text for text in takes if not text.startswith("learnable_sink")])


def _outputs(names: Names, call: Mapping[str, Any]) -> str:
    return f"out [{_out(call)}], {_lse('lse', '', names, call)}"


def _memory(names: Names, call: Mapping[str, Any]) -> str:
    return f"workspace [workspace], out[0]! [{_out(call)}], {_lse('out[1]', '!', names, call)}"


def _out(call: Mapping[str, Any]) -> str:
    return _QUERY[LAYOUTS[call["input_layout"]].out].format(w="R" if _latent(call) else "Dv")


def _lse(name: str, mark: str, names: Names, call: Mapping[str, Any]) -> str:
    if not call[names["lse"]]:
        return f"{name}~ [{call['out'][1].numel() if call.get('out') else 0}]"
    layout = LAYOUTS[call["input_layout"]]
    return f"{name}{mark} [{'T N 1' if layout.packed else '1 N q 1' if layout.query == 'NSD' else 'B N q 1'}]"


def _rows(call: Mapping[str, Any]) -> str:
    axes = _QUERY[LAYOUTS[call["input_layout"]].query]
    return f"query [{axes.format(w='R' if _latent(call) else 'D')}], query_rope [{axes.format(w='Dr')}]"


def _keys(call: Mapping[str, Any], name: str) -> str:
    width = "Dr" if name == "key_rope" else "R" if _latent(call) else "D" if name == "key" else "Dv"
    if call["block_table"] is None:
        return _KEY[LAYOUTS[call["input_layout"]].query].format(w=width)
    return (_LATENT_PAGES if _latent(call) else _PAGES).get(call["value"].dim(), "").format(w=width)


def _latent(call: Mapping[str, Any]) -> bool:
    """Absorbed MLA over pages: all heads share one latent, as wide as its pages."""
    return call["block_table"] is not None and call["query_rope"] is not None and call["num_key_value_heads"] == 1


def _requests(tensor: Tensor) -> str:
    return "1" if tensor.shape[0] == 1 else "B"


def _lengths(names: Names, which: str, call: Mapping[str, Any]) -> str:
    """A list has one length for each request; where requests have an axis, also one for all, or more than needed."""
    layout, given = LAYOUTS[call["input_layout"]], call[names[which]]
    fits = layout.packed or given is None or len(given) == layout.requests(call["query"])
    return f"{names[which]} [{'B' if fits else which}]"


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _forms(names: Names) -> tuple[dict[str, Any], ...]:
    """One call for each layout, and for each way to store keys."""
    query = {"BSH": _meta(2, 3, 512), "BSND": _meta(2, 3, 4, 128), "BNSD": _meta(2, 4, 3, 128), "TND": _meta(6, 4, 128),
             "NTD": _meta(4, 6, 128), "NSD": _meta(4, 3, 128)}
    plain: dict[str, Any] = {names["heads"]: 4, "num_key_value_heads": 4, names["lse"]: True}
    forms = [plain | {"input_layout": name, "query": query[layout.query], "key": query[layout.query],
                      "value": query[layout.query]} for name, layout in LAYOUTS.items()]
    stores = (_meta(9, 16, 512), _meta(9, 4, 16, 128), _meta(9, 4, 8, 16, 16))
    forms += [plain | {"input_layout": "TND", "query": query["TND"], "key": store, "value": store,
                       "block_table": _meta(2, 4)} for store in stores]
    latent = (_meta(9, 16, 512), _meta(9, 1, 16, 512), _meta(9, 1, 32, 16, 16))
    absorbed = {"input_layout": "TND_NTD", "query": _meta(6, 4, 512), "query_rope": _meta(6, 4, 64),
                "block_table": _meta(2, 4), "num_key_value_heads": 1, names["lse"]: False}
    forms += [plain | absorbed | {"key": store, "value": store} for store in latent]
    return tuple(forms)


FORMS_V1, FORMS_V2 = _forms(V1), _forms(V2)

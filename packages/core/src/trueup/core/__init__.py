"""trueup-core: operators with contracts, layouts, a paged MLA cache, and an engine over them."""
import importlib
from typing import TYPE_CHECKING, Any

from trueup.core import hostnpu

# Before anything imports torch: with torch_npu installed and no driver, `import torch` alone would fail.
hostnpu.preload_if_needed()

if TYPE_CHECKING:
    from trueup.core import ledger
    from trueup.core.engine import Engine, EngineConfig
    from trueup.core.layout import Layout
    from trueup.core.ops.attention.pad_topk import pad_topk
    from trueup.core.ops.audit import audit
    from trueup.core.ops.capture import capture
    from trueup.core.ops.contract import ContractError
    from trueup.core.ops.load import load
    from trueup.core.planning import plan
    from trueup.core.rows import Rows
    from trueup.core.scripted import ScriptedDrafter, ScriptedModel
    from trueup.core.view import materialise

__all__ = [
    "ContractError",
    "Engine",
    "EngineConfig",
    "Layout",
    "Rows",
    "ScriptedDrafter",
    "ScriptedModel",
    "audit",
    "capture",
    "ledger",
    "load",
    "materialise",
    "pad_topk",
    "plan",
]

# Where each public name lives.  Imported when first asked for: torch takes a second, `trueup --help` must not.
_HOMES = {
    "ContractError": "trueup.core.ops.contract",
    "Engine": "trueup.core.engine",
    "EngineConfig": "trueup.core.engine",
    "Layout": "trueup.core.layout",
    "Rows": "trueup.core.rows",
    "ScriptedDrafter": "trueup.core.scripted",
    "ScriptedModel": "trueup.core.scripted",
    "audit": "trueup.core.ops.audit",
    "capture": "trueup.core.ops.capture",
    "load": "trueup.core.ops.load",
    "materialise": "trueup.core.view",
    "pad_topk": "trueup.core.ops.attention.pad_topk",
    "plan": "trueup.core.planning",
}


def __getattr__(name: str) -> Any:
    if name == "ledger":  # a module
        return importlib.import_module("trueup.core.ledger")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

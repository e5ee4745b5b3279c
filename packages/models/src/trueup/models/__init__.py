"""trueup-models: GLM-4.7-Flash, GLM-5 and DeepSeek-V3.2 on trueup-core, from a checkpoint folder to text."""
import importlib
from typing import TYPE_CHECKING, Any

import trueup.core  # noqa: F401  before anything imports torch: it makes that safe where torch_npu has no driver

if TYPE_CHECKING:
    from trueup.models import zoo
    from trueup.models.build import load_model
    from trueup.models.llm import LLM

__all__ = ["LLM", "load_model", "zoo"]

# Where each public name lives; imported when first asked for, as in trueup.core.
_HOMES = {"LLM": "trueup.models.llm", "load_model": "trueup.models.build"}


def __getattr__(name: str) -> Any:
    if name == "zoo":
        return importlib.import_module("trueup.models.zoo")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

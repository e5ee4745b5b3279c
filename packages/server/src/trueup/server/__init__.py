"""trueup-server: an OpenAI-compatible endpoint over the trueup engine."""
import importlib
from typing import TYPE_CHECKING, Any

import trueup.core  # noqa: F401  before anything imports torch, as in trueup.models

if TYPE_CHECKING:
    from trueup.server.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("trueup.server.app"), name)

"""The real torch_npu on a machine without an Ascend driver.

Nothing here imports torch, because what :func:`preload_if_needed` does must come before ``import torch``.
"""
from trueup.core.hostnpu.stub import (
    DRIVER,
    check_versions,
    driver_present,
    installed,
    preload,
    preload_if_needed,
    standing_in,
)

__all__ = [
    "DRIVER", "check_versions", "driver_present", "installed", "preload", "preload_if_needed", "standing_in",
]

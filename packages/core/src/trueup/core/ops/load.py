"""Puts the reference kernels behind ``torch.ops.npu.*``."""
import importlib
import threading

import torch

from trueup.core.device import ActivePath, active_path
from trueup.core.ops.registry import OPERATORS, qualified, schemas

FAMILIES = (
    "attention.attention_update", "attention.fused_infer_attention", "attention.sparse_flash_attention",
    "attention.kv_quant_sparse_flash_attention", "attention.lightning_indexer", "attention.quant_lightning_indexer",
    "mla.kv_rmsnorm_rope_cache", "mla.mla_prolog",
    "cache.scatter", "cache.format", "cache.scatter_nd",
    "moe.moe_gating", "moe.moe_gating_softmax", "moe.moe_init_routing", "moe.moe_init_routing_v2",
    "moe.moe_finalize_routing", "moe.moe_permute",
    "matmul.transpose_batchmatmul", "matmul.grouped_matmul", "matmul.dynamic_quant", "matmul.quant_matmul",
    "rowwise.norm", "rowwise.rope", "rowwise.activation", "rowwise.top_k_top_p",
)

_lock = threading.Lock()
# A Library takes its registrations back when it dies.
_libraries: list[torch.library.Library] = []


def load() -> ActivePath:
    """Make ``torch.ops.npu.*`` answer in this process; says who answers.  May be called any number of times.

    With an NPU nothing is registered: torch_npu's kernels run.  With torch_npu but no NPU our kernels are
    registered for CPU tensors under torch_npu's own schemas.  Without torch_npu the schemas are ours too.

    Raises:
        ValueError: torch_npu is installed but cannot work here; the message says what to install.
    """
    path = active_path()
    with _lock:
        for family in FAMILIES:
            importlib.import_module(f"trueup.core.ops.{family}")
        if path.name != "device" and not _libraries:
            _libraries.extend(_register(define=path.name == "own"))
    return path


def _register(define: bool) -> list[torch.library.Library]:
    # Never define where torch_npu is installed: it would end the process at its own definition.
    libraries = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in ("npu", "atb")}
    for name, operator in OPERATORS.items():
        namespace, _, _ = qualified(name)
        if define:
            libraries[namespace].define(schemas()[name].removeprefix(f"{namespace}::"))
        libraries[namespace].impl(name.removeprefix(f"{namespace}::"), operator, "CPU")
    return list(libraries.values())


def schema_differences() -> dict[str, tuple[str, str | None]]:
    """Operators whose schema in this process is not ours: name to (ours, theirs); theirs is None where it is absent.

    Of interest where torch_npu is installed in another version than 2.13.0, which our schemas are from.
    """
    differences: dict[str, tuple[str, str | None]] = {}
    for name, ours in schemas().items():
        namespace, operator, overload = qualified(name)
        try:
            theirs = torch._C._get_schema(f"{namespace}::{operator}", overload)
        except RuntimeError:
            differences[name] = ours, None
            continue
        if torch._C.parse_schema(ours) != theirs:
            differences[name] = ours, str(theirs)
    return differences

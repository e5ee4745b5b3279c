"""Random calls of every operator, run in a process of its own: ``python probe.py <file> <calls per operator>``.

test_conformance.py runs it twice, once without torch_npu and once over the real one, and compares what both saved:
the operator path, the schemas as the dispatcher prints them, and a digest of every result.  Over the real torch_npu
it also asks the shape inference (Meta) kernels about each legal call, and about calls with something changed.
"""
import contextlib
import hashlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from trueup.core import load

import torch  # isort: skip  (after trueup.core, which makes it safe where torch_npu has no driver)
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parents[1]))
from operators.case import Call, Case, cases, changed, copied, invoke
from trueup.core.ops.contract import ContractError, profile
from trueup.core.ops.registry import OPERATORS, packet, qualified

CHANGES_PER_CALL = 4
ASCEND_910B = 220


def as_if_on(soc: int) -> None:
    """Answer torch_npu's questions about the machine: some Meta kernels ask, and there is no driver to say.

    CANN counts as 8.5 or later, where unused results have no element instead of one.
    """
    import torch_npu.npu.utils as utils
    import torch_npu.op_plugin.meta._meta_registrations as meta

    meta.get_soc_version = lambda: soc
    utils._is_gte_cann_version = lambda version, module="CANN": True


def generator(name: str, seed: int) -> Random:
    """The same stream in every process, another one for each operator."""
    return Random(zlib.crc32(name.encode()) * 10007 + seed)


def digest(results: Any) -> str:
    """Of types, shapes and bytes; the values alone would not do, since poison is NaN, which equals nothing."""
    h = hashlib.sha256()
    for x in tree_leaves(results):
        if isinstance(x, Tensor):
            h.update(repr((x.dtype, tuple(x.shape))).encode())
            h.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            h.update(repr(x).encode())
    return h.hexdigest()


def shapes(results: Any) -> list:
    return [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in tree_leaves(results)]


def on_meta(call: Call) -> Call:
    return tree_map(lambda x: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
                    if isinstance(x, Tensor) else x, call)


def ask_meta(name: str, call: Call) -> Any:
    """What the shape inference kernel answers; NotImplementedError where there is none."""
    with contextlib.redirect_stdout(io.StringIO()):  # some of them print
        return invoke(packet(name), name, on_meta(call))


# Changes: most make a call illegal; whether one does is for the two sides to agree on.


def _grown(x: Tensor, axis: int) -> Tensor:
    return torch.cat([x, x.narrow(axis, 0, 1)], axis) if x.shape[axis] else x


TENSOR_CHANGES: dict[str, Callable[[Tensor, Random], Tensor]] = {
    "another axis": lambda x, r: x[None],
    "an axis less": lambda x, r: x[0] if x.dim() and len(x) else x,
    "longer": lambda x, r: _grown(x, r.randrange(x.dim())) if x.dim() else x,
    "shorter": lambda x, r: x.narrow(a := r.randrange(x.dim()), 0, max(0, x.shape[a] - 1)).clone() if x.dim() else x,
    "another dtype": lambda x, r: x.to(r.choice([t for t in (torch.int32, torch.int64, torch.bool, torch.float64,
                                                             torch.int8) if t != x.dtype])),
}
SCALARS = (0, -1, 1, 7, 2**20)


def mutants(call: Call, r: Random) -> Iterator[tuple[str, Call]]:
    """Some calls, each with one argument changed at random."""
    for _ in range(CHANGES_PER_CALL):
        name = r.choice(sorted(call))
        value = call[name]
        if isinstance(value, Tensor):
            what = r.choice(sorted(TENSOR_CHANGES))
            yield f"{name}: {what}", call | {name: TENSOR_CHANGES[what](value, r)}
        elif isinstance(value, list) and value:
            what, other = r.choice([("shorter", value[:-1]), ("longer", [*value, value[-1]]), ("empty", [])])
            yield f"{name}: {what}", call | {name: other}
        elif isinstance(value, str):
            yield f"{name}: unknown", call | {name: "NO_SUCH"}
        elif isinstance(value, int) and not isinstance(value, bool):
            other = r.choice([n for n in SCALARS if n != value])
            yield f"{name}: {other}", call | {name: other}


def outcome(name: str, call: Call) -> str:
    """'taken', 'refused' by contract or dispatcher, or what else happened: that is a fault of ours."""
    torch.manual_seed(0)
    try:
        with profile("device"):
            invoke(packet(name), name, copied(call))
    except ContractError:
        return "refused"
    except (RuntimeError, TypeError) as error:
        refusals = ("Expected a value of type", "missing value for argument", "no tensor arguments to this function")
        if any(text in str(error) for text in refusals):  # the dispatcher's own
            return "refused"
        return f"crashed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    except Exception as error:
        return f"crashed: {type(error).__name__}: {error}"
    return "taken"


def meta_refuses(name: str, call: Call) -> bool:
    try:
        ask_meta(name, call)
    except NotImplementedError:
        return False
    except Exception:
        return True
    return False


def conform(name: str, case: Case, calls: int) -> dict:
    """One row of the table: what the real shape inference says of legal and of changed calls, against ours."""
    row: dict[str, Any] = {"calls": 0, "meta": True, "mismatches": [], "changed": 0, "refused": 0, "faults": []}
    for seed in range(calls):
        r = generator(name, seed)
        call = case.legal(r)
        ours = copied(call)
        with profile("device"):
            ours = shapes(invoke(packet(name), name, ours))
        row["calls"] += 1
        try:
            theirs = shapes(ask_meta(name, call))
        except NotImplementedError:
            row["meta"] = False
        except Exception as error:
            row["mismatches"].append(f"call {seed}: refused by Meta: {str(error).splitlines()[0][:200]}")
            continue
        else:
            if ours != theirs:
                row["mismatches"].append(f"call {seed}: ours {ours}, Meta's {theirs}")
        for what, other in mutants(call, r):
            _judge(row, name, f"call {seed}, {what}", other)
    for wrong in case.wrong:
        _judge(row, name, wrong.name, changed((wrong.of or case.legal)(Random(1)), wrong.change))
    return row


def _judge(row: dict, name: str, what: str, call: Call) -> None:
    ours = outcome(name, call)
    row["changed"] += 1
    if ours.startswith("crashed"):
        row["faults"].append(f"{what}: {ours}")
    elif meta_refuses(name, call):
        row["refused"] += 1
        if ours == "taken":
            row["faults"].append(f"{what}: Meta refuses, we do not")


def main(file: str, calls: int, only: str = "") -> None:
    from trueup.core.ops.load import schema_differences

    torch.set_num_threads(1)
    path, real = load(), "torch_npu" in sys.modules
    saved: dict[str, Any] = {
        "path": path.name, "torch_npu": real, "differences": schema_differences(), "schemas": {}, "on_cpu": {},
        "digests": {}, "rows": {},
    }
    for name in OPERATORS:
        namespace, operator, overload = qualified(name)
        full = f"{namespace}::{operator}" + (f".{overload}" if overload else "")
        saved["schemas"][name] = str(packet(name)._schema)
        saved["on_cpu"][name] = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU")
    for name, case in cases().items():
        if only not in name:
            continue
        saved["digests"][name] = []
        for seed in range(calls):
            call = case.legal(generator(name, seed))
            with profile("device"):
                result = invoke(packet(name), name, call)
            saved["digests"][name].append(digest((result, call)))
        if real:
            as_if_on(ASCEND_910B)
            saved["rows"][name] = conform(name, case, calls)
    torch.save(saved, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

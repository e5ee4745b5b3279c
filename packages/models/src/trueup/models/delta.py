"""A checkpoint that is kept as its difference from another: ``delta.json`` names the folder with the rest.

    {"base": "../glm-4.7-flash-nano"}

A delta has a ``config.json`` of its own, and in its safetensors what its base lacks or has otherwise.  Whatever else
it does not hold (tensors, tokenizer, chat template) is its base's.  The base stands beside it, and is no delta itself.
"""
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trueup.models.stored import Stored, read, stored_tensors, write

_FILE = "delta.json"
# Nothing but a neighbour: a checkpoint from elsewhere must not make us read files of its choice.
_NEIGHBOUR = re.compile(r"\.\./([^/\\]*[^./\\][^/\\]*)")


def base_of(folder: str | Path) -> Path | None:
    """The folder that a delta is the difference from; None: no delta.

    Raises:
        ValueError: a damaged ``delta.json``, a base that is elsewhere, absent, or a delta itself.
    """
    file = Path(folder) / _FILE
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base"]
        neighbour = _NEIGHBOUR.fullmatch(base)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected JSON like {{\"base\": \"../glm-4.7-flash-nano\"}} ({error!r}); "
                         "copy it again") from None
    if not neighbour:
        raise ValueError(f"{file}: base is {base!r}; expected a folder beside this one, as in ../glm-4.7-flash-nano")
    found = file.parent.resolve().parent / neighbour[1]
    if not (found / "config.json").is_file():
        raise ValueError(f"{file}: its base {found} is no checkpoint folder; this one holds only what differs from "
                         f"{neighbour[1]}: copy that beside it")
    if (found / _FILE).is_file():
        raise ValueError(f"{file}: its base {found} is a delta itself; expected a whole checkpoint")
    return found


def folders_of(folder: str | Path) -> list[Path]:
    """Where a checkpoint's files are looked for, in order: its own folder, then its base's."""
    base = base_of(folder)
    return [Path(folder)] if base is None else [Path(folder), base]


def all_tensors(folder: str | Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, whole or delta; of those in both, the delta's.

    Raises:
        ValueError: see :func:`base_of` and :func:`trueup.models.stored.stored_tensors`.
    """
    base = base_of(folder)
    return stored_tensors(folder) if base is None else stored_tensors(base) | stored_tensors(folder)


def write_delta(tensors: Mapping[str, Tensor], base: Path, folder: Path) -> None:
    """Write into ``folder`` those of ``tensors`` that ``base`` lacks or holds otherwise, and ``delta.json``.

    Tensors are compared and written as they are, so they have the dtypes of storage already.  Those that ``base`` has
    and ``tensors`` does not remain the base's.

    Raises:
        ValueError: ``base`` is not beside ``folder``, is a delta, or holds no checkpoint.
    """
    if base.resolve() == folder.resolve() or base.resolve().parent != folder.resolve().parent:
        raise ValueError(f"{base} is not beside {folder}; expected the base of a delta to be its neighbour")
    if (base / _FILE).is_file():
        raise ValueError(f"{base} is a delta itself; expected a whole checkpoint")
    held = stored_tensors(base)
    same = {
        name for name, value in read({name: held[name] for name in tensors if name in held})
        if value.dtype == tensors[name].dtype and torch.equal(value, tensors[name])
    }
    write({name: tensor for name, tensor in tensors.items() if name not in same}, folder)
    (folder / _FILE).write_text(json.dumps({"base": f"../{base.resolve().name}"}) + "\n", encoding="utf-8")

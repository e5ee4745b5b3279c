"""What a checkpoint folder holds: name, file, shape and dtype of every tensor, from the headers; and the tensors."""
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class Stored(NamedTuple):
    """One tensor on disk; ``dtype`` in the spelling of safetensors ('BF16', 'F32', ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: str | Path) -> dict[str, Stored]:
    """Read every header of ``model.safetensors``, or of the shards in ``model.safetensors.index.json``.

    With both there, the single file counts, as in transformers.  Of a delta these are only what differs from its
    base (:func:`trueup.models.delta.all_tensors` joins them).

    Raises:
        ValueError: no such files, a damaged or absent one, or an index that disagrees with its shards.
    """
    folder = Path(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _header(single)
    if index.is_file():
        return _shards(index)
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise ValueError(
        f"{folder}: neither model.safetensors nor model.safetensors.index.json there"
        + (f"; found {listed(found)}" if found else "")
        + ". Expected a Hugging Face checkpoint folder: download it whole, and convert other formats to safetensors"
    )


def read(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """The tensors and their names, file by file.

    Each is a view of its mapped file, of which one is open at a time: to keep a tensor is to keep its whole file.
    """
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name in stored and stored[name].file == file:
                    yield name, tensors.get_tensor(name)


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """One ``model.safetensors`` of tensors as they are, which others may read."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the library writes it for its owner alone


def listed(names: Iterable[str], most: int = 10, separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = [f"... and {len(names) - most:,} more"] if len(names) > most else []
    return separator.join(names[:most] + more)


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, "pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
            return {name: Stored(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: not a whole safetensors file ({error}); a truncated download or a Git LFS pointer? "
            "Download it again"
        ) from None


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name, as the index says."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # Shards lie beside their index; a path would read files from elsewhere.
        good = bool(weight_map) and all(Path(file).name == file for file in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ValueError(f"{index}: expected JSON with a 'weight_map' of tensor names to file names; download it again")
    return weight_map


def _shards(index: Path) -> dict[str, Stored]:
    weight_map, folder = _weight_map(index), index.parent
    files = sorted(set(weight_map.values()))
    if absent := [file for file in files if not (folder / file).is_file()]:
        lost = sum(file in absent for file in weight_map.values())
        raise ValueError(
            f"{index}: names {len(absent)} of {len(files)} files that are not there ({listed(absent)}), "
            f"with {lost:,} tensors; download them into the same folder"
        )
    headers = {file: _header(folder / file) for file in files}
    claimed, held = set(weight_map.items()), {(name, file) for file, header in headers.items() for name in header}
    wrong = []
    for name in sorted({name for name, _ in claimed ^ held}):
        holders = ", ".join(file for file in files if name in headers[file])
        wrong.append(f"{name}: {weight_map.get(name, 'nothing')} by the index, found in {holders or 'no file'}")
    if wrong:
        raise ValueError(
            f"{index}: {len(wrong):,} of {len(weight_map):,} tensors are not where it says; "
            "download it and its files again, from one release:\n  " + listed(wrong, separator="\n  ")
        )
    return {name: headers[file][name] for name, file in weight_map.items()}

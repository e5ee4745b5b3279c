"""The corpus that every machine has: the Python standard library's own source."""
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tables rather than programs; locale.py's alias table alone would be a fifth of the held-out text.
_LEFT_OUT_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data",
}
_LEFT_OUT_FILES = {"locale.py"}
HELD_OUT_SHARE = 40  # one file of so many


@dataclass(frozen=True)
class Corpus:
    """Texts by relative path, split by the hash of the path, so that the split is stable."""

    train: dict[str, str]
    held_out: dict[str, str]
    sha256: str


def read_corpus(root: str | Path | None = None) -> Corpus:
    """Read every ``*.py`` below ``root`` (default: this Python's standard library).

    Raises:
        ValueError: no source file there.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if set(relative.parts[:-1]) & _LEFT_OUT_FOLDERS or relative.name in _LEFT_OUT_FILES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = relative.as_posix()
        digest.update(f"{name}\0{text}\0".encode())
        share = int(hashlib.sha1(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE
        (train if share else held_out)[name] = text
    if not train or not held_out:
        raise ValueError(f"{root}: too few *.py files for a training and a held-out part")
    return Corpus(train, held_out, digest.hexdigest())

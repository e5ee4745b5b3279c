"""The small checkpoints that come with the package, by name."""
from importlib.resources import files
from pathlib import Path


def names() -> list[str]:
    """Every name that :func:`path` knows."""
    return sorted(folder.name for folder in _root().iterdir() if _is_model(folder))


def path(name: str) -> Path:
    """Folder of an embedded checkpoint.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    if name not in names():
        raise ValueError(f"no embedded model {name!r}; there are {', '.join(names())}. The folder of a checkpoint "
                         "is accepted wherever a name is, as in ./my-model")
    return _root() / name


def eagle3() -> Path:
    """Folder of the EAGLE-3 head for glm-4.7-flash-nano: a head is no model, so it has no name of its own."""
    return _root() / "glm-4.7-flash-nano-eagle3"


def resolve(name_or_folder: str | Path) -> Path:
    """Folder of an embedded checkpoint by name, or the folder itself; a name wins over a folder of that name.

    Raises:
        ValueError: neither a name nor an existing folder.
    """
    if str(name_or_folder) not in names() and Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    return path(str(name_or_folder))


def _is_model(folder: Path) -> bool:
    """A delta may take its tokenizer from its base; a drafter's head has a config and neither."""
    return (folder / "config.json").is_file() and any(
        (folder / file).is_file() for file in ("tokenizer.json", "delta.json"))


def _root() -> Path:
    # A wheel is unpacked when it is installed, so these are files in either kind of install.
    return Path(str(files(__name__)))

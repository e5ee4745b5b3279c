"""A chapter's source: reading it, what must hold before it is run, and the stamp that keeps two languages together."""
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import yaml

LANGUAGES = ("en", "zh")
MOST_LINES = 25
MOST_MINUTES = 20
HEADER = {"title", "outcome", "minutes", "prerequisites", "bugs", "hardware"}
TAGS = {*LANGUAGES, "raises-exception", "fold", "solution"}
_ZH_HEADER = re.compile(r'^# %% \[markdown\].*"zh".*$', re.MULTILINE)
_STAMP = re.compile(r'\s+pair="[^"]*"')


class ChapterError(ValueError):
    """What is wrong with a chapter, one line a problem."""


@dataclass
class Cell:
    """One cell.  ``language`` is None for code, which both languages share; ``line`` is where it begins."""

    source: str
    language: str | None
    line: int
    tags: set[str]
    raises: str | None = None  # the exception's name, where the cell must fail
    says: str | None = None  # what its message must contain
    pair: str | None = None  # the stamp, on zh cells
    outputs: list[Any] = field(default_factory=list)


@dataclass
class Chapter:
    """``name`` is the file's, as in ch01_run; ``header`` its metadata (see HEADER)."""

    path: Path
    header: dict[str, Any]
    cells: list[Cell]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.language is None]

    def in_language(self, language: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.language in (None, language)]


def read(path: Path) -> Chapter:
    """Parse a chapter.

    Raises:
        ChapterError: it has no header, or a header that does not parse.
    """
    text = path.read_text(encoding="utf-8")
    first, *rest = jupytext.reads(text, fmt="py:percent").cells or [None]
    try:
        header = yaml.safe_load(first.source.strip().strip("-")) if first and first.cell_type == "raw" else None
    except yaml.YAMLError as error:
        raise ChapterError(f"{path.name}: the header is no YAML: {error}") from None
    if not isinstance(header, dict):
        raise ChapterError(f"{path.name}: begin with a header of comments between two lines '# ---'")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith("# %%")]
    if len(lines) != len(rest):
        raise ChapterError(f"{path.name}: only '# %%' begins a cell, and the header ends where the first one begins")
    cells = []
    for line, cell in zip(lines, rest, strict=True):
        tags = set(cell.metadata.get("tags", []))
        language = next((name for name in LANGUAGES if name in tags), "?") if cell.cell_type == "markdown" else None
        extra = {key: cell.metadata.get(key) for key in ("raises", "says", "pair")}
        cells.append(Cell(cell.source, language, line, tags, **extra))
    return Chapter(path, header, cells)


def problems(chapter: Chapter) -> list[str]:
    """What keeps a chapter from being built, without running it."""
    found = [f"the header lacks {key}" for key in sorted(HEADER - set(chapter.header))]
    for key in ("title", "outcome", "prerequisites", "hardware"):
        value = chapter.header.get(key)
        if value is not None and not (isinstance(value, dict) and all(value.get(name) for name in LANGUAGES)):
            found.append(f"the header's {key} needs a text for each of {', '.join(LANGUAGES)}")
    if chapter.header.get("minutes", 0) > MOST_MINUTES:
        found.append(f"{chapter.header['minutes']} minutes; a chapter takes at most {MOST_MINUTES}")
    for cell in chapter.cells:
        found += [f"line {cell.line}: {text}" for text in _cell_problems(cell)]
    found += [f"line {line}: {text}" for line, text in _pair_problems(chapter)]
    return [f"{chapter.path.name}: {text}" for text in found]


def warnings(chapter: Chapter) -> list[str]:
    """Code cells that claim something and assert nothing, themselves or in the next code cell."""
    code = chapter.code
    return [f"{chapter.path.name}: line {cell.line}: no assertion here or in the next code cell"
            for cell, following in zip(code, [*code[1:], None], strict=True)
            if "print(" in cell.source and not _asserts(cell) and not (following and _asserts(following))]


def _asserts(cell: Cell) -> bool:
    return cell.raises is not None or re.search(r"\bassert\b|\bassert_close\(", cell.source) is not None


def _cell_problems(cell: Cell) -> Iterator[str]:
    if cell.tags - TAGS:
        yield f"unknown tags {', '.join(sorted(cell.tags - TAGS))}; there are {', '.join(sorted(TAGS))}"
    if cell.language == "?":
        yield 'a prose cell needs tags=["en"] or tags=["zh"]'
    if cell.language is None and len(cell.source.splitlines()) > MOST_LINES:
        yield f"{len(cell.source.splitlines())} lines of code; a cell has at most {MOST_LINES}"
    if ("raises-exception" in cell.tags) != (cell.raises is not None):
        yield 'a cell that must fail has both tags=["raises-exception"] and raises="TheException"'


def _pair_problems(chapter: Chapter) -> Iterator[tuple[int, str]]:
    prose = {id(cell) for cell in chapter.cells if cell.language}
    for cell, following in zip(chapter.cells, [*chapter.cells[1:], None], strict=True):
        if cell.language == "en" and (following is None or following.language != "zh"):
            yield cell.line, "the English has no Chinese after it"
        if cell.language == "en" and following is not None and following.language == "zh":
            prose -= {id(cell), id(following)}
            if cell.tags - {"en"} != following.tags - {"zh"}:
                yield following.line, "the tags of the two languages differ"
            if following.pair != stamp(cell, following):
                yield following.line, f"{_older(cell, following)}; when both are right: make chapters-sync"
        if cell.language == "zh" and id(cell) in prose:
            yield cell.line, "the Chinese has no English before it"


def stamp(en: Cell, zh: Cell) -> str:
    """'1a2b3c-4d5e6f': what the two texts of a pair were when they were last known to agree."""
    return "-".join(hashlib.sha256(cell.source.encode()).hexdigest()[:6] for cell in (en, zh))


def _older(en: Cell, zh: Cell) -> str:
    if zh.pair is None:
        return "this pair is new"
    was, now = zh.pair.split("-"), stamp(en, zh).split("-")
    if was[0] != now[0] and was[-1] != now[-1]:
        return "both languages changed"
    return f"only the {'English' if was[0] != now[0] else 'Chinese'} changed, the other is older"


def sync(path: Path, agreed: bool = False) -> list[str]:
    """Stamp the pairs that are new or changed in both languages; returns those of which one is older.

    ``agreed`` stamps these too: for a change in one language that the other needs no change for.
    """
    chapter, left = read(path), []
    stamps: list[str] = []  # of each zh cell in order; '' leaves it alone
    for before, cell in zip([None, *chapter.cells], chapter.cells, strict=False):
        if cell.language != "zh":
            continue
        stamps.append("")
        if before is not None and before.language == "en" and stamp(before, cell) != cell.pair:
            state = _older(before, cell)
            if agreed or not state.startswith("only"):
                stamps[-1] = stamp(before, cell)
            else:
                left.append(f"{path.name}: line {cell.line}: {state}; where it needs no change: "
                            "make chapters-sync AGREED=1")
    queue = iter(stamps)

    def write(match: re.Match[str]) -> str:
        new = next(queue)
        return f'{_STAMP.sub("", match[0])} pair="{new}"' if new else match[0]

    text = path.read_text(encoding="utf-8")
    path.write_text(_ZH_HEADER.sub(write, text), encoding="utf-8")
    return left

"""Running a chapter once, in a kernel of this environment, and what its outputs must be."""
import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tools.book.chapter import Chapter, ChapterError

CELL_SECONDS = 120
# What differs between two runs of one cell, and what it becomes.
_VOLATILE = [
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "0x..."),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?"), "<time>"),
    (re.compile(r"\d[\d,.]*(?=\s?(ns|us|µs|ms|s|seconds|tokens/s)\b)"), "..."),
    (re.compile(r"(/[\w.+-]+)+/(?=(site-packages|packages|tutorials)/)"), ""),
    (re.compile(re.escape(tempfile.gettempdir()) + r"/[\w./-]+"), "<temporary file>"),
    (re.compile(re.escape(str(Path.home())) + r"(?=/)"), "~"),
]


def run(chapter: Chapter, cache: Path | None, sources: Path) -> bool:
    """Fill the outputs of the code cells, from ``cache`` where nothing has changed; True where it did run.

    ``sources`` is the folder whose files the outputs depend on, besides the chapter.

    Raises:
        ChapterError: a cell failed, did not fail as declared, or took too long.
    """
    key = _key(chapter, sources)
    stored = cache / f"{chapter.name}.json" if cache else None
    if stored and stored.is_file() and (found := json.loads(stored.read_text(encoding="utf-8")))["key"] == key:
        outputs = found["outputs"]
    else:
        outputs = _execute(chapter)
    for cell, cell_outputs in zip(chapter.code, outputs, strict=True):
        cell.outputs = cell_outputs
    if stored and outputs:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps({"key": key, "outputs": outputs}), encoding="utf-8")
    return True

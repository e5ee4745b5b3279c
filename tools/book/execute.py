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
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from traitlets.config import Config

from tools.book.chapter import Cell, Chapter, ChapterError

CELL_SECONDS = 120
# What differs between two runs of one cell, and what it becomes.
_VOLATILE = [
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "0x..."),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?"), "(time)"),
    (re.compile(r"\d[\d,.]*(?=\s?(ns|us|µs|ms|s|seconds|tokens/s)\b)"), "..."),
    (re.compile(re.escape(tempfile.gettempdir()) + r"/[\w./-]+"), "(temporary file)"),
    (re.compile(r"(/[\w.+-]+)+/(?=(site-packages|packages|tutorials)/)"), ""),
    (re.compile(re.escape(str(Path.home())) + r"(?=/)"), "~"),
]


def run(chapter: Chapter, cache: Path | None, sources: Path) -> None:
    """Fill the outputs of the code cells, from the folder ``cache`` where nothing changed since.

    ``sources`` is the folder that the outputs depend on besides the chapter.

    Raises:
        ChapterError: a cell failed, did not fail as declared, or took too long.
    """
    key = _key(chapter, sources)
    stored = cache / f"{chapter.name}.json" if cache else None
    found = json.loads(stored.read_text(encoding="utf-8")) if stored and stored.is_file() else {}
    if found.get("key") == key:
        outputs = found["outputs"]
    else:
        outputs = [_plain(chapter, cell, raw) for cell, raw in zip(chapter.code, _execute(chapter), strict=True)]
    for cell, cell_outputs in zip(chapter.code, outputs, strict=True):
        cell.outputs = cell_outputs
    if stored:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps({"key": key, "outputs": outputs}, indent=1), encoding="utf-8")


def stable(text: str) -> str:
    """Text without what differs from run to run and from machine to machine: times, addresses, paths."""
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def _key(chapter: Chapter, sources: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    here = Path(__file__).parent
    files = [chapter.path, *here.glob("*.py"), *(p for p in sources.rglob("*") if "__pycache__" not in p.parts)]
    for file in sorted(p for p in files if p.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _execute(chapter: Chapter) -> list[list[Any]]:
    """The raw outputs of each code cell."""
    notebook = nbformat.v4.new_notebook()
    for cell in chapter.code:
        code = nbformat.v4.new_code_cell(cell.source, metadata={"tags": sorted(cell.tags)})
        notebook.cells.append(code)
    # The same everywhere; files that a chapter writes go to a folder of its own.
    environment = os.environ | {"NO_COLOR": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        # Over local sockets: over TCP anyone on the machine could talk to the kernel.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        client = NotebookClient(notebook, config=config, timeout=CELL_SECONDS, resources={"metadata": {"path": folder}})
        try:
            client.execute(env=environment)
        except CellExecutionError:
            number, bad = next((i, output) for i, cell in enumerate(notebook.cells)
                               for output in cell.get("outputs", []) if output.output_type == "error"
                               and chapter.code[i].raises is None)
            raise ChapterError(f"{chapter.path.name}: line {chapter.code[number].line}: the cell failed\n"
                               + stable("\n".join(bad.traceback))) from None
        except CellTimeoutError:
            raise ChapterError(f"{chapter.path.name}: a cell took more than {CELL_SECONDS} seconds") from None
    return [cell.outputs for cell in notebook.cells]


def _plain(chapter: Chapter, cell: Cell, raw: list[Any]) -> list[dict[str, str]]:
    """Outputs as {kind, text}: what a page shows.  Standard error is left out, a failure is checked."""
    outputs: list[dict[str, str]] = []
    for output in raw:
        if output.output_type == "stream":
            if output.name == "stdout":
                outputs.append({"kind": "text", "text": stable(output.text)})
        elif output.output_type == "error":
            outputs.append({"kind": "error", "name": output.ename, "text": stable(output.evalue)})
        else:
            outputs.append(_richest(output.data))
    _check_failure(chapter, cell, outputs)
    return outputs


def _richest(data: Any) -> dict[str, str]:
    for kind, mime in (("svg", "image/svg+xml"), ("png", "image/png"), ("html", "text/html")):
        if mime in data:
            return {"kind": kind, "text": data[mime]}
    return {"kind": "text", "text": stable(data["text/plain"]) + "\n"}


def _check_failure(chapter: Chapter, cell: Cell, outputs: list[dict[str, str]]) -> None:
    if cell.raises is None:
        return
    where = f"{chapter.path.name}: line {cell.line}"
    error = next((output for output in outputs if output["kind"] == "error"), None)
    if error is None:
        raise ChapterError(f"{where}: expected {cell.raises}, but the cell did not fail")
    if error["name"] != cell.raises:
        raise ChapterError(f"{where}: expected {cell.raises}, got {error['name']}: {error['text']}")
    if cell.says and cell.says not in error["text"]:
        raise ChapterError(f"{where}: expected a message with {cell.says!r}, got {error['text']}")

"""A chapter as a page of the site, in one language: plain Markdown with the real outputs."""
import base64
import re
from pathlib import Path
from typing import Any

from tools.book.chapter import Cell, Chapter

WORDS = {
    "en": {
        "outcome": "At the end", "minutes": "Time", "unit": "minutes", "prerequisites": "Before this",
        "bugs": "Bugs", "hardware": "Hardware", "notebook": "Notebook", "source": "Source", "run": "How to run it",
        "solution": "A solution", "fold": "The code", "fails": "This cell fails, and is meant to",
        "drawn": "Drawn by the cell above",
        "executed": "Every output on this page comes from the last run of its cells.",
    },
    "zh": {
        "outcome": "读完之后", "minutes": "时间", "unit": "分钟", "prerequisites": "先读",
        "bugs": "涉及的缺陷", "hardware": "硬件", "notebook": "笔记本", "source": "源码", "run": "怎样运行",
        "solution": "参考答案", "fold": "代码", "fails": "这个单元格应当失败", "drawn": "由上面的单元格画出",
        "executed": "本页的每个输出都来自最近一次真实运行。",
    },
}


def page(chapter: Chapter, language: str, folder: Path) -> str:
    """The page's Markdown; its raster images are written to ``folder`` under the chapter's name."""
    words, header = WORDS[language], chapter.header
    parts = [f"# {header['title'][language]}", _head(chapter, language)]
    images = _Images(folder, chapter.name)
    inside: list[str] = []  # of an open solution
    for cell in [*chapter.in_language(language), None]:
        hidden = cell is not None and "solution" in cell.tags
        if inside and not hidden:
            parts.append(_details("success", words["solution"], "\n\n".join(inside)))
            inside = []
        if cell is not None:
            (inside if hidden else parts).append(_cell(cell, language, images))
    parts.append(f"*{words['executed']}*{{ .executed }}")
    return "\n\n".join(parts) + "\n"


def head_rows(chapter: Chapter, language: str) -> list[tuple[str, str]]:
    """What stands at a chapter's top: (name, Markdown) of each fact."""
    words, header = WORDS[language], chapter.header
    bugs = ", ".join(f"[{bug}](../bugs.md#{bug.lower()})" for bug in header["bugs"])
    facts = {
        "outcome": header["outcome"][language], "minutes": f"{header['minutes']} {words['unit']}",
        "prerequisites": header["prerequisites"][language], "bugs": bugs, "hardware": header["hardware"][language],
    }
    return [(words[name], text) for name, text in facts.items() if text]


def _head(chapter: Chapter, language: str) -> str:
    words, name = WORDS[language], chapter.name
    table = "\n".join(f"**{key}**{{ .key }}\n:   {value}\n" for key, value in head_rows(chapter, language))
    buttons = " ".join(f"[{text}]({target}){{ .md-button }}" for text, target in (
        (words["notebook"], f"{name}.ipynb"), (words["source"], f"{name}.py"), (words["run"], "../start.md#chapters")))
    return f'<div class="chapter-head" markdown>\n\n{table}\n{buttons}\n\n</div>'


def _cell(cell: Cell, language: str, images: "_Images") -> str:
    words = WORDS[language]
    if cell.language:
        return cell.source
    code = _fence("python", cell.source)
    if "fold" in cell.tags:
        code = _details("abstract", words["fold"], code)
    outputs = "\n\n".join(_output(output, language, images) for output in _joined(cell.outputs))
    return f"{code}\n\n{outputs}" if outputs else code


def _joined(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of text as one: how a kernel cuts them depends on timing."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output["kind"] == joined[-1]["kind"] == "text":
            joined[-1] = {"kind": "text", "text": joined[-1]["text"] + output["text"]}
        else:
            joined.append(output)
    return joined


def _output(output: Any, language: str, images: "_Images") -> str:
    kind, text = output["kind"], output["text"]
    if kind == "error":
        title = WORDS[language]["fails"]
        return f'!!! failure "{title}"\n' + _indent(_fence("text", f"{output['name']}: {text}"))
    if kind == "png":
        image = f"![{WORDS[language]['drawn']}]({images.add(text)})"
        return f'<figure class="output-figure plot" markdown>\n{image}\n</figure>'
    if kind in ("svg", "html"):
        return f'<div class="output-figure {kind}">\n{_inline(text, language)}\n</div>'
    return f'<div class="output" markdown>\n{_fence("text", text.rstrip())}\n</div>'


def _inline(html: str, language: str) -> str:
    """HTML or SVG to stand in the page, where a drawing takes the page's colours.

    Without the spans of the other language, and without blank lines, which would end the block.
    """
    other = next(name for name in WORDS if name != language)
    html = re.sub(rf'<span lang="{other}">.*?</span>', "", re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", html),
                  flags=re.DOTALL)
    return "\n".join(line for line in html.splitlines() if line.strip())


def _fence(language: str, text: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def _details(kind: str, title: str, body: str) -> str:
    return f'??? {kind} "{title}"\n' + _indent(body)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


class _Images:
    """Writes images and names them in the order they come."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.count = folder, name, 0

    def add(self, data: str) -> str:
        self.count += 1
        file = f"{self.name}_{self.count}.png"
        (self.folder / file).write_bytes(base64.b64decode(data))
        return file

"""Markdown extension: a glossary term explains itself when pointed at, the first time a page uses it.

The terms are the table rows of the glossary page, so page and hover text cannot differ.  A term that is code there
(an axis letter) is looked for in code only: a lone capital in prose may be anything.  A term in italics is not looked
for: an everyday word too, such as page.
"""
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

_ROW = re.compile(r"^\| *(`?)([^|`*]+?)`? *\| *([^|]+?) *\|", re.MULTILINE)
_MARKUP = re.compile(r"[`*]|\]\([^)]*\)|\[")
_LEFT_ALONE = {"a", "abbr", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "summary"}


def terms(page: Path) -> dict[str, str]:
    """Term to meaning; a term that is code keeps its backticks.  The first row of a table is its head."""
    text = re.sub(r"^\|.*\|\n\|[ :|-]+\|$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {f"{tick}{term}{tick}": _MARKUP.sub("", meaning) for tick, term, meaning in _ROW.findall(text)}


class _Explain(Treeprocessor):
    def __init__(self, md: Markdown, known: dict[str, str]) -> None:
        super().__init__(md)
        self.known = known
        words = sorted((term for term in known if not term.startswith("`")), key=len, reverse=True)
        # Chinese has no spaces, so a boundary is asked for only beside a Latin letter.
        self.pattern = re.compile("|".join(rf"(?<![A-Za-z-]){re.escape(word)}(?![A-Za-z-])" if word.isascii()
                                           else re.escape(word) for word in words))
        self.seen: set[str] = set()

    def run(self, root: Element) -> None:
        self.seen = set()
        if self.known:
            self._walk(root)

    def _walk(self, element: Element) -> None:
        if element.tag in _LEFT_ALONE:
            return
        element.text, content = self._cut(element.text)
        for child in list(element):
            child_tail, child.tail = child.tail, None
            term = f"`{child.text}`"
            if child.tag == "code" and term in self.known and term not in self.seen:
                child = self._abbr(term, child)
            else:
                self._walk(child)
            child.tail, pieces = self._cut(child_tail)
            content += [child, *pieces]
        element[:] = content

    def _cut(self, text: str | None) -> tuple[str | None, list[Element]]:
        """Text up to the first term, and an element for each term with the text behind it as its tail."""
        if not text or isinstance(text, AtomicString):
            return text, []
        pieces: list[Element] = []
        end = 0
        before: list[str] = [""]
        for match in self.pattern.finditer(text):
            before[-1] += text[end : match.start()]
            if match[0] in self.seen:
                before[-1] += match[0]
            else:
                pieces.append(self._abbr(match[0]))
                before.append("")
            end = match.end()
        before[-1] += text[end:]
        for piece, tail in zip(pieces, before[1:], strict=True):
            piece.tail = tail
        return before[0], pieces

    def _abbr(self, term: str, inner: Element | None = None) -> Element:
        self.seen.add(term)
        abbr = Element("abbr", title=self.known[term])
        if inner is None:
            abbr.text = AtomicString(term)
        else:
            abbr.append(inner)
        return abbr


class GlossaryExtension(Extension):
    def __init__(self, **kwargs: Any) -> None:
        self.config = {"page": ["", "the glossary page, whose tables have the terms"]}
        super().__init__(**kwargs)

    def extendMarkdown(self, md: Markdown) -> None:
        # After inline markup (20), so that code spans and links are elements.
        md.treeprocessors.register(_Explain(md, terms(Path(self.getConfig("page")))), "glossary", 7)


def makeExtension(**kwargs: Any) -> GlossaryExtension:
    return GlossaryExtension(**kwargs)

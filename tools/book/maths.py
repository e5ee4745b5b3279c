"""Markdown extension: ``$...$`` and ``$$`` blocks become MathML when the page is built, so a reader loads nothing."""
import re
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_BLOCK = re.compile(r"^\$\$\s*\n?(.+?)\n?\s*\$\$[ \t]*$", re.MULTILINE | re.DOTALL)


class _Inline(InlineProcessor):
    def handleMatch(self, match: re.Match[str], data: str) -> tuple[str | Element, int, int]:
        return self.md.htmlStash.store(convert(match[1])), match.start(0), match.end(0)


class _Blocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        def block(match: re.Match[str]) -> str:
            return f'\n\n{self.md.htmlStash.store(_scrolling(match[1]))}\n\n'

        return _BLOCK.sub(block, "\n".join(lines)).split("\n")


def _scrolling(latex: str) -> str:
    return f'<div class="maths" tabindex="0">{convert(" ".join(latex.split()), display="block")}</div>'


class MathsExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After fenced code (25) has been set aside; before emphasis looks at underscores, but after code spans (190).
        md.preprocessors.register(_Blocks(md), "maths", 24)
        md.inlinePatterns.register(_Inline(r"\$(?=\S)([^$\n]+?)(?<=\S)\$", md), "maths", 185)


def makeExtension(**kwargs: Any) -> MathsExtension:
    return MathsExtension(**kwargs)

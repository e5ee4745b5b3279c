"""Markdown extension: a line break inside a Chinese sentence leaves no space, as it should not."""
import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

_FULL = r"\u3000-\u303f\u2018-\u201d\uff00-\uffef"  # punctuation as wide as a character
_HAN = r"\u3400-\u9fff"
_BREAK = re.compile(rf"(?<=[{_FULL}])\n|(?<=[{_HAN}])\n(?=[{_HAN}{_FULL}])|\n(?=[{_FULL}])")


class _Join(Treeprocessor):
    def run(self, root: Element) -> None:
        for element in root.iter():
            if element.tag not in ("code", "pre"):
                element.text = _BREAK.sub("", element.text) if element.text else element.text
            element.tail = _BREAK.sub("", element.tail) if element.tail else element.tail


class ChineseExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Join(md), "chinese", 8)  # after inline markup (20), before the glossary (7)


def makeExtension(**kwargs: Any) -> ChineseExtension:
    return ChineseExtension(**kwargs)

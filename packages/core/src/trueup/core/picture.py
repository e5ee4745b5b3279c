"""Rows of labelled boxes, drawn in SVG: how notebooks show a layout, a page or a block table.

A drawing takes its colours from the text around it, so it can be read in light and dark pages alike.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# What a box is, told by its border as well as by its shade.
STYLES = {
    "real": 'fill="currentColor" fill-opacity="0.10" stroke="currentColor"',
    "pad": 'fill="none" stroke="currentColor" stroke-opacity="0.6" stroke-dasharray="3 3"',
    "bad": 'fill="#d33" fill-opacity="0.18" stroke="#d33" stroke-width="2.5"',
}
CHAR, HEIGHT, GAP = 8, 26, 3  # pixels; a monospace character at font size 13 is 7.8 wide
FONT = "font-family='ui-monospace,SFMono-Regular,Menlo,Consolas,monospace' font-size='13'"

Box = str | tuple[str, str]


@dataclass(frozen=True)
class Picture:
    """A finished drawing; a notebook shows it, ``html`` is what it shows."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def boxes(rows: Sequence[tuple[str, Sequence[Box]]], caption: str | tuple[str, str], *,
          width: int | None = None) -> Picture:
    """Draw rows of boxes under each other.

    Args:
        rows: (label, boxes) each; a box is its text, or (text, style) with a style of STYLES, "real" by default.
        caption: what the picture says, shown below it; or the same in English and in Chinese, of which a page of
            the book keeps its own.
        width: characters a box has room for; by default as many as the longest text.

    Raises:
        ValueError: an unknown style.
    """
    table = [(label, [(box, "real") if isinstance(box, str) else box for box in row]) for label, row in rows]
    unknown = {style for _, row in table for _, style in row} - set(STYLES)
    if unknown:
        raise ValueError(f"no box style {', '.join(sorted(unknown))}; there are {', '.join(STYLES)}")
    room = width or max((len(text) for _, row in table for text, _ in row), default=1)
    step = max(HEIGHT, room * CHAR + 8) + GAP
    left = max((len(label) for label, _ in table), default=0) * CHAR + 10
    parts = []
    for number, (label, row) in enumerate(table):
        y = number * (HEIGHT + GAP) + 2
        parts.append(f'<text x="{left - 10}" y="{y + 17}" text-anchor="end">{escape(label)}</text>')
        for column, (text, style) in enumerate(row):
            x = left + column * step
            parts.append(f'<rect x="{x}" y="{y}" width="{step - GAP}" height="{HEIGHT}" rx="3" {STYLES[style]}/>')
            parts.append(f'<text x="{x + (step - GAP) / 2:g}" y="{y + 17}" text-anchor="middle">{escape(text)}</text>')
    columns = max((len(row) for _, row in table), default=0)
    size = left + columns * step + 2, len(table) * (HEIGHT + GAP) + 4
    languages = {"en": caption[0], "zh": caption[1]} if isinstance(caption, tuple) else {}
    words = "".join(f'<span lang="{name}">{escape(text)} </span>' for name, text in languages.items())
    return Picture(
        f'<figure class="trueup-picture"><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" style="max-width:100%;height:auto" aria-hidden="true" '
        f'fill="currentColor" {FONT}>{"".join(parts)}</svg><figcaption>{words or escape(str(caption))}</figcaption>'
        "</figure>"
    )

"""A line chart as SVG.  It brings its own white ground, so that it can be read on light and dark pages."""
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 52, 190, 44, 46  # pixels; the margins hold the words
APART = 17  # the least distance of two labels
FONT = "system-ui, 'PingFang SC', 'Microsoft YaHei', 'Noto Sans CJK SC', sans-serif"


class Line(NamedTuple):
    """One value for each place on the horizontal axis.  ``dash``: SVG's stroke-dasharray; '' draws through."""

    label: str
    values: Sequence[float]
    colour: str
    dash: str = ""


def curve(title: str, across: str, ticks: Mapping[float, str], lines: Sequence[Line]) -> str:
    """The drawing.  ``ticks``: places and their names.  Both axes begin at 0, the upright one has whole numbers."""
    top = max(max(line.values) for line in lines) * 1.05

    def x(place: float) -> float:
        return LEFT + place / max(ticks) * (WIDTH - LEFT - RIGHT - 10)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<title>{escape(title)}</title>', f'<rect width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#fff"/>',
             _text(LEFT - 26, 24, title, "start", 'font-weight="600"'), _text((LEFT + right) / 2, HEIGHT - 10, across)]
    for value in range(int(top) + 1):
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{right}" stroke="{"#ddd" if value else "#555"}"/>')
        parts.append(_text(LEFT - 8, y(value) + 4, str(value), "end"))
    parts += [_text(x(place), bottom + 18, name) for place, name in ticks.items()]
    above = float("inf")
    for line in sorted(lines, key=lambda line: line.values[-1]):
        points = [(x(place), y(value)) for place, value in zip(ticks, line.values, strict=True)]
        parts.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" '
                     f'stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{line.dash}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{line.colour}"/>' for a, b in points]
        above = min(points[-1][1], above - APART)
        parts.append(_text(right + 8, above + 4, f"{line.values[-1]:.1f}  {line.label}", "start",
                           f'fill="{line.colour}"'))
    body = "\n".join(parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'font-family="{FONT}" font-size="13" fill="#222">\n{body}\n</svg>\n')


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'.replace(" >", ">")

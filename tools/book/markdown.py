"""Plain texts as Markdown: nothing in them becomes markup that was not meant to be."""
import re

_SPECIAL = re.compile(r"([\\`*_{}\[\]|#])")
_CODE = re.compile(r"``(.+?)``|(?::\w+:)?`([^`]+)`")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def plain(text: str) -> str:
    """A text without markup."""
    return _SPECIAL.sub(r"\\\1", text).replace("<", "&lt;").replace("$", "&#36;")


def code(text: str) -> str:
    """A code span, in a table too."""
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}".replace("|", "\\|")


def template(text: str) -> str:
    """A rule's text: what stands in braces is code."""
    pieces = _PLACEHOLDER.split(text)
    return "".join(code(piece) if i % 2 else plain(piece) for i, piece in enumerate(pieces))


def prose(text: str) -> str:
    """A docstring's text: ``code``, :func:`name` and **bold** stay, a star is a star."""
    out, end = "", 0
    for match in _CODE.finditer(text):
        out += _bold(text[end : match.start()]) + code(match[1] or match[2])
        end = match.end()
    return out + _bold(text[end:])


def _bold(text: str) -> str:
    pieces = re.split(r"(?<![\w*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w*])", text, flags=re.DOTALL)
    return "".join(f"**{plain(piece)}**" if i % 2 else plain(piece) for i, piece in enumerate(pieces))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table, without the columns that are empty in every row."""
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in used], ["---"] * len(used), *([row[i] for i in used] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""The form of an entry in the table of messages."""
from typing import NamedTuple


class Text(NamedTuple):
    """One text in the two languages of the book; ``{name}`` stands for a group of the message's pattern."""

    en: str
    zh: str


class Message(NamedTuple):
    """A message and what it means.

    Attributes:
        name: its anchor on the page of messages.
        title: what is wrong, in a few words.
        pattern: a regular expression that finds it in a log; named groups are the numbers in it.
        example: the message as it was seen, word for word.
        seen: where: 'vllm-ascend issue #1', or a source file.
        broken: the equality that does not hold, or what happened.
        change: what to do.
        sheets: pages of operators, by name.
        arguments: of the operator.
        case: the bug of the gallery that it looks like.
        pages: further pages of the book.
        bare: names no cause: of use only where nothing else in a log is known.
    """

    name: str
    title: Text
    pattern: str
    example: str
    seen: str
    broken: Text
    change: Text
    sheets: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    case: str | None = None
    pages: tuple[str, ...] = ()
    bare: bool = False

"""The page of messages, from the table behind ``trueup explain``."""
import re

from tools.book.markdown import code, plain
from tools.book.pages import link
from trueup.core.messages import GROUPS, Message

WORDS = {
    "en": {
        "title": "Error messages", "broken": "What is wrong", "arguments": "Arguments", "change": "What to change",
        "case": "Looks like", "read": "Read", "seen": "Seen in",
        "intro": "Messages of devices and frameworks that name a shape or a length, as people have met them, and what "
                 "they mean. `trueup explain` finds them in a message or a whole log, fills in the numbers, and does "
                 "the same for trueup's own messages: [how to use it](how-to/explain.md).",
    },
    "zh": {
        "title": "报错索引", "broken": "哪里不对", "arguments": "参数", "change": "怎样改", "case": "像是", "read":
        "参看",
        "seen": "出处",
        "intro": "设备和框架关于形状与长度的报错（都是真实遇到的原文），以及它们的含义。`trueup explain` "
                 "能在一条消息或整份日志里找到它们，"
                 "填上具体的数，也能解释 trueup 自己的消息：[怎样使用](how-to/explain.md)。",
    },
}


def page(language: str) -> str:
    """The page of one language."""
    words = WORDS[language]
    parts = [f"# {words['title']}", words["intro"]]
    for title, messages in GROUPS.values():
        parts += [f"## {getattr(title, language)}", *(_entry(message, language) for message in messages)]
    return "\n\n".join(parts) + "\n"


def _entry(message: Message, language: str) -> str:
    words, said = WORDS[language], re.search(message.pattern, message.example, re.DOTALL)
    assert said, f"{message.name}: the pattern does not find its example"
    rows = {
        "broken": _text(getattr(message.broken, language), said.groupdict()),
        "arguments": ", ".join(map(code, message.arguments)),
        "change": _text(getattr(message.change, language), said.groupdict()),
        "case": f"[{message.case}](bugs.md#{message.case.lower()})" if message.case else "",
        "read": ", ".join([f"[{plain(name)}](operators/{name}.md)" for name in message.sheets]
                          + [f"[{plain(page.strip('/'))}]({_file(page)})" for page in message.pages]),
        "seen": link(message.seen),
    }
    listed = "\n".join(f"- **{words[key]}**: {text}" for key, text in rows.items() if text)
    return (f"### {plain(getattr(message.title, language))} {{ #{message.name} }}\n\n"
            f"```text\n{message.example}\n```\n\n{listed}")


def _text(text: str, said: dict[str, str | None]) -> str:
    """A text with the numbers of the example."""
    return "".join(code(piece) if i % 2 else plain(piece) for i, piece in enumerate(text.format(**said).split("`")))


def _file(page: str) -> str:
    """'bugs/#sb-01' as a link between source files."""
    name, _, anchor = page.partition("#")
    path = name.strip("/")
    return ("operators/index.md" if path == "operators" else f"{path}.md") + (f"#{anchor}" if anchor else "")

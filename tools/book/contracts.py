"""The Chinese of the contract sheets: docs/zh/contracts.yml, from English text to Chinese text.

The English is in the contracts themselves: what a rule expects, what an operator is for.  So a translation is found
by its English, and one whose English has changed is stale.
"""
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from tools.book.chapter import ChapterError

Say = Callable[[str], str]  # a text in the language of the page

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def read(file: Path) -> dict[str, str]:
    """The translations, by English text; none where the file is not there.

    Raises:
        ChapterError: it is no mapping of texts.
    """
    found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is not None and not (isinstance(found, dict) and all(isinstance(v, str | None) for v in found.values())):
        raise ChapterError(f"{file.name}: expected a mapping from English text to Chinese text")
    return {english: chinese for english, chinese in (found or {}).items() if chinese}


def problems(texts: Iterable[str], translations: dict[str, str]) -> list[str]:
    """Translations of texts that are no more, and those with other placeholders than their English."""
    texts = set(texts)
    stale = [f"stale: {english}" for english in translations if english not in texts]
    odd = [f"placeholders differ: {english}" for english, chinese in translations.items()
           if english in texts and sorted(_PLACEHOLDER.findall(english)) != sorted(_PLACEHOLDER.findall(chinese))]
    return stale + odd


def missing(texts: dict[str, str], translations: dict[str, str]) -> str:
    """What is not translated, as YAML to be filled in.  ``texts``: where each text is first used, by text."""
    lines: list[str] = []
    where = None
    for text, sheet in texts.items():
        if text in translations:
            continue
        if sheet != where:
            lines.append(f"\n# {sheet}")
            where = sheet
        key = json.dumps(text, ensure_ascii=False)  # which is YAML, too
        lines.append(f'{key}: ""' if len(key) < 1000 else f'? {key}\n: ""')
    return "\n".join(lines).strip()

"""What mkdocs.yml cannot say: the pages that are made, and its own names in the language of the build."""
from pathlib import Path
from typing import Any

NAMES = {
    "en": {"home": "Home", "chapters": "Chapters", "how-to": "How to", "reference": "Reference",
           "operators": "Operators"},
    "zh": {"home": "首页", "chapters": "章节", "how-to": "操作指南", "reference": "参考", "operators": "算子"},
}


def on_config(config: Any) -> Any:
    names = NAMES[config.theme["language"]]
    config.nav = [_named(item, names, Path(config.docs_dir)) for item in config.nav]
    return config


def _named(item: Any, names: dict[str, str], docs: Path) -> Any:
    if isinstance(item, str):
        return item
    [(key, value)] = item.items()
    if isinstance(value, list):
        value = [_named(inner, names, docs) for inner in value]
    elif value.endswith("/"):
        pages = sorted(file.name for file in (docs / value).glob("*.md") if file.name != "index.md")
        value = [f"{value}{name}" for name in ("index.md", *pages)]
    return {names[key]: value}

"""What mkdocs.yml cannot say: the chapters that there are, and its own names in the language of the build."""
from pathlib import Path
from typing import Any

NAMES = {
    "en": {"home": "Home", "chapters": "Chapters", "how-to": "How to", "reference": "Reference"},
    "zh": {"home": "首页", "chapters": "章节", "how-to": "操作指南", "reference": "参考"},
}


def on_config(config: Any) -> Any:
    names = NAMES[config.theme["language"]]
    config.nav = [_named(item, names, Path(config.docs_dir)) for item in config.nav]
    return config


def _named(item: Any, names: dict[str, str], docs: Path) -> Any:
    if isinstance(item, str):
        return item
    [(key, value)] = item.items()
    if value == "chapters/":
        value = ["chapters/index.md", *(f"chapters/{file.name}" for file in sorted((docs / "chapters").glob("ch*.md")))]
    return {names[key]: value}

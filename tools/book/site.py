"""The site from its pages: mkdocs once a language, strictly, and a front door that picks one."""
import os
import subprocess
import sys
from pathlib import Path

from tools.book.chapter import LANGUAGES, ChapterError

TEXTS = {
    "en": {"DESCRIPTION": "A small LLM serving core for Ascend NPUs, and the book that explains it",
           "SOURCE": "source"},
    "zh": {"DESCRIPTION": "为昇腾 NPU 而写的小型大模型服务核心，以及讲解它的书",
           "SOURCE": "源码", "TO_LIGHT": "切换到浅色", "TO_DARK": "切换到深色", "TO_AUTO": "跟随系统"},
}
FRONT_DOOR = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>trueup</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<script>location.replace((navigator.language || "").startsWith("zh") ? "zh/" : "en/")</script>
<main><h1>trueup</h1><p><a href="en/">English</a> · <a href="zh/" lang="zh">中文</a></p></main></html>
"""


def build(root: Path, url: str) -> None:
    """Build both languages into ``root``/site.

    Raises:
        ChapterError: a language was not built; mkdocs has said why.
    """
    for language in LANGUAGES:
        if _mkdocs(root, language, url):
            raise ChapterError(f"the site in {language} was not built")
    (root / "site/index.html").write_text(FRONT_DOOR, encoding="utf-8")
    (root / "site/.nojekyll").touch()  # GitHub Pages serves the files as they are


def _mkdocs(root: Path, language: str, url: str) -> int:
    repository = os.environ.get("DOCS_REPOSITORY")  # where the source is public, if it is
    source = f' · <a href="{repository}">{TEXTS[language]["SOURCE"]}</a>' if repository else ""
    variables = {f"DOCS_{name}": text for name, text in TEXTS[language].items()} | {
        "DOCS_LANGUAGE": language,
        "DOCS_COPYRIGHT": f"Apache-2.0{source}",
        "DOCS_DIR": str(root / "docs" / language),
        "DOCS_SITE": str(root / "site" / language),
        "DOCS_URL": f"{url.rstrip('/')}/{language}/",
        "DOCS_GLOSSARY": str(root / "docs" / language / "glossary.md"),
        "NO_MKDOCS_2_WARNING": "1",  # so that real warnings are seen
    }
    # Not quiet: -q hides warnings, and strict then counts none.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", str(root / "mkdocs.yml")]
    return subprocess.run(command, env=os.environ | variables, cwd=Path(__file__).parents[2], check=False).returncode

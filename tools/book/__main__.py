"""The book's builder: ``python -m tools.book`` build, site, check, sync or contracts; --help says more."""
import argparse
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tools.book import contracts, site
from tools.book.chapter import LANGUAGES, Chapter, ChapterError, problems, read, sync, warnings
from tools.book.execute import run
from tools.book.notebook import notebook
from tools.book.pages import chapter_list, gallery
from tools.book.render import page

ROOT = Path(__file__).resolve().parents[2]
TRANSLATIONS = "docs/zh/contracts.yml"
HELP = """
sync   stamp the pairs of prose cells that are new or changed in both languages, and write the notebooks
check  what can be said of the chapters without running them
build  check, run the chapters that changed, and write their pages
site   build, then the whole site, strictly, into site/
contracts  what docs/zh/contracts.yml lacks, as YAML to be filled in, and what in it is stale
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.book", description="Chapters to pages and notebooks.",
                                     epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["sync", "check", "build", "site", "contracts"])
    parser.add_argument("chapters", nargs="*", help="names such as ch01_run (default: all)")
    parser.add_argument("--no-cache", action="store_true", help="run every chapter, changed or not")
    parser.add_argument("--agreed", action="store_true",
                        help="sync: also the pairs with a change in one language that the other needs no change for")
    parser.add_argument("--url", default="http://127.0.0.1:8000/", help="site: where it will be (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)  # for tests
    args = parser.parse_intermixed_args(argv)
    if args.command == "contracts":
        return _contracts(args.root)

    paths = sorted((args.root / "tutorials").glob("ch*.py"))
    failures = [f"there is no chapter {name}" for name in sorted(set(args.chapters) - {path.stem for path in paths})]
    try:
        for path in paths:
            if not args.chapters or path.stem in args.chapters:
                failures += _one(path, args)
        if not failures and args.command in ("build", "site"):
            _write_lists([read(path) for path in paths], args.root)
        if not failures and args.command == "site":
            site.build(args.root, args.url)
    except ChapterError as error:
        failures.append(str(error))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _one(path: Path, args: argparse.Namespace) -> Iterable[str]:
    """Do what ``args`` asks for one chapter; what is wrong with it."""
    if args.command == "sync":
        left = sync(path, args.agreed)
        chapter = read(path)
        for language, file in _notebooks(chapter, args.root).items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(notebook(chapter, language), encoding="utf-8")
        return left or problems(chapter)
    chapter = read(path)
    if found := problems(chapter) + _stale(chapter, args.root):
        return found
    for warning in warnings(chapter):
        print(f"warning: {warning}")
    if args.command != "check":
        begin = time.perf_counter()
        run(chapter, None if args.no_cache else args.root / "build/book", args.root / "packages")
        _write_pages(chapter, args.root)
        print(f"{chapter.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    return []


def _write_pages(chapter: Chapter, root: Path) -> None:
    for language in LANGUAGES:
        folder = root / "docs" / language / "chapters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{chapter.name}.md").write_text(page(chapter, language, folder), encoding="utf-8")
        (folder / f"{chapter.name}.ipynb").write_text(notebook(chapter, language), encoding="utf-8")
        shutil.copy(chapter.path, folder)


def _write_lists(chapters: list[Chapter], root: Path) -> None:
    from tools.book import messages, sheets  # import torch, which only this needs

    chinese = contracts.read(root / TRANSLATIONS)
    say: dict[str, contracts.Say] = {"en": str, "zh": lambda text: chinese.get(text, text)}
    for language in LANGUAGES:
        docs = root / "docs" / language
        (docs / "chapters").mkdir(parents=True, exist_ok=True)
        (docs / "chapters/index.md").write_text(chapter_list(chapters, language), encoding="utf-8")
        (docs / "bugs.md").write_text(gallery(root / "docs/bugs.yml", chapters, language), encoding="utf-8")
        (docs / "messages.md").write_text(messages.page(language), encoding="utf-8")
        sheets.write(root, chapters, say[language], language)
        names = tuple(chapter.name for chapter in chapters)
        for made in (docs / "chapters").glob("ch*"):
            if not made.name.startswith(names):
                made.unlink()  # of a chapter that is no longer there


def _contracts(root: Path) -> int:
    """Print what is to be translated; 1 where something is."""
    from tools.book import sheets

    texts, chinese = sheets.texts(root), contracts.read(root / TRANSLATIONS)
    found = [contracts.missing(texts, chinese), *contracts.problems(texts, chinese)]
    print("\n".join(filter(None, found)) or f"{len(texts)} texts, all translated")
    return 1 if any(found) else 0


def _notebooks(chapter: Chapter, root: Path) -> dict[str, Path]:
    return {language: root / "tutorials" / language / f"{chapter.name}.ipynb" for language in LANGUAGES}


def _stale(chapter: Chapter, root: Path) -> list[str]:
    return [f"{chapter.path.name}: {file.relative_to(root)} is out of step; run make chapters-sync"
            for language, file in _notebooks(chapter, root).items()
            if not file.is_file() or file.read_text(encoding="utf-8") != notebook(chapter, language)]


if __name__ == "__main__":
    sys.exit(main())

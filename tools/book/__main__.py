"""Chapters to pages and notebooks: ``python -m tools.book build``, ``check`` or ``sync``; --help says more."""
import argparse
import shutil
import sys
import time
from pathlib import Path

from tools.book.chapter import LANGUAGES, Chapter, ChapterError, problems, read, sync, warnings
from tools.book.execute import run
from tools.book.notebook import notebook
from tools.book.render import page

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.book", description="Chapters to pages and notebooks.")
    parser.add_argument("command", choices=["build", "check", "sync"], help=(
        "build: run the chapters, write their pages and notebooks; "
        "check: what can be said without running them, and whether the notebooks are in step; "
        "sync: stamp the pairs of prose cells that were changed in both languages, write the notebooks"))
    parser.add_argument("chapters", nargs="*", help="names such as ch01_run (default: all)")
    parser.add_argument("--no-cache", action="store_true", help="build: run every chapter, changed or not")
    parser.add_argument("--agreed", action="store_true",
                        help="sync: also pairs with a change in one language that the other needs no change for")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)  # for tests
    args = parser.parse_args(argv)
    paths = sorted(path for path in (args.root / "tutorials").glob("ch*.py")
                   if not args.chapters or path.stem in args.chapters)
    missing = set(args.chapters) - {path.stem for path in paths}
    failures = [f"there is no chapter {name}" for name in sorted(missing)]
    for path in paths:
        try:
            failures += _one(path, args)
        except ChapterError as error:
            failures.append(str(error))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _one(path: Path, args: argparse.Namespace) -> list[str]:
    left = sync(path, args.agreed) if args.command == "sync" else []
    chapter = read(path)
    if left or (found := problems(chapter)):
        return left or found
    for warning in warnings(chapter):
        print(f"warning: {warning}")
    if args.command == "build":
        begin = time.perf_counter()
        run(chapter, None if args.no_cache else args.root / "build/book", args.root / "packages")
        _write_pages(chapter, args.root)
        print(f"{chapter.name}: {time.perf_counter() - begin:.1f} s")
    return [] if args.command == "sync" and _write_notebooks(chapter, args.root) else _stale(chapter, args.root)


def _write_pages(chapter: Chapter, root: Path) -> None:
    for language in LANGUAGES:
        folder = root / "docs" / language / "chapters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{chapter.name}.md").write_text(page(chapter, language, folder), encoding="utf-8")
        (folder / f"{chapter.name}.ipynb").write_text(notebook(chapter, language), encoding="utf-8")
        shutil.copy(chapter.path, folder)


def _notebook_path(chapter: Chapter, language: str, root: Path) -> Path:
    return root / "tutorials" / language / f"{chapter.name}.ipynb"


def _write_notebooks(chapter: Chapter, root: Path) -> bool:
    for language in LANGUAGES:
        file = _notebook_path(chapter, language, root)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(notebook(chapter, language), encoding="utf-8")
    return True


def _stale(chapter: Chapter, root: Path) -> list[str]:
    files = {language: _notebook_path(chapter, language, root) for language in LANGUAGES}
    return [f"{chapter.path.name}: {file.relative_to(root)} is out of step; run make chapters-sync"
            for language, file in files.items()
            if not file.is_file() or file.read_text(encoding="utf-8") != notebook(chapter, language)]


if __name__ == "__main__":
    sys.exit(main())

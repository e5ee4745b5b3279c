"""The book as it stands: chapters in step, languages alike, code that runs, public names explained."""
import inspect
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import import_module
from pathlib import Path

import pytest

from tools.book.chapter import read
from tools.book.execute import run
from tools.book.render import page

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
PAGES = sorted(str(path.relative_to(DOCS / "en")) for path in (DOCS / "en").rglob("*.md")
               if path.parent.name not in ("chapters", "operators")  # these are made
               and path.name not in ("bugs.md", "messages.md"))
PUBLIC = [(module, name) for module in ("trueup.core", "trueup.models", "trueup.server")
          for name in import_module(module).__all__]


def code(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_chapters_are_in_step():
    done = subprocess.run([sys.executable, "-m", "tools.book", "check"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("chapter", sorted((REPO / "tutorials").glob("ch*.py")), ids=lambda path: path.stem)
def test_two_runs_of_a_chapter_make_the_same_page(chapter, tmp_path):
    pages = []
    for _ in range(2):
        ran = read(chapter)
        run(ran, None, REPO / "packages")
        pages.append(page(ran, "en", tmp_path))
    assert pages[0] == pages[1]


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_of_a_page_have_the_same_parts(name):
    en, zh = ((DOCS / language / name).read_text(encoding="utf-8") for language in ("en", "zh"))
    for part in (r"^#+ ", r"^\|", r"^```\w*$", r"^!!! \w+", r"\{ #[\w-]+ \}", r"^::: .*$", r"\]\([\w./#-]+\)"):
        found = [re.findall(part, text, re.MULTILINE) for text in (en, zh)]
        assert found[0] == found[1], part
    blocks = [re.sub(r" +#.*", "", "".join(code(f"{language}/{name}"))) for language in ("en", "zh")]
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize("name", ["start.md", "how-to/load-a-checkpoint.md", "how-to/check-your-call.md",
                                  "how-to/doctor.md", "how-to/explain.md"])
def test_the_code_of_a_page_runs(name, tmp_path):
    program = "\n".join(code(f"en/{name}"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_code_of_the_serving_page_runs():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "trueup.core.cli", "serve", "--port", str(port)])
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        program = "\n".join(code("en/how-to/serve.md")).replace("http://127.0.0.1:8000", address)
        assert address in program
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0 and "total_tokens=" in done.stdout, done.stderr
    finally:
        server.terminate()
        server.wait()


def sections(doc: str) -> set[str]:
    return set(re.findall(r"^(Args|Returns|Raises|Attributes):$", doc, re.MULTILINE))


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_is_explained(module, name):
    """A docstring of its own, and of each public function or method; what raises ValueError says so."""
    thing = getattr(import_module(module), name)
    parts = {name: thing}
    if inspect.isclass(thing):
        callables = (type(lambda: None), classmethod, staticmethod)
        parts |= {f"{name}.{key}": value for key, value in vars(thing).items()
                  if not key.startswith("_") and isinstance(value, callables)}
    elif inspect.ismodule(thing):
        parts |= {f"{name}.{key}": value for key, value in inspect.getmembers(thing, inspect.isfunction)
                  if not key.startswith("_") and value.__module__ == thing.__name__}
    for label, part in parts.items():
        doc = inspect.cleandoc(part.__doc__ or "")
        assert len(doc) > 20, f"{label} has no docstring"
        function = getattr(part, "__func__", part)
        if inspect.isfunction(function) and "raise ValueError" in inspect.getsource(function):
            own = inspect.cleandoc(thing.__doc__ or "") if inspect.isclass(thing) else ""  # a class may say it for all
            assert "Raises" in sections(doc) | sections(own), f"{label} raises ValueError and does not say so"


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_is_on_an_api_page(module, name):
    """mkdocstrings shows what __all__ lists; a module in it is asked for by itself."""
    text = (DOCS / f"en/api/{module.split('.')[1]}.md").read_text(encoding="utf-8")
    assert f"::: {module}\n" in text + "\n"
    if inspect.ismodule(getattr(import_module(module), name)):
        assert f"::: {module}.{name}" in text

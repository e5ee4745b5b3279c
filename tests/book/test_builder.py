"""The book's builder on small chapters: what it refuses, what it runs, and what it writes."""
import json

import nbformat
import pytest

from tools.book.chapter import ChapterError, problems, read, sync, warnings
from tools.book.execute import run, stable
from tools.book.notebook import notebook
from tools.book.render import page

HEADER = """\
# ---
# title: {en: Small, zh: 小}
# outcome: {en: a result, zh: 一个结果}
# minutes: 3
# prerequisites: {en: none, zh: 无}
# bugs: [SB-03]
# hardware: {en: any, zh: 任何}
# ---
"""
PAIR = """
# %% [markdown] tags=["en"]
# One sentence.

# %% [markdown] tags=["zh"]
# 一句话。
"""
CODE = """
# %%
print("seen")
assert 1 + 1 == 2
"""


@pytest.fixture
def write(tmp_path):
    """Writes a chapter, by default with its pairs stamped, and reads it."""

    def do(*cells, header=HEADER, stamped=True):
        path = tmp_path / "ch09_small.py"
        path.write_text(header + "".join(cells), encoding="utf-8")
        if stamped:
            assert sync(path) == []
        return read(path)

    return do


def executed(chapter, tmp_path, cache=None):
    run(chapter, cache, tmp_path)
    return chapter


def test_a_sound_chapter_has_no_problems(write):
    chapter = write(PAIR, CODE)
    assert problems(chapter) == [] and warnings(chapter) == []


@pytest.mark.parametrize(("cells", "line", "says"), [
    (PAIR.split("# %% [markdown] tags=[\"zh\"]")[0], 10, "the English has no Chinese after it"),
    ("# %% [markdown] tags=[\"zh\"]\n# 一句话。\n", 9, "the Chinese has no English before it"),
    (PAIR.replace('tags=["zh"]', 'tags=["zh", "solution"]'), 13, "the tags of the two languages differ"),
    ("# %% [markdown]\n# No tag.\n", 9, 'needs tags=["en"] or tags=["zh"]'),
    ('# %% tags=["hidden"]\nassert True\n', 9, "unknown tags hidden"),
    ("# %%\n" + "x = 1\n" * 26, 9, "26 lines of code; a cell has at most 25"),
    ('# %% tags=["raises-exception"]\n1 / 0\n', 9, 'both tags=["raises-exception"] and raises='),
    ('# %% raises="ZeroDivisionError"\n1 / 0\n', 9, 'both tags=["raises-exception"] and raises='),
])
def test_a_broken_rule_is_named_with_its_line(write, cells, line, says):
    [problem] = problems(write(cells))
    assert says in problem and problem.startswith(f"ch09_small.py: line {line}: ")


@pytest.mark.parametrize(("change", "says"), [
    (("# minutes: 3\n", ""), "the header lacks minutes"),
    (("minutes: 3", "minutes: 21"), "21 minutes; a chapter takes at most 20"),
    ((", zh: 小", ""), "the header's title needs a text for each of en, zh"),
])
def test_the_header_is_complete(write, change, says):
    [problem] = problems(write(PAIR, header=HEADER.replace(*change)))
    assert says in problem


@pytest.mark.parametrize("header", ["", "# ---\n# title: [\n# ---\n"])
def test_a_header_that_cannot_be_read_is_refused(write, header):
    for cells in (PAIR, ""):
        with pytest.raises(ChapterError, match="header"):
            write(cells, header=header, stamped=False)


@pytest.mark.parametrize(("old", "new", "says"), [
    ("One sentence.", "Two sentences.", "only the English changed"),
    ("一句话。", "两句话。", "only the Chinese changed"),
])
def test_a_change_in_one_language_is_found_and_not_stamped_over(write, old, new, says):
    chapter = write(PAIR, CODE)
    chapter.path.write_text(chapter.path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    [problem] = problems(read(chapter.path))
    assert says in problem
    [left] = sync(chapter.path)
    assert says in left and problems(read(chapter.path)) == [problem]
    assert sync(chapter.path, agreed=True) == [] and problems(read(chapter.path)) == []


def test_a_change_in_both_languages_is_stamped(write):
    chapter = write(PAIR)
    text = chapter.path.read_text(encoding="utf-8").replace("One sentence.", "Two.").replace("一句话。", "两句。")
    chapter.path.write_text(text, encoding="utf-8")
    assert "both languages changed" in problems(read(chapter.path))[0]
    assert sync(chapter.path) == [] and problems(read(chapter.path)) == []


def test_stamping_changes_nothing_else_and_is_repeatable(write):
    chapter = write(PAIR, CODE, PAIR)
    once = chapter.path.read_text(encoding="utf-8")
    sync(chapter.path)
    assert chapter.path.read_text(encoding="utf-8") == once
    assert once.replace(f' pair="{chapter.cells[1].pair}"', "") == HEADER + PAIR + CODE + PAIR


def test_a_print_without_an_assertion_is_warned_of(write):
    bare = "\n# %%\nprint(1)\n"
    assert len(warnings(write(bare, bare, CODE))) == 1  # the second is followed by one


def test_two_runs_make_the_same_pages(write, tmp_path):
    volatile = '\n# %%\nimport time\nprint(object(), time.time_ns() % 997 / 10, "ms")\nassert True\n'
    pages = [page(executed(write(PAIR, volatile, CODE), tmp_path), language, tmp_path) for language in ("en", "en")]
    assert pages[0] == pages[1] and "<object object at 0x...> ... ms" in pages[0] and "\nseen\n" in pages[0]


def test_a_run_is_kept_until_the_chapter_or_a_source_changes(write, tmp_path):
    sources, cache, log = tmp_path / "sources", tmp_path / "cache", tmp_path / "log"
    sources.mkdir()
    cell = f'\n# %%\nwith open({str(log)!r}, "a") as file:\n    file.write("x")\nassert True\n'
    for source in ("one", "one", "two"):
        (sources / "module.py").write_text(source)
        run(write(cell), cache, sources)
    assert log.read_text() == "xx"
    run(write(cell, CODE), cache, sources)
    assert log.read_text() == "xxx"


def test_a_failing_cell_is_an_error_with_its_line_and_message(write, tmp_path):
    with pytest.raises(ChapterError, match=r"(?s)ch09_small.py: line 20: the cell failed.*AssertionError: three"):
        executed(write(PAIR, CODE, '\n# %%\nassert 1 == 3, "three"\n'), tmp_path)


@pytest.mark.parametrize(("cell", "says"), [
    ("1 / 1", "expected ZeroDivisionError, but the cell did not fail"),
    ("int('a')", "expected ZeroDivisionError, got ValueError"),
    ("raise ZeroDivisionError('never')", "expected a message with 'by zero', got never"),
])
def test_a_cell_must_fail_as_declared(write, tmp_path, cell, says):
    head = '\n# %% tags=["raises-exception"] raises="ZeroDivisionError" says="by zero"\n'
    executed(write(head + "1 / 0\n", CODE), tmp_path)
    with pytest.raises(ChapterError, match=says):
        executed(write(head + cell + "\n", CODE), tmp_path)


def test_a_page_shows_its_own_language_and_real_outputs(write, tmp_path):
    drawing = ('\n# %% tags=["fold"]\nfrom IPython.display import HTML\n'
               'HTML("""<svg>\n\n</svg><span lang="en">yes</span><span lang="zh">是</span>""")\n')
    failing = '\n# %% tags=["raises-exception"] raises="KeyError" says="lost"\nraise KeyError("lost")\n'
    solution = '\n# %% tags=["solution"]\nassert "hidden"\n'
    chapter = executed(write(PAIR, CODE, drawing, failing, solution, solution), tmp_path)
    en, zh = (page(chapter, language, tmp_path) for language in ("en", "zh"))
    assert "# Small" in en and "One sentence." in en and "一句话。" not in en and "一句话。" in zh
    assert '<svg>\n</svg><span lang="en">yes</span>\n' in en
    assert '<svg>\n</svg><span lang="zh">是</span>\n' in zh
    assert '!!! failure "This cell fails, and is meant to"\n    ```text\n    KeyError: \'lost\'\n' in en
    assert en.count('??? success "A solution"') == 1 and en.count('    assert "hidden"') == 2
    assert "../bugs.md#sb-03" in en and "3 minutes" in en and "3 分钟" in zh


def test_an_image_is_written_beside_the_page(write, tmp_path):
    pixel = ('\n# %%\nimport base64\nfrom IPython.display import Image\n'
             'Image(base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5'
             'ErkJggg=="))\n')
    text = page(executed(write(pixel, CODE), tmp_path), "en", tmp_path)
    assert "![Drawn by the cell above](ch09_small_1.png)" in text
    assert (tmp_path / "ch09_small_1.png").stat().st_size > 50


def test_a_notebook_has_one_language_no_outputs_and_an_import_check(write):
    links = ("[a](../start.md), [SB-03](../bugs.md#sb-03), [`L`][trueup.core.L], [2](ch02_x.md), "
             "[open points](../operators/index.md#open-points), [m](../messages.md)")
    text = notebook(write(PAIR.replace("One sentence.", links), CODE), "en")
    book = nbformat.reads(text, as_version=4)
    nbformat.validate(book)
    assert "import trueup.models" in book.cells[0].source and "pip install ./packages/core" in book.cells[0].source
    assert [cell.cell_type for cell in book.cells] == ["code", "markdown", "markdown", "code"]
    assert book.cells[2].source == "[a](../../docs/en/start.md), SB-03, `L`, [2](ch02_x.ipynb), open points, m"
    assert all(cell.get("outputs", []) == [] for cell in book.cells) and "一句话" not in text
    assert json.loads(text)["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize(("text", "expected"), [
    ("at 0x7f58e65d7150 done", "at 0x... done"),
    ("took 12.5 ms, 1,234 tokens/s", "took ... ms, ... tokens/s"),
    ("3 rows of 8", "3 rows of 8"),
    ("/home/me/trueup/packages/core/a.py", "packages/core/a.py"),
    ("2026-11-29 16:00:01 begins", "(time) begins"),
    ("\x1b[0;31mred\x1b[0m", "red"),
])
def test_what_differs_between_runs_is_blanked(text, expected):
    assert stable(text) == expected

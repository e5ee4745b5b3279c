"""What must fail the build of the site: a broken link, a broken anchor, a failing cell, a missing translation."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
CHAPTER = """\
# ---
# title: {en: Small, zh: 小}
# outcome: {en: a result, zh: 一个结果}
# minutes: 3
# prerequisites: {en: "[start](../start.md#npu)", zh: 无}
# bugs: [SB-03]
# hardware: {en: any, zh: 任何}
# ---

# %% [markdown] tags=["en"]
# One sentence with a [link](../what-ran-where.md#only-a-device) and [`Layout`][trueup.core.Layout].

# %% [markdown] tags=["zh"]
# 一句话。

# %%
assert 1 + 1 == 2
"""


@pytest.fixture
def root(tmp_path):
    """The real configuration and pages, with a small chapter under the names of those that pages link to."""
    for name in ("tools", "packages"):
        (tmp_path / name).symlink_to(REPO / name)
    shutil.copy(REPO / "mkdocs.yml", tmp_path)
    made = shutil.ignore_patterns("chapters", "operators", "bugs.md", "messages.md")
    shutil.copytree(REPO / "docs", tmp_path / "docs", ignore=made)
    (tmp_path / "tutorials").mkdir()
    for name in ("ch01_run", "ch12_acceptance", "ch13_sparse"):
        (tmp_path / f"tutorials/{name}.py").write_text(CHAPTER, encoding="utf-8")
    assert book(tmp_path, "sync").returncode == 0
    return tmp_path


def book(root, command):
    return subprocess.run([sys.executable, "-m", "tools.book", command, "--root", str(root)], cwd=REPO,
                          capture_output=True, text=True)


def change(root, old, new, resync=True):
    file = root / "tutorials/ch01_run.py"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    if resync:
        subprocess.run([sys.executable, "-m", "tools.book", "sync", "--agreed", "--root", str(root)], cwd=REPO)


def test_the_sound_site_builds_in_both_languages(root):
    done = book(root, "site")
    assert done.returncode == 0, done.stdout + done.stderr
    for language in ("en", "zh"):
        assert (root / "site" / language / "chapters/ch01_run/index.html").is_file()
    assert "zh/" in (root / "site/index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("old", "new", "says"), [
    ("../what-ran-where.md#only-a-device", "../what-ran-here.md", "'../what-ran-here.md', but the target"),
    ("#only-a-device", "#only-a-devise", "does not contain an anchor '#only-a-devise'"),
    ("[trueup.core.Layout]", "[trueup.core.Layuot]", "trueup.core.Layuot"),
    ("1 + 1 == 2", "1 + 1 == 3", "line 16: the cell failed"),
])
def test_a_broken_chapter_fails_the_build(root, old, new, says):
    change(root, old, new)
    done = book(root, "site")
    assert done.returncode != 0 and says in done.stdout + done.stderr


def test_a_missing_translation_fails_the_build(root):
    change(root, '# %% [markdown] tags=["zh"]', "# %%\nassert True\n# removed: ", resync=False)
    done = book(root, "site")
    assert done.returncode != 0 and "the English has no Chinese after it" in done.stderr


def test_a_translation_that_is_older_fails_the_build(root):
    change(root, "One sentence", "Another sentence", resync=False)
    done = book(root, "site")
    assert done.returncode != 0 and "only the English changed, the other is older" in done.stderr


def test_a_page_in_one_language_only_fails_the_build(root):
    (root / "docs/zh/start.md").unlink()
    assert book(root, "site").returncode != 0


def test_a_notebook_out_of_step_fails_the_check(root):
    assert book(root, "check").returncode == 0
    notebook = root / "tutorials/zh/ch01_run.ipynb"
    notebook.write_text(notebook.read_text(encoding="utf-8").replace("一句话", "两句话"), encoding="utf-8")
    done = book(root, "check")
    assert done.returncode != 0 and "tutorials/zh/ch01_run.ipynb is out of step" in done.stderr

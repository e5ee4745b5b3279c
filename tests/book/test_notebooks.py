"""Each committed notebook, from top to bottom, in a fresh environment with wheels built from this tree."""
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
REPO = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPO / "tutorials").glob("*/*.ipynb"))
# Runs a notebook in a kernel of the interpreter that runs this, and prints what its first cell printed.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
book.cells = book.cells[: int(sys.argv[2])]
NotebookClient(book, timeout=120, allow_errors=len(sys.argv) > 3).execute()
print(*(output.get("text", "") for output in book.cells[0].outputs))
"""


def environment(folder: Path) -> Path:
    """A virtual environment that has what this one has, except trueup; its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    where = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                           capture_output=True, text=True).stdout.strip()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "trueup" not in path.name and not (Path(where) / path.name).exists():
            (Path(where) / path.name).symlink_to(path)
    return python


@pytest.fixture(scope="module")
def with_wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for package in ("core", "models", "server"):
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder,
                        REPO / "packages" / package], check=True)
    python = environment(folder / "venv")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *folder.glob("*.whl")], check=True)
    return python


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_notebook_runs(with_wheels, tmp_path, notebook):
    done = subprocess.run([with_wheels, "-c", RUN, notebook, "999"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("language", "says"), [("en", "Not installed here."), ("zh", "这里还没有安装。")])
def test_where_the_packages_are_missing_a_notebook_says_how_to_install_them(tmp_path, language, says):
    python = environment(tmp_path / "venv")
    notebook = next(path for path in NOTEBOOKS if path.parent.name == language)
    done = subprocess.run([python, "-c", RUN, notebook, "1", "allow"], cwd=tmp_path, capture_output=True, text=True)
    assert says in done.stdout and f"{python} -m pip install ./packages/core ./packages/models" in done.stdout

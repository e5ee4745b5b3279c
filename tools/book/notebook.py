"""A chapter as a Jupyter notebook, in one language and without outputs."""
import re
from typing import Any

import nbformat

from tools.book.chapter import Chapter
from tools.book.render import head_rows

CHECK = '''\
# Does this kernel have the book's packages?
try:
    import trueup.models
except ModuleNotFoundError:
    import sys
    print(f"""{words}

    cd trueup
    {{sys.executable}} -m pip install ./packages/core ./packages/models ./packages/server
""")
    raise'''
ADVICE = {
    "en": "Not installed here. In a clone of the repository run this, then restart the kernel:",
    "zh": "这里还没有安装。请在仓库的克隆里运行下面的命令，然后重启内核：",
}


def notebook(chapter: Chapter, language: str) -> str:
    """The .ipynb file's text, the same for the same chapter."""
    book: Any = nbformat.v4.new_notebook(metadata={
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    })
    book.cells.append(nbformat.v4.new_code_cell(CHECK.format(words=ADVICE[language])))
    book.cells.append(nbformat.v4.new_markdown_cell(_head(chapter, language)))
    for cell in chapter.in_language(language):
        metadata: dict[str, Any] = {"tags": sorted(cell.tags)} if cell.tags else {}
        if cell.language is None and cell.tags & {"fold", "solution"}:
            metadata["jupyter"] = {"source_hidden": True}
        if cell.language:
            book.cells.append(nbformat.v4.new_markdown_cell(_links(cell.source, language), metadata=metadata))
        else:
            book.cells.append(nbformat.v4.new_code_cell(cell.source, metadata=metadata))
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
    return nbformat.writes(book) + "\n"


def _head(chapter: Chapter, language: str) -> str:
    rows = "\n".join(f"- **{key}**: {value}" for key, value in head_rows(chapter, language))
    return _links(f"# {chapter.header['title'][language]}\n\n{rows}", language)


def _links(text: str, language: str) -> str:
    """A page's links as a notebook in the repository can follow them; the others as plain text."""
    text = re.sub(r"\[([^\]]+)\](?:\(\.\./(?:bugs|messages|(?:api|operators)/\w+)\.md[^)]*\)|\[[\w.]+\])", r"\1", text)
    text = text.replace("](../", f"](../../docs/{language}/")
    return re.sub(r"\]\((ch\d\d\w*)\.md", r"](\1.ipynb", text)

"""The Markdown extensions of the site."""
import markdown
import pytest

from tools.book import glossary

PAGE = """
| term | meaning |
|---|---|
| `Bp` | requests with padding |
| dummy page | page 0: [nobody](x.md) owns it |
| 哑页 | 第 0 页 |
| *page* | an everyday word |
"""


def html(text, extension, **config):
    return markdown.markdown(text, extensions=["tables", "pymdownx.superfences", extension],
                             extension_configs={extension: config})


@pytest.fixture
def explain(tmp_path):
    page = tmp_path / "glossary.md"
    page.write_text(PAGE, encoding="utf-8")
    return lambda text: html(text, "tools.book.glossary", page=str(page))


def test_the_terms_of_a_page(tmp_path):
    page = tmp_path / "glossary.md"
    page.write_text(PAGE, encoding="utf-8")
    assert glossary.terms(page) == {
        "`Bp`": "requests with padding", "dummy page": "page 0: nobody owns it", "哑页": "第 0 页"}


@pytest.mark.parametrize(("text", "expected"), [
    ("A dummy page, a dummy page", '<p>A <abbr title="page 0: nobody owns it">dummy page</abbr>, a dummy page</p>'),
    ("它写在哑页里。", '<p>它写在<abbr title="第 0 页">哑页</abbr>里。</p>'),
    ("`Bp` rows, Bp", '<p><abbr title="requests with padding"><code>Bp</code></abbr> rows, Bp</p>'),
    ("a *dummy page*!", '<p>a <em><abbr title="page 0: nobody owns it">dummy page</abbr></em>!</p>'),
    ("no dummy pages, no page", "<p>no dummy pages, no page</p>"),
    ("[the dummy page](x.md)", '<p><a href="x.md">the dummy page</a></p>'),
    ("## A dummy page", "<h2>A dummy page</h2>"),
])
def test_a_term_explains_itself_once_and_only_in_prose(explain, text, expected):
    assert explain(text) == expected


def test_maths_is_mathml_and_leaves_code_alone():
    page = html("Costs $x_i^2$, not `$x$`.\n\n$$\na = b\n$$\n\n```text\n$$\na\n$$\n$y$\n```\n", "tools.book.maths")
    assert page.count("<math ") == 2 and 'display="inline"' in page and 'display="block"' in page
    assert "<code>$x$</code>" in page and "$$\na\n$$\n$y$" in page


@pytest.mark.parametrize(("text", "expected"), [
    ("一行，\n两行。", "一行，两行。"), ("一行\n两行", "一行两行"), ("一行。\ntwo", "一行。two"),
    ("one\ntwo", "one\ntwo"), ("一行\ntwo", "一行\ntwo"), ("**粗**\n字", "<strong>粗</strong>\n字"),
])
def test_a_line_break_inside_chinese_is_no_space(text, expected):
    assert html(text, "tools.book.chinese") == f"<p>{expected}</p>"

"""The contract sheets and the page of messages: that they say what the contracts say, in both languages."""
import re
from pathlib import Path

import markdown
import pytest

from tools.book import contracts, messages, operators, sheets
from tools.book.__main__ import main
from tools.book.chapter import ChapterError, read
from tools.book.markdown import code, plain, prose, table, template
from trueup.core.messages import MESSAGES
from trueup.core.ops.contract import OPEN_POINTS
from trueup.core.ops.reading.rules import open_points, rules
from trueup.core.ops.reading.sheet import sheet
from trueup.core.ops.registry import OPERATORS

REPO = Path(__file__).parents[2]
PAGES = sorted(operators.pages())
BUGS = set(re.findall(r"id: (SB-\d+)", (REPO / "docs/bugs.yml").read_text(encoding="utf-8")))
CHAPTERS = [read(path) for path in sorted((REPO / "tutorials").glob("ch*.py"))]


def html(text):
    return markdown.markdown(text, extensions=["tables", "attr_list", "md_in_html", "pymdownx.superfences"])


def text_of(page):
    return re.sub(r"<[^>]+>", "", page).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def english(name):
    return sheets.page(name, CHAPTERS, str, "en")


def test_every_operator_is_on_one_sheet():
    assert sorted(name for names in operators.pages().values() for name in names) == sorted(OPERATORS)
    assert all(sheet(name) == page for page, names in operators.pages().items() for name in names)


@pytest.mark.parametrize("name", PAGES)
def test_a_sheet_says_every_rule_with_its_condition_and_source(name):
    shown = " ".join(text_of(html(english(name))).split())
    for operator in operators.pages()[name]:
        for rule in rules(operator):
            for words in re.split(r"\{[^{}]*\}", rule.expected):
                assert " ".join(words.split()) in shown
            assert rule.source in shown and (rule.case or "") in shown
            assert re.sub(r"[{}]", "", rule.argument) in shown
        assert all(point.name in shown and point.safe in shown for point in open_points(operator))
    for row in operators.rows(operators.pages()[name]):
        assert all(" ".join(condition.split()) in shown for condition in row.conditions)


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_of_a_sheet_have_the_same_parts(name):
    pages = english(name), sheets.page(name, CHAPTERS, str, "zh")
    for part in (r"^#+ .*(\{ #[\w-]+ \})", r"^\|", r"^\?\?\? ", r"\]\(([\w./#-]+)\)", r"^```"):
        found = [re.findall(part, page, re.MULTILINE) for page in pages]
        assert found[0] == found[1], part


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_sheet_lead_somewhere(name):
    page = english(name)
    anchors = set(re.findall(r'\{ #([\w-]+) \}|<a id="([\w-]+)"', page))
    anchors = {a or b for a, b in anchors}
    for target in re.findall(r"\]\(([^)]+)\)", page):
        path, _, anchor = target.partition("#")
        if not path:
            assert anchor in anchors
        elif path == "../bugs.md":
            assert anchor.upper() in BUGS
        elif path == "../messages.md":
            assert anchor in {message.name for message in MESSAGES}
        else:
            assert (REPO / "tutorials" / Path(path).with_suffix(".py").name).is_file(), target


def test_a_sheet_shows_forms_what_is_written_and_what_is_not():
    page = text_of(html(english("npu_kv_rmsnorm_rope_cache")))
    assert "written in place" in page and "left unwritten" in page and "cache_mode='PA'" in page
    page = english("npu_fused_infer_attention_score")
    assert page.count('??? abstract "`input_layout=') >= 15 and "host list" in page
    assert "_npu_fused_infer_attention_score_get_max_workspace(" in page
    assert "[SB-03](../bugs.md#sb-03)" in page and "(../messages.md#last-query-length)" in page
    assert "](../chapters/ch" in english("npu_fused_infer_attention_score_v2").partition("**Chapters**: ")[2]


def test_the_open_points_say_how_to_assume():
    page = english("npu_scatter_pa_kv_cache")
    assert 'with assume("scatter-minus-one"):' in page and plain(OPEN_POINTS["scatter-minus-one"].safe) in page


def test_the_index_lists_operators_open_points_and_meta_kernels(tmp_path):
    page = sheets.index(tmp_path / "conformance.json", str, "en")
    assert all(f"({name}.md)" in page for name in PAGES)
    assert "| rules |\n" in page  # the last column: which operators have a Meta kernel is not known here
    assert all(re.search(rf'<a id="{name}"></a>`{name}` .*\.md#open-points\)', page) for name in OPEN_POINTS)
    (tmp_path / "conformance.json").write_text('{"npu_rms_norm": {"meta": true}, "npu_swiglu": {"meta": false}}')
    page = sheets.index(tmp_path / "conformance.json", str, "en")
    row = {line.split("]")[0]: line for line in page.splitlines() if line.startswith("| [")}
    assert row[r"| [npu\_rms\_norm"].endswith("| yes |") and row[r"| [npu\_swiglu"].endswith("| no |")
    assert row[r"| [npu\_rotary\_mul"].endswith("|  |")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_of_messages_has_every_entry_with_its_numbers(language):
    page = messages.page(language)
    anchors = re.findall(r"\{ #([\w-]+) \}", page)
    assert anchors == [message.name for message in MESSAGES]
    assert all(message.example in page for message in MESSAGES)
    assert ("21 rows, the last cumulative query length is 20" if language == "en" else "21 行") in page
    assert set(re.findall(r"bugs\.md#(sb-\d+)", page)) <= {bug.lower() for bug in BUGS}
    for target in re.findall(r"\]\(((?:operators|how-to)/[^)#]+)", page):
        assert Path(target).stem in {*PAGES, "index"} or (REPO / "docs" / language / target).is_file(), target
    assert "{" not in re.sub(r"\{ #[\w-]+ \}|```.*?```", "", page, flags=re.DOTALL).replace("{32", "")


# Markdown.


@pytest.mark.parametrize("text", [
    "x1's {x1.dtype}", "[{B}, 1, {S}, {D}]: a | b", "entry j*T + t of *this* and t*K + j", "a_b_ <c> & `d`",
    "sum_j |x| $y$ # z", "[x](y)", "1. not a list", "- no",
])
def test_a_rules_text_stays_what_it_is(text):
    shown = html(table(["a", "b"], [[template(text), "end"]]))
    first, last = re.findall(r"<td>(.*?)</td>", shown)
    assert text_of(first).replace("&#36;", "$") == re.sub(r"[{}]", "", text) and last == "end"
    assert len(re.findall(r"<\w", first)) == text.count("{")  # code alone


def test_code_and_bold_of_a_docstring_stay():
    shown = html(prose("``a * b`` of :func:`f`, **in place**: x * y, `c|d`"))
    assert "<code>a * b</code> of <code>f</code>, <strong>in place</strong>: x * y" in shown
    assert code("a`b") == "`` a`b ``"


def test_a_table_leaves_out_empty_columns():
    assert table(["a", "b", "c"], [["1", "", "x"], ["2", "", ""]]) == "| a | c |\n| --- | --- |\n| 1 | x |\n| 2 |  |"


# Translations.


@pytest.fixture
def yml(tmp_path):
    (tmp_path / "docs/zh").mkdir(parents=True)
    return tmp_path / "docs/zh/contracts.yml"


def test_missing_stale_and_odd_translations_are_named(yml, capsys):
    lines = ['"at most 8 axes": "最多 8 个轴"', '"no such rule": "没有"', '"x1\'s {x1.dtype}": "x1 的类型"']
    yml.write_text("\n".join(lines), encoding="utf-8")
    assert main(["contracts", "--root", str(yml.parents[2])]) == 1
    out = capsys.readouterr().out
    assert "stale: no such rule" in out and "placeholders differ: x1's {x1.dtype}" in out
    assert '"an even D: it holds pairs": ""' in out and '"at most 8 axes"' not in out and "\n# npu_swiglu\n" in out


def test_a_translation_is_shown_and_the_rest_stays_english(yml):
    yml.write_text('"at most 8 axes": "最多 8 个轴"\n', encoding="utf-8")
    chinese = contracts.read(yml)
    page = sheets.page("npu_rms_norm", [], lambda text: chinese.get(text, text), "zh")
    assert "最多 8 个轴" in page and "at most 8 axes" not in page and "the last axes of input" in page


def test_what_is_no_mapping_is_refused(yml):
    yml.write_text("- a\n")
    with pytest.raises(ChapterError, match="expected a mapping"):
        contracts.read(yml)
    assert contracts.read(yml.parent / "none.yml") == {}


def test_every_text_of_the_sheets_is_translated():
    texts, chinese = sheets.texts(REPO), contracts.read(REPO / "docs/zh/contracts.yml")
    assert contracts.missing(texts, chinese) == "" and contracts.problems(texts, chinese) == []

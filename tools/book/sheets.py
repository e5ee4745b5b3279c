"""The contract sheets: a page for each operator and an index, from the operators' own declarations and source."""
import json
import re
from pathlib import Path

from tools.book import operators
from tools.book.chapter import Chapter
from tools.book.contracts import Say
from tools.book.markdown import code, plain, prose, table, template
from trueup.core.messages import MESSAGES
from trueup.core.ops.axes import Axes, Signature
from trueup.core.ops.contract import OPEN_POINTS, OpenPoint
from trueup.core.ops.registry import schemas

LEVELS = ("RELATION", "SIZE", "DTYPE")
MANY_FORMS = 3
_COUNTS = re.compile(r"\b(cumulative|ends?|end offset|lengths?|one for each)\b")
WORDS: dict[str, dict[str, str]] = {
    "en": {
        "operators": "Operators", "schema": "Schema", "tensors": "Tensors", "lengths": "Lengths", "rules": "Rules",
        "open": "Open points", "more": "In this book", "sources": "Sources",
        "index_intro": "Every operator that trueup knows, with the rules it is called under. A sheet is read from the "
                       "source of the checks themselves, so it cannot differ from what is checked. Axis letters are "
                       "those of the [glossary](../glossary.md#axis-letters).",
        "index_head": "operator | used for | rules | shape inference in torch_npu", "yes": "yes", "no": "no",
        "open_intro": "What no document, source or test settles. The contracts take the safe side until a device has "
                      "answered; [what ran where](../what-ran-where.md#only-a-device) has more of this kind.",
        "open_head": "name | question | until then | operators",
        "assume": "To leave the safe side in a block of calls:",
        "also": "Also called as", "form_head": "tensor | axes | ", "form": "Form",
        "written": "written in place", "returned": "returned", "unwritten": "left unwritten",
        "itself": "the argument itself", "where": "where",
        "forms_intro": "The axes depend on the form of the call.",
        "lengths_head": "argument | kind | holds", "list": "host list", "tensor": "tensor",
        "rules_intro": "A call is refused when the code in the third column is true. Its names are the operator's "
                       "arguments; other names stand for what the contract computes on the way, and `each` for each "
                       "argument of the row. Code among the words of a rule stands for what the call has there.",
        "RELATION": "Relations: never off", "SIZE": "Sizes", "DTYPE": "Dtypes",
        "rules_head": "argument | expected | refused when | source | bug | open point | only in",
        "returns": "Returns", "chapters": "Chapters", "bugs": "Bugs", "messages": "Messages of devices",
    },
    "zh": {
        "operators": "算子", "schema": "Schema", "tensors": "张量", "lengths": "长度", "rules": "规则",
        "open": "未决点", "more": "书中相关内容", "sources": "出处",
        "index_intro": "trueup 认识的全部算子，以及调用它们时遵守的规则。契约页直接从检查代码的源码读出，"
                       "所以不会与实际检查的内容不符。"
                       "轴字母见[术语表](../glossary.md#axis-letters)。",
        "index_head": "算子 | 用途 | 规则数 | torch_npu 的形状推断", "yes": "有", "no": "无",
        "open_intro": "文档、源码和测试都没有定论的问题。在设备给出答案之前，契约取安全的一侧；"
                      "[哪些在哪里跑过](../what-ran-where.md#only-a-device)里还有同类的问题。",
        "open_head": "名字 | 问题 | 在此之前 | 算子",
        "assume": "要让一段调用离开安全的一侧：",
        "also": "其他调用方式", "form_head": "张量 | 轴 | ", "form": "形式",
        "written": "原地写入", "returned": "返回", "unwritten": "不写入", "itself": "就是该参数本身", "where": "其中",
        "forms_intro": "各轴取决于调用的形式。",
        "lengths_head": "参数 | 种类 | 内容", "list": "主机列表", "tensor": "张量",
        "rules_intro": "第三列的代码为真时，调用被拒绝。代码中的名字是算子的参数；其他名字是契约在途中算出的量，"
                       "`each` 指该行的每个参数。规则文字中的代码指调用在那里的实际内容。",
        "RELATION": "关系：永远不关闭", "SIZE": "大小", "DTYPE": "数据类型",
        "rules_head": "参数 | 期望 | 何时拒绝 | 出处 | 缺陷 | 未决点 | 仅限",
        "returns": "返回", "chapters": "章节", "bugs": "缺陷", "messages": "设备的报错",
    },
}


def write(root: Path, chapters: list[Chapter], say: Say, language: str) -> None:
    """Write the sheets of one language into docs/<language>/operators."""
    folder = root / "docs" / language / "operators"
    folder.mkdir(parents=True, exist_ok=True)
    made = {f"{name}.md": page(name, chapters, say, language) for name in operators.pages()}
    made["index.md"] = index(root / "docs/conformance.json", say, language)
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


def texts(root: Path) -> dict[str, str]:
    """Every text that is to be translated, and the sheet that it is first on."""
    found: dict[str, str] = {}
    for name in [*operators.pages(), "index"]:

        def say(text: str, name: str = name) -> str:
            found.setdefault(text, name)
            return text

        if name == "index":
            index(root / "docs/conformance.json", say, "zh")
        else:
            page(name, [], say, "zh")
    return found


def index(conformance: Path, say: Say, language: str) -> str:
    """The list of operators, and of the open points."""
    words = WORDS[language]
    known = json.loads(conformance.read_text(encoding="utf-8")) if conformance.is_file() else {}
    rows = []
    for name, names in operators.pages().items():
        meta = known.get(names[0], {}).get("meta")
        rows.append([f"[{plain(name)}]({name}.md)", prose(say(operators.doc(names[0]).first)),
                     str(len(operators.rows(names))), "" if meta is None else words["yes" if meta else "no"]])
    points = [[f'<a id="{point.name}"></a>{code(point.name)}', prose(say(point.question)), prose(say(point.safe)),
               ", ".join(f"[{plain(name)}]({name}.md#open-points)" for name in _sheets_with(point))]
              for point in OPEN_POINTS.values()]
    return "\n\n".join([
        f"# {words['operators']}", words["index_intro"], table(words["index_head"].split(" | "), rows),
        f"## {words['open']} {{ #open-points }}", words["open_intro"], table(words["open_head"].split(" | "), points),
    ]) + "\n"


def _sheets_with(point: OpenPoint) -> list[str]:
    return [name for name, names in operators.pages().items() if point in operators.points(names)]


def page(name: str, chapters: list[Chapter], say: Say, language: str) -> str:
    """One sheet."""
    words, names = WORDS[language], operators.pages()[name]
    doc, rows = operators.doc(names[0]), operators.rows(names)
    parts = [f"# {name}", prose(say(doc.first)), *(prose(say(note)) for note in doc.notes)]
    parts += [f"## {words['schema']} {{ #schema }}", _fence(_broken(schemas()[names[0]]))]
    for other in names[1:]:
        title = f"{words['also']} `{other.replace('::', '.')}`"
        body = f"{prose(say(operators.doc(other).first))}\n\n{_fence(_broken(schemas()[other]))}"
        parts.append(_details(title, body))
    parts += [f"## {words['tensors']} {{ #tensors }}", *_forms(names[0], words)]
    if doc.returns:
        parts.append(f"**{words['returns']}**: {prose(say(doc.returns))}")
    if lengths := operators.lengths(names[0]):
        held = [[code(argument), words[kind], _held(argument, doc, rows, say)] for argument, kind in lengths.items()]
        parts += [f"## {words['lengths']} {{ #lengths }}", table(words["lengths_head"].split(" | "), held)]
    sources = list(dict.fromkeys(row.rule.source for row in rows))
    parts += [f"## {words['rules']} {{ #rules }}", words["rules_intro"]]
    for level in LEVELS:
        if here := [row for row in rows if row.rule.level == level]:
            parts.append(f"### {words[level]} {{ #{level.lower()} }}")
            rules = table(words["rules_head"].split(" | "), [_rule(row, names, sources, say) for row in here])
            parts.append(f'<div class="rules" markdown>\n\n{rules}\n\n</div>')
    if points := operators.points(names):
        parts += [f"## {words['open']} {{ #open-points }}", _open_points(points, say, words)]
    parts += [f"## {words['sources']} {{ #sources }}",
              "\n".join(f'{i}. <a id="source-{i}"></a>{plain(source)}' for i, source in enumerate(sources, 1))]
    if more := _more(name, names, rows, chapters, language):
        parts += [f"## {words['more']} {{ #more }}", more]
    return "\n\n".join(parts) + "\n"


def _held(argument: str, doc: operators.Doc, rows: list[operators.Row], say: Say) -> str:
    """What an argument of lengths holds: its docstring's words, or those of the rules that say how it counts."""
    if argument in doc.arguments:
        return prose(say(doc.arguments[argument]))
    telling = [row.rule.expected for row in rows if argument in row.arguments and _COUNTS.search(row.rule.expected)]
    return "<br>".join(template(say(text)) for text in dict.fromkeys(telling))


def _rule(row: operators.Row, names: tuple[str, ...], sources: list[str], say: Say) -> list[str]:
    number = sources.index(row.rule.source) + 1
    case, point = row.rule.case, row.rule.open_point
    return [
        ", ".join(code(re.sub(r"[{}]", "", argument)) for argument in row.arguments),
        template(say(row.rule.expected)),
        "<br>".join(code(condition) for condition in row.conditions),
        f"[{number}](#source-{number})",
        f"[{case}](../bugs.md#{case.lower()})" if case else "",
        f"[{plain(point)}](#open-points)" if point else "",
        "" if row.operators == names else ", ".join(code(name) for name in row.operators),
    ]


def _forms(name: str, words: dict[str, str]) -> list[str]:
    found = operators.forms(name)
    if len(found) == 1:
        return [_form(found[0].axes, words)]
    parts = [words["forms_intro"]]
    for number, form in enumerate(found, 1):
        title = " / ".join(f"`{chosen}`" for chosen in form.chosen) or f"{words['form']} {number}"
        body = _form(form.axes, words)
        parts += [_details(title, body)] if len(found) > MANY_FORMS else [f"**{title}**", body]
    return parts


def _form(axes: Signature, words: dict[str, str]) -> str:
    rows = [[code(name), _axes(letters), words["written"] if name in axes.written else ""]
            for name, letters in axes.inputs.items()]
    for name, letters in axes.outputs:
        state = "itself" if name in axes.inputs else "unwritten" if name in axes.unwritten else "returned"
        rows.append([f"→ {code(name)}", _axes(letters), words[state]])
    sizes = "".join(f"\n\n{words['where']} " + ", ".join(code(f"{letter} = {value}") for letter, value in [item])
                    for item in axes.sizes.items())
    return table(words["form_head"].split(" | "), rows) + sizes


def _axes(letters: Axes) -> str:
    return ", ".join(map(code, letters)) or "—"


def _open_points(points: list[OpenPoint], say: Say, words: dict[str, str]) -> str:
    rows = [[code(point.name), prose(say(point.question)), prose(say(point.safe))] for point in points]
    example = f"from trueup.core.ops.contract import assume\n\nwith assume({points[0].name!r}):\n    ..."
    return (f"{table(words['open_head'].split(' | ')[:3], rows)}\n\n{words['assume']}\n\n"
            f"{_fence(example.replace(chr(39), chr(34)), 'python')}")


def _more(name: str, names: tuple[str, ...], rows: list[operators.Row], chapters: list[Chapter], language: str) -> str:
    words = WORDS[language]
    called = re.compile("|".join(rf"\b{re.escape(n.rpartition('::')[2].partition('.')[0])}\b" for n in names))
    found: dict[str, list[str]] = {
        "chapters": [f"[{chapter.header['title'][language]}](../chapters/{chapter.name}.md)" for chapter in chapters
                     if any(called.search(cell.source) for cell in chapter.in_language(language))],
        "bugs": [f"[{case}](../bugs.md#{case.lower()})" for case in sorted({row.rule.case or "" for row in rows} - {
        ""})],
        "messages": [f"[{getattr(message.title, language)}](../messages.md#{message.name})" for message in MESSAGES
                     if name in message.sheets],
    }
    separator = {"en": ", ", "zh": "，"}[language]
    return "\n".join(f"- **{words[key]}**: {separator.join(links)}" for key, links in found.items() if links)


def _broken(schema: str) -> str:
    """A long schema with an argument a line."""
    if len(schema) <= 100:
        return schema
    head, _, rest = schema.partition("(")
    arguments, _, returns = rest.rpartition(") -> ")
    lines = re.split(r", (?![^\[(]*[\])])", arguments)
    return f"{head}(\n    " + ",\n    ".join(lines) + f"\n) -> {returns}"


def _fence(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"


def _details(title: str, body: str) -> str:
    indented = "\n".join(f"    {line}" if line else "" for line in body.splitlines())
    return f'??? abstract "{title}"\n\n{indented}'

"""The rules that are read from the source of the contracts, against the source and against the errors themselves."""
import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from random import Random

import pytest

from operators.case import cases, changed, invoke
from trueup.core.explain import explain
from trueup.core.ops.contract import DTYPE, OPEN_POINTS, RELATION, SIZE, Check, ContractError, OpenPoint, profile
from trueup.core.ops.load import load
from trueup.core.ops.reading import contract_source
from trueup.core.ops.reading.rules import Rule, open_points, rules
from trueup.core.ops.reading.sheet import sheet, sheet_of_call
from trueup.core.ops.registry import OPERATORS, Operator

load()
OPS = Path(inspect.getfile(Check)).parent
LOADED = {Path(module.__file__): module for name, module in list(sys.modules.items())
          if name.startswith("trueup.core.ops.") and module.__file__}
WRONG = [pytest.param(name, wrong, id=f"{name}-{wrong.name}") for name, case in sorted(cases().items())
         for wrong in case.wrong]


def checks_in(tree: ast.AST) -> set[int]:
    """Lines of every check.fail, found without following anything."""
    return {node.lineno for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "check.fail"}


def reached(function, seen=None) -> set[tuple[str, int]]:
    """Checks of a function and of all that it hands ``check`` to, by a plain search through names."""
    seen = set() if seen is None else seen
    if function in seen:
        return set()
    seen.add(function)
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    file = Path(inspect.getfile(function)).relative_to(OPS).as_posix()
    found = {(file, line + first - 1) for line in checks_in(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) == "check":
            callee = function.__globals__.get(ast.unparse(node.func))
            if inspect.isfunction(callee) and callee.__module__.startswith("trueup.core.ops"):
                found |= reached(callee, seen)
    return found


FOUND = {name: {(rule.file, rule.line) for rule in rules(name)} for name in OPERATORS}


def test_no_check_is_lost():
    written = {(file.relative_to(OPS).as_posix(), line) for file in LOADED
               for line in checks_in(ast.parse(file.read_text(encoding="utf-8")))}
    assert len(written) > 100
    assert written == set().union(*FOUND.values())


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_an_operator_has_the_rules_that_its_contract_reaches(name):
    found, may = FOUND[name], reached(OPERATORS[name].contract)
    assert found <= may
    # What it does not reach lies in helpers, behind a parameter that only other operators set.
    assert may - found <= set().union(*(lines for other, lines in FOUND.items() if other != name))


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_rule_can_be_read_by_itself(name):
    for rule in rules(name):
        assert rule.level in ("RELATION", "SIZE", "DTYPE")
        assert rule.argument and rule.source and rule.condition != "True", rule
        assert re.search(r"\w", re.sub(r"\{[^}]*\}", "", rule.expected)), rule
        assert rule.open_point is None or rule.open_point in OPEN_POINTS
        ast.parse(rule.condition, mode="eval")


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_an_error_comes_from_one_of_the_rules_and_explain_finds_it(name, wrong):
    call = changed((wrong.of or cases()[name].legal)(Random(1)), wrong.change)
    with profile("device"), pytest.raises(ContractError) as error:
        invoke(OPERATORS[name], name, call)
    e = error.value
    matching = [rule for rule in rules(name) if rule.states(e.argument, e.rule, e.expected)]
    assert matching
    assert (e.case, e.open_point) in {(rule.case, rule.open_point) for rule in matching}
    [found] = explain(str(e))
    pages = [text for label, text in found.rows if label == "read"]
    assert pages == [f"operators/{sheet(name)}/", *([f"bugs/#{e.case.lower()}"] if e.case else [])]
    assert dict(found.rows)["refused when"] in {rule.condition for rule in matching}


def test_every_open_point_is_one_of_an_operator():
    assert set().union(*map(open_points, OPERATORS)) == set(OPEN_POINTS.values())


@pytest.mark.parametrize(("name", "points"), [
    ("npu_scatter_pa_kv_cache", {"scatter-minus-one", "scatter-mixed-dtypes"}),  # of its rules
    ("npu_sparse_flash_attention", {"rows-past-the-end", "sfa-empty-row"}),  # a helper of its kernel asks; declared
    ("npu_quant_lightning_indexer", {"rows-past-the-end", "li-tie-order"}),
    ("npu_rms_norm", set()),
])
def test_open_points_of_rules_of_the_kernel_and_those_declared(name, points):
    assert {point.name for point in open_points(name)} == points


# How it reads: contracts made for the purpose.

PAGE = "a page"
MOST = 8
SIZES = (1, 2, 4)
POINT = OpenPoint("only-in-a-test", "Does it?", "no")


def _helper(check, argument, tensor, width, *, least=1):
    for name, size in (("rows", tensor.shape[0]), ("columns", width)):
        if size < least:
            check.fail(SIZE, f"{argument}.{name}", size, f"at least {least} {name}", PAGE)


def _contract(check, x, y, mode=0, **rest):
    if mode not in SIZES:
        check.fail(RELATION, "mode", mode, f"one of {SIZES}", PAGE, "SB-01")
        return
    T, H = x.shape
    if y is None:
        return
    for name, value in rest.items():
        if value is not None:
            check.fail(RELATION, name, value, "None", PAGE)
    advice = f": cut it to {T} rows" if mode == 1 else ""
    if len(y) != T:
        check.fail(RELATION, "y", len(y), f"{T} rows, as x {list(x.shape)}" + advice, PAGE, unless=POINT)
    if T > MOST:
        check.fail(SIZE if H else DTYPE, "x", T, f"at most {MOST}", PAGE)
    _helper(check, "x", x, H, least=2)


@pytest.fixture
def made(monkeypatch):
    schema = "npu::npu_made(Tensor x, Tensor? y, int mode=0, Tensor? scale=None) -> Tensor"
    monkeypatch.setitem(OPERATORS, "npu_made", Operator("npu_made", _contract, print, "x [T H] -> y [T]", ({},)))
    monkeypatch.setattr("trueup.core.ops.reading.rules.schemas", lambda: {"npu_made": schema})
    monkeypatch.setattr("trueup.core.ops.reading.rules.OPERATORS", OPERATORS)
    # Helpers are followed inside trueup.core.ops only.
    monkeypatch.setattr(_helper, "__module__", "trueup.core.ops.test")
    yield rules("npu_made")
    rules.cache_clear()
    contract_source._tree.cache_clear()


def test_conditions_texts_loops_and_helpers(made):
    said = [(r.argument, r.level, r.expected, r.condition) for r in made]
    assert said == [
        ("mode", "RELATION", "one of (1, 2, 4)", "mode not in (1, 2, 4)"),
        ("scale", "RELATION", "None", "y is not None and scale is not None"),
        ("y", "RELATION", "{T} rows, as x {x.shape}: cut it to {T} rows",
         "y is not None and len(y) != T and (mode == 1)"),
        ("y", "RELATION", "{T} rows, as x {x.shape}", "y is not None and len(y) != T and (mode != 1)"),
        ("x", "SIZE", "at most 8", "y is not None and T > 8 and H"),
        ("x", "DTYPE", "at most 8", "y is not None and T > 8 and (not H)"),
        ("x.rows", "SIZE", "at least 2 rows", "y is not None and x.shape[0] < 2"),
        ("x.columns", "SIZE", "at least 2 columns", "y is not None and H < 2"),
    ]
    assert [r.case for r in made][:2] == ["SB-01", None]
    assert {r.open_point for r in made} == {None, "only-in-a-test"}
    assert {r.source for r in made} == {PAGE}
    line = inspect.getsourcelines(_helper)[1] + 3
    assert (made[-1].file, made[-1].line) == ("test_rules.py", line)


def test_a_rule_knows_its_own_errors():
    rule = Rule("lse[{i}]", "DTYPE", "{x.dtype}, as (x)", "", "", None, None, "", 1)
    assert rule.states("lse[3]", "DTYPE", "torch.int8, as (x)")
    assert not rule.states("lse", "DTYPE", "torch.int8, as (x)")
    assert not rule.states("lse[3]", "SIZE", "torch.int8, as (x)")
    assert not rule.states("lse[3]", "DTYPE", "torch.int8, as y")


@pytest.mark.parametrize(("name", "expected"), [
    ("npu_x", "npu_x"), ("npu_x.out", "npu_x"), ("npu_x_functional", "npu_x"), ("npu_x_.acl_format", "npu_x"),
    ("npu_x_v2", "npu_x_v2"), ("atb::_npu_x", "_npu_x"), ("_npu_x_v2_get_max_workspace", "npu_x_v2"),
])
def test_what_shares_a_sheet(name, expected):
    assert sheet(name) == expected


@pytest.mark.parametrize(("call", "expected"), [
    ("aclnnFusedInferAttentionScoreV3", "npu_fused_infer_attention_score"), ("aclnnRmsNorm", "npu_rms_norm"),
    ("aclnnMoeInitRoutingV2", "npu_moe_init_routing_v2"), ("aclnnRotaryPositionEmbedding", "npu_rotary_mul"),
    ("aclnnAdd", None),
])
def test_the_sheet_of_what_cann_calls(call, expected):
    assert sheet_of_call(call) == expected


def test_an_unknown_operator_is_refused():
    with pytest.raises(ValueError, match=r"npu_nope.*npu_rms_norm"):
        rules("npu_nope")

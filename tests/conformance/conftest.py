"""Prints what was compared with the real torch_npu, as one table, when the tests are over."""
from collections.abc import Callable, Iterator

import pytest

from trueup.core.ops.registry import OPERATORS, schemas

FOUND = pytest.StashKey[list[dict]]()
LINE = "{:<54} {:>6} {:>6} {:>7} {:>8} {:>8}  {}"


@pytest.fixture(scope="session")
def record_conformance(pytestconfig: pytest.Config) -> Callable[[dict], None]:
    """Hand in what probe.py saved over the real torch_npu."""
    found = pytestconfig.stash.setdefault(FOUND, [])
    return found.append


def lines(found: dict) -> Iterator[str]:
    yield LINE.format("operator", "schema", "calls", "shapes", "changed", "refused", "")
    for name in sorted(schemas()):
        schema = "differs" if name in found["differences"] else "equal"
        row = found["rows"].get(name)
        if row is None:
            what = "" if name in OPERATORS else "no kernel of ours: schema only"
            yield LINE.format(name, schema, "-", "-", "-", "-", what)
            continue
        same = f"{row['calls'] - len(row['mismatches'])}" if row["meta"] else "-"
        what = "; ".join(row["mismatches"][:1] + row["faults"][:1]) or ("" if row["meta"] else "no Meta kernel")
        yield LINE.format(name, schema, row["calls"], same, row["changed"], row["refused"], what)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for found in config.stash.get(FOUND, []):
        terminalreporter.section("conformance with torch_npu 2.13.0")
        terminalreporter.write_line("shapes: of the legal calls, those whose results have Meta's shapes and dtypes")
        terminalreporter.write_line("refused: of the calls with something changed, those that Meta refuses; so do we")
        for line in lines(found):
            terminalreporter.write_line(line)

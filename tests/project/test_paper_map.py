"""docs/paper-map.md: every numbered requirement resolves to code and to a test, or says that it is open."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "paper-map.md").read_text().splitlines()
    if re.match(r"\| *\d+ *\|", line)
]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_every_requirement_has_one_row():
    assert [int(row[0]) for row in ROWS] == list(range(1, 61))


@pytest.mark.parametrize("row", [r for r in ROWS if r[2] != "open"], ids=lambda r: r[0])
def test_code_and_tests_of_a_row_exist(row):
    code, tests = names(row[2]), names(row[3])
    assert code and tests
    for name in code:
        if name.startswith("docs/"):
            assert (ROOT / name.split("#")[0]).exists()
            continue
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module("fedsieve." + ".".join(parts[:cut]))
                break
            except ModuleNotFoundError:
                continue
        else:
            pytest.fail(f"no module in {name}")
        for attribute in parts[cut:]:
            found = getattr(found, attribute, None) or found.__dataclass_fields__[attribute]
    for name in tests:
        file, function = name.split("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert function in functions, name

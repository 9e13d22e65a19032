"""Names of a stranger in what is printed and written: no markup, no commands to the terminal, no formulas."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from fedsieve.cli.main import main
from fedsieve.formatting import PlainConsole, escape_controls, spreadsheet_cell
from fedsieve.models.predict import write_predictions
from fedsieve.objectives.losses import Loss
from helpers.models import linear_model, with_feature_names

HOSTILE_NAMES = ["mass [kg]", "x[/b]", "[red]", ":smile:", "\x1b[2Jcleared", "\u202ereversed", "$\\frac{"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_column_names_are_printed_as_they_are(folder, capsys):
    x = np.random.default_rng(0).standard_normal((80, len(HOSTILE_NAMES)))
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([[*HOSTILE_NAMES, "y"], *([*row, row.sum()] for row in x)])
    words = ["train", "--task", "file", "--data.path", "rows.csv", "--federation.clients", "4", "--rounds", "3", "--density", "1"]
    assert main([*words, "--out", "run"]) == 0
    assert main(["inspect", "run"]) == 0
    assert main(["predict", "run", "rows.csv"]) == 0  # ignores the column y, and names it
    (folder / "run" / "model.safetensors").unlink()
    said = capsys.readouterr()
    for name in HOSTILE_NAMES:
        assert escape_controls(name) in said.out
    assert "\x1b[2J" not in said.out + said.err and "\u202e" not in said.out + said.err


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_an_error_with_such_a_name_is_one_plain_line(name, folder, capsys):
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([[name, "y"], ["word", 1], ["word", 2]])
    assert main(["train", "--task", "file", "--data.path", "rows.csv"]) == 2
    assert f"column {escape_controls(name)} is 'word'" in capsys.readouterr().err


def test_tables_and_their_titles_hold_no_markup():
    from rich.table import Table

    out = io.StringIO()
    table = Table("[bold]head[/bold]", title="[/x]")
    table.add_row("a[/b]\x1b]0;title\x07")
    PlainConsole(file=out, width=60).print(table)
    assert "[bold]head[/bold]" in out.getvalue() and "[/x]" in out.getvalue() and "a[/b]\\x1b]0;title\\x07" in out.getvalue()


@pytest.mark.parametrize("loss", [Loss.SOFTMAX, Loss.MULTILABEL])
@pytest.mark.parametrize("probabilities", [False, True])
def test_class_names_are_no_formulas_in_a_spreadsheet(loss, probabilities):
    names = ("=cmd|' /C calc'!A0", "@SUM(1)", "+1+2", "-2+3", "\t=1", "-1")
    model = linear_model(loss, features=3, outputs=len(names))
    metadata = replace(model.metadata, classes=names)
    out = io.StringIO()
    write_predictions(out, metadata, 9 * np.eye(len(names), dtype=np.float32), probabilities=probabilities)
    cells = {cell for row in csv.reader(io.StringIO(out.getvalue())) for cell in row}
    assert {f"'{name}" for name in names[:-1]} <= cells
    assert "-1" in cells  # the label is a number
    assert not cells & set(names[:-1])


def test_numbers_and_other_names_stay_as_they_are():
    assert [spreadsheet_cell(text) for text in ("-1", "+2.5", "-inf", "a=b", "", "x-1")] == ["-1", "+2.5", "-inf", "a=b", "", "x-1"]


def test_json_output_keeps_the_names(folder, write_model, capsys):
    model = with_feature_names(linear_model(Loss.SQUARED, 2, density=1), "x[/b]", "=1")
    assert main(["inspect", str(write_model(model)), "--json"]) == 0
    assert "x[/b]" in json.dumps(json.loads(capsys.readouterr().out)["strongest"])

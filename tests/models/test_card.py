"""The card beside a model states the facts of its run."""

import json
from dataclasses import replace

import pytest

from fedsieve.cli.main import main
from fedsieve.formatting import format_bytes
from fedsieve.models.card import model_card
from fedsieve.models.sparse_model import read_model
from fedsieve.objectives.losses import Loss
from helpers.models import linear_model

RESULT = {"rounds": 3, "seed": 7, "bytes_up": 1000, "bytes_down": 2000, "asked": 6, "replied": 5}


@pytest.mark.usefixtures("few_test_rows")
def test_a_run_writes_a_card_with_the_facts_of_its_result(tmp_path):
    folder = tmp_path / "run"
    small = ["--data.num-examples", "300", "--data.num-features", "40", "--density", "0.1", "--federation.clients", "10"]
    assert main(["train", *small, "--rounds", "2", "--seed", "3", "--quiet", "--out", str(folder)]) == 0
    card, result, model = (folder / "MODEL_CARD.md").read_text(), json.loads((folder / "result.json").read_text()), read_model(folder)
    for text in (result["data"], f"{model.num_nonzero} of 40 weights", f"{result['value']:.4f}", "2 rounds, seed 3", "`sieve`"):
        assert text in card
    assert f"{format_bytes(result['bytes_up'])} up, {format_bytes(result['bytes_down'])} down" in card


def test_a_card_without_test_examples_says_that_nothing_was_measured():
    card = model_card(linear_model(Loss.SQUARED, 5), RESULT, {})
    assert "not measured" in card and "the server saw none of them" in card and "5 of 6 were received" in card


def test_a_private_run_states_its_guarantee():
    card = model_card(linear_model(Loss.SQUARED, 5), {**RESULT, "epsilon": 2.5, "delta": 1e-5}, {"r2": 0.5})
    assert "epsilon 2.5" in card and "1e-05" in card


def test_the_name_of_a_class_is_no_markup_and_stays_in_its_row():
    model = linear_model(Loss.LOGISTIC, 5)
    named = replace(model, metadata=replace(model.metadata, classes=("a|b\n# title", "<script>\x1b[31m")))
    card = model_card(named, RESULT, {})
    assert "\\|" in card and "<script>" not in card and "\x1b" not in card and "\n# title" not in card

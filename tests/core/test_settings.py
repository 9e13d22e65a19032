"""One converter: a setting has the same value as text on the command line and as a plain value of TOML, JSON or a run config."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Literal

import pytest

from fedsieve.core.settings import build_settings, field_types, flatten, parse_settings, parse_value


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Example:
    size: int | Literal["all"] = 1
    colour: Colour | None = None
    where: Path | None = None


@pytest.mark.parametrize(
    ("type_hint", "text", "plain", "expected"),
    [
        (int, "12", 12, 12),
        (float, "0.1", 0.1, 0.1),
        (float, "3", 3, 3.0),
        (float, "inf", inf, inf),
        (float | None, "none", None, None),
        (bool, "true", True, True),
        (bool, "false", False, False),
        (str, "word", "word", "word"),
        (Path, "a/b", "a/b", Path("a/b")),
        (Colour, "blue", Colour.BLUE, Colour.BLUE),
        (Literal[32, 16], "16", 16, 16),
        (int | Literal["all"], "all", "all", "all"),
        (int | Literal["all"], "64", 64, 64),
    ],
)
def test_text_and_plain_value_give_the_same_setting(type_hint, text, plain, expected):
    for value in (text, plain):
        found = parse_value(type_hint, value, "x")
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("type_hint", "value", "message"),
    [
        (int, 2.5, "x takes a whole number; got 2.5"),
        (int, True, "x takes a whole number; got true"),
        (int, None, "x takes a whole number; got none"),
        (float, [1.0], "x takes a number; got [1.0]"),
        (str, ["a"], 'x takes a word; got ["a"]'),
        (str, "", "x takes a word; got no value"),
        (bool, 1, "x takes true or false; got 1"),
        (Colour | None, "blu", "x takes red, blue; got blu; did you mean blue?"),
        (int | Literal["all"], "al", "x takes a whole number or all; got al; did you mean all?"),
    ],
)
def test_a_value_of_another_type_is_refused_with_rule_and_value(type_hint, value, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        parse_value(type_hint, value, "x")
    assert str(error.value) == message


def test_settings_are_built_from_their_section():
    types = {"seed": int} | field_types(Example, section="data")
    parsed = parse_settings(types, {"seed": "3", **flatten({"data": {"size": "all", "colour": None, "where": "x"}})})
    assert parsed == {"seed": 3, "data.size": "all", "data.where": Path("x")}
    assert build_settings(Example, parsed, "data") == Example(size="all", where=Path("x"))


def test_an_unknown_setting_is_refused_with_the_nearest_one():
    types = {"seed": int, "best_size": int} | field_types(Example, section="data")
    for key, near in {"sed": "--seed", "data.siez": "--data.size", "colour": "--data.colour", "seed.size": "--data.size"}.items():
        with pytest.raises(ValueError, match=f"--{key} is unknown; did you mean {near}"):
            parse_settings(types, {key: 1}, "--")
    with pytest.raises(ValueError, match=r"--data.far is unknown; there are --data.size, --data.colour, --data.where"):
        parse_settings(types, {"data.far": 1}, "--")

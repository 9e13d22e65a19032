"""The list of mutants that survive names mutants of today's sources."""

import tomllib
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def test_every_listed_survivor_is_a_mutant(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    mutants, mutation = __import__("mutants"), __import__("mutation")
    entries = tomllib.loads((TOOLS / "mutation_survivors.toml").read_text())["survivor"]
    every = [mutant._asdict() for module in dict.fromkeys(entry["module"] for entry in entries) for mutant in mutants.mutants_of(module)]
    assert {entry["module"] for entry in entries} <= mutation.TESTS.keys()
    for entry in entries:
        fields = {name: value for name, value in entry.items() if name != "reason"}
        assert any(fields.items() <= mutant.items() for mutant in every), f"no mutant has these fields: {fields}"

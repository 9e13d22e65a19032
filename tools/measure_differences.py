"""Measure each difference between the recipes: `python tools/measure_differences.py reports/differences`.

Every option in which the recommended recipe differs from the paper's takes the paper's value, alone or together with those that it needs,
on LR, LG and MC with seeds 100 and 101. Writes docs/data/differences.csv and the table of docs/differences.md. Runs in the folder are
reused.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from fedsieve.core.settings import flatten
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.studies import results
from fedsieve.studies.compute import Condition, Study, compute_study

DOCS = Path(__file__).resolve().parent.parent / "docs"
CSV, PAGE = DOCS / "data" / "differences.csv", DOCS / "differences.md"
BEGIN, END = "<!-- differences -->\n", "<!-- /differences -->\n"
ALGORITHMS = {"flops": "FLoPS", "flops-pa": "FLoPS-PA"}
TASKS = ("lr", "lg", "mc")
SEEDS = (100, 101)
UNSET = "not set"
"""The value of an option whose default is computed from others."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What the paper says about an option, why our default is another, and what the measured runs need beside it."""

    paper: str
    reason: str
    together: str = ""
    """an option that takes the paper's value too: neither has an effect, or a meaning, without the other"""
    given: str = ""
    """an option of FLoPS-PA that has the paper's value in both runs of the comparison"""


GATES = "algorithm.gate-encoding"
DIFFERENCES = {
    "federation.client-weighting": Difference(
        paper="w_k = 1/K (L138)", reason="one client with five examples counts as much as one with 500 (D1)"
    ),
    "federation.max-norm-ratio": Difference(paper="no such rule", reason="one malicious reply would decide the mean (D13)"),
    "algorithm.batch-sampling": Difference(
        paper="each batch is drawn at random (L138, L161)", reason="every example is used equally often (D2)"
    ),
    "algorithm.bits": Difference(
        paper="not stated; we take float32", reason="a quarter of the bytes or less; log_alpha of FLoPS-PA has 4 bits (E3)"
    ),
    "algorithm.final-learning-rate-fraction": Difference(
        paper="constant learning rates (L140)", reason="the last rounds average out the noise of gates and batches"
    ),
    "algorithm.server-optimizer": Difference(
        paper="theta~ - eta g (L138)",
        reason="no learning rate in the paper's range suits LR, LG and MC",
        together="algorithm.server-learning-rate",
    ),
    "algorithm.server-learning-rate": Difference(
        paper="from 1e-3 to .1 (L140); the value is our choice (C8)",
        reason="a step of Adam does not depend on the scale of the loss",
        together="algorithm.server-optimizer",
    ),
    "algorithm.step-rule": Difference(
        paper="SGD (L198)", reason="no constant rate suits LR, LG and MC", together="algorithm.learning-rate"
    ),
    "algorithm.learning-rate": Difference(
        paper="from 1e-4 to .1 (L303); the value is our choice (C8)",
        reason="a factor of Polyak's step suits every task",
        together="algorithm.step-rule",
    ),
    "algorithm.gate-rate": Difference(
        paper="from 1e-4 (FLoPS-PA 1e-5) to .1 (L140, L303); the value is our choice (C8)",
        reason="higher rates follow the noise of batches",
    ),
    "algorithm.test-gate": Difference(
        paper="without noise and smoothing (L128)", reason="the median is 0 exactly if P(z != 0) is below 1/2 (A5)"
    ),
    "algorithm.constraint-scale": Difference(
        paper="lambda / abs(theta) sum P (L74, L109)",
        reason="with the mean the multiplier never moves a gate (B1)",
        together="algorithm.dual-rate",
    ),
    "algorithm.dual-rate": Difference(
        paper="1/abs(theta) per exchange (L140), .1/abs(theta) per round (L303)",
        reason="5e-4 per round if it is not set (B1)",
        together="algorithm.constraint-scale",
    ),
    "algorithm.log-alpha-scaling": Difference(
        paper="(1 +- r) log_alpha (L155-157)",
        reason="the literal form never closes an open gate; linear reaches the limits in the last round (C1)",
    ),
    "algorithm.log-alpha-scaling-rate": Difference(
        paper="not stated; the value is our choice (C8)",
        reason="only the literal form has a rate",
        together="algorithm.log-alpha-scaling",
    ),
    "algorithm.scaling-start": Difference(
        paper="FLoPS: not stated (C8); FLoPS-PA: from epoch zero (L171)",
        reason="gates that close early fix the support too soon (C2)",
    ),
    "algorithm.density-schedule": Difference(
        paper="top m from the first message (L171)",
        reason="the first rounds select wrong weights; from nine times m, at most 45 %, until 80 % of the rounds (E11)",
    ),
    "algorithm.log-alpha-limit": Difference(paper="none", reason="keeps log_alpha finite and reachable (A7)", given=GATES),
    "algorithm.initial-gate-probability": Difference(paper="not stated; the value is our choice (C8)", reason="gates start open (E9)"),
    GATES: Difference(paper="z of the top m, mean z of the rest (L171)", reason="fewer bytes, and nothing is lost by an inverse (E3)"),
    "algorithm.min-default-gate": Difference(
        paper="the mean z of the rest (L171)", reason="at exactly 0 the support never changes again (E4)", given=GATES
    ),
    "algorithm.residual-decay": Difference(paper="nothing kept", reason="weights left out of a broadcast are not lost (E5)"),
}
"""By option, in the order of the table."""


@cache
def resolved_settings(algorithm: str, recipe: str, task: str) -> dict[str, Any]:
    """Return all settings of a run with a recipe, by option."""
    run = resolve(RunConfig(task=task, algorithm_name=algorithm, algorithm={"recipe": recipe}))
    return {key.replace("_", "-"): value for key, value in flatten(run.settings_dict).items() if key != "algorithm.recipe"}


def differing_options(algorithm: str) -> list[str]:
    """Return the options in which the recipes differ on any task: those of the table in its order, then others."""
    found = set()
    for task in TASKS:
        paper, ours = (resolved_settings(algorithm, recipe, task) for recipe in ("paper", "recommended"))
        found |= {key for key in paper | ours if paper.get(key) != ours.get(key)}
    return [*(option for option in DIFFERENCES if option in found), *sorted(found - DIFFERENCES.keys())]


def paper_values(algorithm: str, task: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the paper's values of those options in which the recipes differ."""
    values = resolved_settings(algorithm, "paper", task)
    return {option: values[option] for option in options if option in differing_options(algorithm)}


def measured_runs(algorithm: str, option: str, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the run with the paper's value, and of the run that it is compared with."""
    difference = DIFFERENCES[option]
    given = paper_values(algorithm, task, [difference.given])
    return given | paper_values(algorithm, task, [option, difference.together]), given


def build_study() -> Study:
    """Return every run of the table. Options with the same runs share them."""
    wanted: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for algorithm, task in product(ALGORITHMS, TASKS):
        for option in differing_options(algorithm):
            for options in measured_runs(algorithm, option, task):
                wanted[run_label(algorithm, task, options)] = (algorithm, task, options)
    conditions = [
        Condition(
            label={"task": task, "run": label},
            config_for_seed=lambda seed, case=(algorithm, task, options): make_config(*case, seed),
            seeds=SEEDS,
        )
        for label, (algorithm, task, options) in wanted.items()
    ]
    return Study(name="differences", description="one option restored to the paper's value", conditions=conditions, scale="short")


def make_config(algorithm: str, task: str, options: Mapping[str, Any], seed: int) -> RunConfig:
    """Return a run with our defaults and these options."""
    sections: dict[str, dict[str, Any]] = {"algorithm": {}, "federation": {}}
    for option, value in options.items():
        section, name = option.split(".")
        sections[section][name.replace("-", "_")] = value
    default = RunConfig().federation
    federation = type(default)(**sections["federation"])
    return RunConfig(task=task, algorithm_name=algorithm, seed=seed, algorithm=sections["algorithm"], federation=federation)


def run_label(algorithm: str, task: str, options: Mapping[str, Any]) -> str:
    """Return the words of the command that computes a run."""
    return " ".join([f"--task {task} --algorithm {algorithm}", *(f"--{option} {value}" for option, value in options.items())])


def measured_rows(stored: Sequence[results.Row]) -> list[dict[str, str]]:
    """Return one row per option, algorithm and task: both values, and the change of the metric on each seed."""
    values = {(row["label"]["run"], row["seed"]): row["values"].get("value") for row in stored}
    rows = []
    for algorithm in ALGORITHMS:
        for option, task in product(differing_options(algorithm), TASKS):
            row = {"option": option, "algorithm": algorithm, "task": task} | shown_values(algorithm, option, task)
            labels = [run_label(algorithm, task, options) for options in measured_runs(algorithm, option, task)]
            for seed in SEEDS:
                changed, base = (values[label, seed] for label in labels)
                row[f"seed {seed}"] = "diverged" if changed is None or base is None else f"{changed - base:.4f}"
            rows.append(row)
    return rows


def shown_values(algorithm: str, option: str, task: str) -> dict[str, str]:
    """Return the paper's value and ours as text."""
    pair = (resolved_settings(algorithm, recipe, task).get(option, UNSET) for recipe in ("paper", "recommended"))
    return dict(zip(("paper", "ours"), (f"{value:.4g}" if isinstance(value, float) else str(value) for value in pair), strict=True))


def render_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table of the page."""
    lines = ["| option and the paper's value | of | the paper | our default | why | worth on LR, LG, MC |", "|---|---|---|---|---|---|"]
    for option in dict.fromkeys(row["option"] for row in sorted(rows, key=lambda row: [*DIFFERENCES].index(row["option"]))):
        found = [row for row in rows if row["option"] == option]
        difference, names = DIFFERENCES[option], list(dict.fromkeys(row["algorithm"] for row in found))
        papers = {row["paper"] for row in found}
        setting = f"`--{option} {papers.pop()}`" if len(papers) == 1 else f"`--{option}` {list_values(found, 'paper')}"
        worth = "; ".join(format_worth([row for row in found if row["algorithm"] == name]) for name in names)
        beside = difference.together or difference.given
        note = f", with `--{beside}`" if any(beside in differing_options(name) for name in names) else ""
        cells = [setting, ", ".join(ALGORITHMS[name] for name in names), difference.paper, list_values(found, "ours"), difference.reason]
        lines.append(f"| {' | '.join([*cells, worth + note])} |")
    return "\n".join(lines) + "\n"


def list_values(found: Sequence[Mapping[str, str]], column: str) -> str:
    """Return one value, or which algorithm has which value on which tasks."""
    if len({row[column] for row in found}) == 1:
        return found[0][column]
    parts = []
    for name in dict.fromkeys(row["algorithm"] for row in found):
        own = [row for row in found if row["algorithm"] == name]
        by_value: dict[str, list[str]] = {}
        for row in own:
            by_value.setdefault(row[column], []).append(row["task"].upper())
        values = ", ".join(value if len(by_value) == 1 else f"{value} ({' and '.join(tasks)})" for value, tasks in by_value.items())
        parts.append(values if len({row["algorithm"] for row in found}) == 1 else f"{ALGORITHMS[name]} {values}")
    return "; ".join(parts)


def format_worth(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the mean change over the seeds on each task, after the name of the algorithm."""
    cells = []
    for task in TASKS:
        (row,) = (row for row in rows if row["task"] == task)
        texts = [row[f"seed {seed}"] for seed in SEEDS]
        cells.append("diverged" if "diverged" in texts else f"{mean(map(float, texts)):+.3f}".replace("0.", "."))
    return f"{ALGORITHMS[rows[0]['algorithm']]} {', '.join(cells)}"


def read_rows() -> list[dict[str, str]]:
    """Return the stored rows."""
    return list(csv.DictReader(CSV.read_text().splitlines()))


def insert_table(page: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page with another table between its marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{render_table(rows)}\n{END}{rest.split(END)[1]}"


def main(folder: Path) -> None:
    """Compute the runs, and write the file and the page."""
    rows = measured_rows(compute_study(build_study(), folder, workers=2))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(insert_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

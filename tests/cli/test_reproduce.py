"""`fedsieve reproduce`: all of it once in small, its numbers against the paper's cells, misses shown as misses."""

import json
import subprocess
import sys
from itertools import product

import pytest

from fedsieve.cli.main import main
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.report import paper, tables
from fedsieve.studies.catalog import PAPER_STUDIES, STUDIES
from fedsieve.studies.compute import list_jobs
from fedsieve.studies.registry import BUILDERS, TUNED_STUDIES
from fedsieve.studies.scale import SCALES, ScaleName
from helpers.rows import cells, row

LATEX = {
    230: r"LR & 0.05 & 1.00 & 0.05 & 0.18 & 0.91  & 4.62 & 0.85 & 7.65 & 0.16 & 42.57 \\",
    232: r"LG & 0.05 & 0.94 & 0.11 & 0.11 & 0.90 & 0.32 & 0.83 & 0.56 & 0.63 & 0.88 \\",
    234: r"MC & 0.05 & 0.99 & 0.38 & 0.51 & 0.68 & 0.82 & 0.52 & 2.25 & 0.24 & 2.24 \\",
    261: r" & 0.95 & 0.83 & 0.98 & 0.86 & 0.97 & 0.69 &0.96 & 0.74 & 0.96\\",
    262: r" & 0.05 & 0.90 & 1.00 & 0.37 & 0.37 & 0.91 & 1.00 & 0.27 & 0.18\\",
    265: r" & 0.95 & 0.87 & 0.96 & 0.87 & 0.96 & 0.85 & 0.95 & 0.81 & 0.96 \\",
    266: r" & 0.05 & 0.89 & 0.96 & 0.70 & 0.22 & 0.90 & 0.94 & 0.65 & 0.11 \\",
    269: r" & 0.95 & 0.52 & 1.00 & 0.53 & 1.00 & 0.50 & 1 & 0.50 & 1.00\\",
    270: r" & 0.05 & 0.71 & 0.99 & 0.28 & 0.51 & 0.68 & 0.99 & 0.24 & 0.5 \\",
}
"""The rows of Tables 1 and 2 as they stand in the paper's source."""


@pytest.mark.parametrize("line", LATEX)
def test_published_numbers_are_those_of_the_papers_source(line):
    _, density, *cells = LATEX[line].removesuffix(r"\\").split("&")
    found = [cell for cell in paper.CELLS if cell.source_line == line]
    assert [cell.value for cell in found] == [float(cell) for cell in cells]
    assert {cell.true_density for cell in found} == {float(density)}


def test_every_published_cell_has_a_cell_in_its_study():
    for name in ("table-1", "table-2"):
        labels = [cell.label for cell in BUILDERS[name](SCALES[ScaleName.SHORT]).conditions]
        for cell in paper.table_cells(name):
            wanted = {
                "task": cell.task,
                "algorithm": cell.algorithm,
                "target": cell.target_density,
                "truth": cell.true_density,
                "skew": cell.skew,
            }
            assert any(all(label[key] == value for key, value in wanted.items()) for label in labels), cell


@pytest.mark.parametrize("scale", [pytest.param(scale, marks=[pytest.mark.long] * (scale is ScaleName.PAPER)) for scale in ScaleName])
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_built_at_every_scale(name, scale):
    if name in TUNED_STUDIES:
        trials, _, build = TUNED_STUDIES[name]
        places = {f"{cell.label['task']} {cell.label['algorithm']}": {} for cell in trials(SCALES[scale]).conditions}
        jobs = list_jobs(build(SCALES[scale], places))
    else:
        jobs = list_jobs(BUILDERS[name](SCALES[scale]))
    assert jobs
    assert all(job.settings["seed"] < 100 for job in jobs), "seeds from 100 were used for tuning"


@pytest.mark.long
def test_the_whole_paper_in_small(tmp_path):
    words = [sys.executable, "-m", "fedsieve", "reproduce", "all", "--scale", "smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False
    )  # without this suite's shape checks, which cost most of the time
    assert done.returncode == 0, done.stderr
    for name in PAPER_STUDIES:
        assert (tmp_path / name / "table.md").read_text().startswith("# ")
        assert (tmp_path / name / "table.csv").read_text()
        assert list((tmp_path / name).glob("*.png")) and list((tmp_path / name).glob("*.pdf"))
    assert "stand-in" in (tmp_path / "real-data" / "table.md").read_text()
    judged = json.loads((tmp_path / "claims.json").read_text())
    assert [(claim["number"], claim["recipe"]) for claim in judged["claims"]] == list(product(range(51, 60), ("paper", "recommended")))
    assert "generated: 200 training and 10,000 test examples" in judged["data"]
    assert "1,437 training and 360 test examples" in (tmp_path / "real-data" / "table.md").read_text()
    assert "no number means anything" in done.stdout


def test_list_needs_no_torch_and_names_every_study():
    code = "import sys; from fedsieve.cli.main import main; sys.exit(main(['reproduce', 'list']) or ('torch' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in STUDIES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reproduce", "table-3"], "table-3"),
        (["reproduce", "iou", "--scale", "huge"], "huge"),
        (["reproduce", "iou", "--scale", "smoke", "--jobs", "0"], "--jobs"),
        (["reproduce", "iou", "--scale", "smoke", "--out", "/dev/null/x"], "--out"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("scale", "densities"),
    [
        (ScaleName.SHORT, {"lr": {0.5, 0.05, 0.01}, "lg": {0.5, 0.05, 0.01}, "mc": {0.05}}),
        (ScaleName.PAPER, {task: {0.5, 0.2, 0.05, 0.01, 0.005} for task in ("lr", "lg", "mc", "mnist", "rcv1")}),
    ],
)
def test_the_constraint_is_studied_from_both_starts(scale, densities):
    cells = [cell.label for cell in BUILDERS["constraint"](SCALES[scale]).conditions]
    for task, wanted in densities.items():
        found = {(label["target"], label["start"]) for label in cells if label["task"] == task}
        assert found == {(density, start) for density in wanted for start in ("dense", "sparse")}
    assert {label["task"] for label in cells} == densities.keys()


@pytest.mark.parametrize(("task", "size"), [("lr", 1000), ("mc", 10_000), ("mnist", 7840)])
def test_the_papers_dual_rate_is_one_over_all_weights_per_exchange(task, size):
    study = BUILDERS["constraint"](SCALES[ScaleName.PAPER])
    cell = next(cell for cell in study.conditions if cell.label["task"] == task and cell.label["variant"] == "the paper's dual")
    run = resolve(cell.config_for_seed(0))
    assert run.algorithm.dual_rate_per_round(run.objective.layout) / run.algorithm.workload.exchanges == pytest.approx(1 / size)


@pytest.mark.parametrize("task", ["lr", "lg", "mc"])
@pytest.mark.parametrize("algorithm", ["flops", "flops-pa"])
def test_as_published_is_the_recipe_of_the_paper_on_every_task(task, algorithm):
    study = BUILDERS["heterogeneity"](SCALES[ScaleName.SHORT])
    wanted = {"task": task, "algorithm": algorithm, "setting": "as published"}
    (cell,) = (cell for cell in study.conditions if wanted.items() <= cell.label.items())
    literal = resolve(RunConfig(task=task, algorithm_name=algorithm, algorithm={"recipe": "paper"}))
    found = resolve(cell.config_for_seed(0))
    assert found.algorithm == literal.algorithm
    assert found.federation.client_weighting == literal.federation.client_weighting == ClientWeighting.UNIFORM


@pytest.mark.parametrize("name", ["table-1", "table-2", "regimes", "convergence"])
def test_both_algorithms_are_shown_in_both_settings(name):
    labels = [cell.label for cell in BUILDERS[name](SCALES[ScaleName.SHORT]).conditions]
    gated = "flops-pa" if name == "convergence" else "flops"
    wanted = {(gated, "as published"), (gated, "recommended"), ("fed-iter-ht", "as published"), ("fed-iter-ht", "tuned")}
    places = {tuple(sorted((key, value) for key, value in label.items() if key not in ("algorithm", "setting"))) for label in labels}
    dense_only = {place for place in places if name == "table-1" and ("target", 0.95) in place}
    for place in places - dense_only:
        assert wanted <= {(label["algorithm"], label["setting"]) for label in labels if set(place) <= set(label.items())}


def test_a_miss_is_marked_and_a_failed_run_is_shown():
    rows = [*cells("flops", "recommended", 0.80), row({"task": "lg", "algorithm": "flops"}, state="diverged")]
    table = tables.study_table("table-1", "about", "short", rows)
    flops = [e for e in table.entries if e["algorithm"] == "flops" and e["target"] == 0.05]
    verdicts = {(e["task"], e["measure"], e["setting"]): e["verdict"] for e in flops}
    assert verdicts["lr", "r2", "recommended"] == "MISS" and verdicts["lr", "r2", "as published"] == "MISS: no run finished"
    assert "diverged" in table.to_markdown() and "why" in table.to_markdown()
    good = tables.study_table("table-1", "about", "short", cells("flops", "recommended", 0.92))
    entry = next(e for e in good.entries if e["measure"] == "r2" and e["target"] == 0.05 and e["setting"] == "recommended")
    assert entry["verdict"] == "reached" and round(entry["difference"], 3) == 0.011


def test_a_narrow_terminal_omits_columns_and_names_them():
    table = tables.study_table("table-1", "about", "short", cells("flops", "recommended", 0.92))
    narrow, wide = table.to_rich(80), table.to_rich(400)
    shown = [column.header for column in narrow.columns]
    assert {"task", "algorithm", "paper", "measured", "verdict"} <= set(shown) and not {"line", "difference"} & set(shown)
    assert "in the file, not here: truth, skew, line, before projection, difference, finished" in narrow.caption
    assert [column.header for column in wide.columns] == table.columns and "not here" not in wide.caption


def test_reports_need_no_torch():
    code = (
        "import sys; import fedsieve.report.claims, fedsieve.report.figures.paper, fedsieve.report.tables; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

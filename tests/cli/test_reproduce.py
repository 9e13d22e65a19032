"""`fedsieve reproduce`: all of it once in small, its numbers against the paper's cells, its verdicts on rows made by hand."""

import json
import subprocess
import sys

import pytest

from fedsieve.cli.main import main
from fedsieve.report import claims, published, tables
from fedsieve.studies.catalog import PAPER_STUDIES, STUDIES
from fedsieve.studies.registry import BUILDERS, TUNED_STUDIES
from fedsieve.studies.runner import list_jobs
from fedsieve.studies.scale import SCALES, ScaleName

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
    found = [cell for cell in published.CELLS if cell.source_line == line]
    assert [cell.value for cell in found] == [float(cell) for cell in cells]
    assert {cell.true_density for cell in found} == {float(density)}


def test_every_published_cell_has_a_cell_in_its_study():
    for name in ("table-1", "table-2"):
        labels = [cell.label for cell in BUILDERS[name](SCALES[ScaleName.SHORT]).conditions]
        for cell in published.table_cells(name):
            wanted = {
                "task": cell.task,
                "algorithm": cell.algorithm,
                "target": cell.target_density,
                "truth": cell.true_density,
                "skew": cell.skew,
            }
            assert any(all(label[key] == value for key, value in wanted.items()) for label in labels), cell


@pytest.mark.parametrize("scale", ScaleName)
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
    assert [verdict["number"] for verdict in judged] == list(range(51, 60))
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


def row(label, seed=0, state="done", metric="r2", density=0.05, trace=None, **values):
    found = {"key": f"{label}{seed}", "label": label, "seed": seed, "state": state, "metric": metric, "density": density, "trace": trace}
    sizes = values.pop("bytes", {})
    curves = values.pop("curves", {})
    return found | {
        "values": {"value": values.get("r2"), **values},
        "curves": curves,
        "bytes": sizes,
        "reason": "why",
        "note": None,
        "rounds": 10,
    }


EVERY = {"sieve", "flops", "flops-pa"}


@pytest.mark.parametrize(
    ("scale", "task", "methods"),
    [
        (ScaleName.SHORT, "mnist", {"sieve", "flops"}),
        (ScaleName.SHORT, "rcv1", {"sieve"}),
        (ScaleName.PAPER, "mnist", EVERY),
        (ScaleName.PAPER, "rcv1", EVERY),
    ],
)
def test_the_constraint_study_has_all_densities_and_both_starts_on_real_data(scale, task, methods):
    cells = [cell.label for cell in BUILDERS["constraint"](SCALES[scale]).conditions if cell.label["task"] == task]
    found = {(label["algorithm"], label["target"], label["start"]) for label in cells}
    assert found == {(m, d, s) for m in methods for d in (0.5, 0.2, 0.05, 0.01, 0.005) for s in ("dense", "sparse")}
    if scale is ScaleName.SHORT:
        assert {label["variant"] for label in cells if label["algorithm"] == "flops"} <= {"mirror ascent, annealed target"}


def judged(number, **studies):
    return next(v for v in claims.evaluate_claims({name.replace("_", "-"): rows for name, rows in studies.items()}) if v.number == number)


def cells(method, setting, quality, **more):
    label = {"task": "lr", "algorithm": method, "setting": setting, "target": 0.05, "truth": 0.05, "skew": "non-iid"} | more
    return [row(label, seed, r2=quality + 0.001 * seed) for seed in (0, 1, 2)]


def test_a_claim_that_depends_on_the_baseline_says_on_which():
    rows = cells("flops", "tuned", 0.95) + cells("fed-iter-ht", "as published", 0.2) + cells("fed-iter-ht", "tuned", 0.96)
    assert judged(52, table_1=rows).verdict == "held only when setting of FedIter-HT is as published"
    assert judged(52, table_1=cells("flops", "tuned", 0.95) + cells("fed-iter-ht", "tuned", 0.2)).verdict == "held"
    assert judged(52, table_1=cells("flops", "tuned", 0.1) + cells("fed-iter-ht", "tuned", 0.2)).verdict == "not held"
    assert judged(52).verdict == "not evaluated"


def test_a_difference_inside_its_interval_is_no_win():
    mine, base = cells("flops", "tuned", 0.95), cells("fed-iter-ht", "tuned", 0.9495)
    for entry, value in zip(base, (0.93, 0.97, 0.949), strict=True):
        entry["values"]["r2"] = value
    assert judged(52, table_1=mine + base).verdict == "not held"


def test_gates_must_end_near_their_target():
    def gates(last):
        return [row({"task": "lr", "algorithm": "flops"}, curves={"test_density": [1.0, last]}, test_density=last)]

    assert judged(54, gates=gates(0.051)).verdict == "held"
    assert judged(54, gates=gates(0.06)).verdict == "not held"


def test_overlap_must_fall_and_recover():
    def maps(steps):
        size = len(steps) + 1
        overlap = [[1.0] * size for _ in range(size)]
        for i, value in enumerate(steps):
            overlap[i][i + 1] = value
        return [row({"task": "lr", "algorithm": "flops", "setting": "tuned"}, trace={"overlap": overlap})]

    assert judged(55, iou=maps([1, 1, 0.6, 0.7, 0.9, 1, 1, 1])).verdict == "held"
    assert judged(55, iou=maps([1] * 8)).verdict == "not held"


def test_the_range_of_rates_ends_at_the_first_failure():
    def sweep(values):
        label = {"task": "lr", "algorithm": "flops-pa", "setting": "polyak", "sweep": "weights"}
        return [row(label | {"rate": rate}, state="done" if value else "diverged", r2=value) for rate, value in values.items()]

    assert judged(58, learning_rates=sweep({0.1: 0.93, 0.3: 0.95, 1.0: 0.94})).verdict == "held"
    assert judged(58, learning_rates=sweep({0.1: 0.93, 0.3: None, 1.0: 0.94})).verdict == "not held"


def test_bytes_and_rounds_are_compared():
    def sent(method, quality, count):
        label = {"task": "lr", "algorithm": method, "setting": "tuned"}
        return [row(label, r2=quality, bytes=dict.fromkeys(("up", "down", "up_paper_formula", "down_paper_formula"), count))]

    held = sent("flops-pa", 0.95, 200) + sent("fed-avg", 0.951, 4000) + sent("fed-iter-ht", 0.9, 100)
    assert judged(56, communication=held).verdict == "held"
    worse = sent("flops-pa", 0.90, 200) + sent("fed-avg", 0.951, 4000) + sent("fed-iter-ht", 0.9, 100)
    assert judged(56, communication=worse).verdict.startswith("held only when")

    def line(method, skew, values):
        label = {"task": "lr", "algorithm": method, "setting": "tuned", "skew": skew, "part": "instances"}
        return [row(label, curves={"round": list(range(1, len(values) + 1)), "r2": values}, oracle_value=1.0)]

    slow, fast = [0.0, 0.5, 0.95], [0.5, 0.95, 0.95]
    rows = [r for skew in ("iid", "non-iid") for r in line("flops-pa", skew, fast) + line("fed-iter-ht", skew, slow)]
    assert judged(57, convergence=rows).verdict == "held"


def test_other_claims_on_constructed_rows():
    starts = [
        row({"task": "lr", "algorithm": "flops", "start": s, "r": 0.5, "prune start": 0.5}, r2=v) for s, v in ((0.2, 0.6), (0.95, 0.95))
    ]
    assert judged(59, starts=starts).verdict == "held only when start is 0.95"
    assert judged(53, table_1=cells("flops", "tuned", 0.95) + cells("flops", "tuned", 0.85, target=0.95)).verdict == "held"
    reached = [r for skew in ("iid", "non-iid") for r in cells("flops", "tuned", 0.95, skew=skew)]
    for entry in reached:
        entry["values"]["test_density"] = 0.05
    assert judged(51, table_2=reached).verdict == "held"


def test_a_miss_is_marked_and_a_failed_run_is_shown():
    rows = [*cells("flops", "tuned", 0.80), row({"task": "lg", "algorithm": "flops"}, state="diverged")]
    table = tables.study_table("table-1", "about", "short", rows)
    verdicts = {(e["task"], e["measure"]): e["verdict"] for e in table.entries if e["algorithm"] == "flops" and e["target"] == 0.05}
    assert verdicts["lr", "r2"] == "MISS"
    assert "diverged" in table.to_markdown() and "why" in table.to_markdown()
    good = tables.study_table("table-1", "about", "short", cells("flops", "tuned", 0.92))
    entry = next(e for e in good.entries if e["measure"] == "r2" and e["target"] == 0.05 and e["algorithm"] == "flops")
    assert entry["verdict"] == "reached" and round(entry["difference"], 3) == 0.011


def test_a_narrow_terminal_leaves_out_details_and_says_so_a_wide_one_nothing():
    table = tables.study_table("table-1", "about", "short", cells("flops", "tuned", 0.92))
    narrow, wide = table.to_rich(80), table.to_rich(400)
    shown = [column.header for column in narrow.columns]
    assert {"task", "algorithm", "paper", "measured", "verdict"} <= set(shown) and not {"line", "difference"} & set(shown)
    assert "in the file, not here: truth, skew, line, difference" in narrow.caption
    assert [column.header for column in wide.columns] == table.columns and "not here" not in wide.caption


def test_reports_need_no_torch():
    code = (
        "import sys; import fedsieve.report.claims, fedsieve.report.figures.paper, fedsieve.report.tables; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What each part of sieve is worth: one option changed at a time, compared with the default on the same seeds."""

from dataclasses import asdict

import pytest

from fedsieve.cli.main import main
from fedsieve.report.figures import ablation as report
from fedsieve.report.figures.ablation import table_entries
from fedsieve.report.figures.style import FigureWriter
from fedsieve.report.tables import study_table
from fedsieve.studies.ablation import VARIANTS, ablation_study
from fedsieve.studies.results import DEFAULT_VARIANT
from fedsieve.studies.scale import SCALES, ScaleName


def test_every_variant_differs_from_the_default_only_in_its_named_options():
    cells = ablation_study(SCALES[ScaleName.SHORT]).conditions
    assert len({(cell.label["task"], cell.label["setting"]) for cell in cells}) == 10
    whole = {
        (cell.label["task"], cell.label["setting"]): cell.config_for_seed(0) for cell in cells if cell.label["part"] == DEFAULT_VARIANT
    }
    for cell in cells:
        base, run = whole[cell.label["task"], cell.label["setting"]], cell.config_for_seed(0)
        one, other = asdict(base.algorithm), asdict(run.algorithm)
        assert {name for name in one if one[name] != other[name]} == VARIANTS[cell.label["part"]].keys()
        assert (run.density, run.rounds, run.data, run.federation) == (base.density, base.rounds, base.data, base.federation)


def row(part, seed, value, state="done"):
    label = {"task": "lr", "setting": "", "algorithm": "sieve", "part": part}
    shared = {"metric": "accuracy", "note": None, "reason": "why"}
    return shared | {
        "label": label,
        "seed": seed,
        "state": state,
        "values": {"value": value, "expected_density": 0.05},
        "bytes": {"up": 60, "down": 40},
    }


def test_a_variant_is_compared_on_the_seeds_that_both_finished():
    rows = [row(DEFAULT_VARIANT, seed, 0.9 + 0.01 * seed) for seed in range(3)]
    rows += [row("no polishing", 0, 0.8), row("no polishing", 1, 0.79), row("no polishing", 2, None, "diverged")]
    whole, other = table_entries(rows)
    assert whole["difference to default"] is None and whole["finished"] == "3/3"
    assert other["difference to default"] == pytest.approx(-0.11) and other["error"] == pytest.approx(0.01)
    assert other["finished"] == "2/3" and other["bytes"]["mean"] == 100


def test_without_a_true_support_the_table_has_no_tdr_and_failures_are_drawn(tmp_path):
    rows = [row(DEFAULT_VARIANT, 0, 0.9), row("no polishing", 0, 1.2), row("eight bits", 0, 0.5), row("support frozen", 0, None, "failed")]
    rows[0]["state"], rows[0]["metric"] = "failed", None  # a run that broke off before it was set up
    report.draw([*rows, row(DEFAULT_VARIANT, 1, 0.9), row("no polishing", 1, 1.2)], FigureWriter(folder=tmp_path))
    assert (tmp_path / "ablation.png").exists()
    assert "none finished" not in study_table("ablation", "about", "short", rows[1:3]).to_markdown()


@pytest.mark.long
@pytest.mark.usefixtures("few_test_rows")
def test_the_ablation_computes_and_reports(tmp_path):
    assert main(["reproduce", "ablation", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    assert {"table.md", "table.csv", "ablation.png", "ablation.pdf", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    assert all(part in (tmp_path / "table.md").read_text() for part in VARIANTS)

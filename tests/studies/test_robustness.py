"""The hostile study: every attack and share under every mean, and a table that says what is left."""

import json

from fedsieve.cli.main import main
from fedsieve.core.aggregation import Aggregator
from fedsieve.report.figures import robustness as page
from fedsieve.runtime.attacks import COLLUDING
from fedsieve.studies import results
from fedsieve.studies.robustness import ATTACK_SCALES, MALICIOUS_FRACTIONS, robustness_study
from fedsieve.studies.scale import SCALES, ScaleName


def test_every_attack_and_share_meets_every_mean():
    cells = {
        tuple(cell.label.values()) for cell in robustness_study(SCALES[ScaleName.SHORT]).conditions if cell.label["algorithm"] == "sieve"
    }
    wanted = {
        ("lr", "sieve", attack.value, share, mean.value) for attack in ATTACK_SCALES for share in MALICIOUS_FRACTIONS for mean in Aggregator
    }
    assert wanted | {("lr", "sieve", "none", 0.0, mean.value) for mean in Aggregator} == cells


def test_the_study_has_colluding_attacks():
    assert set(ATTACK_SCALES) >= COLLUDING


def test_a_smoke_study_writes_a_table_a_figure_and_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr("fedsieve.data.synthetic.NUM_TEST_EXAMPLES", 200)
    assert main(["reproduce", "robustness", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    assert {"table.md", "table.csv", "robustness-lr.png", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    rows = results.read_rows(tmp_path)
    assert len(rows) == 12
    assert {row["label"]["aggregator"] for row in rows} == {"weighted", "similarity"}
    assert "no number means anything" in (tmp_path / "table.md").read_text()


def test_what_is_worse_than_nothing_or_diverged_is_called_lost():
    def row(mean, value, state="done", attack="flip", share=0.3, seed=0):
        label = {"task": "lr", "algorithm": "sieve", "attack": attack, "malicious": share, "aggregator": mean}
        return {
            "key": json.dumps(label),
            "label": label,
            "seed": seed,
            "state": state,
            "metric": "r2",
            "values": {"value": value, "tdr": 1.0},
        }

    rows = [row("weighted", -3.0), row("median", 0.0, "diverged"), row("krum", 0.9)]
    rows += [row(mean, 0.95, attack="none", share=0.0) for mean in ("weighted", "median", "krum")]
    (hit,) = [entry for entry in page.table_entries(rows) if entry["attack"] == "flip"]
    assert (hit["weighted"], hit["median"], hit["krum"]) == ("lost", "lost", "0.90 / 1.00")
    counts = "weighted 0 of 1 (worst: lr, sieve, flip 30%, lost), median 0 of 1 (worst: lr, sieve, flip 30%, lost), krum 0 of 1"
    assert page.summarize(rows).endswith(f"{counts} (worst: lr, sieve, flip 30%, 0.05 below)")
    assert page.summarize([*rows[:2], row("krum", 0.94), *rows[3:]]).endswith("krum 1 of 1")
    (hit,) = [entry for entry in page.table_entries([*rows, row("krum", 0.8, seed=1)]) if entry["attack"] == "flip"]
    assert hit["krum"] == "0.85 ± 0.07 / 1.00"

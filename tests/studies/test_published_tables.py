"""Other people's tables: their data, their settings, their numbers, and the table that shows them beside ours."""

import numpy as np
import pytest
import torch

from fedsieve import wire
from fedsieve.cli.main import main
from fedsieve.core.packets import Packet
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.random import generator
from fedsieve.data import published
from fedsieve.experiments.resolve import resolve
from fedsieve.report.figures import published_tables as report
from fedsieve.report.published_tables import TABLES
from fedsieve.report.tables import study_table
from fedsieve.studies.published_tables import SETTINGS, tables_study
from fedsieve.studies.results import OURS, THEIRS
from fedsieve.studies.scale import SCALES, ScaleName

SHORT = tables_study(SCALES[ScaleName.SHORT])


def test_every_table_has_published_rows_and_each_run_of_theirs_is_one_of_them():
    assert SETTINGS.keys() == TABLES.keys()
    for name, setting in SETTINGS.items():
        table = TABLES[name]
        assert setting.rows.keys() <= table.values.keys() and table.rounds[-1] == setting.rounds and table.source
        assert all(len(values) == len(table.rounds) for values in table.values.values())


def test_their_rows_run_with_their_clients_weights_and_learning_rates():
    for condition in SHORT.conditions:
        run, table = resolve(condition.config_for_seed(0)), TABLES[condition.label["table"]]
        assert table.is_scaled or round(run.federation.clients * run.federation.participation) == table.clients_per_round
        assert run.objective.layout.size in (table.num_weights, table.num_weights - 10)  # the model of FedML has ten intercepts more
        if condition.label["role"] == THEIRS:
            row = SETTINGS[condition.label["table"]].rows[condition.label["row"]]
            assert run.algorithm.bits == 32 and run.algorithm.final_learning_rate_fraction == 1
            assert (run.algorithm.learning_rate, run.algorithm.local_steps) == (row.learning_rate, row.local_steps)


def test_simulations_of_fed_ht_have_the_means_and_variances_of_the_paper():
    (x, y), (test_x, _), owners = published.simulate_fed_ht(50, 1000, 0.1, logistic=False)
    assert x.shape == (100 * 45, 1000) and test_x.shape == (50, 1000) and np.array_equal(np.bincount(owners), np.full(100, 45))
    within = np.stack([x[owners == client].var(0, ddof=1) for client in range(100)]).mean(0)
    assert np.allclose(within[[0, 9, 99]], [1, 10**-1.2, 100**-1.2], rtol=0.1)
    means = np.stack([x[owners == client].mean(0) for client in range(100)])
    assert means[:, 500:].std() == pytest.approx(1.0, abs=0.03)
    assert y.std() > 5  # coefficients of about one on a hundred features with mean one


def test_the_first_example_of_simulation_one_is_that_of_flowers_generator():
    rng = np.random.default_rng(42)  # the draws of the pull request, in its order, for its first client
    mean, shift = rng.normal(0.1, 0.1), rng.normal(0.0, 0.1)
    coefficients, centre = rng.normal(mean, 1.0, 100), rng.normal(shift, 1.0, 1000)
    z = centre + rng.standard_normal((100, 1000)) * np.arange(1.0, 1001) ** -0.6
    target = z[:, :100] @ coefficients + rng.normal(mean, 1.0, 100)
    first = np.random.default_rng(0).permutation(100)[10]
    (x, y), _, _ = published.simulate_fed_ht(100, 1000, 0.1, logistic=False)
    assert np.allclose(x[0], z[first], atol=1e-5) and y[0] == pytest.approx(target[first], abs=1e-3)


def test_a_tenth_of_each_client_has_label_one_in_simulation_two():
    (_, y), (_, test_y), owners = published.simulate_fed_ht(50, 200, 1.0, logistic=True)
    positives = np.bincount(owners, weights=y)
    assert set(np.unique(y)) == {0, 1} and positives.max() == 5 and positives.sum() > 400 and 0 < test_y.mean() < 0.3


def test_clients_of_two_classes_share_each_class_evenly():
    labels = np.repeat(np.arange(10), 600)
    owners = published.assign_two_classes(labels, 20, np.random.default_rng(0))
    for label in range(10):
        shares = np.bincount(owners[labels == label], minlength=20)
        assert np.ptp(shares[shares > 0]) <= 1
    assert all(len(np.unique(labels[owners == client])) == 2 for client in range(20))


def test_the_power_law_gives_each_client_two_neighbouring_digits():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 70_000)
    owners = published.assign_by_power_law(labels, rng)
    sizes = np.bincount(owners[owners >= 0], minlength=1000)
    assert sizes.min() >= 10 and sizes.max() > 10 * np.median(sizes) and (owners < 0).sum() < 2000
    for client in (0, 9, 555):
        assert set(np.unique(labels[owners == client])) == {client % 10, (client + 1) % 10}
    pixels = rng.random((70_000, 3), dtype=np.float32)
    (x, y), (test_x, _), train_owners = published.split_power_law(pixels, labels)
    assert len(np.unique(train_owners)) == 1000 and len(x) == len(y) and 68_000 < len(x) + len(test_x) <= 70_000
    assert len(test_x) == pytest.approx(0.1 * len(pixels), abs=1000) and abs(x.mean()) < 0.02 and x.std() == pytest.approx(1, abs=0.02)


def row(name, role, mse, seed=0, state="done"):
    label = {"task": "fed-ht-linear", "table": "Fed-HT, Simulation I", "row": name, "algorithm": "fed-ht", "role": role}
    curves = {"round": [1, 50, 100], "bytes": [10, 500, 1000], "mse": [60.0, 30.0, mse]}
    return {"label": label, "seed": seed, "state": state, "curves": curves, "note": None, "reason": "why", "values": {}, "data": None}


def test_published_measured_and_both_bytes_are_in_one_line():
    rows = [
        row("Fed-HT, K = 3", THEIRS, 5.5),
        row("Fed-HT, K = 3", THEIRS, 5.7, 1),
        row("sieve", OURS, 7.0),
        row("flops-pa", OURS, 0, 0, "failed"),
    ]
    entries = {(entry["row"], entry["round"]): entry for entry in report.table_entries(rows)}
    last, middle = entries["Fed-HT, K = 3", 100], entries["Fed-HT, K = 3", 60]
    assert last["published"] == 5.62 and last["measured"]["mean"] == pytest.approx(5.6) and last["bytes theirs"] == 80_000_000
    assert middle["measured"]["mean"] == 30.0 and middle["bytes here"]["mean"] == 500
    assert entries["sieve", 100]["published"] is None and entries["sieve", 100]["bytes theirs"] is None
    assert entries["FedIter-HT, K = 3", 100]["published"] == "TBD" and entries["FedIter-HT, K = 3", 100]["measured"] == "not run here"
    assert entries["flops-pa", 100]["finished"] == "0/1"
    text = study_table("tables", "about", "short", rows).to_markdown()
    assert "| Fed-HT, K = 3 | theirs | mse | 100 | 5.62 | 5.600 ± 0.141 | 80 MB | 1 kB |" in text and "none finished" in text


def test_theirs_recomputed_are_the_lengths_of_their_messages_in_our_format():
    def length(size, num_entries):
        support = torch.from_numpy(np.sort(generator(0, "positions").permutation(size)[:num_entries]))
        field = QuantizedField(torch.zeros(num_entries), None, Coding.FLOAT32)
        packet = Packet(size, None if num_entries == size else support, {"update": field}, {})
        return wire.encode(packet, wire.MessageId(0, 0, 0)).length

    for table in TABLES.values():
        for row, stored in table.recoded_bytes.items():
            down, up = table.message_entries[row]
            assert length(down, down) + length(down, up) == stored
    assert TABLES["HeteroFL, MNIST"].bytes_until("HeteroFL e", 100) == 2 * 4 * 6594 * 100 * 400
    assert TABLES["Natasha-R, CIFAR-10"].bytes_until("Top-k 1 %", 20) == 15 * 20 * (4 * 471_338 + 8 * 4713)
    assert TABLES["FLamby, heart disease"].recoded_bytes_until("Scaffold", 15) is None


def test_the_page_shows_the_stored_rows():
    from tools.publish_tables import CSV, PAGE, insert_table, read_rows

    page = PAGE.read_text()
    assert insert_table(page, read_rows(CSV)) == page, "run tools/publish_tables.py"
    assert len(page.splitlines()) <= 100


def test_a_table_without_a_run_keeps_its_stored_rows():
    from tools.publish_tables import merge_tables

    def line(table, measured):
        return {"table": table, "measured": measured}

    stored = [line("A", "1"), line("B", "1")]
    new = [line("A", report.NOT_RUN), line("B", report.NOT_RUN), line("B", "2"), line("C", report.NOT_RUN)]
    assert merge_tables(stored, new) == [stored[0], *new[1:]]


@pytest.mark.long
@pytest.mark.usefixtures("few_test_rows")
def test_the_study_runs_in_small(tmp_path):
    assert main(["reproduce", "tables", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    assert "synthetic examples, not the real data" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "tables.png").exists()

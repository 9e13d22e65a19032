"""Figures of studies show what the rows say: the drawn series, and nothing else."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fedsieve.report.figures import paper
from fedsieve.report.figures.style import FigureWriter
from fedsieve.report.tables import study_table
from helpers.rows import cells, row

RNG = np.random.default_rng(0)
ROUNDS = [1, 2, 3, 4]
DATA = "generated: 10 training and 5 test examples"


@pytest.fixture
def draw(monkeypatch):
    """Draw a study and return its figures by name; no file is written."""
    drawn = {}
    monkeypatch.setattr(FigureWriter, "save", lambda _, figure, name: drawn.update({name: figure}))

    def draw_study(name, rows, scale="short"):
        paper.draw(name, scale, rows, Path(), study_table(name, "about", scale, rows))
        return drawn

    return draw_study


def traced(label, seed, **more):
    curves = {"round": ROUNDS, **{name: RNG.random(4).tolist() for name in ("r2", "accuracy", "tdr", "tdr_features", "dense_value")}}
    curves |= {"expected_density": RNG.random(4).tolist(), "test_density": RNG.random(4).tolist()}
    config = {"rounds": 4, "algorithm": {"scaling_start": 0.5}}
    overlap = RNG.random((4, 4)).tolist()
    trace = {"rounds": ROUNDS, "kind": "gates", "overlap": overlap, "gates": RNG.random((4, 6)).tolist(), "num_kept": 2}
    return row(label, seed, curves=curves, config=config, trace=trace, data=DATA, r2=0.5, **more)


def make_rows(*labels, metric="r2"):
    return [traced(label, seed, metric=metric) for label in labels for seed in (0, 1)]


def panels(figure):
    """The panels with a title, by title."""
    return {axes.get_title(): axes for axes in figure.get_axes() if axes.get_title()}


def assert_drawn(axes, rows, name, index=0):
    """The panel has a line that is the mean of this curve, with its own colour and dashes once."""
    wanted = np.mean([entry["curves"][name] for entry in rows], axis=0)
    found = [line for line in axes.lines if len(line.get_xdata()) == 4 and np.allclose(line.get_ydata(), wanted)]
    assert len(found) == 1, name
    assert list(found[0].get_xdata()) == ROUNDS
    return found[0]


def test_gates_are_drawn_with_target_and_start_of_scaling(draw):
    labels = [
        {"task": task, "algorithm": "flops", "setting": setting} for task in ("lr", "mc") for setting in ("as published", "recommended")
    ]
    rows = make_rows(*labels)
    drawn = panels(draw("gates", rows)["gates"])
    assert len(drawn) == 4
    for title, label in (("LR, FLoPS as published", labels[0]), ("MC, FLoPS recommended", labels[3])):
        part = [entry for entry in rows if entry["label"] == label]
        assert_drawn(drawn[title], part, "expected_density")
        assert_drawn(drawn[title], part, "test_density")
        constant = [list(line.get_ydata()) for line in drawn[title].lines if line.get_label() == "target"]
        assert constant == [[0.05, 0.05]]
        (start,) = (line for line in drawn[title].lines if line.get_label() == "log-alpha scaling starts")
        assert list(start.get_xdata()) == [2.0, 2.0]


def test_overlap_maps_are_those_of_the_first_seed(draw):
    labels = [
        {"task": "lr", "algorithm": name, "setting": setting} for name, setting in (("flops", "recommended"), ("fed-iter-ht", "tuned"))
    ]
    rows = make_rows(*labels)
    drawn = panels(draw("iou", rows)["iou"])
    assert drawn.keys() == {"FLoPS, recommended, seed 0", "FedIter-HT, tuned, seed 0"}
    for axes, first in zip(drawn.values(), rows[::2], strict=True):
        assert np.array_equal(axes.images[0].get_array(), first["trace"]["overlap"])


def test_test_time_gates_are_drawn_gate_by_gate_with_their_overlap(draw):
    rows = make_rows({"task": "lr", "algorithm": "flops", "setting": "recommended"})
    left, right = panels(draw("test-time-gates", rows)["test-time-gates"]).values()
    assert np.array_equal(left.images[0].get_array(), np.array(rows[0]["trace"]["gates"]).T)
    assert np.array_equal(right.images[0].get_array(), rows[0]["trace"]["overlap"])
    assert [text.get_text() for text in left.get_yticklabels()] == ["2 kept", "4 others"]


def test_regimes_have_nine_panels_of_true_discovery_rates(draw):
    regimes = ("SNR 3, correlation .2", "SNR 3, correlation .7", "SNR 20, correlation .7")
    settings = (("flops", "as published"), ("flops", "recommended"), ("fed-iter-ht", "as published"), ("fed-iter-ht", "tuned"))
    labels = [
        {"task": task, "regime": regime, "algorithm": algorithm, "setting": setting}
        for regime in regimes
        for task in ("lr", "lg", "mc")
        for algorithm, setting in settings
    ]
    rows = make_rows(*labels)
    drawn = panels(draw("regimes", rows)["regimes"])
    assert len(drawn) == 9
    for task, name in (("lr", "tdr"), ("mc", "tdr_features")):
        for regime in regimes:
            part = [entry for entry in rows if entry["label"]["task"] == task and entry["label"]["regime"] == regime]
            for algorithm, setting in settings:
                line = [entry for entry in part if (entry["label"]["algorithm"], entry["label"]["setting"]) == (algorithm, setting)]
                dashes = assert_drawn(drawn[f"{task.upper()}: {regime}"], line, name).get_linestyle()
                assert dashes == ("--" if setting == "as published" else "-")


def test_dashes_of_convergence_mean_as_published_in_every_panel(draw):
    lines = (("flops-pa", "as published"), ("flops-pa", "recommended"), ("fed-iter-ht", "as published"), ("fed-iter-ht", "tuned"))
    cases = [("lr", "non-iid", "curves"), ("lg", "non-iid", "curves"), ("lr", "iid", "instances"), ("lr", "non-iid", "instances")]
    labels = [
        {"task": task, "skew": skew, "part": part, "algorithm": algorithm, "setting": setting}
        for task, skew, part in cases
        for algorithm, setting in lines
    ]
    rows = make_rows(*labels)
    drawn = draw("convergence", rows)["convergence"].get_axes()
    assert len(drawn) == 4
    for axes, (task, skew, part) in zip(drawn, cases, strict=True):
        assert len(axes.lines) == len(lines)
        assert ("non-IID" in axes.get_title()) == (skew == "non-iid")
        for algorithm, setting in lines:
            wanted = {"task": task, "skew": skew, "part": part, "algorithm": algorithm, "setting": setting}
            line = assert_drawn(axes, [entry for entry in rows if entry["label"] == wanted], "r2" if task == "lr" else "accuracy")
            assert line.get_linestyle() == ("--" if setting == "as published" else "-")


def test_real_data_are_drawn_by_task_and_named_below(draw):
    labels = [{"task": task, "target": 0.05, "algorithm": "flops-pa", "setting": "recommended"} for task in ("mnist", "emnist")]
    rows = make_rows(*labels, metric="accuracy")
    figure = draw("real-data", rows)["real-data"]
    drawn = panels(figure)
    assert_drawn(drawn["EMNIST, 5 % kept"], rows[2:], "accuracy")
    assert f"mnist, emnist: {DATA}" in caption(figure)


def caption(figure):
    return " ".join(" ".join(text.get_text() for text in part.texts) for part in (figure, *figure.subfigs)).replace("\n", " ")


def test_rates_are_drawn_where_they_are_and_negative_means_are_marked_as_such(draw):
    label = {"task": "lr", "algorithm": "flops-pa", "setting": "polyak", "sweep": "weights"}
    values = {0.1: 0.2, 1.0: 0.9, 10.0: -0.5}
    rows = [row(label | {"rate": rate}, seed, r2=value) for rate, value in values.items() for seed in (0, 1)]
    rows += [row(label | {"rate": 100.0}, seed, state="diverged") for seed in (0, 1)]
    figure = draw("learning-rates", rows)["learning-rates"]
    lines = figure.get_axes()[0].lines
    (points,) = (line for line in lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-")
    assert dict(zip(points.get_xdata(), points.get_ydata(), strict=True)) == {0.1: 0.2, 1.0: 0.9}
    markers = {line.get_marker(): list(line.get_xdata()) for line in lines if line.get_marker() in ("x", "v")}
    assert markers == {"v": [10.0], "x": [100.0]}
    (legend,) = figure.subfigs[0].legends
    assert "triangles: mean below 0" in legend.get_title().get_text() and "none below" not in legend.get_title().get_text()


@pytest.mark.parametrize(("scale", "marked"), [("smoke", True), ("short", False)])
def test_only_smoke_runs_have_a_watermark(draw, scale, marked):
    rows = make_rows({"task": "lr", "algorithm": "flops", "setting": "recommended"})
    assert ("smoke run" in caption(draw("gates", rows, scale)["gates"])) == marked


def test_a_table_is_drawn_with_its_numbers_and_the_papers(draw):
    rows = cells("flops", "recommended", 0.92, spread=0.0) + cells("flops", "as published", 0.80, spread=0.0)
    quality = draw("table-1", rows)["table-1"].get_axes()[0]
    names = [text.get_text() for text in quality.get_yticklabels()]
    for name, value in (("LR  FLoPS, recommended (0.05)", 0.92), ("LR  FLoPS, as published (0.05)", 0.80)):
        points = {float(line.get_xdata()[0]) for line in quality.lines if list(line.get_ydata()) == [names.index(name)]}
        assert {round(point, 6) for point in points} == {value, 0.91}


def constraint_rows(task, data, *, seeds):
    rows = []
    variants = [
        ("sieve", "bisection, schedule of sieve"),
        *(("flops", f"variant {i}") for i in range(5)),
        ("flops-pa", "a"),
        ("flops-pa", "b"),
    ]
    for start, (i, (algorithm, variant)) in product(("dense", "sparse"), enumerate(variants)):
        label = {"task": task, "algorithm": algorithm, "variant": variant, "target": 0.05, "start": start}
        for seed in range(seeds + (i == 0)):
            entry = traced(label, seed, expected_density=0.05, test_density=0.05) | {"data": data}
            entry["curves"]["multiplier"] = [-0.4, 1e-3, 0.05, 3.0]
            rows.append(entry)
    return rows


def test_the_constraint_is_drawn_with_distinct_colours_readable_ticks_and_its_own_caption(draw):
    figure = draw("constraint", [*constraint_rows("lr", "generated", seeds=2), *constraint_rows("mnist", "MNIST", seeds=2)])[
        "constraint-lr-dense"
    ]
    figure.canvas.draw()
    for axes in figure.get_axes()[:2]:
        boxes = [label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()]
        assert len(boxes) > 1 and not any(one.overlaps(other) for one, other in zip(boxes, boxes[1:], strict=False))
    texts = [text.get_text() for part in figure.subfigs for text in part.texts]
    assert texts[-1] == "lr: generated"
    (legend,) = (legend for part in figure.subfigs for legend in part.legends)
    assert legend.get_title().get_text() == "lines: mean of 2 to 3 seeds; bands: ± 1 sd"
    colours = [line.get_color() for line in legend.get_lines()]
    assert len(set(colours)) == len(colours) == 9

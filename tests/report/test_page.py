"""The page of a run: whole, self-contained, true to the store, and readable where the store is not whole."""

import json
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsieve.cli.main import main
from fedsieve.report.html import page, png_encoder
from fedsieve.report.html.overview import pareto_front
from fedsieve.report.html.run_record import find_runs, read_run
from fedsieve.report.html.supports import pairwise_iou
from fedsieve.storage import run_directory

EVERY_RUN = ["Summary", "Quality", "Bytes", "Supports and gates", "Kept weights", "Clients", "Reproduce this run"]
KINDS = {
    "lr": [*EVERY_RUN, "Density and constraint", "Support recovery"],
    "mc": [*EVERY_RUN, "Density and constraint", "Support recovery"],
    "digits": [*EVERY_RUN, "Density and constraint"],
    "dense": [*EVERY_RUN, "Density", "Support recovery"],
    "groups": [*EVERY_RUN, "Density and constraint"],
    "comparison": ["Quality against bytes: lr", "Comparison", "Runs", "Each run", *EVERY_RUN],
}


def tree(text):
    """The page as XML: every element closed, every attribute quoted. The script is not XML, and is none of it."""
    return ElementTree.fromstring(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL).replace("<!DOCTYPE html>", ""))


def words(element):
    return "".join(element.itertext())


def tables(root):
    """Rows of every table by its caption, with exact numbers where the shown ones are shortened."""
    found = {}
    for table in root.iter("table"):
        rows = [[cell.get("data-v", words(cell)) for cell in row] for row in table.find("tbody")]
        found.setdefault(words(table.find("caption")), ([words(head) for head in table.find("thead/tr")], rows))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_well_formed_and_has_every_section_of_its_kind(runs, kind):
    root = tree((runs / kind / "report.html").read_text())
    headings = {words(heading) for level in ("h2", "h3") for heading in root.iter(level)}
    assert set(KINDS[kind]) <= headings


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_nothing(runs, kind):
    text = (runs / kind / "report.html").read_text()
    for element in tree(text).iter():
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert element.get(name, "#").startswith(("#", "data:image/png;base64,")), element.attrib
    assert "@import" not in text and "url(" not in text
    (policy,) = (meta.get("content") for meta in tree(text).iter("meta") if meta.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_has_a_text_alternative_and_numbers(runs, kind):
    root = tree((runs / kind / "report.html").read_text())
    drawings = [element for element in root.iter("svg") if element.get("aria-hidden") != "true"]
    assert drawings and all(element.get("role") == "img" and element.get("aria-label") for element in drawings)
    assert all(element.get("alt") for element in root.iter("img"))
    for figure in root.iter("figure"):
        assert words(figure.find("figcaption")).strip()
        assert figure.find("details//table") is not None


def test_the_tables_have_the_stored_numbers(runs):
    rows = run_directory.read_metrics(runs / "lr")
    found = tables(tree((runs / "lr" / "report.html").read_text()))
    columns, body = found["R2 per round"]
    assert columns == ["round", "sparse model", "before projection"]
    assert [[int(a), float(b)] for a, b, _ in body] == [[row["round"], row["r2"]] for row in rows]
    columns, body = found["Bytes per round"]
    whole, parts = [int(line[1]) for line in body], [sum(map(int, line[3:8])) for line in body]
    assert whole == parts == [row["bytes_up"] for row in rows]
    assert [float(line[1]) for line in found["Violation per round"][1]] == [row["violation"] for row in rows]


def test_the_parts_of_a_message_add_up_in_every_algorithm(runs):
    for folder in find_runs(runs):
        for row in run_directory.read_metrics(folder):
            for way in ("up", "down"):
                parts = {part: row[f"bytes_{way}_{part}"] for part in ("header", "positions", "scalars", "weights", "gates")}
                assert sum(parts.values()) == row[f"bytes_{way}"]
                assert sum(parts.values()) - parts["header"] == row[f"bytes_{way}_payload"]
    assert run_directory.read_metrics(runs / "mc")[-1]["bytes_up_gates"] > 0
    assert run_directory.read_metrics(runs / "dense")[-1]["bytes_up_positions"] == 0


def test_support_recovery_on_the_page_equals_the_metrics(runs):
    _, body = tables(tree((runs / "lr" / "report.html").read_text()))["Found, missed and false"]
    rows = run_directory.read_metrics(runs / "lr")
    assert [int(found) / (int(found) + int(false)) for _, found, _, false in body] == pytest.approx([row["tdr"] for row in rows])
    assert [int(found) / (int(found) + int(missed)) for _, found, missed, _ in body] == pytest.approx([row["recall"] for row in rows])


def test_the_clients_are_those_of_the_run(runs):
    about = json.loads((runs / "digits" / "run_info.json").read_text())
    rows = run_directory.read_metrics(runs / "digits")
    columns, body = tables(tree((runs / "digits" / "report.html").read_text()))["Clients"]
    assert columns == ["client", "examples", "rounds sampled", "rounds replied", "replies rejected", "labels"]
    by_client = {int(line[0]): line for line in body}
    assert (
        [int(by_client[i][1]) for i in range(20)] == about["clients"]["num_examples"] == np.sum(about["clients"]["labels"], axis=1).tolist()
    )
    assert sum(int(line[2]) for line in body) == sum(len(row["cohort"]) for row in rows)


def test_the_density_chart_marks_the_round_in_which_the_algorithm_changes(runs):
    """The search of sieve ends, FLoPS-PA starts to scale, FedAvg does not change."""
    pages = {kind: (runs / kind / "report.html").read_text() for kind in ("lr", "mc", "dense")}
    assert {kind: ("search ends" in text, "prune start" in text) for kind, text in pages.items()} == {
        "lr": (True, False),
        "mc": (False, True),
        "dense": (False, False),
    }


@pytest.mark.parametrize(("sent", "drawn"), [(0.3, True), (0.1000001, False)])
def test_the_density_of_messages_is_drawn_if_it_differs_from_the_target(runs, tmp_path, sent, drawn):
    place = tmp_path / "run"
    shutil.copytree(runs / "lr", place)
    first, *rest = run_directory.read_metrics(place)
    rows = [first | {"message_density": sent}, *(row | {"message_density": 0.1} for row in rest)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ("messages" in re.search("Density per round.*?</table>", page.render_report([place]), re.DOTALL)[0]) is drawn


def test_the_masks_show_the_weights_kept(runs):
    root = tree((runs / "digits" / "report.html").read_text())
    shown = [image.get("alt") for image in root.iter("img")]
    kept = load_file(runs / "digits" / "model.safetensors")["index"] // 64
    assert shown == [f"class {i}: {(kept == i).sum()} of 64 pixels kept" for i in range(10)]


def test_a_comparison_shows_its_result_and_every_run(runs):
    found = tables(tree((runs / "comparison" / "report.html").read_text()))
    result = json.loads((runs / "comparison" / "result.json").read_text())
    columns, body = found["R2 after all rounds (seeds 1, 2)"]
    assert [line[0] for line in body] == list(result["algorithms"])
    assert [float(line[columns.index("R2")]) for line in body] == [m["equal_rounds"]["mean"] for m in result["algorithms"].values()]
    (caption,) = (name for name in found if name.startswith("6 runs"))
    assert len(found[caption][1]) == 6


def test_the_settings_of_the_page_reproduce_the_run(runs):
    root = tree((runs / "lr" / "report.html").read_text())
    command, settings = (words(pre) for pre in root.iter("pre"))
    assert command == f"fedsieve train --config {runs / 'lr' / 'config.toml'} --out {runs / 'lr-again'}"
    assert settings == (runs / "lr" / "config.toml").read_text()
    assert {"python", "torch", "fedsieve", "platform"} <= {words(dt) for dt in root.iter("dt")}


def test_fifty_runs_stay_below_six_megabytes_and_lose_no_row_of_the_overview(runs, tmp_path):
    for i in range(50):
        place = tmp_path / "many" / f"run{i}"
        shutil.copytree(runs / ("lr", "mc", "digits")[i % 3], place)
        lines = (place / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(lines[t % len(lines)]) | {"round": t + 1} for t in range(100)]
        rows = [{name: value for name, value in row.items() if name != "crc32"} for row in rows]
        (place / "metrics.jsonl").write_bytes(b"".join(map(run_directory.encode_metrics, rows)))
        trace = np.load(place / "supports.npz")
        run_directory.write_supports(place, **{name: np.repeat(trace[name], 25, axis=0) for name in ("supports", "gate_histogram")})
    assert main(["report", str(tmp_path / "many")]) == 0
    place = tmp_path / "many" / "report.html"
    assert place.stat().st_size < 6e6
    captions = [words(caption) for caption in tree(place.read_text()).iter("caption")]
    assert "50 runs" in captions


def test_a_half_written_run_has_a_page(runs, tmp_path):
    place = tmp_path / "half"
    shutil.copytree(runs / "lr", place)
    for name in ("result.json", "model.safetensors", "supports.npz", "report.html"):
        (place / name).unlink()
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:50])
    assert len(read_run(place).rows) == 2
    text = page.render_report([place])
    assert "2 of 4" in text and "not finished" in text


def test_a_run_of_an_earlier_version_has_a_page(runs, tmp_path):
    place = tmp_path / "old"
    shutil.copytree(runs / "lr", place)
    (place / "run_info.json").unlink()
    rows = run_directory.read_metrics(place)
    new = ("header", "positions", "scalars", "weights", "gates")
    kept = [{key: value for key, value in row.items() if not key.endswith(new)} for row in rows]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert "Bytes sent" in page.render_report([place])


def test_text_from_the_store_is_never_markup(runs, tmp_path):
    place = tmp_path / "<img src=x>"
    shutil.copytree(runs / "lr", place)
    rows = run_directory.read_metrics(place)
    rows[-1]["rejected"] = [[0, "<script>alert(1)</script>"]]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page.render_report([place])
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text and "<img src=x" not in text


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda place: shutil.rmtree(place), "does not exist"),
        (lambda place: (place / "config.toml").unlink(), "holds no run"),
        (lambda place: (place / "config.toml").write_text("= ="), "cannot be read"),
        (lambda place: (place / "metrics.jsonl").write_text("nonsense\n{}\n"), "damaged in line 1"),
        (lambda place: (place / "metrics.jsonl").write_text('{"round": 1}\n{}\n'), "damaged in line 1"),
        (lambda place: (place / "metrics.jsonl").write_bytes(b"\xff\xfe\n"), "cannot be read"),
        (lambda place: (place / "metrics.jsonl").write_text(""), "no finished round"),
        (lambda place: (place / "supports.npz").write_bytes(b"PK nonsense"), "damaged"),
        (lambda place: (place / "model.safetensors").write_bytes(b"nonsense"), "damaged"),
        (lambda place: (place / "result.json").write_text("[]"), "damaged"),
        (lambda place: (place / "result.json").write_text('{"metric": "r2"}'), "did not write"),
    ],
)
def test_a_damaged_run_is_one_line_and_exit_code_two(runs, tmp_path, capsys, damage, says):
    place = tmp_path / "run"
    shutil.copytree(runs / "lr", place)
    damage(place)
    assert main(["report", str(place), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and "Traceback" not in said
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(runs, tmp_path, capsys):
    assert main(["report", str(runs / "lr"), "--out", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert main(["report", str(runs / "lr"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_without_a_folder_the_newest_run_is_reported(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "no run in runs/" in capsys.readouterr().err
    shutil.copytree(runs / "lr", tmp_path / "runs" / "one")
    assert main(["report", "--out", "page.html"]) == 0
    assert capsys.readouterr().out == "report in page.html\n"


def test_the_page_opens_in_the_browser_the_system_names(runs, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert main(["report", str(runs / "lr"), str(runs / "mc"), "--out", str(tmp_path / "both.html"), "--open"]) == 0
    assert opened == [(tmp_path / "both.html").as_uri()]


def test_a_failing_report_does_not_lose_the_run(tmp_path, monkeypatch, capsys, few_test_rows):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedsieve.report.html.page.render_report", lambda *_: 1 / 0)
    assert (
        main(["train", "--data.num-examples", "300", "--data.num-features", "40", "--rounds", "2", "--out", "run", "--density", "0.1"]) == 0
    )
    said = capsys.readouterr()
    assert "the run is stored" in said.err and "run folder" in said.out
    assert (tmp_path / "run" / "result.json").exists() and not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("words", [["report", "--help"], ["watch", "--help"], ["report", "RUN"]])
def test_pages_need_no_torch(runs, words):
    words = [str(runs / "lr") if word == "RUN" else word for word in words]
    code = f"import sys; from fedsieve.cli.main import main; sys.exit(main({words}) or ('torch' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_overlap_is_intersection_over_union():
    rng = np.random.default_rng(0)
    supports = np.stack([np.sort(rng.choice(30, 8, replace=False)) for _ in range(5)])
    brute = [[len(set(a) & set(b)) / len(set(a) | set(b)) for b in supports.tolist()] for a in supports.tolist()]
    assert np.allclose(pairwise_iou(supports), brute)


def test_supports_of_unequal_length_are_kept_and_compared():
    supports = run_directory.pad_supports([np.array([1, 5, 7]), np.array([5]), np.array([5, 7])])
    assert supports.tolist() == [[1, 5, 7], [5, -1, -1], [5, 7, -1]]
    assert np.allclose(pairwise_iou(supports), [[1, 1 / 3, 2 / 3], [1 / 3, 1, 1 / 2], [2 / 3, 1 / 2, 1]])


def test_the_pareto_front_has_exactly_the_undominated_points():
    points = {"a": (10, 0.5), "b": (20, 0.4), "c": (30, 0.9), "d": (30, 0.8), "e": (5, 0.1)}
    beaten = {n for n, (x, y) in points.items() for x2, y2 in points.values() if x2 <= x and y2 >= y and (x2, y2) != (x, y)}
    assert pareto_front(points) == sorted(set(points) - beaten, key=lambda n: points[n])


def test_a_picture_is_a_png_another_library_reads(tmp_path):
    from base64 import b64decode

    from matplotlib import image

    matrix = np.array([[0.0, 1.0, -1.0], [0.5, 0.0, 0.0]])
    (tmp_path / "p.png").write_bytes(b64decode(png_encoder.signed_png(matrix).split(",")[1]))
    read = image.imread(tmp_path / "p.png")
    assert read.shape == (2, 3, 4)
    assert ((read[..., 3] > 0) == (matrix != 0)).all()
    assert np.allclose(read[0, 1, :3] * 255, png_encoder.POSITIVE) and np.allclose(read[0, 2, :3] * 255, png_encoder.NEGATIVE)


def test_a_study_has_a_page_with_its_table_its_figures_and_its_claims(tmp_path):
    from fedsieve.cli.main import main

    assert main(["reproduce", "gates", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "gates, scale smoke" in text and text.count("data:image/png;base64,") >= 1
    assert "<table" in text and "no number means anything" in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text


def test_the_page_shows_failures_rejections_and_epsilon(tmp_path, monkeypatch):
    from fedsieve.cli.main import main

    monkeypatch.setattr("fedsieve.data.synthetic.NUM_TEST_EXAMPLES", 200)
    words = [
        "train",
        "--algorithm",
        "fed-avg",
        "--rounds",
        "3",
        "--data.num-examples",
        "200",
        "--data.num-features",
        "20",
        "--federation.clients",
        "10",
    ]
    words += ["--federation.participation", "0.5", "--density", "0.1", "--quiet", "--out", str(tmp_path / "run")]
    secret = tmp_path / "secret"  # cohorts of private runs follow from a secret; with this one a reply is late
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    assert (
        main(
            [
                *words,
                "--failures.dropout",
                "0.3",
                "--failures.straggler-fraction",
                "0.3",
                "--failures.malicious-fraction",
                "0.2",
                "--privacy.noise-multiplier",
                "1",
                "--secret-file",
                str(secret),
            ]
        )
        == 0
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "replies were aggregated" in page and "it arrived after the exchange was closed" in page
    assert "Epsilon per round" in page and "privacy of one client" in page

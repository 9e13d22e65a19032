import re
from pathlib import Path

from jaxtyping import config

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_ten_lines_of_python_do_what_the_readme_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, network = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    for code in (table, network):
        assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope: dict = {}
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # at the speed a user meets; shapes are checked elsewhere
    exec(table, scope)
    assert int((scope["model"].coef_ != 0).sum()) == 3 and scope["model"].score(scope["x"], scope["y"]) > 0.9
    assert str(scope["model"].bytes_up_) in capsys.readouterr().out
    exec(network, scope)
    assert scope["run"].nonzero == 73 and (tmp_path / "model.pt").exists()


def test_every_algorithm_and_task_is_in_the_readme():
    from fedsieve.algorithms import ALGORITHMS
    from fedsieve.experiments.tasks import TASKS

    for name in (*ALGORITHMS, *TASKS):
        assert f"`{name}`" in README


def test_the_table_of_results_is_part_of_the_results_page():
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    rows = re.findall(r"^\| .* \|$", README.split("<!-- communication -->")[1].split("<!-- /communication -->")[0], re.MULTILINE)
    assert len(rows) > 5 and all(row in page for row in rows), "run tools/publish_results.py"


def test_links_have_existing_targets():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target

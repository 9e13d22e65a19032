import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_ten_lines_of_python_do_what_the_readme_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope: dict = {}
    exec(code, scope)
    assert int((scope["theta"] != 0).sum()) == 50
    assert scope["problem"].recovery(scope["theta"])["tdr"] == 1.0
    assert "r2" in capsys.readouterr().out


def test_every_method_and_task_is_in_the_readme():
    from fedsieve.algorithms import METHODS
    from fedsieve.experiments.tasks import TASKS

    for name in (*METHODS, *TASKS):
        assert f"`{name}`" in README


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target

"""Flower's PyTorch quickstart on digits, and its conversion by the diff of docs/flower.md."""

import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

from flwr.app import Context, RecordDict

from helpers.flower_app import ProcessGrid

ROOT = Path(__file__).parents[2]
APP, PAGE = ROOT / "tests" / "flower" / "quickstart", ROOT / "docs" / "flower.md"
PARTITIONS = 10
CONFIG = {
    "num-server-rounds": 20,
    "fraction-evaluate": 0.2,
    "local-epochs": 1,
    "learning-rate": 0.1,
    "batch-size": 32,
    "partitions": PARTITIONS,
}


def read_hunks():
    """(file, old text, new text) of each hunk of the page; blank context lines separate hunks."""
    for diff in re.findall(r"```diff\n(--- .*?)```", PAGE.read_text(), flags=re.DOTALL):
        head, _, *lines = diff.splitlines()
        for hunk in "\n".join(lines).split("\n \n"):
            old, new = ("\n".join(line[1:] for line in hunk.splitlines() if line[0] in kinds) for kinds in (" -", " +"))
            yield head.removeprefix("--- "), old, new


def copy(folder):
    """Copy the quickstart as it is; return the folder."""
    return Path(shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__")))


def convert(folder):
    """Copy the quickstart and apply the diff; return the folder."""
    copy(folder)
    for name, old, new in read_hunks():
        text = (folder / name).read_text()
        assert text.count(old) == 1, old
        (folder / name).write_text(text.replace(old, new))
    return folder


def run_in_process(folder, **changes):
    """Run client and server app of a folder on a grid in this process; return what the server app wrote."""
    path = folder / "result.json"
    config = CONFIG | changes | {"result": str(path)}
    sys.path.insert(0, str(folder))
    try:
        grid = ProcessGrid(import_module("digits.client_app").app, PARTITIONS, config)
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
        import_module("digits.server_app").app(grid, context)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "digits"]:
            del sys.modules[name]
    return json.loads(path.read_text())

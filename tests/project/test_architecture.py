"""docs/architecture.md: the tree lists every file, and the files and names of the walk exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedsieve"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_FILES_OF_A_ROUND = 10


def tree_paths():
    """The paths below the package in the tree of the page; a folder ends with a slash."""
    (tree,) = re.findall(r"```text\nsrc/fedsieve/\n(.*?)```", PAGE, flags=re.DOTALL)
    folders, paths = [], []
    for line in tree.splitlines():
        indent, name = re.match(r"( +)(\S+)", line).groups()
        folders = folders[: len(indent) // 2 - 1]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


def walk_rows():
    """The file and the description of each step of the walk."""
    return re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| (.*) \|$", PAGE, flags=re.MULTILINE)


def test_everything_in_the_tree_exists():
    assert [path for path in tree_paths() if not (SOURCE / path).exists()] == []


def test_no_file_is_missing_from_the_tree():
    has_code = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or "def " in path.read_text()]
    assert {path.relative_to(SOURCE).as_posix() for path in has_code} <= set(tree_paths())


def test_every_line_of_the_tree_has_a_description():
    (tree,) = re.findall(r"```text\nsrc/fedsieve/\n(.*?)```", PAGE, flags=re.DOTALL)
    assert all(re.match(r" +\S+ +\S", line) for line in tree.splitlines())


def test_a_round_is_followed_in_at_most_ten_files():
    files = {file for file, _ in walk_rows()}
    assert len(walk_rows()) >= 8 and len(files) <= MAX_FILES_OF_A_ROUND
    assert all((SOURCE / file).exists() for file in files)


def test_the_names_of_the_walk_are_in_their_files():
    for file, description in walk_rows():
        text = (SOURCE / file).read_text()
        for name in re.findall(r"`([\w.]+)`", description):
            assert re.search(rf"\b{name.split('.')[-1]}\b", text) or (SOURCE / name).exists(), (file, name)


def test_every_file_that_the_text_names_exists():
    for file in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert (SOURCE / file).exists() or (ROOT / file).exists(), file

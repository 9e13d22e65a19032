import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_command_line_reference_is_what_the_help_says():
    sys.path.insert(0, str(ROOT / "tools"))
    import cli_reference

    assert (ROOT / "docs" / "cli.md").read_text() == cli_reference.reference(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target

"""The page on performance shows what was measured."""

import json

from benchmarks import __main__ as benchmarks


def test_the_table_of_the_page_is_that_of_the_stored_ratios():
    _, _, rest = benchmarks.PAGE.read_text().partition(benchmarks.TABLE_BEGIN)
    assert rest.partition(benchmarks.TABLE_END)[0] == benchmarks.render_table(json.loads(benchmarks.RATIOS.read_text()))

"""The table of ``tests/README.md`` is the one that the imports of the test files give."""

from __future__ import annotations

from tests.helpers.tested_folders import BEGIN, COMMAND, END, PAGE, importers, page_lines


def test_the_table_is_that_of_the_imports() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert table.strip().splitlines() == page_lines(), f"rewrite it: {COMMAND}"


def test_names_count_for_the_folder_that_defines_them() -> None:
    tests = importers()
    assert "unit/data/test_public_templates.py" in tests["data/chat"]
    assert "project/test_tested_folders.py" not in {test for row in tests.values() for test in row}
    assert "callbacks" in tests and "strategies/step" in tests

"""The table of ``tests/README.md`` names every folder, and test files that import from it."""

from __future__ import annotations

import re

from tests.helpers.tested_folders import BEGIN, COMMAND, END, PAGE, importers, page_lines

_ROW = re.compile(r"^\| `([^`]+)` \|(.*)\|$")


def _rows(lines: list[str]) -> dict[str, list[str]]:
    """Return the named test files of every folder of a table."""
    found = [match for line in lines if (match := _ROW.match(line))]
    return {match[1]: re.findall(r"`([^`]+)`", match[2]) for match in found}


def test_the_table_names_every_folder_and_files_that_import_from_it() -> None:
    # Which five files are closest changes with any import: the page may be behind in that.
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    written, tests = _rows(table.splitlines()), importers()
    assert written.keys() == _rows(page_lines()).keys(), f"rewrite it: {COMMAND}"
    for folder, names in written.items():
        assert {f"{name}.py" for name in names} <= set(tests[folder]), f"rewrite it: {COMMAND}"


def test_names_count_for_the_folder_that_defines_them() -> None:
    tests = importers()
    assert "unit/data/test_public_templates.py" in tests["data/chat"]
    assert "project/test_tested_folders.py" not in {test for row in tests.values() for test in row}
    assert "callbacks" in tests and "strategies/step" in tests

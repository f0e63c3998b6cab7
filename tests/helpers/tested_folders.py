"""Which test files import from which folder of the library: the table of ``tests/README.md``.

    python -m tests.helpers.tested_folders             # rewrite the table
    python -m tests.helpers.tested_folders data/chat   # every test file of a folder, for pytest

Names imported from a package count for the folder that defines them. A test that reaches a folder
only through the Trainer does not count. Read from the sources alone, without an import.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- tested folders -->", "<!-- end of the tested folders -->"
COMMAND = "python -m tests.helpers.tested_folders"
_PACKAGE = "megatron_lightning"
_MOVED_UP = ("strategies", "callbacks")  # packages at the top of the repository
_NOT_LISTED = ("project", "gpu")  # of the pages, and for a device
_SHOWN = 5
_ELSEWHERE = ""


def _sources() -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the path of every module of the library."""
    for top in (_PACKAGE, *_MOVED_UP):
        base = ROOT / top
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if top == _PACKAGE and parts[0] in _MOVED_UP:
                continue  # symbolic links
            inner = () if top == _PACKAGE else (top,)
            names = [name for name in parts if name != "__init__"]
            yield ".".join([_PACKAGE, *inner, *names]), path


def _imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and local name of every import from a module, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name


class _Library:
    """Folders of the library's modules and exports."""

    def __init__(self) -> None:
        self.modules = dict(_sources())
        self._exports = {
            (module, local): (source, name)
            for module, path in self.modules.items()
            if path.name == "__init__.py"
            for source, name, local in _imports(path)
        }

    def folders(self) -> list[str]:
        """Return every folder that has modules, such as ``data/chat``."""
        packages = (name for name, path in self.modules.items() if path.name == "__init__.py")
        return sorted(folder for folder in map(_folder, packages) if folder)

    def folder_of(self, module: str, name: str) -> str:
        """Return the folder that defines a name of a module. Empty: none, or the top package."""
        while f"{module}.{name}" not in self.modules and (module, name) in self._exports:
            module, name = self._exports[module, name]
        module = f"{module}.{name}" if f"{module}.{name}" in self.modules else module
        path = self.modules.get(module)
        if path is None:
            return _ELSEWHERE
        return _folder(module if path.name == "__init__.py" else module.rpartition(".")[0])


def _folder(package: str) -> str:
    return "/".join(package.split(".")[1:])


@cache
def importers() -> dict[str, list[str]]:
    """Return the test files of every folder, by the folder's share of the names they import."""
    library = _Library()
    shares: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders = Counter(library.folder_of(module, name) for module, name, _ in _imports(path))
        del folders[_ELSEWHERE]
        for folder, names in folders.items():
            test = path.relative_to(ROOT / "tests").as_posix()
            shares[folder].append((-names / folders.total(), test))
    return {folder: [test for _, test in sorted(shares[folder])] for folder in library.folders()}


def page_lines() -> list[str]:
    """Return the lines of the table."""
    lines = ["| library folder | test files closest to it |", "|---|---|"]
    for folder, tests in importers().items():
        listed = [test for test in tests if test.partition("/")[0] not in _NOT_LISTED]
        if listed:
            shown = ", ".join(f"`{test.removesuffix('.py')}`" for test in listed[:_SHOWN])
            lines.append(f"| `{folder}` | {shown}{', …' if len(listed) > _SHOWN else ''} |")
    return lines


def main() -> None:
    """Rewrite the table, or print the test files of the folders asked for."""
    if sys.argv[1:]:
        found = importers()
        print(*dict.fromkeys(f"tests/{test}" for name in sys.argv[1:] for test in found[name]))
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}\n", *page_lines(), f"\n{END}{after}"]))


if __name__ == "__main__":
    main()

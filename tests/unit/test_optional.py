"""Optional packages: a missing one is a line with the extra that brings it."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.rows.sources import read_rows
from megatron_lightning.data.text.corpus import opened
from megatron_lightning.data.text.tokenizers import huggingface_tokenizer
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.evaluate import check_installed
from megatron_lightning.optional import EXTRAS, require

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_lightning", "strategies", "callbacks")
DISTRIBUTIONS = {
    "lm_eval": "lm-eval",
    "pydantic": "fastapi",
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
}
# Import names of the packages that every installation has, where they differ.
INSTALLED = {"docstring-parser": "docstring_parser", "pillow": "PIL"}
BY_INSTALLED = {"lightning_utilities", "typing_extensions", "yaml", "megatron_lightning"}


def _settings() -> configparser.ConfigParser:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings


def _always_installed() -> set[str]:
    lines = _settings()["options"]["install_requires"].split("\n")
    names = [re.split(r"[>=<\[; ]", line)[0] for line in lines if line]
    return {INSTALLED.get(name, name) for name in names} | BY_INSTALLED


def _imports(
    node: ast.AST, doors: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[int, str, tuple[ast.AST, ...]]]:
    """Yield line and module of each import that may run, and what is around it.

    Args:
        node: A part of a file.
        doors: The function, and handlers of each ``try`` in it, around the part.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        inner = doors
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (child,)
        elif isinstance(child, ast.Try):
            inner = (*doors, *child.handlers)
        if isinstance(child, ast.Import):
            yield from ((child.lineno, name.name, doors) for name in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield child.lineno, child.module or "", doors
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _imports(child, inner)


def test_every_import_of_an_optional_package_is_behind_the_helper() -> None:
    always = _always_installed() | set(sys.stdlib_module_names)
    bare = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, module, doors in _imports(ast.parse(path.read_text(encoding="utf-8"))):
                package = module.partition(".")[0]
                if package in always:
                    continue
                door = "".join(map(ast.unparse, doors))
                if "except ImportError:" in door:
                    continue  # without the package something else is done
                named = "fastapi" if package == "starlette" else package  # one brings the other
                if not re.search(rf"(require|missing)\(['\"]{named}", door):
                    bare.append(f"{path.relative_to(ROOT)}:{line}: {module}")
    assert bare == [], "call megatron_lightning.optional.require before the import"


def test_extras_bring_their_packages() -> None:
    extras = _settings()["options.extras_require"]
    for package, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(package, package) in extras[extra], (package, extra)


def test_a_broken_package_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastapi.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fastapi", raising=False)
    with pytest.raises(ImportError, match=r"cannot be imported \(No module named 'no_such_part'\)"):
        require("fastapi", "the server")


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("transformers", "hf", lambda path: huggingface_tokenizer(path)),
        ("transformers", "hf", lambda path: ChatTokenizer.load(path)),
        ("pyarrow", "data", lambda path: list(read_rows(f"{path}/rows.parquet"))),
        ("datasets", "finetune", lambda path: list(read_rows("no/such-set"))),
        ("lm_eval", "eval", lambda path: check_installed()),
    ],
)
def test_a_missing_package_is_one_line_with_its_extra(
    package: str,
    extra: str,
    use: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.parquet").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as found:
        use(tmp_path)
    text = str(found.value)
    assert f"needs the package {package}, which is not installed. `pip install " in text
    assert "\n" not in text and re.search(rf"'megatron_lightning\[({extra}|finetune)\]'`", text)


def test_a_compressed_file_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    path = tmp_path / "text.jsonl.zst"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    text = r"package zstandard, which is not installed.*'megatron_lightning\[data\]'`"
    with pytest.raises(ConfigError, match=text), opened(str(path)):
        pass

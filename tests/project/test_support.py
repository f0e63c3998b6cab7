"""The support matrix: the page is made of the table, the tests that the table names exist and are
of the feature and the layout, and refused cells are refused with the printed message."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache

import pytest

from benchmarks import support
from benchmarks.hf_coverage import read_table
from benchmarks.support import BEGIN, END, KINDS, LAYOUTS, PAGE, REFUSALS, message, page_lines, rows
from tests.project.test_readme import ROOT

# Options of the strategy, or what ids and constants of tests call them.
OF_COLUMN: Mapping[str, str] = {
    "tp": r"tensor[_-]model[_-]parallel[_-]size|TP2|\"tensor\"|\btp=",
    "sp": r"sequence_parallel|-sp|, sp|sp2|\bTP\b|\bsp=",
    "pp": r"pipeline[_-]model[_-]parallel[_-]size|PP2|\"pipeline\"|\bpp=",
    "vpp": r"virtual_pipeline_model_parallel_size|\"virtual_pipeline\"|\bvpp=",
    "cp": r"context_parallel_size|CP2|\bcp=",
    "ep": r"expert_model_parallel_size|expert_tensor_parallel_size|\bep=",
    "etp": r"expert_tensor_parallel_size|\betp=",
    "ddp": r"\bddp\b|DDP2",
    "zero1": r"zero1|DP[24]|dp[24]|MegatronStrategy",
    "fsdp": r"fsdp",
    "gpt": r"TransformerConfig|GPTModel|GPTLightningModule",
    "hub": r"hf_models|transformers|Llama|AutoModel|HuggingFaceModule|MaskedLanguageModule",
    "any": r"Module",
}
# The aliases of all axes, which every test with a named layout imports: they say nothing of a test.
OF_ALL_TESTS = ("tests.helpers.layouts", "AXES")
TESTS = sorted({test for row in rows() for test, _, _ in row.tests()})


@lru_cache(maxsize=256)
def _names(module: str) -> tuple[dict[str, tuple[ast.stmt, str]], dict[str, tuple[str, str]]]:
    """Return the top-level statements of a module by the names that they bind, and the names that
    it imports from other tests."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    bound: dict[str, tuple[ast.stmt, str]] = {}
    imported: dict[str, tuple[str, str]] = {}
    text = path.read_text() if path.is_file() else ""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound[node.name] = node, source
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            for alias in node.names:
                imported[alias.asname or alias.name] = str(node.module), alias.name
        else:
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    bound.setdefault(name.id, (node, source))
    return bound, imported


def _source(module: str, name: str, seen: set[tuple[str, str]]) -> str:
    """Return the source of a name of a test module with everything of the tests that it uses."""
    bound, imported = _names(module)
    if name in imported:
        return _source(*imported[name], seen)
    if (module, name) in seen or name not in bound:
        return ""
    seen.add((module, name))
    node, source = bound[name]
    used = dict.fromkeys(child.id for child in ast.walk(node) if isinstance(child, ast.Name))
    fixtures = dict.fromkeys(child.arg for child in ast.walk(node) if isinstance(child, ast.arg))
    programs = [f"{name.replace('.', '/')}.py" for name in re.findall(r'"(tests\.[\w.]+)"', source)]
    started = [(ROOT / path).read_text() for path in programs if (ROOT / path).is_file()]
    own = [_source(module, name, seen) for name in used | fixtures]
    return "\n".join([source, *started, *own])


@lru_cache(maxsize=256)
def source_of(test: str) -> str:
    """Return the source of ``lightning/test_a.py::test_b`` with what the test uses."""
    path, _, name = test.partition("::")
    return _source(f"tests.{path.removesuffix('.py').replace('/', '.')}", name, {OF_ALL_TESTS})


def test_the_page_is_the_table_and_what_the_strategy_prints() -> None:
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = page_lines({name: message(name) for name in REFUSALS})
    assert text.strip().splitlines() == lines


def test_cells_are_of_known_columns() -> None:
    assert len(rows()) >= 25
    assert {name for row in rows() for name in row.refused.values()} == set(REFUSALS)
    columns = LAYOUTS.keys() | KINDS.keys()
    for row in rows():
        tested = [column for _, column, _ in row.tests()]
        assert columns >= {*tested, *row.measured, *row.refused}, row.feature
        assert len(tested) == len(set(tested)), row.feature
        assert not set(tested) & set(row.measured), row.feature
        for cell in row.measured.values():
            family, layout = cell.split()
            assert read_table(support.MEASURED)[family][layout].startswith(("equal", "refused"))


def test_tests_are_of_their_feature_and_column() -> None:
    for row in rows():
        for test, column, case in row.tests():
            source = source_of(test)
            assert source, f"{row.feature}: no test {test}"
            assert re.search(row.word, source), f"{test} does not name {row.word}"
            named = re.search(OF_COLUMN[column], f"{source}\n{case}")
            assert named, f"{row.feature}, {column}: {test} does not name the layout"
        if row.gpu is not None:
            assert source_of(f"gpu/{row.gpu.partition('[')[0]}"), row.gpu


def test_a_test_of_something_else_is_seen() -> None:
    source = source_of("lightning/training/test_manual.py::test_two_optimizers")
    assert re.search("automatic_optimization", source)
    assert not re.search(OF_COLUMN["pp"], source)
    assert not source_of("lightning/training/test_manual.py::test_three_optimizers")


@pytest.mark.slow  # imports 60 files of tests
@pytest.mark.timeout(300)
def test_cases_are_collected() -> None:
    files = sorted({test.partition("::")[0] for test in TESTS})
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-rs", "-m", "not gpu"]
        + [f"tests/{file}" for file in files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    collected = set(run.stdout.splitlines())
    without = set(re.findall(r"SKIPPED \[\d+\] (\S+\.py):\d+: could not import", run.stdout))
    for row in rows():
        for test, column, case in row.tests():
            node = f"tests/{test}[{case}]" if case else f"tests/{test}"
            if node.partition("::")[0] in without:
                continue  # the package of an extra is not installed
            assert node in collected, f"{row.feature}, {column}: {node}"

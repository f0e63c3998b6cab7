"""Rules for the files of the project."""

from __future__ import annotations

import ast
import configparser
import functools
import gc
import importlib
import inspect
import io
import pkgutil
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
from torch import nn
from torchmetrics import MeanMetric

from megatron_lightning import callbacks, file_names, launch, lightning_internals, strategies

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_lightning"
PURE = (
    "megatron_lightning.errors",
    "megatron_lightning.config",
    "megatron_lightning.rules",
    "megatron_lightning.parallel.grid.layout",
    "megatron_lightning.parallel.grid.grid",
    "megatron_lightning.pipeline.schedules.actions",
    "megatron_lightning.pipeline.schedules",
    "megatron_lightning.pipeline.schedules.simulate",
    "megatron_lightning.pipeline.schedules.partition",
    "megatron_lightning.pipeline.schedules.stage_layouts",
    "megatron_lightning.pipeline.schedules.formulas",
    "megatron_lightning.pipeline.schedules.picture",
    "megatron_lightning.pipeline.schedules.trace",
    "megatron_lightning.pipeline.schedules.description",
    "megatron_lightning.planning",
    "megatron_lightning.planning.plan_report",
    "megatron_lightning.recipe_reading.plan_command",
)
USERS_OF_LIGHTNING = (
    "strategies/",
    "callbacks/",
    "megatron_lightning/cards/trainings.py",
    "megatron_lightning/cli.py",
    "megatron_lightning/modules/",
    "megatron_lightning/guards/",
    "megatron_lightning/launch/",
    "megatron_lightning/lightning_internals/",
    "megatron_lightning/step/",
)
INTERNALS = "megatron_lightning/lightning_internals/"
SHARED = {
    # A strategy without a launcher of Lightning's, and with precision plugins and a default
    # checkpoint plugin of our own.
    "Strategy": "_checkpoint_io _configure_launcher _launcher _precision_plugin "
    "_reset_optimizers_and_schedulers",
    # Batch norm over the data-parallel ranks is ours, and Lightning's plugin converts the layers.
    "ParallelStrategy": "_layer_sync",
    # Hooks run although an optimizer step is left out.
    "Precision": "_after_closure",
    # The processes that Lightning starts, watched; weights of all ranks come back from its workers.
    "_SubprocessScriptLauncher": "_call_children_scripts",
    "_MultiProcessingLauncher": "_collect_rank_zero_results "
    "_recover_results_in_main_process _strategy _wrapping_function",
    # Checkpoints at other times than ModelCheckpoint's, and in another place.
    "ModelCheckpoint": "_last_checkpoint_saved _last_global_step_saved _monitor_candidates "
    "_save_checkpoint _save_last_checkpoint _should_save_on_exception "
    "_should_skip_saving_checkpoint",
}
INHERITED = {name: frozenset(names.split()) for name, names in SHARED.items()}
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "bytearray",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "ContextVar",
    "local",
}
# A compiled graph passes tensors and numbers to a custom operator, and no objects. So a number
# represents an object in the graph, and a weak dict maps the number back, as torch does for process
# groups. An entry ends with its object.
NUMBERED_OBJECTS = {
    "megatron_lightning/layers/linear/splittable.py": "_HIDDEN",
    "megatron_lightning/parallel/random/rng.py": "_STREAMS",
    "megatron_lightning/precision/delayed_scaling.py": "_HISTORIES",
}
READ_ONLY_TYPES = {"Mapping", "Sequence", "Set", "Collection"}  # mypy refuses to change such a name
PRODUCTS = re.compile(
    "matmul|mm|bmm|addmm|addbmm|baddbmm|mv|addmv|einsum|tensordot|bilinear|inner"
    "|_?(scaled_)?(grouped_)?mm(_v2)?|_?scaled_dot_product_.*"
)
# Kernels of attention multiply activations with activations; a norm scales channels, and sums them.
WITHOUT_WEIGHTS = {
    "megatron_lightning/layers/norm.py": {"@"},
    "megatron_lightning/layers/attention/attention_backend.py": {
        "scaled_dot_product_attention",
        "@",
    },
    # States of layers multiply activations; inner is the width of Mamba-2's mixer.
    "megatron_lightning/layers/state_space/scan.py": {"einsum"},
    "megatron_lightning/layers/state_space/delta_rule.py": {"@", "einsum"},
    "megatron_lightning/layers/state_space/mamba.py": {"inner"},
    "megatron_lightning/models/blueprint.py": {"inner"},
    "megatron_lightning/models/costs.py": {"inner"},
    # norms of rows, in fp32 whatever the precision of the layers
    "megatron_lightning/layers/adapters/magnitude.py": {"@"},
    "megatron_lightning/layers/adapters/weight_adapters.py": {
        "@"
    },  # of factors, and gradients of these
    "megatron_lightning/layers/context/chunked_kernel.py": {"@"},
    "megatron_lightning/layers/shared_rows/conditions.py": {"matmul"},  # a setting of torch
    "megatron_lightning/layers/context/kernels.py": {
        f"_scaled_dot_product_{kernel}{backward}"
        for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
        for backward in ("", "_backward")
    }
    | {"@"},
}

# A string hides an import from the contracts. What is here reads a room above its own by name.
UPWARD_STRINGS = {
    "megatron_lightning/bridge/auto.py": ["megatron_lightning.modules"],  # AutoBridge.to_module
}

# Rooms with more than 16 files, and how many of these hold no public name. A number may only fall.
# A new file whose names the room's __init__ exports changes nothing here.
FULL_ROOMS = {
    "bridge/families": 1,
    "callbacks": 4,
    "config": 8,
    "modules": 9,
}


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@functools.cache
def _sources() -> tuple[tuple[str, ast.Module], ...]:
    paths = [
        path
        for folder in (PACKAGE, ROOT / "strategies", ROOT / "callbacks")
        for path in sorted(folder.rglob("*.py"))
    ]
    gc.disable()  # a collection walks all trees so far
    try:
        return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths)
    finally:
        gc.enable()


def test_type_checkers_of_users_read_the_types() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert "py.typed" in _setup()["options.package_data"]["megatron_lightning"].split(", ")


def test_setup_lists_every_package() -> None:
    listed = set(_setup()["options"]["packages"].split())
    folders = [
        path.parent
        for top in (PACKAGE, PACKAGE / "strategies", PACKAGE / "callbacks")
        for path in top.rglob("__init__.py")
    ]
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert listed == found, (
        f"setup.cfg [options] packages: missing {found - listed}, too many {listed - found}"
    )


def test_the_folders_at_the_top_are_linked() -> None:
    links = {"strategies": "strategies", "callbacks": "callbacks", "recipes": "configs"}
    for name, folder in links.items():
        assert (PACKAGE / name).is_symlink() and (PACKAGE / name).resolve() == ROOT / folder


@pytest.mark.parametrize("name", ["strategies", "callbacks"])
def test_importing_a_folder_by_its_short_name_is_refused(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"import megatron_lightning.{name}, not {name}" in result.stderr


def test_every_direct_dependency_is_pinned() -> None:
    pinned = {
        _normalised(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    options, extras = _setup()["options"], _setup()["options.extras_require"]
    required = {
        _normalised(re.split(r"[\[><=;]", line)[0])
        for line in "\n".join(
            [options["install_requires"], extras["test"], extras["interop"]]
        ).split("\n")
    }
    assert not (required - {"", "megatron-lightning"}) - pinned, "pin these in constraints.txt"


def _normalised(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def test_pure_modules_import_neither_torch_nor_lightning() -> None:
    program = f"""
import importlib, sys
for name in {PURE!r}:
    importlib.import_module(name)
    loaded = {{"torch", "lightning", "numpy"}} & set(sys.modules)
    assert not loaded, f"{{name}} imports {{loaded}}"
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_run_of_ones_own_module_imports_neither_text_nor_folders_nor_data() -> None:
    """At most 0.3 s beyond Lightning's import: ``benchmarks/bench_start.py`` measures."""
    program = """
import sys
import megatron_lightning.callbacks, megatron_lightning.modules, megatron_lightning.strategies
own = [name for name in sys.modules if name.startswith("megatron_lightning.")]
allowed = {"bridge": 5, "inference": 0, "modules": 1, "callbacks": 1, "data": 6, "peft": 17}
for room, most in allowed.items():
    found = [name for name in own if name.split(".")[1] == room]
    assert len(found) <= most, found
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_preprocess_needs_no_torch() -> None:
    code = "import sys, megatron_lightning.data.text.preprocess; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_mutable_module_state() -> None:
    found = []
    for path, tree in _sources():
        found += [
            f"{path}:{node.lineno}: global"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
        ]
        for node in tree.body:
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and node.value is not None
                and _is_mutable(node)
                and ast.unparse(_targets(node)[0]) != NUMBERED_OBJECTS.get(path)
            ):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not found, (
        "use a tuple, frozenset or MappingProxyType, or annotate a table as Mapping:\n"
        + "\n".join(found)
    )


def test_one_file_knows_what_lightning_keeps_to_itself() -> None:
    known = _private_names_of_lightning()
    found = []
    for path, tree in _sources():
        if path.startswith(INTERNALS) or not path.startswith(USERS_OF_LIGHTNING):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
                names = [alias.name for alias in node.names if alias.name.startswith("_")]
            elif isinstance(node, ast.Attribute) and (
                node.attr in known or re.match("_[A-Z].*__", node.attr)
            ):
                names = [] if ast.unparse(node.value) in ("self", "cls", "super()") else [node.attr]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "setattr")
            ):
                names = [
                    key.value
                    for key in node.args[1:2]
                    if isinstance(key, ast.Constant) and key.value in known
                ]
            else:
                names = []
            found += [f"{path}:{node.lineno}: {name}" for name in names]
    assert not found, f"give these public names in {INTERNALS}:\n" + "\n".join(found)


def test_no_checkpoint_of_a_run_is_kept() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    kept = [name for name in listed.stdout.splitlines() if ".ckpt" in name]
    assert all(name.startswith("tests/oracles/") for name in kept), kept


def test_rooms_are_not_corridors() -> None:
    rooms = [path for path in (ROOT / "megatron_lightning").rglob("*") if path.is_dir()]
    rooms += [path for path in (ROOT / "strategies").rglob("*") if path.is_dir()]
    found = {
        path.relative_to(ROOT).as_posix().removeprefix("megatron_lightning/"): _without_export(
            files
        )
        for path in rooms
        if len(files := [*path.glob("[!_]*.py")]) > 16
    }
    assert found == FULL_ROOMS, (
        "put files into rooms by subject, or export their names in the room's __init__; a smaller "
        "number goes in here"
    )


def test_the_strategy_holds_what_touches_the_trainer_alone() -> None:
    """Rooms that need no Trainer lie beside it."""
    files = [*(ROOT / "strategies").rglob("*.py")]
    assert sum(len(_code_lines(path.read_text())) for path in files) <= 4800


def _code_lines(source: str) -> set[int]:
    """Return the lines with code, without comments, docstrings and blank lines."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in {*skipped, tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return lines


def _without_export(files: Iterable[Path]) -> int:
    """Return how many files of a room the room's ``__init__`` does not import from."""
    return sum(
        f".{path.parent.name}.{path.stem}" not in (path.parent / "__init__.py").read_text()
        for path in files
    )


def test_names_of_files_are_spelled_once() -> None:
    names = {name for name in _strings(vars(file_names).values()) if "." in name}
    assert {"config.json", "adapter_model.bin", "manifest.json"} < names
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
        if path != "megatron_lightning/file_names.py"
    ]
    assert not found, "take the names from file_names.py:\n" + "\n".join(found)


def _strings(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str | tuple):
            yield from [value] if isinstance(value, str) else value


def test_no_string_hides_an_import_upward() -> None:
    found: dict[str, list[str]] = {}
    for path, tree in _sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            [first, *_] = node.args
            module = first.value if isinstance(first, ast.Constant) else None
            if name == "import_module" and str(module).startswith("megatron_lightning"):
                found.setdefault(path, []).append(module)
    assert found == UPWARD_STRINGS


def test_products_with_weights_are_in_one_file() -> None:
    """A precision replaces them there, for every layer."""
    rooms = tuple(f"megatron_lightning/{room}/" for room in ("layers", "models", "pipeline"))
    found = [
        f"{path}:{node.lineno}: {name}"
        for path, tree in _sources()
        if path.startswith(rooms) and path != "megatron_lightning/layers/linear/gemm.py"
        for node in ast.walk(tree)
        if (name := _product(node)) and name not in WITHOUT_WEIGHTS.get(path, ())
    ]
    assert not found, (
        "call megatron_lightning.layers.linear.gemm.matmul for a product with a weight; list one "
        "without a weight here:\n" + "\n".join(found)
    )


def _product(node: ast.AST) -> str | None:
    """Return the name of the product that ``node`` computes or imports."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
        return "@"
    if isinstance(node, ast.Attribute):
        if ast.unparse(node).endswith("backends.cuda.matmul"):  # settings
            return None
        if node.attr == "linear" and ast.unparse(node.value).split(".")[-1] in ("F", "functional"):
            return "F.linear"
        return node.attr if PRODUCTS.fullmatch(node.attr) else None
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        names = [alias.name for alias in node.names]
        return next((n for n in names if n == "linear" or PRODUCTS.fullmatch(n)), None)
    return None


@pytest.mark.parametrize(
    "code",
    [
        "x @ w",
        "x @= w",
        "torch.addmm(b, x, w)",
        "x.matmul",
        "F.linear(x, w)",
        "torch.nn.functional.linear(x, w)",
        "from torch.nn.functional import linear",
        "torch._grouped_mm(x, w)",
        "F.scaled_mm(x, w)",
        "torch.einsum('ij,kj->ik', x, w)",
    ],
)
def test_products_are_found(code: str) -> None:
    assert any(_product(node) for node in ast.walk(ast.parse(code)))


def _private_names_of_lightning() -> set[str]:
    """Return what Lightning names with an underscore and others (torch, torchmetrics, named tuples)
    do not."""
    folder = Path(pl.__file__).parents[1]
    sources = [path for part in ("fabric", "pytorch") for path in (folder / part).rglob("*.py")]
    names = {name for path in sources for name in _own_private_names(path.read_text())}
    return names - {*dir(nn.Module()), *dir(MeanMetric()), "_fields"}


def _own_private_names(source: str) -> set[str]:
    return set(re.findall(r"(?:\bself\.|\bsuper\(\)\.|\bdef )(_[a-z]\w*)", source))


def test_private_names_that_subclasses_share_with_lightning_are_listed() -> None:
    found: dict[str, set[str]] = {}
    for package in (strategies, callbacks, launch, lightning_internals):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name)).values()
            for cls in (
                member
                for member in members
                if inspect.isclass(member) and member.__module__ == module.name
            ):
                names = _own_private_names(inspect.getsource(cls))
                for base in reversed(
                    [base for base in cls.__mro__ if base.__module__.startswith("lightning.")]
                ):
                    shared = names & _own_private_names(inspect.getsource(base))
                    found.setdefault(base.__name__, set()).update(shared)
                    names -= shared
    assert {name: names for name, names in found.items() if names} == INHERITED


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _is_mutable(node: ast.Assign | ast.AnnAssign) -> bool:
    if any(ast.unparse(target) == "__all__" for target in _targets(node)):
        return False
    if isinstance(node, ast.AnnAssign) and READ_ONLY_TYPES & {
        part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)
    }:
        return False
    value = node.value
    if isinstance(value, ast.Call):
        name = (
            value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        )
        return name in MUTABLE_CALLS
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def test_make_lists_the_commands_that_the_documents_name() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {
        "install",
        "lint",
        "format",
        "check",
        "test",
        "test-all",
        "demo",
        "gpu",
        "gpu-bench",
    } <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_kinds_that_are_looked_for_exist() -> None:
    """A class named by its path must be there, or a check would pass over its objects."""
    source = (ROOT / "strategies/checks/kinds.py").read_text()
    names = re.findall(r'_imported\(\s*"([\w.]+)", "(\w+)"', source)
    assert len(names) > 8
    for module, kind in names:
        assert hasattr(importlib.import_module(f"megatron_lightning.modules.{module}"), kind)

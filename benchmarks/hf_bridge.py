"""Folders of every causal-LM family: read lazily, given back, through a checkpoint, and verified.

    python -m benchmarks.hf_bridge --work coverage.jsonl

A tiny random model of each family is saved by ``save_pretrained`` in shards of 40 KB. The table
goes into docs/hf_coverage.md, behind the one of layouts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import resource
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks import hf_families
from benchmarks.hf_coverage import FOLDER_COLUMNS, FOLDERS, TABLE
from benchmarks.hf_families import Family, NotBuiltError
from benchmarks.hf_training import verdict
from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.hf_models.transformers_model import fill_weights, lazy_parameters
from megatron_lightning.parallel.shards.spec import Box

_YOUTU = "Stock `transformers` zeroes a row of a loaded embedding of youtu. Here the file wins."
_MAX_BYTES = 8 << 30  # of address space: a family whose default sizes are not shrunk
COLUMNS = {
    "load": "parameters and buffers equal `from_pretrained`",
    "boxes": "random boxes are equal, and only their bytes are read",
    "export": "the folder comes back byte by byte",
    "checkpoint": "also through `convert import` and `convert export`, without the folder",
    "verify": "`convert verify`: tensors and logits",
}


def load(bridge: AutoBridge) -> str:
    """Compare a lazily loaded model with the stock one."""
    stock = bridge.model_class.from_pretrained(bridge.path)
    ours = fill_weights(bridge.lazy_model(dtype="auto"))
    expected = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    found = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    if list(expected) != list(found):
        return f"wrong: names differ ({sorted(set(expected) ^ set(found))[:3]})"
    wrong = [n for n, x in expected.items() if not _equal(x, found[n])]
    return f"wrong: {wrong[0]} differs" if wrong else "equal"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def boxes(bridge: AutoBridge) -> str:
    """Read random boxes of every parameter, and count the bytes."""
    folder: Any = bridge.folder
    draw = random.Random(0)
    for name, lazy in lazy_parameters(bridge.lazy_model(dtype="auto")).items():
        full = lazy.read()
        for _ in range(3):
            offset = tuple(draw.randrange(n) for n in lazy.shape)
            shape = tuple(draw.randint(1, n - o) for n, o in zip(lazy.shape, offset, strict=True))
            box, before = Box(offset, shape), folder.bytes_read
            if not _equal(lazy.read(box), full[box.slices]):
                return f"wrong: a box of {name} differs"
            extra = folder.bytes_read - before - prod(shape) * lazy.dtype.itemsize
            if extra:
                return f"wrong: {extra} bytes too many for a box of {name}"
    return "equal"


def export(bridge: AutoBridge, target: Path) -> str:
    """Write an untrained folder."""
    plan = bridge.plan()
    fills = {name: lazy.fill for name, lazy in plan.parameters.items()}
    write_folder(target, plan.folder, plan.tensors(fills))
    return _same_files(bridge.path, target)


def _same_files(expected: Path, found: Path) -> str:
    content, other = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (expected, found)
    )
    differing = sorted(n for n in {*content, *other} if content.get(n) != other.get(n))
    return f"wrong: {', '.join(differing[:3])}" if differing else "equal"


def through_checkpoint(path: Path, parent: Path) -> str:
    """Import a folder, hide it, and export the checkpoint."""
    commands.import_(str(path), str(parent / "c.ckpt"))
    hidden = path.rename(parent / "hidden")
    try:
        commands.export(str(parent / "c.ckpt"), str(parent / "again"))
    finally:
        hidden.rename(path)
    return _same_files(path, parent / "again")


def verify(path: Path) -> str:
    """Run ``convert verify``."""
    commands.verify(str(path))
    return "equal"


def measure(family: Family) -> dict[str, str]:
    """Return the verdict of every column; "built" says why there is none."""
    try:
        config = hf_families.small_config(family)
        model: Any = hf_families.build(family, config)
    except NotBuiltError as error:
        return {"built": str(error).splitlines()[0]}
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        path = parent / "folder"
        model.save_pretrained(path, max_shard_size="40KB")
        steps: dict[str, Any] = {
            "load": lambda: load(AutoBridge.from_hf_pretrained(path)),
            "boxes": lambda: boxes(AutoBridge.from_hf_pretrained(path)),
            "export": lambda: export(AutoBridge.from_hf_pretrained(path), parent / "out"),
            "checkpoint": lambda: through_checkpoint(path, parent),
            "verify": lambda: verify(path),
        }
        return {name: _tried(step) for name, step in steps.items()}


def measure_apart(family: Family, limit_s: float) -> dict[str, str]:
    """Measure a family in a process of its own, with an end to its time and memory."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        results.put(measure(family))

    process = context.Process(target=run)
    process.start()
    process.join(limit_s)
    if process.is_alive() or process.exitcode:
        ended = f"ended with {process.exitcode}" if process.exitcode else f"took {limit_s:.0f} s"
        process.kill()
        process.join()
        return {"built": ended}
    row: dict[str, str] = results.get()
    return row


def _tried(step: Any) -> str:
    sink = io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            result: str = step()
    except Exception as error:
        return verdict(error)
    return result


def section(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the part of the page that this program writes."""
    import transformers

    built = {name: row for name, row in results.items() if "built" not in row}
    lines = [
        FOLDERS,
        "",
        "`HuggingFaceModule` reads your folder, and `convert` gives it back. To try both on a tiny",
        "random folder per family, in 40 KB shards, run `python -m benchmarks.hf_bridge`. These",
        f"are the results with transformers {transformers.__version__}.",
        "",
        "| | | equal | of |",
        "|---|---|---|---|",
    ]
    for column, meaning in COLUMNS.items():
        count = Counter(row[column].split(":")[0] for row in built.values())
        lines.append(f"| {column} | {meaning} | {count['equal']} | {len(built)} |")
    others = {
        name: {c: v for c, v in row.items() if v != "equal"} for name, row in sorted(built.items())
    }
    lines += ["", "Families where not everything is equal:", ""]
    lines += [
        f"- {name}: {'; '.join(f'{column}: {value}' for column, value in row.items())}"
        for name, row in others.items()
        if row
    ] or ["- none"]
    if "youtu" in built:
        lines += ["", _YOUTU]
    missing = sorted(set(results) - set(built))
    lines += ["", f"Not built from a shrunk configuration: {', '.join(missing) or 'none'}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure all families, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", nargs="+", help="only these; default: all")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one family")
    parser.add_argument("--work", type=Path, help="file of hf_coverage, for columns of its table")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = {}
    for family in hf_families.families():
        if not options.families or family.name in options.families:
            results[family.name] = measure_apart(family, options.limit_s)
            print(family.name, results[family.name], flush=True)
            if options.work is not None and "built" not in results[family.name]:
                columns = {name: results[family.name][name] for name in FOLDER_COLUMNS}
                with options.work.open("a") as file:
                    file.write(json.dumps({"family": family.name, **columns}) + "\n")
    before = options.table.read_text().partition(FOLDERS)[0] if options.table.exists() else ""
    options.table.write_text(before + section(results))


if __name__ == "__main__":
    main()

"""The support matrix: which features are tested under which layouts and models, and what is
refused.

    python -m benchmarks.support           # prints the tables
    python -m benchmarks.support --write   # docs/support.md

The rows are in ``docs/support.yaml``. A cell is tested if its test has passed in the record of
:mod:`benchmarks.slices`; commit and date are printed beside the test. A refused cell names an entry
of :data:`REFUSALS`: a Trainer on CPU processes that is refused in this process, before any other
starts. The page prints the message.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import gpu_tests, hf_coverage, machine, slices
from benchmarks.optimizers import BEGIN, END, write
from benchmarks.outcomes import Outcome, read_record
from megatron_lightning.config import (
    ContextOptions,
    DataParallelOptions,
    MoEConfig,
    TransformerConfig,
)
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.popen_launcher import ScriptLauncher
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy

TABLE = slices.TABLE
PAGE = machine.ROOT / "docs" / "support.md"
MEASURED = machine.ROOT / hf_coverage.TABLE
LAYOUTS: Mapping[str, str] = {
    "tp": "TP",
    "sp": "TP + SP",
    "pp": "PP",
    "vpp": "VPP",
    "cp": "CP",
    "ep": "EP",
    "etp": "ETP",
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
}
"""Columns of the first table -> heading."""
KINDS: Mapping[str, str] = {"gpt": "`GPTModel`", "hub": "`transformers`", "any": "any module"}
"""Kinds of models, columns of the second table -> heading."""


class Row(NamedTuple):
    """A feature."""

    feature: str
    page: str
    """Page of the docs that describes the feature."""
    word: str
    """Regular expression found in every test of the feature."""
    tested: Mapping[str, Mapping[str, str]] = {}
    """Test below ``tests/`` -> column -> case."""
    measured: Mapping[str, str] = {}
    """Column -> family and layout of ``docs/hf_coverage.md``."""
    refused: Mapping[str, str] = {}
    """Column -> key of :data:`REFUSALS`."""
    gpu: str | None = None
    """Test below ``tests/gpu``, with or without its case in brackets."""

    def tests(self) -> Iterator[tuple[str, str, str]]:
        """Yield test, column and case of every tested cell."""
        for test, cells in self.tested.items():
            for column, case in cells.items():
                yield test, column, case


def rows() -> list[Row]:
    """Return the rows of the table."""
    return [Row(**row) for row in yaml.safe_load(TABLE.read_text())]


# ----------------------------------------------------------------------------------------- refusals


class _Module(pl.LightningModule):
    """A few layers of torch, without declarations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss."""
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Manual(_Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def _gpt(**options: Any) -> GPTLightningModule:
    sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 6, "kv_channels": 4}
    return GPTLightningModule(TransformerConfig(**{**sizes, "vocab_size": 32, **options}))


def _fit(
    module: Callable[[], pl.LightningModule],
    *,
    devices: int = 2,
    trainer: Mapping[str, Any] | None = None,
    **strategy: Any,
) -> Callable[[], object]:
    """Return a fit on CPU processes."""

    def fit() -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        made = pl.Trainer(
            strategy=MegatronStrategy(**strategy),
            accelerator="cpu",
            devices=devices,
            max_steps=1,
            **{**quiet, "enable_model_summary": False, **(trainer or {})},
        )
        rows: Any = torch.zeros(8, 8)
        made.fit(module(), DataLoader(rows, batch_size=4))

    return fit


def _manual_gpt() -> GPTLightningModule:
    module = _gpt()
    module.automatic_optimization = False
    return module


def _experts() -> GPTLightningModule:
    return _gpt(moe=MoEConfig(num_experts=4))


def _quantized() -> dict[str, Any]:
    return {"plugins": [MegatronFP8Precision(recipe=FP8Recipe(fp8_param_gather=True))]}


TP, PP, EP = (f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert"))
CP, MICRO = "context_parallel_size", "micro_batch_size"
OVERLAP = DataParallelOptions(overlap_param_gather=True)
REFUSALS: Mapping[str, Callable[[], object]] = {
    "experts-of-a-dense-model": _fit(_gpt, **{EP: 2}),
    "experts-without-sequence-parallel": _fit(_experts, **{TP: 2}, sequence_parallel=False),
    "experts-not-divided": _fit(_experts, **{EP: 3}, devices=3),
    "no-plan": _fit(_Module, **{TP: 2}),
    "no-sequence": _fit(_Module, **{CP: 2}),
    "batch-norm-over-replicas": _fit(_Module, trainer={"sync_batchnorm": True}),
    "dropout-of-attention": _fit(lambda: _gpt(attention_dropout=0.1), **{CP: 2}),
    "heads-of-an-exchange": _fit(
        _gpt, devices=4, **{CP: 4}, context_options=ContextOptions(cp_comm_type="a2a")
    ),
    "one-chunk": _fit(_Module, **{PP: 2}, pipeline_schedule="zbv"),
    "quantized-of-ddp": lambda: _fit(_gpt, trainer=_quantized(), data_parallel="ddp")(),
    "quantized-compiled-fsdp": lambda: _fit(
        _gpt, trainer=_quantized(), data_parallel="fsdp", compile="block"
    )(),
    "compiled-split-fsdp": _fit(
        _gpt,
        devices=4,
        **{PP: 2, MICRO: 1},
        pipeline_schedule="zb-h1",
        data_parallel="fsdp",
        compile="block",
    ),
    "manual-pipeline": _fit(_Manual, **{PP: 2}),
    "manual-context": _fit(_manual_gpt, **{CP: 2}),
    "manual-fsdp": _fit(_Manual, data_parallel="fsdp"),
    "averaging-fsdp": lambda: _fit(
        _Module, trainer={"callbacks": [EMAWeightAveraging()]}, data_parallel="fsdp"
    )(),
    "overlap-ddp": _fit(_Module, data_parallel="ddp", data_parallel_options=OVERLAP),
    "overlap-fsdp": _fit(_Module, data_parallel="fsdp", data_parallel_options=OVERLAP),
}
"""Name -> a call that raises the strategy's error."""


def message(name: str) -> str:
    """Return what the strategy says in a refused cell.

    Raises:
        RuntimeError: If the call passes.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        with patch.object(ScriptLauncher, "_start", side_effect=RuntimeError("processes start")):
            REFUSALS[name]()
    except ConfigError as error:
        return " ".join(str(error).split())
    raise RuntimeError(f"{name} is not refused")


# -------------------------------------------------------------------------------------------- table


class Notes:
    """Messages with numbers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def number(self, text: str) -> str:
        """Return the mark of a message."""
        if text not in self.lines:
            self.lines.append(text)
        return f"refused [{self.lines.index(text) + 1}]"


class Records(NamedTuple):
    """Measured outcomes for the cells of the page."""

    slices: Mapping[str, Outcome]
    """Test -> outcome on CPU processes."""
    families: Mapping[str, Any]
    """Cells of ``docs/hf_coverage.md``."""


def cell(row: Row, column: str, messages: Mapping[str, str], records: Records, notes: Notes) -> str:
    """Return what a cell of the page says."""
    words = [
        slices.word(slices.node(test, case), records.slices)
        for test, own, case in row.tests()
        if own == column
    ]
    if column in row.measured:
        family, layout = row.measured[column].split()
        kind, _, note = records.families[family][layout].partition(": ")
        words.append(notes.number(note) if note else f"measured {kind}")
    if column in row.refused:
        words.append(notes.number(messages[row.refused[column]]))
    return ", ".join(words) or "·"


def page_lines(messages: Mapping[str, str]) -> list[str]:
    """Return the tables, the notes and the tests of every row.

    Args:
        messages: Key of :data:`REFUSALS` -> message.
    """
    notes, table, record = Notes(), rows(), gpu_tests.read_record()
    records = Records(read_record(slices.RECORD), hf_coverage.read_table(MEASURED))

    def line(row: Row, columns: Sequence[str]) -> str:
        cells = (cell(row, column, messages, records, notes) for column in columns)
        return f"| [{row.feature}]({row.page}) | {' | '.join(cells)} |"

    lines = ["### By layout", ""]
    lines += [f"| feature | {' | '.join(LAYOUTS.values())} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    lines += [line(row, list(LAYOUTS)) for row in table]
    lines += ["", "### By kind of model, and on a GPU", ""]
    lines += [f"| feature | {' | '.join(KINDS.values())} | GPU |", "|---" * (len(KINDS) + 2) + "|"]
    for row in table:
        lines.append(f"{line(row, list(KINDS))} {gpu_tests.cell(row.gpu, record)} |")
    lines += ["", "### What is refused", ""]
    lines += ["You get one of these messages before your first step:", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes.lines, 1)]
    lines += ["", "### Tests", ""]
    lines += [
        "To run the tests for your feature, pass their path below `tests/` to pytest. Behind each"
    ]
    lines += ["stand the last runs of its cases, by date and commit:", ""]
    for row in table:
        named = []
        for test, cells in row.tested.items():
            columns = ", ".join((LAYOUTS | KINDS)[column] for column in cells)  # type: ignore[operator]
            runs = slices.place(
                (slices.node(test, case) for case in cells.values()), records.slices
            )
            named.append(f"    - `{test}`: {columns} ({runs})")
        lines += [f"- {row.feature}", *named] if named else []
    return lines


def main() -> None:
    """Print the tables, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    lines = page_lines({name: message(name) for name in REFUSALS})
    print("\n".join(lines))
    if options.write:
        write(PAGE, lines)


__all__ = ["BEGIN", "END", "PAGE", "REFUSALS", "Row", "message", "page_lines", "rows"]

if __name__ == "__main__":
    main()

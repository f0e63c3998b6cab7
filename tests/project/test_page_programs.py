"""The Python blocks of the pages run, in order, on one process and with small sizes.

A block stands where its reader has a module, data and a Trainer. A page's ``Stage`` makes these
names, and names the texts that become smaller. Blocks that are run in full elsewhere, and blocks
that need a program of others, are listed with the test, or with the reason.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning import callbacks, config
from megatron_lightning.data import IndexedDatasetWriter
from megatron_lightning.inference import EngineOptions, Sampling
from megatron_lightning.models import GPTModel, MoEConfig
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.chats import make_tokenizer, turn, write_rows
from tests.helpers.hf_folders import make_folder
from tests.project.test_readme import ROOT, blocks, save

DOCS = ROOT / "docs"
ELSEWHERE = {
    ("checkpoints.md", '"""Read a checkpoint'): "test_the_reader_of_the_docs_reads_a_checkpoint",
    ("own_model.md", "class NanoGPT"): "test_the_models_of_the_page_train_and_are_divided",
    ("own_model.md", "NanoGPT(), loader"): "test_the_models_of_the_page_train_and_are_divided",
    ("own_model.md", "units="): "test_the_units_that_the_page_names_are_the_ones_found",
    ("own_model.md", "class Llama"): "test_the_models_of_the_page_train_and_are_divided",
    ("own_model.md", "class Bert"): "test_the_models_of_the_page_train_and_are_divided",
    ("own_model.md", "class ViT"): "test_the_table_of_the_vision_transformer_equals_one_device",
    ("own_model.md", "vit_plan = "): "test_the_table_of_the_vision_transformer_equals_one_device",
    (
        "parallelism.md",
        "plan = ShardingPlan",
    ): "test_the_table_of_the_docs_is_the_one_of_the_package",
    ("parallelism.md", "Muon("): "test_muon_and_adamw_of_the_docs_share_the_parameters",
    ("planning.md", "flops("): "test_the_plan_in_python_is_that_of_the_command",
    ("schedules.md", "make_schedule("): "test_the_schedules_of_the_docs",
    ("tutorial/first_module.md", "class Classifier"): "test_the_first_module_is_described",
    ("tutorial/first_module.md", "trainer.fit"): "test_the_example_of_a_module_runs",
    ("tutorial/first_module.md", "describe("): "test_the_first_module_is_described",
    ("training.md", "lr_find("): "test_learning_rate_finder",
    ("inference.md", "record_routes"): "test_a_replay_trains_as_on_one_device",
}
"""Page and a text of a block -> the test that runs the block."""
NOT_RUN = {
    ("determinism.md", "deterministic=True"): "a process of its own; test_flags.py sets it",
    ("training.md", "def validation_loss"): "a recipe; the trial of the two sweeps below it",
    ("training.md", "import optuna"): "the package optuna, and trials of a sweep",
    ("training.md", "from ray import tune"): "the package ray, and trials of a sweep",
    ("from_trl.md", "SFTTrainer("): "the package trl",
    ("fp8.md", 'backend="transformer_engine"'): "Transformer Engine, and a GPU",
    ("inference.md", "openai.OpenAI"): "the package openai; tests/faults/test_server.py uses it",
    ("long_runs.md", "run.SlurmExecutor"): "the package nemo_run, and a cluster",
    ("long_runs.md", "rerun_step"): "a hook of a broken machine; test_rerun.py calls it on ranks",
}
"""Page and a text of a block -> what the block needs."""


class _SmallTrainer(pl.Trainer):
    """A Trainer of two steps on the CPU."""

    def __init__(self, **options: Any) -> None:
        small = {"max_steps": 2, "max_epochs": None, "logger": False, "enable_progress_bar": False}
        defaults = {"accelerator": "cpu", "devices": 1, "enable_model_summary": False}
        super().__init__(**{**defaults, **options, **small})


class _Tuned(pl.LightningModule):
    """A language model of ``transformers``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def _loader(vocab_size: int = 60) -> Any:
    rows = torch.randint(0, vocab_size, (4, 8), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)


def _folder(path: Path) -> Path:
    """Return a Llama folder with a tokenizer of its size."""
    if not (path / "llama").is_dir():
        make_folder("llama", path)
        make_tokenizer(vocab_size=320).save_pretrained(path / "llama")
    return path / "llama"


def _chat_folder(path: Path) -> Path:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(path / "chats")
    make_tokenizer().save_pretrained(path / "chats")
    return path / "chats"


# ------------------------------------------------------------------------------------------- pages


@dataclass(frozen=True)
class Stage:
    """What the reader of a page has."""

    names: Callable[[Path], Mapping[str, Any]] = lambda path: {}
    smaller: Mapping[str, str] = field(default_factory=dict)
    """Text of the page -> text that runs here."""
    between: Mapping[str, Callable[[dict[str, Any]], object]] = field(default_factory=dict)
    """A text of a block -> what its reader did before the block."""


def _module_and_data(path: Path) -> dict[str, Any]:
    trainer = _SmallTrainer(strategy=MegatronStrategy())
    return {"module": _Tuned(_folder(path)), "data": _loader(), "trainer": trainer}


def _masked_text(path: Path) -> dict[str, Any]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]
    (path / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path / "bert")
    (path / "data").mkdir()
    with IndexedDatasetWriter(path / "data" / "wiki_text_sentence", np.int32) as writer:
        for document in range(40):
            sentences = [[5 + (document + 7 * i + j) % 90 for j in range(9)] for i in range(4)]
            writer.add_document([t for s in sentences for t in s], [len(s) for s in sentences])
    return {}


def _tokens(path: Path) -> dict[str, Any]:
    _folder(path)
    (path / "data").mkdir()
    with IndexedDatasetWriter(path / "data" / "web_text_document", np.int32) as writer:
        for document in range(40):
            writer.add_document([(document + 7 * i) % 60 for i in range(30)])
    return {}


def _experts(path: Path) -> dict[str, Any]:
    options = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    balanced = MoEConfig(
        num_experts=4,
        router_topk=2,
        router_score_function="sigmoid",
        router_enable_expert_bias=True,
    )
    module = GPTLightningModule(config.TransformerConfig(**options, moe=balanced))
    module.configure_model()
    module.trainer = _SmallTrainer()
    return {"self": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}


def _engine_files(path: Path) -> dict[str, Any]:
    save(path / "demo" / "checkpoints" / "last.ckpt", 50)
    module, trainer = (
        HuggingFaceModule(str(_folder(path))),
        _SmallTrainer(strategy=MegatronStrategy()),
    )
    rows = [{"tokens": torch.tensor([1, 2, 3]), "labels": torch.tensor([2, 3, 4])}] * 4
    trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    model = transformers.AutoModelForCausalLM.from_pretrained(_folder(path))
    return {"trainer": trainer, "model": model, "prompts": [[1, 2]]}


def _pairs(path: Path) -> dict[str, Any]:
    rows = [
        {
            "prompt": [turn("user", f"what is {number}")],
            "chosen": [turn("assistant", "the sky")],
            "rejected": [turn("assistant", "grass")],
        }
        for number in range(16)
    ]
    write_rows(path / "pairs.jsonl", rows)
    return {"trainer": _SmallTrainer(strategy=MegatronStrategy())}


def _new_trainer(names: dict[str, Any]) -> None:
    names["trainer"] = _SmallTrainer(strategy=MegatronStrategy())


def _chats(path: Path) -> dict[str, Any]:
    row = {"messages": [turn("user", "what is blue"), turn("assistant", "the sky")]}
    write_rows(path / "chats.jsonl", [row] * 16)
    return {**_pairs(path), "folder": _chat_folder(path)}


def _adapted(names: dict[str, Any]) -> None:
    module = names["module"]
    module.configure_model()
    names |= {"self": module, "tokens": torch.ones(1, 4, dtype=torch.long)}


def _saved(names: dict[str, Any]) -> None:
    """Fit the module of the page, and save a checkpoint."""
    names["trainer"] = _SmallTrainer(strategy=MegatronStrategy())
    names["trainer"].fit(names["Tuned"](), _loader())
    names["trainer"].save_checkpoint("checkpoints/last.ckpt")
    names["engine"] = SimpleNamespace(update=lambda name, tensor: None)


def _plain_file(names: dict[str, Any]) -> None:
    module = names["FineTuning"]()
    module.configure_model()
    torch.save({"state_dict": module.state_dict()}, "full.ckpt")


_HUB = {"meta-llama/Llama-3.2-1B": "llama"}
STAGES = {
    "after_fit.md": Stage(_module_and_data),
    "checkpoints.md": Stage(_module_and_data),
    "data.md": Stage(
        _masked_text,
        {
            "bert-base-uncased": "bert",
            "1_000_000": "8",
            "sequence_length=512": "sequence_length=64",
        },
    ),
    "experts.md": Stage(_experts),
    "fine_tuning.md": Stage(
        lambda path: _folder(path) and {}, _HUB, {"adapters_disabled(self.model)": _adapted}
    ),
    "from_nemo.md": Stage(
        _tokens,
        {
            **_HUB,
            "sequence_length=4096": "sequence_length=16",
            "global_batch_size=256": "global_batch_size=2",
            "warmup_steps=500": "warmup_steps=1",
            "vocab_size=128256": "vocab_size=60",
        },
    ),
    "from_trl.md": Stage(
        _chats,
        {
            "meta-llama/Llama-3.2-1B-Instruct": "chats",
            "sequence_length=2048": "sequence_length=64",
            "sequence_length=1024": "sequence_length=64",
        },
        {"DPOModule(": _new_trainer},
    ),
    "hugging_face.md": Stage(
        lambda path: _folder(path) and {}, _HUB, {"save_hf_pretrained": _saved}
    ),
    "inference.md": Stage(_engine_files),
    "long_runs.md": Stage(
        lambda path: {
            "MyModule": lambda: _Tuned(_folder(path)),
            "MyData": _loader,
        },
        {"MegatronStrategy(...)": "MegatronStrategy()"},
    ),
    "own_model.md": Stage(lambda path: {"Layer": nn.Identity}),
    "pipeline.md": Stage(lambda path: {"path": _folder(path), "transformers": transformers}),
    "plans.md": Stage(lambda path: {"MyStyle": object}),
    "preferences.md": Stage(
        lambda path: _chat_folder(path) and _pairs(path),
        {"meta-llama/Llama-3.2-1B-Instruct": "chats", "sequence_length=2048": "sequence_length=64"},
    ),
    "training.md": Stage(
        lambda path: {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)}
    ),
    "transformers.md": Stage(
        lambda path: _folder(path) and {"loader": _loader()}, _HUB, {"full.ckpt": _plain_file}
    ),
}
"""Pages whose blocks need more than the imports that every page takes for granted."""


def _programs() -> dict[str, list[str]]:
    """Return the Python blocks of every page, without the blocks of the two lists."""
    listed = [*ELSEWHERE, *NOT_RUN]
    found = {}
    for file in sorted(DOCS.rglob("*.md")):
        page = file.relative_to(DOCS).as_posix()
        texts = [text for name, text in listed if name == page]
        programs = [
            block
            for block in blocks(file.read_text(), "python")
            if not any(text in block for text in texts)
        ]
        if programs:
            found[page] = programs
    return found


def _on_one_process(block: str, smaller: Mapping[str, str]) -> str:
    """Return a block with small sizes, and on one process if the block trains."""
    for shown, used in sorted(smaller.items(), key=lambda item: -len(item[0])):
        block = block.replace(shown, used)
    if ".fit(" in block or "pl.Trainer(" in block:
        block = re.sub(r"(_parallel_size|devices)=\d+", r"\1=1", block)
        block = block.replace("pl.Trainer(", "Trainer(")
        # Compilation is of no interest here, and takes seconds.
        block = block.replace(', compile="block"', "")
    if re.search(r"^return ", block, flags=re.MULTILINE):  # the end of a hook
        block = f"def hook():\n{textwrap.indent(block, '    ')}\nhook()\n"
    return block


def _known(path: Path) -> dict[str, Any]:
    """Return the names that pages take for granted."""
    options = {name: getattr(config, name) for name in ("CheckpointOptions", "PipelineOptions")}
    return {
        "__name__": "copied",
        "pl": pl,
        "torch": torch,
        "nn": nn,
        "Trainer": _SmallTrainer,
        "ModelCheckpoint": ModelCheckpoint,
        "MegatronStrategy": MegatronStrategy,
        "MegatronFP8Precision": MegatronFP8Precision,
        "FP8Recipe": FP8Recipe,
        "MoEConfig": MoEConfig,
        "GPTModel": GPTModel,
        "ShardingPlan": ShardingPlan,
        "Sampling": Sampling,
        "EngineOptions": EngineOptions,
        **{name: getattr(callbacks, name) for name in callbacks.__all__},
        **options,
    }


@pytest.mark.timeout(300)  # seconds on an idle machine
@pytest.mark.spread(4)
@pytest.mark.parametrize("page", _programs())
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings.filterwarnings("ignore")
    monkeypatch.chdir(tmp_path)
    stage = STAGES.get(page, Stage())
    names = {**_known(tmp_path), **stage.names(tmp_path)}
    for block in _programs()[page]:
        for text, prepare in stage.between.items():
            if text in block:
                prepare(names)
        try:
            exec(compile(_on_one_process(block, stage.smaller), page, "exec"), names)
        except BaseException as error:
            raise AssertionError(f"{page} does not run:\n{block}") from error


def test_the_lists_name_blocks_and_tests() -> None:
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for (page, text), reason in [*ELSEWHERE.items(), *NOT_RUN.items()]:
        found = [b for b in blocks((DOCS / page).read_text(), "python") if text in b]
        assert found, f"{page} has no block with {text!r}"
        assert (page, text) in NOT_RUN or f"def {reason}(" in tests, reason
    texts = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    for stage in STAGES.values():
        assert all(text in texts for text in (*stage.smaller, *stage.between))

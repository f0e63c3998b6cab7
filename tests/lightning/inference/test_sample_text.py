"""Text in a fit: that of one device on every layout, and losses as without it, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from megatron_lightning.callbacks import SampleText
from megatron_lightning.config import MoEConfig, RecomputeOptions, TransformerConfig
from megatron_lightning.data.text.tokenizers import train_sentencepiece
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.inference import EngineOptions, Sampling
from megatron_lightning.inference.live.live_codec import find_codec
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.fp8 import MegatronFP8Precision
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

VOCABULARY = 290
PROMPTS = ["def f(x):", "import", "", "return x, sys"]
DENSE = tiny_config(
    num_layers=4,
    num_query_groups=2,
    vocab_size=VOCABULARY,
    max_sequence_length=64,
    init_method_std=0.3,
)
EXPERTS = replace(DENSE, moe=MoEConfig(num_experts=4, layer_freq=(1, 0, 1, 0)))
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
EP, MICRO = "expert_model_parallel_size", "micro_batch_size"
RECOMPUTE = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2, MICRO: 2}),
    "pp2 vpp2": (2, {PP: 2, VPP: 2, MICRO: 2}),
    "zbv": (2, {PP: 2, VPP: 2, MICRO: 2, "pipeline_schedule": "zbv"}),
    "dp2": (2, {}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "cp2": (2, {CP: 2}),
    "ep2": (2, {EP: 2}),
    "tp2 pp2": (4, {TP: 2, PP: 2, MICRO: 4}),
    "pp2 fsdp": (4, {PP: 2, MICRO: 2, "data_parallel": "fsdp"}),
    "recompute": (2, {TP: 2, "recompute": RECOMPUTE}),
}
USUAL = ("tp2", "pp2 vpp2", "ep2")


def sampler(tokenizer: str, **options: Any) -> SampleText:
    return SampleText(
        PROMPTS, max_new_tokens=10, temperature=0.8, tokenizer_model=tokenizer, **options
    )


def fit(
    config: TransformerConfig,
    options: dict[str, Any] | None,
    tokenizer: str,
    *,
    writes: bool,
    draft_tokens: int = 0,
    **of_trainer: Any,
) -> tuple[list[float], Any]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (32, 25), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    own = EngineOptions(draft_tokens=draft_tokens)
    losses, texts = Losses(), sampler(tokenizer, options=own)
    run = trainer(
        strategy,
        max_steps=4,
        callbacks=[losses, *([texts] if writes else [])],
        limit_val_batches=1,
        val_check_interval=1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=1,
        **of_trainer,
    )
    size = 8
    if options is not None:
        layout = strategy.layout
        size = 8 * layout.tp * layout.pp * layout.cp // run.world_size
    # Rounding moves tokens to other experts, and AdamW scales it up: larger steps than 1e-6 train
    # another model on another layout.
    module = GPTLightningModule(config, learning_rate=1e-2 if config.moe is None else 1e-6)
    run.fit(module, DataLoader(rows, batch_size=size), DataLoader(rows, batch_size=size))
    assert len(texts.acceptance) == (len(texts.texts) if draft_tokens else 0)
    return losses.losses, texts.texts


def fits(
    config: TransformerConfig, options: Any, tokenizer: str, draft_tokens: int = 0
) -> list[Any]:
    return [
        fit(config, options, tokenizer, writes=writes, draft_tokens=writes * draft_tokens)
        for writes in (False, True)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(["def f(x):\n    return x\n", "import os, sys\n"] * 20, VOCABULARY, path)
    return str(path)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in USUAL else pytest.mark.slow) for n in LAYOUTS],
)
def test_text_in_a_fit(name: str, tokenizer: str) -> None:
    size, options = LAYOUTS[name]
    config = EXPERTS if name in ("ep2", "tp2 pp2") else DENSE
    _, expected = fit(config, None, tokenizer, writes=True)
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    distinct = {text for _, rows in expected for row in rows for text in row}
    assert len(distinct) > 12 or config.moe is not None
    for plain, written in run_ranks(size, fits, config, options, tokenizer, timeout_s=110):
        assert written[0] == plain[0]
        assert written[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_text_by_drafts_in_a_fit(name: str, tokenizer: str) -> None:
    size, options = LAYOUTS[name]
    config = EXPERTS if name in ("ep2", "tp2 pp2") else DENSE
    config = replace(config, mtp_num_layers=2)
    _, expected = fit(config, None, tokenizer, writes=True)
    for plain, written in run_ranks(size, fits, config, options, tokenizer, 2, timeout_s=110):
        assert written == (plain[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp8"])
def test_losses_stay_equal_in_other_precisions(precision: str, tokenizer: str) -> None:
    losses = []
    for writes in (False, True):
        options: dict[str, Any] = {"precision": precision}
        if precision == "fp8":
            options = {"plugins": [MegatronFP8Precision()]}
        found, texts = fit(DENSE, {}, tokenizer, writes=writes, **options)
        losses.append(found)
    assert losses[0] == losses[1]
    assert len({text for _, rows in texts for row in rows for text in row}) > 12


def _write(folder: str, tokenizer: str) -> None:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (8, 25), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    drafts = EngineOptions(draft_tokens=1)
    run = trainer(
        MegatronStrategy(),
        max_steps=4,
        callbacks=[sampler(tokenizer, every_n_steps=2, name="tales", options=drafts)],
        logger=[CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "board", "")],
    )
    module = GPTLightningModule(replace(DENSE, mtp_num_layers=1))
    run.fit(module, DataLoader(rows, batch_size=2))
    # Lightning sets the mode after a validation only.
    assert all(m.training for m in module.modules()), "text leaves the mode of training"


def test_every_logger_gets_the_texts(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, _write, str(tmp_path), tokenizer)
    lines = [json.loads(x) for x in (tmp_path / "csv" / "texts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2] * 4 + [4] * 4
    assert [line["prompt"] for line in lines] == PROMPTS * 2
    assert all(line["text"] and line["name"] == "tales" for line in lines)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [event.step for event in board.Tensors("tales/text_summary")] == [2, 4]
    acceptance = board.Scalars("tales_draft_acceptance")
    assert [event.step for event in acceptance] == [2, 4]
    assert all(0 <= event.value < 1 for event in acceptance)
    assert "tales_draft_acceptance" in (tmp_path / "csv" / "metrics.csv").read_text()


class _InStep(GPTLightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        if batch_idx == 0:
            with pytest.raises(PipelineError, match="text by an engine"):
                strategy.engine().generate([[1]], Sampling(max_new_tokens=2))
        return super().training_step(batch, batch_idx)


def _refused(tokenizer: str) -> None:
    rows: Any = [{"tokens": torch.arange(24), "labels": torch.arange(24)}] * 8
    run = trainer(MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=2), max_steps=2)
    run.fit(_InStep(DENSE), DataLoader(rows, batch_size=4))


def test_what_cannot_work_is_refused(tokenizer: str) -> None:
    run_ranks(2, _refused, tokenizer)
    for options, message in (
        ({"prompts": "text"}, "continues a list of texts"),
        ({"prompts": []}, "continues a list of texts"),
        ({"prompts": ["x"], "every_n_steps": 0}, "every_n_steps is 0"),
        ({"prompts": ["x"], "num_samples": 0}, "num_samples is 0"),
        ({"prompts": ["x"], "temperature": -1.0}, "temperature=-1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            SampleText(**options)
    with pytest.raises(ConfigError, match="came without a tokenizer"):
        find_codec(GPTLightningModule(DENSE), None, None, "sentencepiece")

"""Text of a model under ``compile="block"``: in a training, in ``predict_step`` and by ``generate``
from its checkpoint, the same as of an uncompiled one.

A text grows by one token at a time, so the layer's graphs see another length each time. The
weights deviate so much that a wrong layer or head changes the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import CompileOptions
from megatron_lightning.inference import Sampling, sample
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.distributed.test_generate import PROMPTS, texts_on
from tests.helpers.language_model import VOCABULARY, small_gpt
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer
from tests.parity.test_compiled import TP, _Graphs

SAMPLING = Sampling(max_new_tokens=8, temperature=0.9, top_k=20, top_p=0.9)
LENGTH = 16


class _Writer(GPTLightningModule):
    """Continues prompts."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.write(batch["prompts"])

    def write(self, prompts: list[list[int]]) -> list[list[int]]:
        return sample(self._next_logits, prompts, SAMPLING, max_sequence_length=LENGTH)

    def _next_logits(self, tokens: Tensor, last: Tensor) -> Tensor:
        logits: Tensor = self(tokens)
        return logits[torch.arange(len(tokens)), last]


class _Texts(pl.Callback):
    """Writes a text after each validation."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.texts.append(pl_module.write(PROMPTS))


def _write(layout: dict[str, Any], folder: str) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in text]
    prompts: Any = [{"prompts": PROMPTS}]
    results = []
    for compiled in (False, True):
        options = dict(layout)
        if compiled:
            options |= {
                "compile": "block",
                "compile_options": CompileOptions(backend="aot_eager"),
            }
        pl.seed_everything(3, verbose=False)
        config = small_gpt(3, init_method_std=0.5, max_sequence_length=LENGTH)
        module, texts, graphs = _Writer(config, learning_rate=1e-2), _Texts(), _Graphs()
        fit = trainer(
            MegatronStrategy(**options),
            max_steps=2,
            val_check_interval=1,
            callbacks=[texts, graphs],
        )
        fit.fit(module, DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=4))
        fit.save_checkpoint(f"{folder}/{compiled}.ckpt")
        last = trainer(MegatronStrategy(**options)).predict(
            module, DataLoader(prompts, batch_size=None)
        )
        results.append((texts.texts, last, graphs.count, graphs.breaks))
    return results


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        pytest.param(1, {}, id="tp1"),
        pytest.param(2, {TP: 2, "sequence_parallel": False}, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_write_the_same_text(
    tensor: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Graphs: a step, and evaluation at its first length and at others."""
    for (texts, predicted, *_), compiled in run_ranks(
        tensor, _write, layout, str(tmp_path), timeout_s=280
    ):
        assert compiled == (texts, predicted, 3, {})
        assert len(texts) == 2 and texts[0] != texts[1] and predicted == texts[1:]
    for own in ("False", "True"):
        checkpoint = str(tmp_path / f"{own}.ckpt")
        for text in run_ranks(tensor, texts_on, checkpoint, tensor, 1, SAMPLING):
            assert [text] == predicted

"""Steps that say themselves, with ``run_pipeline``, what is done with each micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.strategies import MegatronStrategy, run_pipeline
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import (
    MICRO,
    ONE,
    Layout,
    assert_close,
    layouts,
    make_layout,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import VectorModule, loader, vectors


class _Explicit(VectorModule):
    """Says itself what is run for every micro-batch; all else runs once, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def _losses(self, batch: list[Tensor]) -> dict[str, Tensor]:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.log("inner", loss, sync_dist=True)
        return {"loss": loss, "size": out.square().mean()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        # A mean over the whole batch: no function of a micro-batch.
        shifted = [batch[0] + batch[0].mean(), batch[1]]
        outputs = run_pipeline(self, self._losses, shifted)
        self.sizes.append(len(batch[0]))
        self.log("outer", outputs["loss"] + outputs["size"], sync_dist=True)
        return outputs

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        before, after = (
            run_pipeline(self, self._losses, batch),
            run_pipeline(self, self._losses, [-batch[0], batch[1]]),
        )
        self.log("flipped", after["loss"] - before["loss"], sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return run_pipeline(self, self.net, batch[0]) * 2


EXPLICIT = PipelineOptions(explicit_steps=True)
PP2_EXPLICIT = make_layout(
    "pp2", 2, 1, pipeline_model_parallel_size=2, micro_batch_size=2, pipeline_options=EXPLICIT
)
MICRO_EXPLICIT = make_layout("micro", 1, 1, micro_batch_size=2, pipeline_options=EXPLICIT)
ZB_EXPLICIT = make_layout(
    "zb",
    2,
    1,
    pipeline_model_parallel_size=2,
    micro_batch_size=2,
    pipeline_schedule="zb-h1",
    pipeline_options=EXPLICIT,
)


def _explicit(layout: Layout, folder: str) -> dict[str, Any]:
    module, record = _Explicit(), Losses()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    chosen = layout.trainer(folder, max_epochs=2, callbacks=[record], **options)
    chosen.fit(module, loader(layout), loader(layout, vectors(16, 1)))
    metrics = metrics_of(chosen)
    predicted = chosen.predict(module, loader(layout, vectors(16, 2)))
    return {
        "losses": record.losses,
        "norms": record.norms,
        "metrics": metrics,
        "predicted": predicted,
        "sizes": module.sizes,
    }


@layouts(PP2_EXPLICIT, slow=[ONE, MICRO_EXPLICIT, ZB_EXPLICIT])
def test_steps_that_run_the_pipeline_themselves(layout: Layout, tmp_path: Path) -> None:
    expected = single(_explicit)
    for rank in run(layout, _explicit, tmp_path):
        assert_close(rank, expected)


class _Twice(_Explicit):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class _Penalised(_Explicit):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx)["loss"] + penalty


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (_Twice, EXPLICIT, PipelineError, "training_step called run_pipeline twice"),
        (
            _Penalised,
            EXPLICIT,
            PipelineError,
            "a graph of its own; backward runs inside run_pipeline",
        ),
        (VectorModule, EXPLICIT, PipelineError, r"did not call run_pipeline\(self, fn, batch\)"),
        (
            _Explicit,
            None,
            ConfigError,
            r"set pipeline_options=PipelineOptions\(explicit_steps=True\)",
        ),
    ],
)
def test_wrong_uses_of_run_pipeline(
    module: Any, options: PipelineOptions | None, error: Any, message: str
) -> None:
    strategy = MegatronStrategy(micro_batch_size=4, pipeline_options=options)
    with pytest.raises(error, match=message):
        trainer(strategy, devices=1, max_epochs=1).fit(module(), loader(MICRO))

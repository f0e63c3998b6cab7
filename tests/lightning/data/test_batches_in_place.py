"""Steps may write into their batch: the run that only follows what units use has a copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.helpers.trainers import Losses
from tests.lightning.support import PP2, Layout, assert_close, layouts, metrics_of, run, single
from tests.lightning.vectors import VectorModule, loader


class _Writes(VectorModule):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        batch[1][batch[1] == 2] = 1
        batch[0].add_(1)
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


def _fit(layout: Layout, folder: str) -> dict[str, Any]:
    record = Losses()
    fit = layout.trainer(folder, max_epochs=1, callbacks=[record])
    fit.fit(_Writes(), loader(layout), loader(layout))
    return {"losses": record.norms, "metrics": metrics_of(fit)}


@layouts(PP2)
def test_steps_write_into_their_batch(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _fit, tmp_path):
        assert_close(rank, single(_fit))

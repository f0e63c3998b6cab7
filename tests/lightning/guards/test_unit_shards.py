"""Steps that compute with FSDP2's shards of parameters beside the model are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from megatron_lightning.errors import ShardingError
from megatron_lightning.resilience.failure import PeerFailure
from tests.lightning.support import Layout, make_layout, run, thinned
from tests.lightning.vectors import VectorModule, loader


class _Penalty(VectorModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self._penalty()

    def _penalty(self) -> Tensor:
        return 0.1 * sum(p.square().sum() for p in self.parameters())


class _Logged(_Penalty):
    def _penalty(self) -> Tensor:
        penalty = super()._penalty()
        self.log("penalty", penalty, sync_dist=True)
        return penalty


def _refused(layout: Layout, folder: str, kind: type[VectorModule]) -> str | None:
    try:
        layout.trainer(folder, max_epochs=1).fit(kind(), loader(layout))
    except PeerFailure:
        return None
    except ShardingError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("kind", "what"),
    thinned([(_Penalty, "returns a loss of them"), (_Logged, "fails with them")], usual=2),
)
def test_penalties_on_shards_are_refused(
    kind: type[VectorModule], what: str, tmp_path: Path
) -> None:
    layout = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
    texts = [text for text in run(layout, _refused, tmp_path, kind) if text is not None]
    assert texts
    for text in texts:
        assert f"{kind.__name__}.training_step" in text and what in text and "weight_decay" in text

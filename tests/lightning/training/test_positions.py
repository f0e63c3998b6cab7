"""Optimizers that choose parameters by their positions are those of one device on every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses
from tests.lightning.support import PP2, Layout, assert_close, run, single


class _ByPosition(ToyModule):
    kind = "decay"

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        half = len(parameters) // 2
        if self.kind == "adagrad":  # makes its state at once
            return torch.optim.Adagrad(parameters, lr=0.1)
        if self.kind == "norms":
            groups = [{"params": [p], "lr": 0.1 * float(p.norm())} for p in parameters]
            return torch.optim.SGD(groups, lr=0.1)
        if self.kind == "decay":  # of the rate, layer by layer
            rows = enumerate(reversed(parameters))
            groups = [{"params": [p], "lr": 0.1 * 0.8**index} for index, p in rows]
        elif self.kind == "head":  # of one stage: the optimizer of the other has nothing to step
            named = self.named_parameters()
            return torch.optim.SGD([p for name, p in named if "head" in name], lr=0.1)
        elif self.kind == "halves":
            groups = [{"params": parameters[:half], "lr": 0.01}, {"params": parameters[half:]}]
        else:
            for parameter in parameters[:half]:
                parameter.requires_grad_(False)
            groups = [{"params": [p for p in parameters if p.requires_grad]}]
        return torch.optim.SGD(groups, lr=0.1)


def _losses(layout: Layout, folder: str, kind: str) -> list[float]:
    module, record = _ByPosition(num_layers=4), Losses()
    module.kind = kind
    trainer = layout.trainer(folder, max_steps=4, callbacks=[record])
    trainer.fit(module, datamodule=layout.data_module())
    return record.losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decay", "halves", "frozen", "adagrad", "head"])
def test_positions_are_those_of_one_device(kind: str, tmp_path: Path) -> None:
    expected = single(_losses, kind)
    for losses in run(PP2, _losses, tmp_path, kind):
        assert_close(losses, expected)


def _refusal(layout: Layout, folder: str) -> str:
    with pytest.raises((ConfigError, PeerFailure)) as error:
        _losses(layout, folder, "norms")
    return "" if isinstance(error.value, PeerFailure) else str(error.value)


def test_rates_from_values_of_other_stages_are_refused(tmp_path: Path) -> None:
    texts = run(PP2, _refusal, tmp_path)
    assert any("configure_optimizers" in text and "names and shapes" in text for text in texts)

"""Resume with an optimizer of another class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from megatron_lightning.errors import CheckpointError
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.optim.class_names import check_class, class_names
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.lightning.support import DP2, ONE, PP2, TP2_TOY, Layout, layouts, run


class _Derived(AdamW):
    pass


class _Module(ToyModule):
    def __init__(self, optimizer: type[Any], options: dict[str, Any]) -> None:
        super().__init__(num_layers=2)
        self.make = lambda: optimizer(self.parameters(), lr=1e-3, **options)

    def configure_optimizers(self) -> Any:
        return self.make()


def _resume(layout: Layout, folder: str, then: Any, options: dict[str, Any]) -> str:
    options = {"max_steps": 1, "limit_val_batches": 0, **options}
    now = {key: options.pop(key) for key in ("fused", "momentum") if key in options}
    trainer = layout.trainer(folder, **options)
    trainer.fit(_Module(AdamW, {}), datamodule=layout.data_module())
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    resumed = layout.trainer(folder, **{**options, "max_steps": 2})
    try:
        path = f"{folder}/a.ckpt"
        resumed.fit(_Module(then, now), datamodule=layout.data_module(), ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    except PeerFailure:
        return "refused"
    return ""


@layouts(ONE, TP2_TOY, slow=[DP2, PP2])
def test_another_class_is_refused(layout: Layout, tmp_path: Path) -> None:
    for found in run(layout, _resume, tmp_path, SGD, {"momentum": 0.9}):
        assert "holds the state of AdamW, and configure_optimizers returns SGD" in found
        assert "load the weights alone" in found


@pytest.mark.parametrize(("then", "options"), [(AdamW, {"fused": True}), (_Derived, {})])
def test_a_derived_class_and_other_options_resume(
    then: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    assert run(ONE, _resume, tmp_path, then, options) == [""]


def test_a_chain_goes_by_its_own_name_and_older_checkpoints_have_none() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    chain = ChainedOptimizer(AdamW([first]), SGD([second]))
    assert class_names(chain) == ["ChainedOptimizer"]
    check_class(chain, ())
    with pytest.raises(CheckpointError, match="ChainedOptimizer"):
        check_class(chain, class_names(AdamW([first])))

"""Random numbers of generators of the CPU, where new tensors are on another device: inside of
``torch.device``, in which Lightning builds models, or after ``torch.set_default_device``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.assembly.checks.replicas import _sketch
from megatron_lightning.data.pretraining.mock import MockGPTDataset
from megatron_lightning.optim.trials.trial_steps import random_tensor
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.peft import LoRA

VALUES = torch.arange(12.0)


def _adapter() -> Tensor:
    model = LoRA(r=4, target_modules=["0"]).apply(nn.Sequential(nn.Linear(8, 8, device="cpu")))
    owner: Any = next(child for child in model.modules() if hasattr(child, "init_weights"))
    name, shape = next((n, p.shape) for n, p in owner.named_parameters() if "lora_A" in n)
    values = torch.empty(shape, device="cpu")
    owner.init_weights(name, values)
    return values


DRAWS: dict[str, Callable[[], Any]] = {
    "adapters": _adapter,
    "probes": lambda: random_tensor((4, 3), torch.Generator().manual_seed(0)),
    "sketches": lambda: _sketch(VALUES),
    "seeds": lambda: torch.tensor(
        RngStreams(3, device=torch.device("cpu")).draw_seed("training-seeds"), device="cpu"
    ),
    "mock data": lambda: MockGPTDataset(8, 16, 50, 4)[0]["tokens"],
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same(name: str) -> None:
    expected = DRAWS[name]()
    with torch.device("meta"):
        found = DRAWS[name]()
    assert torch.equal(found, expected)

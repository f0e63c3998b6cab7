"""Models whose forward knows nothing of pipelines equal themselves on one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import consolidate
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import hf_models
from tests.helpers.families import OWN, STACKS, Family, batches
from tests.helpers.hf_models import BATCH, STEPS
from tests.helpers.layouts import MICRO, PP, TP, VPP, fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

pytest.importorskip("transformers")

RTOL = 1e-5  # fp32, 8 optimizer steps; micro-batches sum in another order than one batch
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {PP: 2, MICRO: 1}),
    "pp2-vpp2": (2, {PP: 2, VPP: 2, MICRO: 1}),
    "zbv": (2, {PP: 2, VPP: 2, MICRO: 1, "pipeline_schedule": "zbv"}),
    "pp4": (4, {PP: 4, MICRO: 1}),
    "pp2-dp2": (4, {PP: 2, MICRO: 1}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "pp2-fsdp2": (4, {PP: 2, MICRO: 1, "data_parallel": "fsdp"}),
    "tp2-pp2": (4, {TP: 2, PP: 2, MICRO: 1}),
}
FAMILIES = [*hf_models.MODELS, *OWN]
SPREAD = {
    "llama-tied": ["pp2", "fsdp"],
    "qwen3": ["tp2-pp2"],
    "bert": ["pp2"],
    "t5": ["pp4"],
    "pyramid": ["pp2"],
    "nanogpt": ["pp2", "pp2-vpp2"],
    "unet": ["pp2", "fsdp"],
    "residual": ["zbv"],
    "mixtral": ["pp2"],
}
NOT_DIVIDED = {
    **{name: ["tp2-pp2"] for name in OWN if name not in STACKS},  # they have no sharding plan
}


def _train(name: str, optimizer: str, options: dict[str, Any] | None, replicas: int) -> Any:
    run = fit(options, Family(name, optimizer), batches(name, BATCH // replicas), steps=STEPS)
    return run.losses, run.norms


def _train_all(name: str, cases: list[tuple[str, dict[str, Any], int]]) -> list[Any]:
    return [_train(name, *case) for case in cases]


@cache
def _one_device(name: str, optimizer: str) -> Any:
    return run_ranks(1, _train, name, optimizer, None, 1)[0]


def _cases() -> list[Any]:
    return [
        pytest.param(
            name,
            SPREAD[name] if default else [x for x in LAYOUTS if x not in NOT_DIVIDED.get(name, ())],
            id=f"{name}{'' if default else '-all'}",
            marks=() if default else pytest.mark.slow,
        )
        for default in (True, False)
        for name in (SPREAD if default else FAMILIES)
    ]


@pytest.mark.spread(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "layouts"), _cases())
def test_untouched_models_equal_one_device(name: str, layouts: list[str]) -> None:
    for world in (2, 4):
        chosen = [layout for layout in layouts if LAYOUTS[layout][0] == world]
        keys = [(layout, optimizer) for layout in chosen for optimizer in ("AdamW", "SGD")]
        cases = []
        for layout, optimizer in keys:
            options = LAYOUTS[layout][1]
            size = options.get(PP, 1) * options.get(TP, 1)
            cases.append((optimizer, options, world // size))
        ranks = run_ranks(world, _train_all, name, cases, timeout_s=280) if cases else []
        for index, (layout, optimizer) in enumerate(keys):
            losses, norms = _one_device(name, optimizer)
            found = np.mean([rank[index][0] for rank in ranks], axis=0)
            assert found == pytest.approx(losses, rel=RTOL), (layout, optimizer)
            for rank in ranks:
                assert rank[index][1] == pytest.approx(norms, rel=RTOL), (layout, optimizer)


def _epoch(
    name: str, options: dict[str, Any] | None, replicas: int, epoch: int, folder: str
) -> list[float]:
    """Train for one more epoch of one batch of its own; return its loss."""
    record, strategy = Losses(), "auto" if options is None else MegatronStrategy(**options)
    rows = list(batches(name, 1).dataset)[epoch * BATCH : (epoch + 1) * BATCH]
    fit = trainer(strategy, max_epochs=epoch + 1, callbacks=[record])
    start = f"{folder}/{epoch - 1}.ckpt" if epoch else None
    loader = DataLoader(rows, batch_size=BATCH // replicas)
    fit.fit(Family(name, "AdamW"), loader, ckpt_path=start)
    fit.save_checkpoint(f"{folder}/{epoch}.ckpt")
    return record.losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_move_between_layouts_and_plain_lightning(tmp_path: Path) -> None:
    losses = []
    layouts = [None, "pp2", "tp2-pp2", "fsdp", "zbv", "pp2-vpp2", "pp4", None]
    for folder, chain in (("plain", [None] * len(layouts)), ("moved", layouts)):
        place = tmp_path / folder
        for epoch, layout in enumerate(chain):
            if epoch and layout is None and folder == "moved":
                last = place / f"{epoch - 1}.ckpt"
                consolidate(last.rename(place / "sharded"), last)
            world, options = (1, None) if layout is None else LAYOUTS[layout]
            replicas = world if layout == "fsdp" else 1
            ranks = run_ranks(world, _epoch, "llama", options, replicas, epoch, str(place))
            losses.append(float(np.mean(ranks)))
    half = len(losses) // 2
    assert losses[half:] == pytest.approx(losses[:half], rel=RTOL)

"""Modules before the units, such as vision towers, lie and run on the first stage only, and the
model equals itself on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.bridge import commands
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.hf_models import BATCH, STEPS
from tests.helpers.layouts import MICRO, PP, TP, VPP, fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

pytest.importorskip("transformers")

import transformers

from tests.helpers.image_models import MODELS, TOWERS, ImageModel, loader

RTOL = 1e-5  # fp32, 8 optimizer steps; micro-batches sum in another order than one batch
ATOL = 1e-5  # weights, of the order of 1
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {PP: 2, MICRO: 1}),
    "zbv": (2, {PP: 2, VPP: 2, MICRO: 1, "pipeline_schedule": "zbv"}),
    "pp4": (4, {PP: 4, MICRO: 1}),
    "pp2-vpp2-dp2": (4, {PP: 2, VPP: 2, MICRO: 1}),
    "tp2-pp2": (4, {TP: 2, PP: 2, MICRO: 1}),
    "pp2-fsdp2": (4, {PP: 2, MICRO: 1, "data_parallel": "fsdp"}),
}
HOLDERS = {
    "pp2": [1],
    "zbv": [0],
    "pp4": [3],
    "pp2-vpp2-dp2": [2, 3],
    "tp2-pp2": [2, 3],
    "pp2-fsdp2": [2, 3],
}
"""Ranks of the first stage. The last stage is on pp rank 0."""


def _train(name: str, options: dict[str, Any] | None, replicas: int, images: bool) -> Any:
    module = ImageModel(name)
    if options and name == "reader" and TP in options:  # transformers has plans for the others
        options = {**options, "sharding_plan": "auto"}
    run = fit(options, module, loader(name, BATCH // replicas, images=images), steps=STEPS)
    tower = module.model.get_submodule(TOWERS[name])
    num_elements = sum(p.numel() for p in tower.parameters())
    if isinstance(run.trainer.strategy, MegatronStrategy):
        state = run.trainer.strategy.full_state_dict()
    else:
        state = module.state_dict()
    values = {k: v.numpy() for k, v in state.items() if v.is_floating_point()}
    return run.losses, run.norms, values, module.calls.count, num_elements


def _train_all(cases: list[tuple[str, dict[str, Any] | None, int, bool]]) -> list[Any]:
    return [_train(*case) for case in cases]


QUICK = [("pp2", "qwen2.5-vl", True), ("pp2", "reader", False)]
SLOW = [(layout, name, True) for layout in LAYOUTS for name in MODELS]
SLOW += [("pp4", "llava", False), ("tp2-pp2", "qwen2.5-vl", False)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="pp2"),
        *(pytest.param([c for c in SLOW if c[0] == x], id=f"{x}-all") for x in LAYOUTS),
    ],
)
def test_towers_run_on_the_first_stage_only(cases: list[tuple[str, str, bool]]) -> None:
    world, options = LAYOUTS[cases[0][0]]
    replicas = world // (options.get(TP, 1) * options[PP])
    ranks = run_ranks(
        world,
        _train_all,
        [(name, options, replicas, images) for _, name, images in cases],
        timeout_s=280,
    )
    alone = run_ranks(1, _train_all, [(name, None, 1, images) for _, name, images in cases])[0]
    for index, (layout, name, images) in enumerate(cases):
        losses, norms, weights, num_calls, num_elements = alone[index]
        found = [rank[index] for rank in ranks]
        assert found[0][2].keys() == weights.keys()
        assert np.mean([rank[0] for rank in found], axis=0) == pytest.approx(losses, rel=RTOL)
        for number, (_, own_norms, own_weights, own_calls, own_elements) in enumerate(found):
            assert own_norms == pytest.approx(norms, rel=RTOL), (layout, name)
            for key in weights if own_weights else ():
                assert np.allclose(own_weights[key], weights[key], rtol=0, atol=ATOL), (name, key)
            # One call for a micro-batch, and one without values before the first.
            holds = number in HOLDERS[layout]
            assert own_calls == (num_calls * BATCH // replicas + 1 if holds and images else 0)
            assert (own_elements > 0) == holds
            if TP not in options:
                assert own_elements == (num_elements if holds else 0)
        assert torch.tensor(norms).isfinite().all()


def _resume(options: dict[str, Any] | None, path: Path | None) -> list[float]:
    """Return the losses of a fit of 4 steps, or of its steps behind a checkpoint."""
    record = Losses()
    strategy = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=4, callbacks=[record])
    fit.fit(ImageModel("llava"), loader("llava"), ckpt_path=path)
    return record.losses


def _save_and_resume(path: Path) -> tuple[dict[str, Any], list[float]]:
    """Save after 2 steps under PP 2. Return the weights, and the losses of TP 2 from there."""
    fit = trainer(MegatronStrategy(**{PP: 2, MICRO: 1}), max_steps=2)
    fit.fit(ImageModel("llava"), loader("llava"))
    fit.save_checkpoint(path)
    weights = {k: v.numpy() for k, v in fit.strategy.full_state_dict().items()}
    return weights, _resume({TP: 2}, path)


def _resume_all(path: Path) -> list[list[float]]:
    return [_resume(None, None), _resume({}, path)]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_checkpoint_with_a_tower_loads_on_other_layouts_and_exports(tmp_path: Path) -> None:
    path = tmp_path / "pp2.ckpt"
    ranks = run_ranks(2, _save_and_resume, path, timeout_s=180)
    (alone, resumed), *_ = run_ranks(1, _resume_all, path)
    for losses in (resumed, *(losses for _, losses in ranks)):
        assert losses == pytest.approx(alone[2:], rel=RTOL)
    weights = {k.removeprefix("model."): v for found, _ in ranks for k, v in found.items()}
    ImageModel("llava").model.save_pretrained(tmp_path / "start")
    commands.export(str(path), str(tmp_path / "out"), like=str(tmp_path / "start"))
    model = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert set(weights) == set(model.state_dict())
    assert all(np.array_equal(v, weights[k]) for k, v in model.state_dict().items())

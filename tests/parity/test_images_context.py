"""Models with images on ranks that share sequences: the tower and the merge see full rows, and the
text model divides them. Training equals one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import ContextOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import CP, MICRO, PP, TP, fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")

from tests.helpers.image_models import FLAT, IMAGE_TOKEN, MERGED, PATCH, SIZE, ImageModel

BATCH, STEPS, LENGTH = 2, 3, 16
DEALT = {"context_options": ContextOptions(chunks_per_rank=4)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {CP: 2}),
    "cp2-zero1": (4, {CP: 2}),
    "cp2-fsdp": (4, {CP: 2, "data_parallel": "fsdp"}),
    "tp2-cp2": (4, {TP: 2, CP: 2}),
    "cp2-pp2": (4, {CP: 2, PP: 2, MICRO: 1}),
    "cp4": (4, {CP: 4}),
}


class Reader(ImageModel):
    """Full rows go into the model, and the loss is that of this rank's part."""

    sequence_dims: ClassVar[Mapping[str, int]] = {"labels": 1}
    counts_calls = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        given = {name: value for name, value in batch.items() if name != "labels"}
        if self.name in FLAT and "pixel_values" in given:
            given["pixel_values"] = given["pixel_values"].flatten(0, 1)
        logits = self.model(**given, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def num_items(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).sum()


def rows(name: str, *, images: bool) -> list[dict[str, Tensor]]:
    """Return rows whose image lies in the middle: on CP 2 rank 0 has no token of it."""
    draw, count = torch.Generator().manual_seed(2), STEPS * BATCH
    tokens = torch.randint(3, 60, (count, LENGTH + 1), generator=draw)
    data = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
    data["labels"][::2, -3:] = -100
    if images:
        flat, in_parts = name in FLAT, name == "llava-next"
        # The whole image, its only part, and an end of each of the two lines.
        num_tokens = 1 if flat else 2 * MERGED + 2 if in_parts else MERGED
        first = 4 if in_parts else 6
        for row in range(count):
            # On CP 2 rank 0 has the image of every second row.
            begin = 2 if flat and row % 2 else first
            where = slice(begin, begin + num_tokens)
            data["input_ids"][row, where] = IMAGE_TOKEN
            data["labels"][row, where] = -100
        if flat:
            data["pixel_values"] = torch.randn(count, 4, 3 * 2 * PATCH**2, generator=draw)
            data["image_grid_thw"] = torch.tensor([1, 2, 2]).expand(count, 3)
            data["mm_token_type_ids"] = (data["input_ids"] == IMAGE_TOKEN).long()
        else:
            shape = (count, 2, 3, SIZE, SIZE) if in_parts else (count, 3, SIZE, SIZE)
            data["pixel_values"] = torch.randn(shape, generator=draw)
        if in_parts:
            data["image_sizes"] = torch.tensor([SIZE, SIZE]).expand(count, 2)
    return [{key: value[index] for key, value in data.items()} for index in range(count)]


def _train(name: str, options: dict[str, Any] | None, replicas: int, images: bool) -> Any:
    module = Reader(name)
    samples: Any = rows(name, images=images)
    run = fit(options, module, DataLoader(samples, BATCH // replicas), steps=STEPS)
    strategy = run.trainer.strategy
    is_ours = isinstance(strategy, MegatronStrategy)
    state = strategy.full_state_dict() if is_ours else module.state_dict()
    return run.norms, {k: v.numpy() for k, v in state.items() if v.is_floating_point()}


def _train_all(cases: list[Any]) -> list[Any]:
    return [_train(*case) for case in cases]


MODELS = [("llava", True), ("llava-frozen", True), ("qwen2.5-vl", True), ("llava", False)]
MODELS += [("qwen3-vl", True), ("qwen3-vl", False), ("llava-next", True)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "models"),
    [
        pytest.param("cp2", MODELS, id="cp2"),
        *(
            pytest.param(name, MODELS, id=name, marks=pytest.mark.slow)
            for name in LAYOUTS
            if name != "cp2"
        ),
    ],
)
def test_images_equal_one_process(layout: str, models: list[tuple[str, bool]]) -> None:
    """Gradient norms and weights; fp32, sums in another order."""
    world, options = LAYOUTS[layout]
    replicas = world // (options.get(TP, 1) * options.get(PP, 1) * options[CP])
    cases = [(name, options, replicas, images) for name, images in models]
    found = run_ranks(world, _train_all, cases, timeout_s=280)
    alone = run_ranks(1, _train_all, [(name, None, 1, images) for name, images in models])[0]
    for index, (norms, weights) in enumerate(alone):
        assert found[0][index][1].keys() == weights.keys()
        for rank in found:
            own_norms, own_weights = rank[index]
            assert own_norms == pytest.approx(norms, rel=1e-5), models[index]
            for key in weights if own_weights else ():
                assert np.allclose(own_weights[key], weights[key], rtol=0, atol=1e-5), key


class _Parts(Reader):
    """The batch is divided, and the model gets full rows all the same."""

    sequence_dims: ClassVar[Mapping[str, int]] = {"labels": 1, "input_ids": 1, "position_ids": 1}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert batch["input_ids"].shape[1] == LENGTH // 2
        return super().training_step(batch, batch_idx)


class _Cut(Reader):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch | {"input_ids": batch["input_ids"][:, 1:]}, batch_idx)


def _of_parts(options: dict[str, Any] | None) -> list[float]:
    samples: Any = rows("llava", images=True)
    for sample in samples:  # two documents
        sample["position_ids"] = torch.arange(LENGTH) % 10
    loader = DataLoader(samples, BATCH)
    return fit(options, (Reader if options is None else _Parts)("llava"), loader, steps=2).norms


def _refused() -> str:
    samples: Any = rows("llava", images=True)
    with pytest.raises(ConfigError) as error:
        trainer(MegatronStrategy(**{CP: 2}), max_steps=1).fit(_Cut("llava"), DataLoader(samples))
    return str(error.value)


@pytest.mark.slow
def test_parts_of_rows_become_full_ones() -> None:
    (alone,) = run_ranks(1, _of_parts, None)
    for options in ({CP: 2}, {CP: 2, MICRO: 1, **DEALT}):
        for norms in run_ranks(2, _of_parts, options):
            assert norms == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_other_rows_are_refused() -> None:
    text = "input_ids of 15 columns, and the full rows have 16"
    assert all(text in message for message in run_ranks(2, _refused))

"""Students that are trained on answers of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.modules import DistillationModule, GPTLightningModule
from megatron_lightning.modules.post_training.own_texts import OwnTexts, sampling_engine
from megatron_lightning.parallel import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import TP, tiny_config
from tests.helpers.preferences import SGDOptions
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STUDENT, TEACHER = (tiny_config(num_layers=n, max_sequence_length=24) for n in (1, 2))
STEPS, BATCH = 4, 4


class Distilled(SGDOptions, DistillationModule):
    """Keeps the rows that it trains on."""

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.seen = [*getattr(self, "seen", ()), (batch["tokens"], batch["labels"])]
        return super()._loss(batch)


def _rows() -> list[dict[str, Tensor]]:
    """Return rows with two answers each; one row has none."""
    draws = torch.Generator().manual_seed(1)
    rows = []
    for number in range(STEPS * BATCH):
        tokens = torch.randint(8, 64, (17,), generator=draws)
        labels = tokens[1:].clone()
        labels[: 2 + number % 3] = labels[5:8] = labels[12 + number % 4 :] = -100
        if number == 2:
            labels[:] = -100
        rows.append({"tokens": tokens[:-1], "labels": labels})
    return rows


def fit(
    options: dict[str, Any], data: int = 1, share: float = 1.0, *, seed: int = 0, steps: int = STEPS
) -> tuple[list[float], list[float], list[tuple[Tensor, Tensor]]]:
    """Train on the ranks of this process's group; return losses, norms and rows."""
    record = Losses()
    strategy = MegatronStrategy(pipeline_options=PipelineOptions(explicit_steps=True), **options)
    module = Distilled(
        GPTLightningModule(STUDENT),
        GPTLightningModule(TEACHER),
        kind="jsd",
        on_policy=share,
        max_completion_length=6,
        end_ids=[*range(8)],
        seed=seed,
    )
    rows: Any = _rows()
    chosen = trainer(strategy, max_steps=steps, callbacks=[record])
    chosen.fit(module, DataLoader(rows, batch_size=BATCH // data))
    return record.losses, record.norms, module.seen


def test_answers_are_the_students_and_micro_batches_do_not_matter() -> None:
    _, norms, seen = fit({})
    for (tokens, labels), start in zip(seen, range(0, STEPS * BATCH, BATCH), strict=True):
        for number, row in enumerate(_rows()[start : start + BATCH]):
            if start + number == 2:
                assert (labels[number] == -100).all()
                continue
            places = (labels[number] != -100).nonzero().flatten().tolist()
            assert places[0] == 8 and 1 <= len(places) <= 6  # the last answer begins behind it
            assert tokens[number, :9].equal(row["tokens"][:9])
            assert places == list(range(8, 8 + len(places)))
            ends = [int(one) < 8 for one in labels[number, places]]
            assert not any(ends[:-1]) and (ends[-1] or len(places) == 6)
            assert tokens[number, places[1:]].equal(labels[number, places[:-1]])
    for size in (1, 2):
        own = fit({"micro_batch_size": size})
        assert own[1] == pytest.approx(norms, rel=1e-5)
    assert len({labels.sum().item() for _, labels in seen}) == STEPS
    assert not fit({}, seed=1, steps=1)[2][0][0].equal(seen[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_every_layout_is_trained_alike(layout: str) -> None:
    norms = fit({})[1]
    options, data = {"dp": ({}, 2), "tp": ({TP: 2}, 1)}[layout]
    for own in run_ranks(2, _on_ranks, options, data, timeout_s=300):
        assert own == pytest.approx(norms, rel=1e-5)


def _on_ranks(options: dict[str, Any], data: int) -> list[float]:
    return fit(options, data)[1]


def test_a_share_of_the_steps_is_sampled() -> None:
    chosen = [OwnTexts(share=0.3).is_step(step) for step in range(1000)]
    assert 250 < sum(chosen) < 350
    assert chosen != [OwnTexts(share=0.3, seed=1).is_step(step) for step in range(1000)]
    _, _, seen = fit({}, share=0.5)
    rows = torch.stack([row["tokens"] for row in _rows()]).view(STEPS, BATCH, -1)[..., :12]
    own = [not tokens[:, :12].equal(given) for (tokens, _), given in zip(seen, rows, strict=True)]
    assert own == [OwnTexts(share=0.5).is_step(step) for step in range(STEPS)]
    assert len(set(own)) == 2


def test_replicas_that_wait_for_each_other_do_not_generate_alone() -> None:
    for uses_inference_mode, layout in (
        (False, ParallelLayout()),
        (True, ParallelLayout(expert_model_parallel_size=2)),
    ):
        engine: Any = object.__new__(OwnGenerate)
        engine._uses_inference_mode = uses_inference_mode
        engine.context = SimpleNamespace(layout=layout, dp=SimpleNamespace(size=2))
        strategy = SimpleNamespace(engine=lambda engine=engine, **_: engine)
        with pytest.raises(ConfigError, match="on 2 replicas by the generate of a Linear"):
            sampling_engine(strategy, torch.nn.Linear(1, 1), ())
        engine.context.dp.size = 1
        assert sampling_engine(strategy, None, ()) is engine


def test_what_cannot_be_sampled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = GPTLightningModule(STUDENT), GPTLightningModule(TEACHER)
    for options, message in (
        ({"on_policy": 1.5}, "share of the steps"),
        ({"beta": 0.5}, "with the kind jsd"),
        ({"kind": "jsd", "beta": 2.0}, "from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            DistillationModule(*models, **options)  # type: ignore[arg-type]
    module = DistillationModule(*models, on_policy=1.0)
    loader: Any = DataLoader(_rows(), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no engine"):
        trainer("auto", max_steps=1).fit(module, loader)
    with pytest.raises(ConfigError, match="explicit_steps=True"):
        trainer(MegatronStrategy(micro_batch_size=1), max_steps=1).fit(module, loader)
    context = ParallelContext(ParallelLayout())
    monkeypatch.setattr(context, "pp", SimpleNamespace(size=2))
    strategy = SimpleNamespace(context=context)
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size=2 partitions student"):
        OwnTexts(share=0.5).check(strategy, {})
    packed: Any = [{**row, "document_ids": torch.zeros(16, dtype=torch.long)} for row in _rows()]
    with pytest.raises(ConfigError, match="rows are packed"):
        trainer(MegatronStrategy(), max_steps=1).fit(module, DataLoader(packed, batch_size=2))

"""Policies trained on recorded generations: files, updates of a generation, resumes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import GPTLightningModule, PolicyModule, RolloutDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.policies import Policy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

ROWS, END = 8, 7
CONFIG = tiny_config(max_sequence_length=24)


def write(folder: Path, generations: int = 2, **changes: Any) -> str:
    """Write generations of eight rows in groups of four; with a row that is not scored, one
    without an answer, a group without signal, and a tool's tokens."""
    draws = random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(generations):
        lines = []
        for row in range(ROWS):
            count = 0 if row == 3 else 3 + 5 * row % 11
            value = {0: None, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0}.get(row, draws.random())
            value = draws.random() if number and row > 3 else value
            lines.append(
                {
                    "group": number * 2 + row // 4,
                    "prompt_ids": [draws.randrange(64) for _ in range(2 + row // 4)],
                    "ids": [draws.randrange(8, 64) for _ in range(count)],
                    "mask": [int(i not in (2, 3)) for i in range(count)],
                    "logprobs": [-4.1 - 0.1 * draws.random() for _ in range(count)],
                    "rewards": {"right": value, "short": None if value is None else -count / 9},
                }
                | changes
            )
            if row % 2 and count and "ids" not in changes:
                lines[-1]["ids"][-1] = END
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"generation-{number}.jsonl").write_text(text)
    return str(folder)


class _Metrics(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def fit(
    replay: str,
    options: dict[str, Any] | None = None,
    *,
    batch_size: int = ROWS,
    runs: int = 1,
    start: str | None = None,
    save: str | None = None,
    steps: int = -1,
    **of_policy: Any,
) -> _Metrics:
    """Train on the ranks of this process's group."""
    record = _Metrics()
    explicit = {"pipeline_options": PipelineOptions(explicit_steps=True)}
    strategy: Any = "auto" if options is None else MegatronStrategy(**explicit, **options)
    chosen = trainer(
        strategy, max_epochs=1, max_steps=steps, callbacks=[record], accumulate_grad_batches=runs
    )
    module = Policy(GPTLightningModule(CONFIG), **of_policy)
    data = RolloutDataModule(
        replay=replay, batch_size=batch_size, reward_weights={"short": 0.5}, end_ids=[END], pad_to=8
    )
    chosen.fit(module, datamodule=data, ckpt_path=start)
    if save is not None:
        chosen.save_checkpoint(save)
    return record


def _on_ranks(replay: str, options: dict[str, Any], batch_size: int, more: Any) -> _Metrics:
    return fit(replay, options, batch_size=batch_size, **more)


def test_updates_do_not_depend_on_batches_and_replicas(tmp_path: Path) -> None:
    """Norms by SGD of whole generations, in accumulated batches, and in micro-batches."""
    replay = write(tmp_path / "rows")
    of_policy: dict[str, Any] = {"loss_type": "dapo", "temperature": 0.8}
    whole = fit(replay, **of_policy)
    assert len(whole.norms) == 2
    for own in (
        fit(replay, {}, batch_size=4, runs=2, **of_policy),
        fit(replay, {"micro_batch_size": 3}, **of_policy),
        *run_ranks(2, _on_ranks, replay, {"micro_batch_size": 2}, 4, of_policy, timeout_s=120),
    ):
        assert own.norms == pytest.approx(whole.norms, rel=1e-5)
    first = whole.metrics[0]
    assert first["groups_without_signal"] == 0.0  # lengths are a reward, too
    assert first["unscored_rows"] == 1.0
    assert first["truncated_rows"] == pytest.approx(5 / 8)
    assert first["reward"] == pytest.approx(first["reward/right"] + 0.5 * first["reward/short"])


@pytest.mark.slow
def test_later_updates_compare_with_the_scores_before_the_first(tmp_path: Path) -> None:
    """On any number of replicas, and after a resume within the generation."""
    replay, saved = write(tmp_path / "rows"), str(tmp_path / "saved.ckpt")
    of_policy: dict[str, Any] = {"num_iterations": 3, "epsilon": 0.001}
    whole = fit(replay, batch_size=4, **of_policy)
    assert len(whole.norms) == 12
    clipped = [m["clip_high"] + m["clip_low"] for m in whole.metrics]
    # Of each generation the first update has ratios of 1, and later ones have not.
    assert clipped[0] == clipped[6] == 0.0 < min(clipped[2:6])
    for own in run_ranks(2, _on_ranks, replay, {}, 2, of_policy, timeout_s=120):
        assert own.norms == pytest.approx(whole.norms, rel=1e-5)
    before = fit(replay, {}, batch_size=4, steps=3, save=saved, **of_policy)
    after = fit(replay, {}, batch_size=4, start=saved, **of_policy)
    assert before.norms + after.norms == pytest.approx(whole.norms, rel=1e-6)


def test_rows_without_an_end_count_in_the_weight_alone(tmp_path: Path) -> None:
    replay = write(tmp_path / "rows", 1)
    masked = fit(replay, mask_truncated_completions=True)
    assert masked.norms != fit(replay).norms
    path = tmp_path / "rows" / "generation-0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if not row["ids"] or row["ids"][-1] != END:
            row["mask"] = [0] * len(row["ids"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fit(replay).norms == masked.norms


@pytest.mark.parametrize(
    ("changes", "batch_size", "message"),
    [
        ({}, 3, r"8 rows, and an update has batch_size=3 x 1 replicas x .* = 3, which does not"),
        ({"logprobs": [0.0]}, 8, r"generation-0.jsonl:1: logprobs has 1 entries and ids has 3"),
        ({"ids": None}, 8, r"generation-0.jsonl:1: .* has ids, a list of ids, .* has None"),
        ({"prompt_ids": []}, 8, r"prompt_ids is empty"),
        ({"rewards": {"other": 1.0}}, 8, "reward_weights has short, and the rows .* other"),
        ({"prompt_ids": [1] * 30}, 8, r"row 0 of generation 0 has 33 ids, and the model has 24"),
    ],
)
def test_files_that_cannot_be_trained_are_refused(
    tmp_path: Path, changes: dict[str, Any], batch_size: int, message: str
) -> None:
    replay = write(tmp_path / "rows", 1, **changes)
    with pytest.raises((ConfigError, DataError), match=message):
        fit(replay, batch_size=batch_size)


def test_policies_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    gpt = GPTLightningModule(CONFIG)
    for options, message in (
        ({"reference": "model"}, "beta is 0"),
        ({"beta": 0.1, "reference": "adapters"}, "has no adapters"),
        ({"top_entropy_quantile": 0.0}, "above 0 and at most 1"),
        ({"temperature": 0.0, "beta": 0.0}, "temperature is 0.0"),
        ({"num_iterations": 0}, "num_iterations"),
    ):
        with pytest.raises(ConfigError, match=message):
            PolicyModule(gpt, **options).configure_model()  # type: ignore[arg-type]
    policy = PolicyModule(GPTLightningModule(tiny_config(z_loss=1e-3)))
    with pytest.raises(ConfigError, match="z_loss"):
        policy.configure_model()
    strategy = MegatronStrategy(micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"Set pipeline_options=PipelineOptions\(explicit_steps"):
        trainer(strategy, max_steps=1).fit(
            Policy(gpt), datamodule=RolloutDataModule(replay=write(tmp_path), batch_size=8)
        )


def test_a_policy_is_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    saved = str(tmp_path / "policy.ckpt")
    fit(write(tmp_path / "rows"), beta=0.1, loss_type="grpo", save=saved)
    loaded = PolicyModule.load_from_checkpoint(saved, weights_only=False)
    assert (loaded.policy.beta, loaded.policy.loss_type) == (0.1, "grpo")

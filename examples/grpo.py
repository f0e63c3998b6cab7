"""Group relative policy optimization on two pipeline stages: ``python examples/grpo.py``.

A tiny model writes eight answers to each prompt with the engine of the same job. The reward of an
answer is the share of tokens that repeat the token before. The advantage is the reward less the
mean of the prompt's answers, over their deviation (DeepSeekMath, arXiv:2402.03300, section 4.1).
Every answer is written to ``rollouts/version_N``, from which ``RolloutDataModule(replay=...)``
trains again.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.modules import GPTLightningModule, PolicyModule, RolloutDataModule
from megatron_lightning.strategies import MegatronStrategy

VOCABULARY, PROMPT, NEW, ANSWERS, PROMPTS = 16, 4, 9, 8, 8
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_sequence_length=PROMPT + NEW,
)


def repeats(prompt: list[int], answer: list[int], row: Mapping[str, Any]) -> float:
    """Return the share of tokens that repeat the token before."""
    before = [prompt[-1], *answer[:-1]]
    return sum(a == b for a, b in zip(before, answer, strict=True)) / NEW


def write_prompts(folder: str, count: int) -> str:
    """Write prompts of random ids, and return the path."""
    draws = random.Random(0)
    rows = ([draws.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(count))
    path = Path(folder) / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": row}) + "\n" for row in rows))
    return str(path)


def train(
    strategy: MegatronStrategy, devices: int, folder: str, steps: int = 40, **options: Any
) -> pl.Trainer:
    pl.seed_everything(0)
    policy = PolicyModule(
        GPTLightningModule(CONFIG, learning_rate=1e-2),
        loss_type="grpo",
        max_completion_length=NEW,
    )
    data = RolloutDataModule(
        prompts=write_prompts(folder, steps * PROMPTS),
        rewards=[repeats],
        num_generations=ANSWERS,
        batch_size=PROMPTS * ANSWERS,
        pad_to=1,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(policy, datamodule=data)
    return trainer


if __name__ == "__main__":
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        micro_batch_size=16,
        pipeline_options=PipelineOptions(explicit_steps=True),
    )
    with TemporaryDirectory() as folder:
        trainer = train(strategy, devices=2, folder=folder)
    if trainer.is_global_zero:
        print(f"reward {trainer.callback_metrics['reward']:.4f}")

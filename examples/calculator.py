"""A policy that learns to call a calculator: ``python examples/calculator.py``.

A tiny model is taught two ways of answering ``47*86=``: a guess, and the call ``c47*86.``, to which
the calculator answers ``4042>`` and the model repeats ``4042.``. Three answers in ten call. The
environment rewards right products, which this model cannot compute itself, so that GRPO (see
``examples/grpo.py``) teaches it to call always. The calculator's tokens have no loss.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
from grpo import QUIET, Messages, teach

from megatron_lightning.config import PipelineOptions
from megatron_lightning.modules import GPTLightningModule, PolicyModule, RolloutDataModule, Turn
from megatron_lightning.strategies import MegatronStrategy


class Calculator:
    """The environment of a conversation."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin with the messages of the row."""
        self.product = product(row["question"])

    def step(self, messages: Sequence[Mapping[str, Any]], answer: str) -> Turn:
        """Compute what is called for, or reward an answer."""
        if answer.startswith("c"):
            return Turn([{"role": "tool", "content": product(answer[1:])}])
        return Turn(reward=float(answer == self.product), done=True)


def product(text: str) -> str:
    """Return the product that a text asks for, or nothing."""
    a, _, b = text.partition("*")
    return f"{int(a) * int(b):04}" if a.isdigit() and b.isdigit() else ""


def questions(count: int, seed: int) -> Iterator[str]:
    draws = random.Random(seed)
    for _ in range(count):
        yield f"{draws.randrange(10, 100)}*{draws.randrange(10, 100)}"


def guesses_and_calls(count: int) -> Iterator[Messages]:
    """Return questions with a guess or a call."""
    draws = random.Random(2)
    for question in questions(count, seed=0):
        texts = [("user", question), ("assistant", f"{draws.randrange(9802):04}")]
        if draws.random() < 0.3:
            result = product(question)
            texts[1:] = [("assistant", f"c{question}"), ("tool", result), ("assistant", result)]
        yield [{"role": role, "content": text} for role, text in texts]


def train(
    model: str, folder: str, *, steps: int = 40, prompts: int = 16, **options: Any
) -> pl.Trainer:
    """Train the model in a folder by the rewards of its conversations."""
    pl.seed_everything(0)
    path = Path(folder, "prompts.jsonl")
    rows = (
        {"prompt": [{"role": "user", "content": question}], "question": question}
        for question in questions(steps * prompts, seed=1)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = PolicyModule(
        GPTLightningModule(init_from_hf=model, learning_rate=5e-4, warmup_steps=10),
        max_completion_length=24,
    )
    data = RolloutDataModule(
        prompts=str(path),
        environment=Calculator,
        max_turns=3,
        num_generations=8,
        batch_size=8 * prompts,
        pad_to=8,
    )
    explicit = PipelineOptions(explicit_steps=True)
    trainer = pl.Trainer(
        strategy=MegatronStrategy(pipeline_options=explicit),
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        **QUIET,
        **options,
    )
    trainer.fit(policy, datamodule=data)
    return trainer


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        trainer = train(teach(folder, guesses_and_calls(40_000)), folder)
    found = trainer.callback_metrics
    print(f"reward {found['reward']:.4f}, turns {found['turns']:.2f}")

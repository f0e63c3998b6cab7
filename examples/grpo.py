"""Group relative policy optimization on two pipeline stages: ``python examples/grpo.py``.

A tiny model writes eight samples for each prompt with the engine of the same job. The reward of a
sample is the share of tokens that repeat the token before. The advantage is the reward less the
mean of the prompt's samples, over their deviation (DeepSeekMath, arXiv:2402.03300, section 4.1).
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.inference import Sampling
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy, run_pipeline

VOCABULARY, PROMPT, NEW, SAMPLES = 16, 4, 9, 8
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_sequence_length=PROMPT + NEW,
)


def reward(prompt: list[int], answer: list[int]) -> float:
    before = [prompt[-1], *answer[:-1]]
    return sum(a == b for a, b in zip(before, answer, strict=True)) / NEW


class GRPO(GPTLightningModule):
    """A policy, trained on samples of its own."""

    clip = 0.2
    """Distance of the probability ratio from 1 beyond which a token has no gradient."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        # Runs once on every rank. The rollouts are equal on all ranks of a replica.
        rollouts = self._rollouts(batch.tolist())
        self.log("reward", rollouts.pop("reward"), prog_bar=True, sync_dist=True)
        return run_pipeline(self, self._loss, rollouts)

    def _rollouts(self, prompts: list[list[int]]) -> dict[str, Tensor]:
        """Return samples of the prompts, their log-probabilities, advantages and mean reward."""
        sampling = Sampling(max_new_tokens=NEW, seed=SAMPLES * len(prompts) * self.global_step)
        groups = self.trainer.strategy.engine().generate(prompts, sampling, SAMPLES)
        samples = [(p, one) for p, group in zip(prompts, groups, strict=True) for one in group]
        tokens = torch.tensor([p + one.tokens for p, one in samples], device=self.device)
        logprobs = torch.tensor([one.logprobs for _, one in samples], device=self.device)
        rewards = torch.tensor([reward(p, one.tokens) for p, one in samples], device=self.device)
        by_prompt = rewards.view(-1, SAMPLES)
        advantages = by_prompt - by_prompt.mean(1, keepdim=True)
        advantages = advantages / (by_prompt.std(1, keepdim=True) + 1e-4)
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:].contiguous(),
            "logprobs": logprobs,
            "advantages": advantages.flatten(),
            "reward": rewards.mean(),
        }

    def _loss(self, rollouts: dict[str, Tensor]) -> Tensor:
        """Return the loss of one micro-batch of rollouts, on every stage."""
        logprobs = -self(rollouts["tokens"], labels=rollouts["labels"])[:, PROMPT - 1 :]
        ratio = (logprobs - rollouts["logprobs"]).exp()
        advantages = rollouts["advantages"][:, None]
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def train(strategy: MegatronStrategy, devices: int, steps: int = 40, **options: Any) -> pl.Trainer:
    pl.seed_everything(0)  # every process draws the same prompts
    prompts = torch.randint(0, VOCABULARY, (steps * 8, PROMPT))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(GRPO(CONFIG, learning_rate=1e-2), DataLoader(prompts, batch_size=8))
    return trainer


if __name__ == "__main__":
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2,
        micro_batch_size=16,
        pipeline_options=PipelineOptions(explicit_steps=True),
    )
    trainer = train(strategy, devices=2)
    if trainer.is_global_zero:
        print(f"reward {trainer.callback_metrics['reward']:.4f}")

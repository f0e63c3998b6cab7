"""Sums by reinforcement learning (GRPO): ``python examples/grpo.py``, or with a seed behind it.

A tiny model is taught the form of an answer, ``07+35=42.``, by sums of which two thirds are one too
large. Then it writes eight answers to each of 32 sums in every step, with the engine of the same
job, and a verifier rewards those that are right: a third at first, nine in ten after 150 steps. The
advantage is the reward less the mean of the prompt's answers, over their deviation (DeepSeekMath,
arXiv:2402.03300, section 4.1). Every answer is written to ``rollouts/version_N``, from which
``RolloutDataModule(replay=...)`` trains again. It takes a few minutes on two cores.
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_lightning.config import PipelineOptions
from megatron_lightning.modules import (
    FinetuneDataModule,
    GPTLightningModule,
    PolicyModule,
    RolloutDataModule,
)
from megatron_lightning.strategies import MegatronStrategy

STEPS = 150  # of the reinforcement
CHARACTERS = "0123456789+*c=.>"
TEMPLATE = (  # a conversation is one line: 07+35=42.
    "{% for message in messages %}{{ message.content }}"
    "{{ {'user': '=', 'assistant': '.', 'tool': '>'}[message.role] }}{% endfor %}"
)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
Messages = list[dict[str, str]]


def make_model(folder: str) -> str:
    """Write a small Llama with a tokenizer of characters and a chat template."""
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=".")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def teach(folder: str, conversations: Iterable[Messages], *, epochs: int = 1, seed: int = 0) -> str:
    """Fine-tune a new model on conversations; return the folder of its weights."""
    pl.seed_everything(seed)
    model, chats, taught = make_model(f"{folder}/model"), Path(folder, "chats.jsonl"), "taught"
    chats.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    data = FinetuneDataModule(
        str(chats), sequence_length=128, batch_size=64, packing="none", pad_to=1
    )
    trainer = pl.Trainer(strategy=MegatronStrategy(), devices=1, max_epochs=epochs, **QUIET)
    module = GPTLightningModule(
        init_from_hf=model, learning_rate=3e-3, warmup_steps=20, lr_schedule="linear"
    )
    trainer.fit(module, datamodule=data)
    trainer.strategy.save_hf_pretrained(f"{folder}/{taught}")
    return f"{folder}/{taught}"


def random_sums(count: int, draws: random.Random) -> Iterator[tuple[str, int]]:
    """Return sums of two numbers below 30, and their results."""
    for _ in range(count):
        a, b = draws.randrange(30), draws.randrange(30)
        yield f"{a:02}+{b:02}", a + b


def sloppy_sums(count: int, seed: int = 0) -> Iterator[Messages]:
    """Return conversations of sums, of which two thirds are one too large."""
    draws = random.Random(seed)
    for question, result in random_sums(count, draws):
        answer = str(result + draws.choice([0, 1, 1]))
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def is_right(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the sum, and 0 for any other answer."""
    return float(answer == str(row["sum"]))


def train(
    model: str,
    folder: str,
    strategy: MegatronStrategy,
    devices: int = 1,
    *,
    steps: int = STEPS,
    prompts: int = 32,
    seed: int = 0,
    **options: Any,
) -> pl.Trainer:
    """Train the model in a folder by the rewards of its answers."""
    pl.seed_everything(seed)
    sums = random_sums(steps * prompts, random.Random(seed + 1))
    rows = ({"prompt": f"{question}=", "sum": result} for question, result in sums)
    path = Path(folder, "prompts.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = PolicyModule(
        GPTLightningModule(
            init_from_hf=model,
            learning_rate=1e-3,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            warmup_steps=10,
            decay_steps=STEPS,
            lr_schedule="linear",
        ),
        max_completion_length=4,
    )
    data = RolloutDataModule(
        prompts=str(path),
        rewards=[is_right],
        num_generations=8,
        batch_size=8 * prompts,
        pad_to=1,
        seed=seed,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=steps,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        **QUIET,
        **options,
    )
    trainer.fit(policy, datamodule=data)
    return trainer


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    strategy = MegatronStrategy(pipeline_options=PipelineOptions(explicit_steps=True))
    with TemporaryDirectory() as folder:
        taught = teach(folder, sloppy_sums(24_000, seed), epochs=3, seed=seed)
        trainer = train(taught, folder, strategy, seed=seed)
    print(f"reward {trainer.callback_metrics['reward']:.4f}")

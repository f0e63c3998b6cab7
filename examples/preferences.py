"""Train a chat model by preferences: ``python examples/preferences.py [MODEL PAIRS.jsonl]``.

MODEL is a folder or a Hub id, and every line of PAIRS.jsonl has a prompt, a chosen and a rejected
answer. Without them, a tiny Llama and pairs are made in ``demo/``, with an answer and an excuse.
Adapters are trained by DPO on 2 processes, tensor parallel; the reference is the model without
adapters.
"""

import json
import random
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from finetune import make_demo

from megatron_lightning.modules import DPOModule, HuggingFaceModule, PreferenceDataModule
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy


def make_pairs(path: Path, count: int = 500) -> str:
    """Write questions with an answer and an excuse, unless they are there."""
    draw = random.Random(1)
    if path.exists():
        return str(path)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            answers = f"{a} + {b} = {a + b}.", draw.choice(["I do not know.", "Ask me later."])
            row = {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}]}
            for side, text in zip(("chosen", "rejected"), answers, strict=True):
                row[side] = [{"role": "assistant", "content": text}]
            file.write(json.dumps(row) + "\n")
    return str(path)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        model, pairs = sys.argv[1:3]
    else:
        model, pairs = make_demo(Path("demo"))[0], make_pairs(Path("demo/pairs.jsonl"))
    pl.seed_everything(0)
    on_gpu = torch.cuda.is_available()
    trainer = pl.Trainer(
        strategy=MegatronStrategy(tensor_model_parallel_size=2),
        accelerator="gpu" if on_gpu else "cpu",
        precision="bf16-true" if on_gpu else "32-true",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
    )
    policy = HuggingFaceModule(model, learning_rate=1e-3, peft=LoRA(r=16))
    data = PreferenceDataModule(pairs, sequence_length=64, batch_size=8, val_fraction=0.1)
    trainer.fit(DPOModule(policy, reference="adapters"), datamodule=data)
    if trainer.is_global_zero:
        found = trainer.callback_metrics
        print(f"loss of held-out pairs {found['val_loss']:.3f} (0.693: no preference), ", end="")
        print(f"chosen preferred in {found['val_rewards_accuracy']:.0%}")

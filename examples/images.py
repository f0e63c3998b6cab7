"""Chats with images: ``python examples/images.py``. Needs ``pip install transformers pillow``.

A tiny LLaVA learns to name what it sees, its tower frozen, tensor parallel on 2 processes. At the
end it names one of them. ``FinetuneDataModule`` takes your rows as well, and
``HuggingFaceModule`` your vision-language model (docs/images.md). Everything lies in ``demo/``.
"""

import json
from pathlib import Path

import lightning.pytorch as pl
from captions import draw, make_model  # examples/captions.py

from megatron_lightning.callbacks import SampleText
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule, ImageOptions
from megatron_lightning.strategies import MegatronStrategy

MODEL, IMAGES, CHATS = "demo/llava", Path("demo/images"), Path("demo/images.jsonl")


def make_chats() -> None:
    """Draw squares and circles, and write a conversation about each."""
    draw(IMAGES)
    with CHATS.open("w") as file:
        for path in sorted(IMAGES.glob("*/*.png")):
            question = [{"type": "image", "image": str(path.relative_to(IMAGES))}]
            answer = {"role": "assistant", "content": f"a {path.parent.name}"}
            row = {"messages": [{"role": "user", "content": question}, answer]}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    pl.seed_everything(0)
    if not CHATS.exists():
        make_model(MODEL)
        make_chats()
    module = HuggingFaceModule(MODEL, learning_rate=5e-3, freeze=["**.vision_tower.**"])
    data = FinetuneDataModule(
        str(CHATS), sequence_length=64, batch_size=16, images=ImageOptions(folder=str(IMAGES))
    )
    sample = SampleText(
        [""], every_n_steps=90, max_new_tokens=4, temperature=0, chat=True,
        images=[[str(IMAGES / "red square" / "7.png")]],
    )  # fmt: skip
    trainer = pl.Trainer(
        strategy=MegatronStrategy(tensor_model_parallel_size=2),
        accelerator="cpu",
        devices=2,
        max_epochs=15,
        logger=False,
        enable_checkpointing=False,
        callbacks=[sample],
    )
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        print(f"loss on answers: {trainer.callback_metrics['train_loss']:.4f}")

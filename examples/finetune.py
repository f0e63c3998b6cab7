"""Fine-tune a chat model: ``python examples/finetune.py [MODEL CHATS.jsonl]``.

MODEL is a folder or a Hub id, and every line of CHATS.jsonl is a conversation in OpenAI's form.
A batch is 8 rows of 2048 tokens: few or short conversations ask for smaller numbers below.
Without them, a tiny Llama and chats about sums are made in ``demo/``, and nothing is downloaded.
Adapters (LoRA) are trained on 2 processes, tensor parallel, several conversations to a row, with
the loss on answers alone. ``my-adapter`` (or ``demo/adapter``) is a folder of Hugging Face's peft.
``pip install 'megatron_lightning[finetune]'`` has what it needs.
"""

import json
import random
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_lightning.config import CheckpointOptions
from megatron_lightning.modules import FinetuneDataModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.peft.commands import export
from megatron_lightning.strategies import MegatronStrategy

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(folder: Path) -> None:
    """Write a small Llama with a tokenizer of bytes and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_chats(path: Path, count: int = 2000) -> None:
    """Write conversations of one to three sums."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(draw.randint(1, 3)):
                a, b = draw.randint(0, 9), draw.randint(0, 9)
                messages.append({"role": "user", "content": f"What is {a} + {b}?"})
                messages.append({"role": "assistant", "content": f"{a} + {b} = {a + b}."})
            file.write(json.dumps({"messages": messages}) + "\n")


def make_demo(folder: Path) -> tuple[str, str]:
    """Make model and chats, unless they are there, and return their paths."""
    model, chats = folder / "chat_model", folder / "chats.jsonl"
    folder.mkdir(exist_ok=True)
    if not chats.exists():
        make_model(model)
        make_chats(chats)
    return str(model), str(chats)


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__.splitlines()[0])
    is_demo = len(sys.argv) == 1
    model, chats = make_demo(Path("demo")) if is_demo else sys.argv[1:3]
    target = "demo/adapter" if is_demo else "my-adapter"
    pl.seed_everything(0)
    on_gpu = torch.cuda.is_available()
    trainer = pl.Trainer(
        strategy=MegatronStrategy(
            tensor_model_parallel_size=2,
            checkpoint_options=CheckpointOptions(adapters_only=True),
        ),
        accelerator="gpu" if on_gpu else "cpu",
        precision="bf16-true" if on_gpu else "32-true",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
    )
    module = HuggingFaceModule(model, learning_rate=3e-3, warmup_steps=0.1, peft=LoRA(r=16))
    data = FinetuneDataModule(
        chats,
        sequence_length=256 if is_demo else 2048,
        batch_size=8,
        packing="offline",
        val_fraction=0.05,
    )
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(f"{target}.ckpt")
    if trainer.is_global_zero:
        export(f"{target}.ckpt", target, overwrite=True)
        print(f"loss on answers that were held out: {trainer.callback_metrics['val_loss']:.3f}")

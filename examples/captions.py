"""A vision-language model with a module and a loader of your own: ``python examples/captions.py``.

Tensor parallel 2 x pipeline parallel 2 on 4 processes; the tower is frozen, and lies with its
projector on the first stage alone. ``--context-parallel-size 2``: two processes share every row
instead. Needs ``pip install transformers pillow``. Images are in a folder for each caption, as
``demo/images/red square/7.png``. ``python examples/captions.py MODEL FOLDER`` takes a LLaVA of the
Hub or of a folder, and your images; alone, the script draws images and makes a tiny model in demo/.
Chats with images need neither module nor loader: ``examples/images.py``.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, Dataset
from transformers import AutoProcessor

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.strategies import MegatronStrategy

COLORS, SHAPES = ("red", "green", "blue"), ("square", "circle")
TEMPLATE = (
    "<s>{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif message.role == 'user' %}{{ part.text }}{% else %}"
    "{% generation %} {{ part.text }} </s>{% endgeneration %}{% endif %}{% endfor %}{% endfor %}"
)


class Captioned(Dataset[tuple[Image.Image, str]]):
    """Images of a folder, with the names of their folders as captions."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(path for path in Path(folder).glob("*/*") if path.is_file())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        path = self.files[index]
        return Image.open(path).convert("RGB"), f"<image> a {path.parent.name}"


class Captions(pl.LightningModule):
    """Learns to write the caption of an image. The vision tower stays as it is."""

    # Ranks that share rows divide the labels. The model divides its input behind the images.
    sequence_dims: ClassVar[dict[str, int]] = {"labels": 1}

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        self.model = AutoBridge.from_hf_pretrained(self.path).to_model()
        self.model.train()  # transformers returns models in eval mode
        self.model.get_submodule("model.vision_tower").requires_grad_(False)

    def num_items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the number of tokens in the loss: captions differ in length."""
        return (batch["labels"] != -100).sum()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, shift_labels=batch["labels"], use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=2e-3)


class Collate:
    """Makes batches by the model's processor. Padding and places of images have no loss.

    No token sees the padding, which lies at the ends of rows. So there is no mask.
    """

    def __init__(self, path: str) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(path)

    def __call__(self, samples: list[tuple[Image.Image, str]]) -> dict[str, torch.Tensor]:
        images, texts = zip(*samples, strict=True)
        end = self.processor.tokenizer.eos_token
        batch = self.processor(
            images=list(images),
            text=[f"{text} {end}" for text in texts],
            padding=True,
            padding_side="right",
            pad_to_multiple_of=8,  # twice the ranks that share a row divide it
            return_tensors="pt",
        )
        ignored = (batch.pop("attention_mask") == 0) | (
            batch["input_ids"] == self.processor.image_token_id
        )
        tokens = batch["input_ids"].masked_fill(ignored, -100)
        return {**batch, "labels": torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)}


def draw(folder: Path) -> None:
    """Draw squares and circles of three colors."""
    generator = torch.Generator().manual_seed(0)
    for color in COLORS:
        for shape in SHAPES:
            place = folder / f"{color} {shape}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(16):
                image = Image.new("RGB", (32, 32), "white")
                x, y = torch.randint(0, 14, (2,), generator=generator).tolist()
                box = (x, y, x + 16, y + 16)
                pen = ImageDraw.Draw(image)
                (pen.rectangle if shape == "square" else pen.ellipse)(box, fill=color)
                image.save(place / f"{number}.png")


def make_model(folder: str) -> None:
    """Make a LLaVA with random weights, and its processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    words = ["<pad>", "<s>", "</s>", "<image>", "a", *COLORS, *SHAPES]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        ),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    config.image_seq_length = 16
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    pl.seed_everything(0)
    parser = ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo/llava")
    parser.add_argument("images", nargs="?", default="demo/images")
    parser.add_argument("--context-parallel-size", type=int, default=1)
    options = parser.parse_args()
    model, images, shared = options.model, options.images, options.context_parallel_size
    strategy = (
        MegatronStrategy(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=4
        )
        if shared == 1
        else MegatronStrategy(context_parallel_size=shared)
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4 if shared == 1 else shared,
        max_epochs=4,
        logger=False,
    )
    if model == parser.get_default("model") and not Path(model).exists():
        make_model(model)
        draw(Path(images))
    loader = DataLoader(Captioned(images), batch_size=16, shuffle=True, collate_fn=Collate(model))
    trainer.fit(Captions(model), loader)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")

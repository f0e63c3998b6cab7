"""Small models whose forward knows nothing of pipelines, in the plainest LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import hf_models
from tests.helpers.hf_models import BATCH, LENGTH, STEPS, VOCABULARY, Untouched


class Block(nn.Module):
    """A pre-norm transformer block, as nanoGPT writes it."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(size, 3 * size), "proj": nn.Linear(size, size)})
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.attn["qkv"](self.ln_1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["proj"](y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A forward that mixes units with code of its own, and ties its head by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, 32),
                "wpe": nn.Embedding(64, 32),
                "h": nn.ModuleList(Block(32, 4) for _ in range(4)),
                "ln_f": nn.LayerNorm(32),
            }
        )
        self.lm_head = nn.Linear(32, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Any]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, loss


class UNet(nn.Module):
    """Skip connections from the first half to the second, and an in-place write between units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.down = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden, skips = self.embed(x).tanh(), []
        for layer in self.down:
            hidden = layer(hidden)
            hidden.mul_(0.5)  # writes into what the layer has returned
            skips.append(hidden)
            hidden = hidden.tanh()
        for layer in self.up:
            hidden = (layer(hidden) + skips.pop()).tanh()
        logits = self.head(hidden)
        return logits, None if y is None else F.cross_entropy(logits, y)


class Residual(nn.Module):
    """Blocks that return (hidden, residual), called by keyword, as in Mamba and some Llamas."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, *, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual = hidden if residual is None else hidden + residual
            return self.linear(self.norm(residual)).tanh(), residual

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Residual.Layer() for _ in range(5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden, residual = self.embed(x), None
        for layer in self.layers:
            hidden, residual = layer(hidden=hidden, residual=residual)
        logits = self.head(hidden + residual)
        return logits, None if y is None else F.cross_entropy(logits, y)


class Pyramid(nn.Module):
    """Stages of one class that widen, as in image models: the last has most of the parameters."""

    class Stage(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.down = nn.Linear(inputs, outputs)
            self.layers = nn.ModuleList(nn.Linear(outputs, outputs) for _ in range(2))

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.down(hidden)
            for layer in self.layers:
                hidden = hidden + layer(hidden).tanh()
            return hidden

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 12, 24, 48)
        self.stages = nn.ModuleList(Pyramid.Stage(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        for stage in self.stages:
            x = stage(x)
        logits = self.head(x)
        return logits, None if y is None else F.cross_entropy(logits, y)


def _bart() -> nn.Module:
    sizes = {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in _HEADS_AND_LAYERS}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48,
            max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, **sizes,
        )
    )  # fmt: skip


_HEADS_AND_LAYERS = ("layers", "attention_heads")
STACKS: dict[str, Callable[[], nn.Module]] = {
    "bart": _bart,
    "t5-untied": lambda: hf_models.t5(tie_word_embeddings=False, initializer_factor=0.2),
}
"""Encoder-decoder models. Without tied weights, T5's own initializer begins with gradients of norm
38. At a learning rate of 0.1, norms of one process then differ by 1.4e-5 between fp32 and fp64, and
a bound of 1e-5 would compare roundings. In fp64, losses under PP 2 differ by 3e-12 after 8 steps.
"""

OWN: dict[str, Callable[[], nn.Module]] = {
    "pyramid": Pyramid,
    **STACKS,
    "nanogpt": NanoGPT,
    "unet": UNet,
    "residual": Residual,
}


class Family(Untouched):
    """One model, called as its documentation says."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = OWN[self.name]() if self.name in OWN else hf_models.build(self.name)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        loss: Tensor = output[1] if isinstance(output, tuple) else output.loss
        return loss


def batches(name: str, batch_size: int = BATCH) -> DataLoader[Any]:
    """Return the batches of a model."""
    if name not in OWN:
        return hf_models.loader(name, batch_size)
    generator = torch.Generator().manual_seed(1)
    num = STEPS * BATCH
    if name in ("nanogpt", *STACKS):
        ids = torch.randint(3, VOCABULARY, (num, LENGTH), generator=generator)
        data: Any = [{"input_ids": v, "labels": v.roll(-1)} for v in ids]
    else:
        x = torch.randn(num, 8, generator=generator)
        data = [{"x": v, "y": (v.sum() > 0).long()} for v in x]
    return DataLoader(data, batch_size=batch_size)

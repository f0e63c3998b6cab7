"""Untouched models of ``transformers``, tiny and random, in a LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, STEPS, BATCH = 67, 8, 8, 4

_DECODER = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
}
_ENCODER = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _decoder(family: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**(_DECODER | options))
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


def _gemma3(**options: Any) -> nn.Module:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(_DECODER | options)))


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=4,
            n_embd=32,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=32,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**_ENCODER, vocab_size=VOCABULARY, max_position_embeddings=32)
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_ENCODER, image_size=8, patch_size=4, num_labels=5)
    )


def t5(**changes: Any) -> nn.Module:
    """Return an encoder-decoder of 4 + 4 layers."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=4,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            **changes,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _decoder("Llama"),
    "llama-tied": lambda: _decoder("Llama", tie_word_embeddings=True),
    # Only eager attention repeats the key as often as num_key_value_groups says.
    "llama-one-key": lambda: _decoder(
        "Llama", num_key_value_heads=1, attention_bias=True, attn_implementation="eager"
    ),
    "mistral": lambda: _decoder("Mistral", sliding_window=4),
    "qwen3": lambda: _decoder("Qwen3", num_key_value_heads=1, tie_word_embeddings=True),
    "gemma3": lambda: _gemma3(sliding_window=4),
    "phi3": lambda: _decoder("Phi3", resid_pdrop=0.0, embd_pdrop=0.0),
    "gpt-neox": lambda: _decoder("GPTNeoX"),
    "mixtral": lambda: _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: _decoder(
        "Qwen3Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
    ),
    "olmoe": lambda: _decoder("Olmoe", num_experts=4, num_experts_per_tok=2),
    # A parameter of each head in the attention itself: sinks.
    "gpt-oss": lambda: _decoder(
        "GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "apertus": lambda: _decoder("Apertus"),
    "gpt2": _gpt2,
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(n_layer=4, hidden_size=32, n_head=4, vocab_size=VOCABULARY)
    ),
    "bert": _bert,
    "vit": _vit,
    "t5": t5,
}


def build(name: str) -> nn.Module:
    """Return a model with seeded weights, to which noise is added: some begin with zeros."""
    torch.manual_seed(0)
    model = MODELS[name]()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    return model


class Untouched(pl.LightningModule):
    """A model that the constructor builds."""

    def __init__(self, name: str, optimizer: str = "SGD") -> None:
        super().__init__()
        self.name = name
        self.optimizer = optimizer
        self.build()

    def build(self) -> None:
        self.model = build(self.name)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate = {"SGD": 0.1, "AdamW": 1e-3}[self.optimizer]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(
            self.parameters(), lr=rate
        )
        return optimizer


class Loaded(Untouched):
    """A model that ``configure_model`` builds, by ``make``."""

    def __init__(self, make: Callable[[], nn.Module], name: str = "llama") -> None:
        self._make = make
        super().__init__(name)

    def build(self) -> None:
        """Leave it to ``configure_model``."""

    def configure_model(self) -> None:
        self.model = self._make()


class _Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, name: str) -> None:
        draw, count = torch.Generator().manual_seed(2), STEPS * BATCH
        if name == "vit":
            self.data = {
                "pixel_values": torch.randn(count, 3, 8, 8, generator=draw),
                "labels": torch.randint(5, (count,), generator=draw),
            }
            return
        tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=draw)
        self.data = {"input_ids": tokens, "labels": tokens}

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.data.items()}


def loader(name: str, batch_size: int = BATCH) -> DataLoader[dict[str, Tensor]]:
    """Return the batches of a model."""
    return DataLoader(_Samples(name), batch_size)

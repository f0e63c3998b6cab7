"""Small random models of other libraries, untouched, in the plainest LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, SEQUENCE, SAMPLES = 128, 16, 8


def _decoder(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config(**sizes | options))
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=4,
        n_positions=64,
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        **dropouts,
    )
    return GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


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


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _decoder("Llama"),
    "llama-tied": lambda: _decoder("Llama", tie_word_embeddings=True),
    "mistral": lambda: _decoder("Mistral", sliding_window=8),
    "qwen3": lambda: _decoder("Qwen3", head_dim=8),
    "gemma3": lambda: _decoder("Gemma3", head_dim=8, sliding_window=8),
    "phi3": lambda: _decoder("Phi3"),
    "gpt-neox": lambda: _decoder("GPTNeoX"),
    "mixtral": lambda: _decoder("Mixtral", num_local_experts=4),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "nanogpt": NanoGPT,
    "unet": UNet,
    "residual": Residual,
}


class Family(pl.LightningModule):
    """One model, called as its documentation says."""

    def __init__(self, name: str, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        torch.manual_seed(0)
        self.model = FAMILIES[name]()
        with torch.no_grad():  # zeros at the start hide mistakes
            for parameter in dict.fromkeys(self.model.parameters()):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        loss: Tensor = output[1] if isinstance(output, tuple) else output.loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(name: str, batch_size: int = SAMPLES) -> DataLoader[Any]:
    """Return batches for 8 steps."""
    generator = torch.Generator().manual_seed(1)
    num = 8 * SAMPLES
    ids = torch.randint(3, VOCABULARY, (num, SEQUENCE), generator=generator)
    if name in ("unet", "residual"):
        x = torch.randn(num, 8, generator=generator)
        data: Any = [{"x": v, "y": (v.sum() > 0).long()} for v in x]
    elif name == "vit":
        images = torch.randn(num, 3, 16, 16, generator=generator)
        data = [{"pixel_values": v, "labels": (v.sum() > 0).long()} for v in images]
    elif name == "nanogpt":
        data = [{"input_ids": v, "labels": v.roll(-1)} for v in ids]
    else:
        mask = torch.ones(SEQUENCE, dtype=torch.long)
        data = [{"input_ids": v, "attention_mask": mask, "labels": v * 3 % VOCABULARY} for v in ids]
    return DataLoader(data, batch_size=batch_size)

"""Fine-tuning curves: LoRA beside ``peft``, and all weights beside TRL, on the same rows in order.

The tokens of the first half of a row are a prompt, without a loss. Both begin with the same folder,
LoRA also with the same factors, which ``peft`` has drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import load_adapters

if TYPE_CHECKING:
    from benchmarks.curves import Plan

RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_IGNORED = -100


def labels_of(row: Tensor) -> Tensor:
    """Return the labels of a row, not shifted, without those of the prompt."""
    return torch.cat([torch.full_like(row[: len(row) // 2], _IGNORED), row[len(row) // 2 :]])


class _Tuned(HuggingFaceModule):
    """An untouched Llama with the adapters of a folder."""

    adapters: str

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new:
            load_adapters(self, self.adapters)


def module_of(plan: Plan, folder: str, settings: dict[str, Any]) -> Any:
    """Return the module of a curve of ours."""
    if plan.tuning == "lora":
        module = _Tuned(folder, **settings)
        module.adapters = adapter_folder(folder)
        return module
    return GPTLightningModule(init_from_hf=folder, **settings)


def loader_of(rows: Tensor, replicas: int, batch: int) -> DataLoader[Any]:
    """Return the rows, with labels that are shifted."""
    data: Any = [{"tokens": row[:-1], "labels": labels_of(row)[1:]} for row in rows]
    return DataLoader(data, batch // replicas)


def adapter_folder(folder: str) -> str:
    """Return where the first factors are, in the form of ``peft``."""
    return f"{folder}-adapter"


def make_adapter(folder: str, seed: int) -> None:
    """Draw factors for the model of a folder by ``peft``; B is not 0, so that A has a gradient at
    once.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    options: Any = {
        "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "init_lora_weights": False,
    }  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**options))
    model.save_pretrained(adapter_folder(folder))

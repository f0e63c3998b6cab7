"""Fine-tuning curves: LoRA beside ``peft``, and all weights beside TRL, on the same rows in order.

The tokens of the first half of a row are a prompt, without a loss. Both begin with the same folder,
LoRA also with the same factors, which ``peft`` has drawn.
"""

from __future__ import annotations

import os
import tempfile
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import load_adapters

if TYPE_CHECKING:
    from benchmarks.curves import Contract, Plan

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


def train_with_trl(
    plan: Plan, contract: Contract, folder: str, rows: Tensor
) -> tuple[list[float], float, dict[str, str]]:
    """Train by TRL's ``SFTTrainer``, or by the Trainer of ``transformers`` with ``peft``; return
    losses, processor seconds and versions.
    """
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # accelerate would take them for a launcher's
    losses: list[float] = []
    columns = {"input_ids": rows.tolist(), "labels": [labels_of(row).tolist() for row in rows]}

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(columns["input_ids"])

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(*args, **options)
            losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
            return loss

    begin = time.process_time()
    arguments = SFTConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=contract.rows, max_steps=contract.steps,
        learning_rate=contract.peak_lr, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": contract.min_lr}, warmup_steps=contract.warmup_steps,
        adam_beta1=contract.betas[0], adam_beta2=contract.betas[1], adam_epsilon=contract.eps,
        weight_decay=contract.weight_decay, max_grad_norm=contract.clip, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True}, logging_strategy="no",
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if plan.tuning == "lora":
        model = PeftModel.from_pretrained(model, adapter_folder(folder), is_trainable=True)
    InOrder(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=_tokenizer(contract.vocab_size),
    ).train()
    return losses, time.process_time() - begin, {name: version(name) for name in ("trl", "peft")}


def _tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer that the Trainer asks for, and that nothing encodes with."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")

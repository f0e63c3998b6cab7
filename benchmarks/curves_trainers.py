"""Curves of the Trainer of ``transformers``, and of TRL's, which is one.

Optimizer, schedule and clipping are theirs. Rows come in order, and every step's loss is kept.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from benchmarks.curves_tuning import adapter_folder, labels_of

if TYPE_CHECKING:
    from benchmarks.curves import Contract, Plan


def silence() -> None:
    """Print no warnings and no progress of libraries."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "megatron_lightning", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def train_with_transformers(
    contract: Contract, folder: str, rows: Tensor
) -> tuple[list[float], float, dict[str, str]]:
    """Train by the Trainer of ``transformers``; return losses, processor seconds, and no version
    beyond those of every record.
    """
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    class LlamaTrainer(_InOrder, Trainer):  # type: ignore[misc]
        pass

    _begin()
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    begin = time.process_time()
    trainer = LlamaTrainer(
        model=LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=TrainingArguments(tempfile.mkdtemp(), **_arguments(contract)),
        train_dataset=data,
    )
    trainer.train()
    return trainer.losses, time.process_time() - begin, {}


def train_with_trl(
    plan: Plan, contract: Contract, folder: str, rows: Tensor
) -> tuple[list[float], float, dict[str, str]]:
    """Train by TRL's ``SFTTrainer``, with ``peft``'s LoRA if the plan says so; return losses,
    processor seconds and versions.
    """
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    class Tuner(_InOrder, SFTTrainer):  # type: ignore[misc]
        pass

    _begin()
    columns = {"input_ids": rows.tolist(), "labels": [labels_of(row).tolist() for row in rows]}
    begin = time.process_time()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if plan.tuning == "lora":
        model = PeftModel.from_pretrained(model, adapter_folder(folder), is_trainable=True)
    arguments = SFTConfig(
        tempfile.mkdtemp(), bf16=False, gradient_checkpointing=False, max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True}, **_arguments(contract),
    )  # fmt: skip
    trainer = Tuner(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=_tokenizer(contract.vocab_size),
    )
    trainer.train()
    seconds = time.process_time() - begin
    return trainer.losses, seconds, {name: version(name) for name in ("trl", "peft")}


class _InOrder:
    """Mixin of a Trainer, before it: rows in order, and the losses of all steps."""

    def __init__(self, **options: Any) -> None:
        self.losses: list[float] = []
        super().__init__(**options)

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)  # type: ignore[attr-defined]

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Return the loss of a batch, and keep it."""
        loss = super().compute_loss(*args, **options)  # type: ignore[misc]
        self.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss


def _begin() -> None:
    silence()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # accelerate would take them for a launcher's


def _arguments(contract: Contract) -> dict[str, Any]:
    """Return the contract as arguments of a Trainer."""
    return {
        "per_device_train_batch_size": contract.rows, "max_steps": contract.steps,
        "learning_rate": contract.peak_lr, "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": contract.min_lr}, "warmup_steps": contract.warmup_steps,
        "adam_beta1": contract.betas[0], "adam_beta2": contract.betas[1],
        "adam_epsilon": contract.eps, "weight_decay": contract.weight_decay,
        "max_grad_norm": contract.clip, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "dataloader_num_workers": 0, "logging_strategy": "no",
    }  # fmt: skip


def _tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer that the Trainer asks for, and that nothing encodes with."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")

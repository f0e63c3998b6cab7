"""``megatron-lightning adapters …``: between checkpoints, folders of ``peft`` and merged models, on
any machine, without process groups. Signatures are the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from megatron_lightning.bridge.import_folder import state_before_training
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.checkpoint.text_record import TEXTS, TextRecord, is_of_tokenizer, read_texts
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import CHAT_TEMPLATE, CHAT_TEMPLATES, GENERATION_CONFIG
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.peft import folder
from megatron_lightning.peft.fitting import check_trainable, fitted, largest_in, ties_of
from megatron_lightning.peft.merged_models import (
    base_model,
    gpt_checkpoint,
    gpt_config_of,
    write_merged,
    write_merged_gpt,
    write_tensors,
)
from megatron_lightning.peft.record import PEFT, check_describable, method_entry
from megatron_lightning.peft.sources import (
    check_apart,
    read_saved,
    record_of,
    rounding_of,
)
from megatron_lightning.peft.texts import card, stops

Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    source: str,
    target: str,
    dtype: Dtype | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapters of a checkpoint as a folder of Hugging Face peft.

    Args:
        source: A checkpoint of any layout, or a folder of peft.
        target: The folder to write.
        dtype: Dtype of the adapters. Default: the stored dtype.
        chat_template: Template used in training, or a file with the template. Default: the
            tokenizer's.
        overwrite: Replace an existing target.

    Raises:
        CheckpointError: If the source has no adapters, or the target exists.
        ConfigError: If the adapters were trained inside of a rounding.
    """
    adapters = read_saved(source)
    check_apart(rounding_of(source))
    files = _tokenizer_files(source)
    files |= stops(files, chat_template) | card(adapters, Path(target).name, merged=False)
    folder.write_folder(target, adapters, dtype=_dtype(dtype), overwrite=overwrite, files=files)
    print(f"{target} holds the adapters of {len(adapters.layers)} layers.")


def merge(  # noqa: PLR0917  # every argument is an option of the command line
    source: str,
    target: str,
    base: str | None = None,
    dtype: Dtype | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Add adapters to the weights of their base, in fp32 and rounded once.

    Args:
        source: A checkpoint of any layout, or a folder of peft.
        target: The folder to write. For a GPTLightningModule, the checkpoint to write.
        base: Folder or Hub id of the base. For a GPTLightningModule, the checkpoint of the base.
            Leave base out if the source holds the base, or names a local folder. Only a named base
            is downloaded.
        dtype: Dtype of the weights. Default: the base's.
        chat_template: Template used in training, or a file with the template. Default: the
            tokenizer's. Generation stops at the end of a turn.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        CheckpointError: If the adapters were trained on another base, or the target exists.
    """
    adapters = read_saved(source)
    if adapters.is_gpt and (checkpoint := gpt_checkpoint(adapters, source, base)) is not None:
        _check_free(target, overwrite=overwrite)
        write_merged_gpt(adapters, source, target, checkpoint, _dtype(dtype))
    else:
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        found = base_model(adapters, source, base, **options)
        texts, of_base = _tokenizer_files(source), found.plan.folder.files.contents
        texts |= stops({**of_base, **texts}, chat_template)
        texts |= card(adapters, Path(target).name, merged=True)
        # A template of the training serves alone.
        others = [
            name
            for name in of_base
            if CHAT_TEMPLATE in texts and name.startswith(f"{CHAT_TEMPLATES}/")
        ]
        untied = write_merged(
            adapters,
            found,
            target,
            source,
            _dtype(dtype),
            files={**dict.fromkeys(others), **texts},
            overwrite=overwrite,
        )
        if untied:
            print(f"{', '.join(untied)} is a weight of its own there (tie_word_embeddings: false).")
    print(f"{target} holds the base with the adapters of {len(adapters.layers)} layers added.")


def import_(  # noqa: PLR0917  # every argument is an option of the command line
    source: str,
    target: str,
    base: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write a folder of Hugging Face peft as a checkpoint of adapters, for further training.

    Args:
        source: The folder.
        target: The checkpoint to write, for HuggingFaceModule(peft=...). If the base is a
            checkpoint, for GPTLightningModule(peft=...).
        base: Folder or Hub id of the base, or a checkpoint of a GPTLightningModule. Leave base out
            if the folder names a local base. The base's weights are not read.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        CheckpointError: If the folder is none, or the target exists.
    """
    _check_free(target, overwrite=overwrite)
    adapters = folder.read_folder(source)
    # A checkpoint as base means a GPTLightningModule. Other bases are folders.
    config = None if base is None else gpt_config_of(base)
    model: nn.Module
    if config is None:
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        model = base_model(adapters, source, base, **options).model
    else:
        with torch.device("meta"):
            model = GPTModel(config)
    adapters = fitted(adapters, model, source)
    check_trainable(adapters, model, source)
    check_describable(adapters.kind, source)
    ties = {name: owner for name, owner in ties_of(model).items() if name in adapters.saved}
    names = [name for name in model.state_dict() if name not in adapters.saved]
    tensors = {f"state_dict.model.{n}": t for n, t in adapters.state() if n not in ties}
    entry: dict[str, Any] = {
        **method_entry(adapters.method.exactly(adapters)),
        "largest": list(largest_in(adapters, model)),
        "imported": True,
        "targets": list(adapters.targets),
        "fused": {},
        "saved": list(adapters.saved),
        "ties": ties,
        "task": adapters.task,
        "names": "gpt" if adapters.is_gpt else "own",
        "base": asdict(adapters.base),
        "left_out": [f"model.{name}" for name in names],
    }
    state = state_before_training({}) | {PEFT: {"model": entry}}
    if files := _tokenizer_files(source):
        state[TEXTS] = TextRecord(tokenizer=KeptFiles(files)).state
    stored = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_tensors(target, stored, lambda name, box: tensors[name][box.slices], state)
    print(f"{target} holds the adapters of {len(adapters.layers)} layers.")


COMMANDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"export": export, "import": import_, "merge": merge}
)
"""Name of a tool -> function."""


# ----------------------------------------------------------------------------------------- files


def _check_free(target: str, *, overwrite: bool) -> None:
    """Check that a checkpoint does not exist, or is to be replaced."""
    if Path(target).exists() and not overwrite:
        raise CheckpointError(f"{target} exists. Name another one, or replace it with --overwrite.")


def _tokenizer_files(source: str) -> dict[str, bytes]:
    """Return the files of the tokenizer in a checkpoint or a folder of peft, with the end tokens
    that training taught.
    """
    if folder.is_folder(source):
        files: KeptFiles | None = KeptFiles.of_folder(Path(source))
    else:
        files = read_texts(source, record_of(open_checkpoint(source), source).path)
    contents = {} if files is None else files.contents
    return {
        name: text
        for name, text in contents.items()
        if is_of_tokenizer(name) or name == GENERATION_CONFIG
    }


def _dtype(name: Dtype | None) -> torch.dtype | None:
    dtypes: Mapping[str, torch.dtype] = vars(torch)
    return None if name is None else dtypes[name]

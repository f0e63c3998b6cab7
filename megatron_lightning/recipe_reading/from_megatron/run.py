"""Data, checkpoints and logs of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lightning.recipe_reading.from_megatron.options import Options, value_of

_LOGGERS = "lightning.pytorch.loggers"
_WEIGHTS_ALONE = ("no_load_optim", "finetune")
_PARTS: Mapping[str, str] = {
    "train": "train_data_path",
    "validation": "valid_data_path",
    "test": "test_data_path",
}


def convert_data(options: Options) -> dict[str, Any]:
    """Return the values of the data that are no plain numbers, by Megatron's names."""
    values: dict[str, Any] = {}
    if words := options.take_words("data_path"):
        values["data_path"] = _blend(words)
    parts = {part: options.take_words(name) for part, name in _PARTS.items()}
    if any(parts.values()):
        values["data_path"] = {part: _blend(words) for part, words in parts.items() if words}
        options.take("split")
    if split := options.take_words("split"):
        values["split"] = ",".join(split)
    options.leave("data_args_path", "per_split_data_args_path", "vocab_file", "merge_file")
    kind = options.take("tokenizer_type")
    if "tokenizer_model" in options:
        values["tokenizer_type"] = kind
    return values


def _blend(words: Sequence[str]) -> Any:
    """Return a path, a list of paths, or a list of pairs of a weight and a path."""
    if len(words) == 1:
        return words[0]
    numbers = [value_of("data_path", [word]) for word in words[::2]]
    if len(words) % 2 == 0 and all(isinstance(number, int | float) for number in numbers):
        return [[weight, path] for weight, path in zip(numbers, words[1::2], strict=True)]
    return list(words)


def convert_files(options: Options) -> dict[str, Any]:
    """Return the values of checkpoints and logs: callbacks and loggers."""
    values: dict[str, Any] = {}
    folder, interval = options.take("save"), options.take("save_interval")
    if folder is not None:
        arguments = {"dirpath": folder, "save_top_k": -1, "save_last": True}
        if interval is not None:
            arguments["every_n_train_steps"] = interval
        path = "lightning.pytorch.callbacks.ModelCheckpoint"
        values["save"] = [{"class_path": path, "init_args": arguments}]
        if options.look("load") == folder and not any(name in options for name in _WEIGHTS_ALONE):
            options.take("load")
            values["load"] = "last"
    if "load" in options:  # written by Megatron
        options.leave("load", *_WEIGHTS_ALONE)
    for name in _WEIGHTS_ALONE:
        options.take(name)
    options.leave(
        "pretrained_checkpoint", "profile_step_start", "profile_step_end", "profile_ranks"
    )
    if "profile" not in options:
        options.take("use_pytorch_profiler")  # of no effect alone
    if options.look("timing_log_level") == 0:
        options.take("timing_log_level")
    if loggers := _loggers(options):
        values["tensorboard_dir"] = loggers
    return values


def _loggers(options: Options) -> list[dict[str, Any]]:
    loggers = []
    if folder := options.take("tensorboard_dir"):
        arguments = {"save_dir": folder, "default_hp_metric": False}
        loggers.append({"class_path": f"{_LOGGERS}.TensorBoardLogger", "init_args": arguments})
    project, name = options.take("wandb_project"), options.take("wandb_exp_name")
    if project:
        arguments = {"project": project} | ({"name": name} if name else {})
        loggers.append({"class_path": f"{_LOGGERS}.WandbLogger", "init_args": arguments})
    return loggers

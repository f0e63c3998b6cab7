"""``megatron-lightning convert …``: between checkpoints and Hugging Face folders, on any machine,
without process groups. Signatures are the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_lightning.bridge import dumps
from megatron_lightning.bridge.auto import AutoBridge, ModelKind, is_checkpoint
from megatron_lightning.bridge.export_model import tensors_of_checkpoint
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.folders.folder import HuggingFaceFolder
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.bridge.hf_models.logits import Comparison, compare_logits
from megatron_lightning.bridge.import_folder import import_folder
from megatron_lightning.bridge.low_bit.asked import Asked, quantized_folder
from megatron_lightning.bridge.low_bit.schemes import Scheme
from megatron_lightning.bridge.megatron_checkpoints.export_megatron import write_megatron
from megatron_lightning.bridge.megatron_checkpoints.megatron import MegatronBridge
from megatron_lightning.bridge.megatron_checkpoints.model_state import (
    ModelState,
    state_of_checkpoint,
    state_of_folder,
)
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import is_megatron
from megatron_lightning.bridge.pruning.command import prune
from megatron_lightning.bridge.verification import RoundTrip, compare_folders, round_trip
from megatron_lightning.checkpoint.progress import progress_bar
from megatron_lightning.errors import (
    CheckpointError,
    ConfigError,
    MissingCheckpointError,
    ReportedError,
)
from megatron_lightning.file_names import CONFIG
from megatron_lightning.precision.served.inputs import InputName
from megatron_lightning.precision.served.values import Fit, ServedName
from megatron_lightning.printed_json import json_text

Dtype = Literal["float32", "bfloat16", "float16"]
_LISTED = 10
_KINDS: Mapping[str, ModelKind] = MappingProxyType({"hf": "transformers", "gpt": "gpt"})


def export(  # noqa: PLR0917  # every argument is an option of the command line
    checkpoint: str,
    target: str,
    like: str | None = None,
    model: str | None = None,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    family: str | None = None,
    tokenizer: str | None = None,
    format: Literal["hf", "torch_dist"] = "hf",
    quantize: ServedName | Literal["none"] | None = None,
    group_size: int | None = None,
    scheme: Scheme = "compressed-tensors",
    scales: Fit = "max",
    activations: InputName | None = None,
    statistics: str | None = None,
    kv_cache: Literal["fp8"] | None = None,
) -> None:
    """Write a checkpoint of any layout, or a folder, as a Hugging Face folder, or as a checkpoint
    of Megatron.

    Args:
        checkpoint: Checkpoint of a module with the folder's model, untouched or as ``GPTModel``. Or
            a checkpoint of Megatron-LM or Megatron Bridge (``torch_dist``), with ``like``. Or a
            Hugging Face folder or Hub id, to quantize, dequantize or cast the weights, or for
            ``format`` torch_dist.
        target: The folder to write.
        like: Folder or Hub id with the files, names and dtypes to follow. Default: the model's
            folder, kept in the checkpoint without weights.
        model: Path of the model in the LightningModule. Default: the first model from a folder.
        dtype: Dtype of the weights. Default: the folder's, and in torch_dist the checkpoint's.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.
        family: Rules for a ``GPTModel``, by name or class path. Default: the rules used at import,
            or the first family describing the model.
        tokenizer: Folder or Hub id of a tokenizer, for a ``GPTModel`` trained from scratch.
        format: hf: a Hugging Face folder. torch_dist: a checkpoint of Megatron-Core with the state
            of Adam, to be loaded by Megatron-LM with any layout.
        quantize: Format of the weights of linear layers, for servers. none: not quantized. Default:
            the format that the checkpoint was trained for (``qat``).
        group_size: Values of a scale, with ``quantize=int4``: 128, 64 or 32.
        scheme: Names and settings of the quantized tensors. ``modelopt`` with ``nvfp4``.
        scales: How scales are chosen. max: by the largest value. mse: by the smallest squared error
            of a few scales. 4over6 (nvfp4): by that of two. gptq (int4): max, with codes by the
            second moments in ``statistics``. trained: as MegatronFP8Precision chose them in the
            training, in its format if ``quantize`` is left out.
        activations: Format in which servers round the inputs of these layers: that of ``quantize``.
            Default: as the checkpoint was trained, else bf16.
        statistics: File of the callback ``LayerStatistics``, for the scales of ``kv_cache`` and of
            ``activations`` nvfp4 and fp8_tensor, and for ``scales`` gptq.
        kv_cache: Write scales of keys, behind rotary, and values for a cache in fp8.

    Raises:
        CheckpointError: If the checkpoint is not of the folder's model, or the target exists.
        ConfigError: If no family describes a ``GPTModel``, naming the fields, or Megatron-Core has
            no such model.
    """
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    if format == "torch_dist":
        unused = {
            "like": like, "tokenizer": tokenizer, "quantize": quantize, "group_size": group_size,
            "scheme": None if scheme == "compressed-tensors" else scheme,
            "scales": None if scales == "max" else scales, "activations": activations,
            "statistics": statistics, "kv_cache": kv_cache,
        }  # fmt: skip
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "family": family}
        _export_megatron(
            _megatron_state(checkpoint, model, revision, unused, options),
            Path(target),
            dtype=torch_dtype,
            overwrite=overwrite,
        )
        return
    saved = tensors_of_checkpoint(
        checkpoint,
        like=like,
        model=model,
        dtype=torch_dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        family=family,
        tokenizer=tokenizer,
    )
    asked = Asked(quantize, group_size, scheme, scales, activations, statistics, kv_cache)
    quantized = quantized_folder(saved, asked, trusts=trust_remote_code, family=family)
    folder, tensors = saved.folder, saved.tensors
    if quantized is not None:
        folder, tensors = quantized, quantized.tensors
        print(quantized.describe())
    with progress_bar("exporting", _num_bytes(tensors)) as advance:
        write_folder(Path(target), folder, tensors, overwrite=overwrite, advance=advance)
    print(f"{target} holds {len(tensors)} tensors in {len(folder.headers)} files.")


def _megatron_state(
    checkpoint: str,
    model: str | None,
    revision: str | None,
    unused: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ModelState:
    """Return what a checkpoint or folder holds, for Megatron."""
    for name, value in unused.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, and a checkpoint of Megatron has no files of a folder "
                f"and no quantized weights. Leave {name} out."
            )
    if is_megatron(checkpoint):
        raise ConfigError(
            f"{checkpoint} is a checkpoint of Megatron already. Name a checkpoint of "
            "MegatronStrategy, or a Hugging Face folder."
        )
    if is_checkpoint(checkpoint) and not (Path(checkpoint) / CONFIG).is_file():
        return state_of_checkpoint(checkpoint, model=model, **options)
    return state_of_folder(AutoBridge.from_hf_pretrained(checkpoint, revision=revision, **options))


def _export_megatron(
    state: ModelState, target: Path, *, dtype: torch.dtype | None, overwrite: bool
) -> None:
    total = sum(_num_bytes(lazies) for lazies in (state.weights, *state.states.values()))
    with progress_bar("exporting", total) as advance:
        folder = write_megatron(target, state, dtype=dtype, overwrite=overwrite, advance=advance)
    adam = state.adam
    states = f"no state of an optimizer, since {state.reason}"
    if adam is not None:
        states = f"the state of Adam after {adam.step:,.0f} steps"
    print(f"{folder} holds {len(state.weights)} tensors, and {states}.")
    flags = f"--load {target} --ckpt-format torch_dist --use-checkpoint-args --no-load-rng"
    if adam is None:
        flags += " --no-load-optim"
    else:
        flags += (
            f" --lr {adam.learning_rate:g} --min-lr {adam.min_learning_rate:g} "
            "--use-distributed-optimizer --override-opt_param-scheduler"
        )
    print(f"  next, in Megatron-LM: {flags}, with data and layout")


def import_(  # noqa: PLR0917  # every argument is an option of the command line
    path: str,
    checkpoint: str,
    to: Literal["hf", "gpt"] | None = None,
    like: str | None = None,
    dtype: Dtype | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    family: str | None = None,
) -> None:
    """Write a Hugging Face folder, or a checkpoint of Megatron-LM or Megatron Bridge, as a
    checkpoint readable in any layout.

    The checkpoint is an unstarted run of a ``HuggingFaceModule`` or ``GPTLightningModule``. Start a
    fit from the checkpoint by ``--ckpt_path``, ``--model.path`` or ``--model.init_from_hf``.

    Args:
        path: The folder, or a Hub id, or a Megatron checkpoint (``torch_dist``).
        checkpoint: The checkpoint directory to write.
        to: Names of the parameters. hf: names of the untouched model, for any family. gpt: names of
            ``GPTModel``, for families with rules. Default: hf, and gpt of a Megatron checkpoint.
        like: Folder or Hub id of the model in a Megatron checkpoint, which itself says no
            configuration. A folder with config.json and a tokenizer is enough.
        dtype: Dtype of the parameters. Default: the folder's, or without weights the Megatron
            checkpoint's.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.
        family: Rules for a ``GPTModel``, by name or class path. Default: the rules of the folder's
            architecture.

    Raises:
        CheckpointError: If the target exists, or the folder is damaged.
        ConfigError: If there are no rules for the folder, or ``GPTModel`` cannot represent a
            setting of the folder.
    """
    options: dict[str, Any] = {
        "revision": revision, "trust_remote_code": trust_remote_code, "family": family,
    }  # fmt: skip
    optimizer_states: dict[str, Any] = {
        "dtype": None if dtype is None else getattr(torch, dtype), "overwrite": overwrite,
    }  # fmt: skip
    if is_megatron(path):
        _import_megatron(
            MegatronBridge(path, like, **options), checkpoint, to or "gpt", optimizer_states
        )
        return
    if like is not None:
        if not Path(path).exists():
            raise MissingCheckpointError.at(path)
        raise ConfigError(
            f"like is {like!r}, and {path} is no checkpoint of Megatron: a Hugging Face folder "
            "says its configuration itself. Leave like out."
        )
    bridge = AutoBridge.from_hf_pretrained(path, **options)
    with progress_bar("importing", _num_bytes(bridge.folder.tensors)) as advance:
        count = import_folder(
            bridge, Path(checkpoint), kind=_KINDS[to or "hf"], advance=advance, **optimizer_states
        )
    print(f"{checkpoint} holds {count} tensors, and the files of {path} that hold none.")


def _import_megatron(
    megatron: MegatronBridge, checkpoint: str, to: str, options: Mapping[str, Any]
) -> None:
    kind, bridge = _KINDS[to], megatron.bridge
    optimizer = megatron.optimizer(kind)
    options = {**options, "optimizer": optimizer, "origin": str(megatron.folder.path)}
    num_bytes = _num_bytes(bridge.folder.tensors) + _num_bytes(optimizer)
    with progress_bar("importing", num_bytes) as advance:
        count = import_folder(bridge, Path(checkpoint), kind=kind, advance=advance, **options)
    states = "no state of an optimizer, since there is none in the parameters' shapes"
    if megatron.folder.iteration is None:
        states = "no state of an optimizer, since no iteration is in the name, as in iter_0001000"
    elif optimizer:
        states = f"the state of Adam after {megatron.folder.iteration:,} steps"
    print(
        f"{checkpoint} holds {count} tensors of {megatron.folder.path}, {states}, and the files of "
        f"{bridge.origin} that hold none."
    )
    model = "--model.init_from_hf" if to == "gpt" else "--model=HuggingFaceModule --model.path"
    state = f" --ckpt_path={checkpoint}" if optimizer else ""
    print(f"  next: megatron-lightning fit {model}={checkpoint}{state}, with data and layout")


def verify(  # noqa: PLR0917  # every argument is an option of the command line
    path: str,
    to: Literal["hf", "gpt"] = "hf",
    revision: str | None = None,
    trust_remote_code: bool = False,
    family: str | None = None,
    json: bool = False,
) -> None:
    """Check that a Hugging Face folder comes through unchanged: every tensor there and back, and
    the logits of the model.

    Args:
        path: The folder, or a Hub id.
        to: The model on the way. hf: the untouched model. gpt: ``GPTModel``.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.
        family: Rules for a ``GPTModel``, by name or class path. Default: the rules of the folder's
            architecture.
        json: Print JSON: num_tensors, differing, logits_difference, first_different_block, errors.

    Raises:
        CheckpointError: Naming the different tensors, or the difference of the logits with the
            first different block.
        ConfigError: If there are no rules for the folder, or ``GPTModel`` cannot represent a
            setting of the folder.
    """
    bridge = AutoBridge.from_hf_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code, family=family
    )
    is_gpt = to == "gpt"
    found = round_trip(bridge, is_gpt=is_gpt)
    comparison = None if found.differing else compare_logits(bridge, is_gpt=is_gpt)
    problem = _problem(path, found, comparison)
    if json:
        difference = None if comparison is None else comparison.difference
        known = {
            "num_tensors": found.num_tensors,
            "differing": found.differing,
            "logits_difference": None
            if difference is None or math.isnan(difference)
            else difference,
            "first_different_block": None if comparison is None else comparison.block,
            "errors": [] if problem is None else [problem],
        }
        print(json_text(known))
    if problem is not None:
        raise ReportedError(problem) if json else CheckpointError(problem)
    if comparison is not None and not json:
        memory = "one block in memory at a time" if comparison.by_block else "all weights in memory"
        print(
            f"{path}: {found.num_tensors} tensors come back equal, and logits differ by "
            f"{comparison.difference:.1e} of the largest one ({memory})."
        )


def _problem(path: str, found: RoundTrip, comparison: Comparison | None) -> str | None:
    """Return a sentence about what differs. None: nothing does."""
    if comparison is None:
        return (
            f"{len(found.differing)} of {found.num_tensors} tensors of {path} come back with other "
            f"values: {', '.join(found.differing[:_LISTED])}."
        )
    if math.isnan(comparison.difference):
        return (
            f"the logits of {path} cannot be compared, since some are NaN. All tensors come back "
            "equal: look for NaN in the folder's weights."
        )
    if comparison.is_equal:
        return None
    block = "" if comparison.block is None else f", from block {comparison.block} on"
    return (
        f"the logits of {path} differ by {comparison.difference:.1e} of the largest one from "
        f"those of transformers, with equal weights{block}: buffers or the configuration are "
        "not the folder's."
    )


def compare(first: str, second: str, json: bool = False) -> None:
    """Compare the tensors of two Hugging Face folders. Exit with 1 if the folders differ.

    Args:
        first: A folder, or a Hub id.
        second: Another one.
        json: Print JSON: num_equal, only_in_first, only_in_second, differing.

    Raises:
        MissingCheckpointError: If there is no such folder, and the Hub has no such id.
    """
    found = compare_folders(*(HuggingFaceFolder(local_folder(path)) for path in (first, second)))
    if json:
        print(json_text(asdict(found)))
    elif found.are_equal:
        print(f"{found.num_equal} tensors are equal.")
    else:
        rows = [f"only in {first}: {name}" for name in found.only_in_first]
        rows += [f"only in {second}: {name}" for name in found.only_in_second]
        rows += [f"differs: {name}" for name in found.differing]
        print("\n".join(rows))
    if not found.are_equal:
        raise SystemExit(1)


def compare_dumps(
    first: str,
    second: str,
    tolerance: float = 1e-5,
    allow_missing: bool = False,
    json: bool = False,
) -> None:
    """Compare two dumps of DumpTensors, in the order of a step, and name the first module that
    differs. Exit with 1 if the dumps differ, or a dump has an entry that the other lacks.

    Args:
        first: A file of safetensors, or a folder with dumps of several steps.
        second: Another one, of any layout or program with the same names.
        tolerance: Largest difference that counts as equal, relative to an entry's largest value.
        allow_missing: Exit with 0 also if entries are in one dump only.
        json: Print JSON: num_entries, only_in_first, only_in_second, differing.

    Raises:
        CheckpointError: If a path holds no dump, or the dumps share no entry.
    """
    found = dumps.compare_dumps(Path(first), Path(second), tolerance)
    if json:
        print(json_text(asdict(found)))
    else:
        print("\n".join(found.lines(first, second)))
    is_missing = bool(found.only_in_first or found.only_in_second)
    if found.differing or (is_missing and not allow_missing):
        raise SystemExit(1)


COMMANDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "import": import_, "export": export, "verify": verify, "compare": compare,
        "compare-dumps": compare_dumps, "prune": prune,
    }
)  # fmt: skip
"""Name of a tool -> function."""


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())

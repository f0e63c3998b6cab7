"""Read LightningCLI configuration files for a plan, without making their objects and without torch.

All mistakes are collected, so that a single run reports every mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_lightning.config import (
    ContextOptions,
    DataParallelOptions,
    PipelineOptions,
    RecomputeOptions,
    StrategySettings,
    TransformerConfig,
)
from megatron_lightning.config.global_batch import replica_batch_size
from megatron_lightning.config.value_checks import is_count
from megatron_lightning.mistakes import Errors
from megatron_lightning.models.measured import MeasuredModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.ledger.tower_memory import TowerSizes
from megatron_lightning.planning.planned_run import MeasuredRecipe, Recipe
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.recipe_reading.groups import read_group, read_object, read_section
from megatron_lightning.recipe_reading.model_sizes import (
    folder_config,
    folder_sizes,
    measured_model,
)
from megatron_lightning.recipe_reading.sections import read_sections

_MODEL, _STRATEGY = "GPTLightningModule", "MegatronStrategy"
_FOLDER_MODEL = "HuggingFaceModule"
_FOLDER_OPTIONS = ("revision", "family", "trust_remote_code")
_FROZEN = ("freeze", "train_only")
_FP8 = "MegatronFP8Precision"


def read_recipe(
    paths: Sequence[str],
    overrides: Sequence[str],
    world_size: int | None,
    errors: Errors,
    *,
    image_tokens: int | None = None,
) -> Recipe | MeasuredRecipe | None:
    """Return the recipe in files, or None after recording mistakes in ``errors``.

    Args:
        paths: Configuration files of ``megatron-lightning fit``. Later files win.
        overrides: Options such as "trainer.devices=8". Options win over files.
        world_size: Number of ranks. None: the Trainer's num_nodes x devices.
        errors: Takes the mistakes.
        image_tokens: Tokens of the images of a sample. None: all tokens of the sample.
    """
    sections = read_sections(paths, overrides, errors)
    if sections is None:
        return None
    trainer = read_section(sections.get("trainer"), "trainer", errors)
    settings = _strategy(trainer.get("strategy"), errors)
    _, data = read_object(sections.get("data"), "data", errors)
    layout = None if settings is None else errors.attempt(ParallelLayout.of, settings)
    fp8_recipe = _fp8_recipe(trainer.get("plugins"), errors)
    precision = trainer.get("precision") if fp8_recipe is None else "bf16-mixed"
    model, tower = _model(sections.get("model"), precision, settings or StrategySettings(), errors)
    is_measured = model is not None and not isinstance(model, TransformerConfig)
    if is_measured and fp8_recipe is not None:
        errors.add(
            f"trainer.plugins has {_FP8}, and the bytes of quantized layers are known for a "
            "GPTModel. Plan with precision bf16-mixed and without the plugin."
        )
    adapters = None if is_measured else _adapters(sections.get("model"), errors)
    ranks = world_size if world_size is not None else _world_size(trainer, errors)
    longest = model.max_sequence_length if isinstance(model, TransformerConfig) else 1
    length = data.get("sequence_length", longest)
    sequence_length = _count(length, "data.sequence_length", errors)
    runs = trainer.get("accumulate_grad_batches", 1)
    accumulated = _count(runs, "trainer.accumulate_grad_batches", errors)
    batch_size = _batch_size(data, layout, ranks, accumulated, errors)
    if tower is not None:
        tower = _with_images(tower, image_tokens, sequence_length, errors)
    elif image_tokens is not None and model is not None:
        errors.add(
            f"--image-tokens is {image_tokens}, and the model reads no images. Leave it out."
        )
    if errors.found or model is None or settings is None or layout is None:
        return None
    run: dict[str, Any] = {
        "layout": layout,
        "world_size": ranks,
        "node_size": _node_size(trainer, ranks),
        "precision": precision,
        "fp8_recipe": fp8_recipe,
        "adapters": adapters,
        "device": "cpu" if trainer.get("accelerator") == "cpu" else "cuda",
        "batch_size": batch_size,
        "accumulated": accumulated,
        "sequence_length": sequence_length,
        "micro_batch_size": settings.micro_batch_size or batch_size,
        "data_parallel": settings.data_parallel,
        "data": settings.data_parallel_options or DataParallelOptions(),
        "context": settings.context_options or ContextOptions(),
        "pipeline": settings.pipeline_options or PipelineOptions(),
        "recompute": settings.recompute or RecomputeOptions(),
        "schedule": settings.pipeline_schedule,
        "compile": settings.compile,
        **_step(sections.get("model"), errors),
    }
    if isinstance(model, TransformerConfig):
        return Recipe(model=model, tower=tower, **run)
    return MeasuredRecipe(model=model, **run)


def _with_images(
    tower: TowerSizes, image_tokens: int | None, sequence_length: int, errors: Errors
) -> TowerSizes:
    """Return a tower with the tokens of a sample's images. None: all tokens."""
    number = sequence_length if image_tokens is None else image_tokens
    if not 0 <= number <= sequence_length:
        errors.add(
            f"--image-tokens is {number}, and a sample has {sequence_length} tokens "
            "(data.sequence_length) with those of its images. Set it from 0 to "
            f"{sequence_length}."
        )
    return replace(tower, image_tokens=number)


def _batch_size(
    data: Mapping[str, Any],
    layout: ParallelLayout | None,
    world_size: int,
    accumulated: int,
    errors: Errors,
) -> int:
    """Return the samples of a batch on a data-parallel rank."""
    schedule = data.get("batch_size_schedule")
    final = schedule.get("global_batch_size") if isinstance(schedule, Mapping) else None
    global_size = data.get("global_batch_size", final)
    if global_size is None:
        return _count(data.get("batch_size"), "data.batch_size", errors)
    global_size = _count(global_size, "data.global_batch_size", errors)
    replicas = layout and errors.attempt(layout.data_parallel_size, world_size)
    if not isinstance(replicas, int) or errors.found:
        return 1
    size = errors.attempt(replica_batch_size, global_size, replicas, accumulated)
    return size if isinstance(size, int) else 1


def _strategy(given: Any, errors: Errors) -> StrategySettings | None:
    path, options = read_object(given, "trainer.strategy", errors)
    if path.rpartition(".")[2] not in (_STRATEGY, "megatron", ""):
        errors.add(
            f"trainer.strategy is {path!r}, and a plan describes {_STRATEGY}. Set "
            f"trainer.strategy.class_path to megatron_lightning.strategies.{_STRATEGY}."
        )
        return None
    return read_group(StrategySettings, options, "trainer.strategy", errors)


def _model(
    given: Any, precision: Any, settings: StrategySettings, errors: Errors
) -> tuple[TransformerConfig | MeasuredModel | None, TowerSizes | None]:
    """Return the configuration of a :class:`GPTModel`, or measures of another module, and the tower
    of images before it.

    Args:
        given: The section of the model.
        precision: The Trainer's.
        settings: The strategy's.
        errors: Takes the mistakes.
    """
    path, arguments = read_object(given, "model", errors)
    name = path.rpartition(".")[2]
    if name not in (_MODEL, _FOLDER_MODEL, ""):
        if errors.found:  # found without torch
            return None, None
        measured = errors.attempt(
            measured_model,
            path,
            arguments,
            half=precision_of(precision).compute_bytes == 2,
            pipeline=settings.pipeline_options,
            plan=settings.sharding_plan,
        )
        return measured, None
    folder = arguments.get("path" if name == _FOLDER_MODEL else "init_from_hf")
    if name == _FOLDER_MODEL or (arguments.get("config") is None and folder is not None):
        if not isinstance(folder, str):
            errors.add(f"model.path is {folder!r}. Set it to a Hugging Face folder or Hub id.")
            return None, None
        options = {key: arguments[key] for key in _FOLDER_OPTIONS if arguments.get(key) is not None}
        if name == _MODEL:
            return errors.attempt(folder_config, folder, **options), None
        frozen = {key: arguments[key] for key in _FROZEN if arguments.get(key)}
        return errors.attempt(folder_sizes, folder, frozen, **options) or (None, None)
    return read_group(TransformerConfig, arguments.get("config"), "model.config", errors), None


def _adapters(given: Any, errors: Errors) -> AdapterSizes | None:
    """Return the adapters of the model. None: all weights are trained."""
    _, arguments = read_object(given, "model", errors)
    if arguments.get("peft") is None:
        return None
    path, options = read_object(arguments["peft"], "model.peft", errors)
    return errors.attempt(AdapterSizes.of_options, options, path)


def _step(given: Any, errors: Errors) -> dict[str, Any]:
    """Return what the model's section says of the optimizer step."""
    _, arguments = read_object(given, "model", errors)
    rule = arguments.get("maximal_update")
    rows = arguments.get("param_groups")
    return {
        "rounds_weights": arguments.get("qat") is not None,
        "optimizer": arguments.get("optimizer"),
        "maximal_update": (
            None if rule is None else read_object(rule, "model.maximal_update", errors)[1]
        ),
        "param_groups": (
            [read_object(row, "model.param_groups", errors)[1] for row in rows]
            if isinstance(rows, list)
            else None
        ),
    }


def _fp8_recipe(plugins: Any, errors: Errors) -> FP8Recipe | None:
    """Return the recipe of the Trainer's plugin for quantized layers, or None."""
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, str | dict):
            path, arguments = read_object(plugin, "trainer.plugins", errors)
            if path.rpartition(".")[2] == _FP8:
                return read_group(
                    FP8Recipe, arguments.get("recipe"), "trainer.plugins.recipe", errors
                )
    return None


def _count(value: Any, name: str, errors: Errors) -> int:
    if not is_count(value):
        errors.add(f"{name} is {value!r}; it must be a positive integer.")
        return 1
    count: int = value
    return count


def _num_devices(trainer: Mapping[str, Any]) -> int | None:
    """Return the Trainer's devices. None: not a number."""
    devices = trainer.get("devices", "auto")
    if isinstance(devices, str) and devices.isdigit():
        return int(devices)
    return len(devices) if isinstance(devices, list) else devices if is_count(devices) else None


def _node_size(trainer: Mapping[str, Any], world_size: int) -> int:
    """Return the ranks of a node: the Trainer's devices, or at most 8 if that is not a number."""
    count = _num_devices(trainer)
    return count if count and count <= world_size else min(8, world_size)


def _world_size(trainer: Mapping[str, Any], errors: Errors) -> int:
    nodes, count = trainer.get("num_nodes", 1), _num_devices(trainer)
    if not count or not isinstance(nodes, int):
        errors.add(
            f"trainer.devices is {trainer.get('devices', 'auto')!r} and num_nodes {nodes!r}, which "
            "is not a number of ranks. Set --world-size."
        )
        return 1
    return nodes * count

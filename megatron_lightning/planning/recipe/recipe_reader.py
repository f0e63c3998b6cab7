"""Read LightningCLI configuration files for a plan, without making their objects and without torch.

All mistakes are collected, so that a single run reports every mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from math import ceil
from typing import Any, TypeVar

from megatron_lightning.config import (
    CompileOptions,
    CompileScope,
    ContextOptions,
    DataParallelOptions,
    LatentAttentionConfig,
    MoEConfig,
    PipelineOptions,
    RecomputeOptions,
    RopeScaling,
    TransformerConfig,
)
from megatron_lightning.config.global_batch import replica_batch_size
from megatron_lightning.config.measured import MeasuredModel
from megatron_lightning.models.blueprint import num_parameters
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.layer_tapes import DeviceKind
from megatron_lightning.planning.ledger.precision_bytes import precision_of
from megatron_lightning.planning.recipe.folder_sizes import folder_config, measured_model
from megatron_lightning.planning.recipe.sections import Errors, read_sections
from megatron_lightning.precision.recipes import FP8Recipe
from megatron_lightning.rules import check_options, resolve_compile

T = TypeVar("T")

STRATEGY_OPTIONS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "micro_batch_size", "pipeline_schedule", "pipeline_options", "context_options",
    "data_parallel", "data_parallel_options", "recompute", "compile", "compile_options",
    "fused_loss", "non_finite", "start_method", "sharding_plan", "checkpoint_options",
    "process_group_backend", "nccl_communicator_config_path", "timeout_s",
)  # fmt: skip
"""Parameters of ``MegatronStrategy``, listed here because the class's signature needs torch."""
_SIZES = STRATEGY_OPTIONS[:7]
_MODEL, _STRATEGY = "GPTLightningModule", "MegatronStrategy"
_FOLDER_MODEL = "HuggingFaceModule"
_FOLDER_OPTIONS = ("revision", "family", "trust_remote_code")
_FP8 = "MegatronFP8Precision"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Values of a configuration file for a plan, apart from the model."""

    layout: ParallelLayout
    world_size: int
    node_size: int
    """Ranks of a node."""
    precision: str | int | None
    fp8_recipe: FP8Recipe | None
    """Recipe of the plugin for quantized layers, or None."""
    adapters: AdapterSizes | None
    """Trained adapters of a frozen model. None: all parameters are trained."""
    device: DeviceKind
    batch_size: int
    """Samples of a pipeline run on a data-parallel rank."""
    accumulated: int
    """Pipeline runs of an optimizer step."""
    sequence_length: int
    micro_batch_size: int
    data_parallel: Any
    data: DataParallelOptions
    context: ContextOptions
    pipeline: PipelineOptions
    recompute: RecomputeOptions
    schedule: str | list[str]
    compile: CompileScope | None

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a pipeline run."""
        return ceil(self.batch_size / self.micro_batch_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        replicas = self.layout.data_parallel_size(self.world_size)
        return self.batch_size * self.accumulated * replicas

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return False


@dataclass(frozen=True, kw_only=True)
class Recipe(PlannedRun):
    """Values of a configuration file with the sizes of a :class:`GPTModel`."""

    model: TransformerConfig

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.model.moe is not None

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model."""
        return num_parameters(self.model)


@dataclass(frozen=True, kw_only=True)
class MeasuredRecipe(PlannedRun):
    """Values of a configuration file with a module that was measured."""

    model: MeasuredModel

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model."""
        return sum((self.model.parameters(1) or {}).values())


def read_recipe(
    paths: Sequence[str], overrides: Sequence[str], world_size: int | None, errors: Errors
) -> Recipe | MeasuredRecipe | None:
    """Return the recipe in files, or None after recording mistakes in ``errors``.

    Args:
        paths: Configuration files of ``megatron-lightning fit``. Later files win.
        overrides: Options such as "trainer.devices=8". Options win over files.
        world_size: Number of ranks. None: the Trainer's num_nodes x devices.
        errors: Takes the mistakes.
    """
    sections = read_sections(paths, overrides, errors)
    if sections is None:
        return None
    trainer = _section(sections.get("trainer"), "trainer", errors)
    options = _strategy(trainer.get("strategy"), errors)
    _, data = _object(sections.get("data"), "data", errors)
    sizes = {name: options[name] for name in _SIZES if name in options}
    layout = errors.attempt(ParallelLayout, **sizes)
    micro_batch_size = options.get("micro_batch_size")
    mode = options.get("data_parallel", "zero1")
    # Every section is read even after a mistake, so that one call names all mistakes.
    errors.attempt(
        check_options,
        micro_batch_size,
        mode,
        options.get("start_method", "popen"),
        options.get("non_finite", "ignore"),
    )
    groups: dict[str, Any] = {
        name: _build(kind, options.get(name), f"strategy.{name}", errors)
        for name, kind in _GROUPS.items()
    }
    compiled = options.get("compile_options")
    if compiled is not None:
        compiled = _build(CompileOptions, compiled, "strategy.compile_options", errors)
    errors.attempt(resolve_compile, options.get("compile"), compiled)
    fp8_recipe = _fp8_recipe(trainer.get("plugins"), errors)
    precision = trainer.get("precision") if fp8_recipe is None else "bf16-mixed"
    pipeline = groups["pipeline_options"]
    model = _model(sections.get("model"), precision, options, pipeline, errors)
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
    if errors.found or model is None or layout is None:
        return None
    settings: dict[str, Any] = {
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
        "micro_batch_size": micro_batch_size or batch_size,
        "data_parallel": mode,
        "data": groups["data_parallel_options"],
        "context": groups["context_options"],
        "pipeline": pipeline,
        "recompute": groups["recompute"],
        "schedule": options.get("pipeline_schedule", "auto"),
        "compile": options.get("compile"),
    }
    if isinstance(model, TransformerConfig):
        return Recipe(model=model, **settings)
    return MeasuredRecipe(model=model, **settings)


_GROUPS: Mapping[str, type[Any]] = {
    "data_parallel_options": DataParallelOptions,
    "context_options": ContextOptions,
    "pipeline_options": PipelineOptions,
    "recompute": RecomputeOptions,
}
_NESTED: Mapping[str, type[Any]] = {
    "mla": LatentAttentionConfig,
    "moe": MoEConfig,
    "rope_scaling": RopeScaling,
}


def _batch_size(
    data: Mapping[str, Any],
    layout: ParallelLayout | None,
    world_size: int,
    accumulated: int,
    errors: Errors,
) -> int:
    """Return the samples of a batch on a data-parallel rank."""
    global_size = data.get("global_batch_size")
    if global_size is None:
        return _count(data.get("batch_size"), "data.batch_size", errors)
    global_size = _count(global_size, "data.global_batch_size", errors)
    replicas = layout and errors.attempt(layout.data_parallel_size, world_size)
    if not isinstance(replicas, int) or errors.found:
        return 1
    size = errors.attempt(replica_batch_size, global_size, replicas, accumulated)
    return size if isinstance(size, int) else 1


def _section(given: Any, name: str, errors: Errors) -> Mapping[str, Any]:
    """Return the values of a section, or nothing for a value without options."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        errors.add(
            f"{name} is {given!r}, which holds no options. Write each as a line name: value."
        )
        return {}
    return given


def _object(given: Any, name: str, errors: Errors) -> tuple[str, Mapping[str, Any]]:
    """Return class path ("" if there is none) and arguments of a section."""
    if isinstance(given, str):
        return given, {}
    section = _section(given, name, errors)
    path, arguments = section.get("class_path", ""), section.get("init_args")
    if not isinstance(path, str):
        errors.add(f"{name}.class_path is {path!r}, which names no class.")
        path = ""
    if arguments is None and path:
        arguments = {}
    return path, section if arguments is None else _section(arguments, f"{name}.init_args", errors)


def _strategy(given: Any, errors: Errors) -> Mapping[str, Any]:
    path, options = _object(given, "trainer.strategy", errors)
    if path.rpartition(".")[2] not in (_STRATEGY, "megatron", ""):
        errors.add(
            f"trainer.strategy is {path!r}, and a plan describes {_STRATEGY}. Set "
            f"trainer.strategy.class_path to megatron_lightning.strategies.{_STRATEGY}."
        )
        return {}
    for name in options:
        _check_known(name, STRATEGY_OPTIONS, "trainer.strategy", errors)
    return options


def _model(
    given: Any, precision: Any, options: Mapping[str, Any], pipeline: Any, errors: Errors
) -> TransformerConfig | MeasuredModel | None:
    """Return the configuration of a :class:`GPTModel`, or measures of another module.

    Args:
        given: The section of the model.
        precision: The Trainer's.
        options: The strategy's.
        pipeline: The strategy's options of the pipeline.
        errors: Takes the mistakes.
    """
    path, arguments = _object(given, "model", errors)
    name = path.rpartition(".")[2]
    if name not in (_MODEL, _FOLDER_MODEL, ""):
        if errors.found:  # found without torch
            return None
        half = precision_of(precision).compute_bytes == 2
        plan = options.get("sharding_plan")
        return errors.attempt(
            measured_model, path, arguments, half=half, pipeline=pipeline, plan=plan
        )
    folder = arguments.get("path" if name == _FOLDER_MODEL else "init_from_hf")
    if name == _FOLDER_MODEL or (arguments.get("config") is None and folder is not None):
        if not isinstance(folder, str):
            errors.add(f"model.path is {folder!r}. Set it to a Hugging Face folder or Hub id.")
            return None
        options = {key: arguments[key] for key in _FOLDER_OPTIONS if arguments.get(key) is not None}
        return errors.attempt(folder_config, folder, **options)
    _, config = _object(arguments.get("config"), "model.config", errors)
    config = dict(config)
    for name, kind in _NESTED.items():
        if isinstance(config.get(name), dict):
            config[name] = _build(kind, config[name], f"model.config.{name}", errors)
    if isinstance(config.get("window_size"), list):
        config["window_size"] = tuple(config["window_size"])
    model_config: TransformerConfig | None = _build(
        TransformerConfig, config, "model.config", errors
    )
    return model_config


def _adapters(given: Any, errors: Errors) -> AdapterSizes | None:
    """Return the adapters of the model. None: all weights are trained."""
    _, arguments = _object(given, "model", errors)
    if arguments.get("peft") is None:
        return None
    _, options = _object(arguments["peft"], "model.peft", errors)
    return errors.attempt(AdapterSizes.of_options, options)


def _fp8_recipe(plugins: Any, errors: Errors) -> FP8Recipe | None:
    """Return the recipe of the Trainer's plugin for quantized layers, or None."""
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, str | dict):
            path, arguments = _object(plugin, "trainer.plugins", errors)
            if path.rpartition(".")[2] == _FP8:
                return _build(FP8Recipe, arguments.get("recipe"), "trainer.plugins.recipe", errors)
    return None


def _build(kind: type[T], given: Any, path: str, errors: Errors) -> T | None:
    """Return an object of a group of options."""
    if isinstance(given, str):
        errors.add(f"{path} is {given!r}, which is no group of options. Write each under it.")
        return None
    _, values = _object(given, path, errors)
    known_fields = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        _check_known(name, known_fields, path, errors)
    missing_names = [
        name
        for name, one in known_fields.items()
        if name not in values and one.default is MISSING and one.default_factory is MISSING
    ]
    if missing_names:
        errors.add(
            f"{path} lacks {', '.join(missing_names)}. Set {'them' if missing_names[1:] else 'it'}."
        )
        return None
    return errors.attempt(
        kind, **{name: value for name, value in values.items() if name in known_fields}
    )


def _check_known(name: str, known: Collection[str], path: str, errors: Errors) -> None:
    if name not in known:
        nearest = get_close_matches(name, known, n=1)
        meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
        errors.add(f"{path} has no option {name!r}.{meant}")


def _count(value: Any, name: str, errors: Errors) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    errors.add(f"{name} is {value!r}; it must be a positive integer.")
    return 1


def _node_size(trainer: Mapping[str, Any], world_size: int) -> int:
    """Return the ranks of a node: the Trainer's devices, or at most 8 if that is not a number."""
    devices = trainer.get("devices", "auto")
    count = len(devices) if isinstance(devices, list) else devices
    if isinstance(count, str) and count.isdigit():
        count = int(count)
    return count if isinstance(count, int) and 1 <= count <= world_size else min(8, world_size)


def _world_size(trainer: Mapping[str, Any], errors: Errors) -> int:
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices", "auto")
    count = len(devices) if isinstance(devices, list) else devices
    if isinstance(count, str) and count.isdigit():
        count = int(count)
    if not isinstance(count, int) or count < 1 or not isinstance(nodes, int):
        errors.add(
            f"trainer.devices is {devices!r} and num_nodes {nodes!r}, which is not a number of "
            "ranks. Set --world-size."
        )
        return 1
    return nodes * count

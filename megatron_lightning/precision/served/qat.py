"""Quantization-aware training: the forward rounds weights as servers will hold them.

What was applied to a model stands in its checkpoints under ``"qat"``, by the model's path in the
LightningModule:

    weights, group_size, modules, ...  fields of :class:`QAT`
    layers      paths of the rounded layers
    stacks      path of a module of experts -> its rounded parameters
    dtype       dtype in which values are rounded
    input_amax  path of a layer -> its largest input, if scales of inputs are fixed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from megatron_lightning.config.value_checks import is_count
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.adapters.adaptable import adapt
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.parallel.shards.patterns import compile_pattern, describe_unused
from megatron_lightning.precision.served.checks import (
    check_columns,
    check_fused,
    check_halves,
    check_inputs,
    check_layer,
)
from megatron_lightning.precision.served.gemm import ServedGemm, ServedStack
from megatron_lightning.precision.served.input_scales import InputScales
from megatron_lightning.precision.served.inputs import InputName
from megatron_lightning.precision.served.layer_inputs import LayerInputs
from megatron_lightning.precision.served.rounding import Rounding
from megatron_lightning.precision.served.selection import Served, served_in
from megatron_lightning.precision.served.values import NAMES, ServedFormat, ServedName, fused_paths

QAT_RECORD = "qat"
"""Entry of a checkpoint's state."""
_APPLIED = "_megatron_qat"
_BF16 = "bf16"


class Record(NamedTuple):
    """The entry of a model."""

    qat: QAT
    served: Served
    dtype: torch.dtype
    rounding: Rounding | None = None
    """The switch of the model. None: the record is of a checkpoint."""
    saved_amax: Mapping[str, float] = MappingProxyType({})
    """``input_amax`` of a checkpoint."""

    @property
    def input_amax(self) -> Mapping[str, float]:
        """Path of a layer -> its largest input. Empty: no scale of inputs is fixed."""
        scales = None if self.rounding is None else self.rounding.inputs
        return self.saved_amax if scales is None else scales.amax

    def apply(self, model: nn.Module) -> nn.Module:
        """Make a full model round as a checkpoint's training did. Return the model."""
        self.qat.apply(model, rounded_as=self.dtype)
        self.give_scales(qat_of(model)[""])
        return model

    @property
    def inputs(self) -> LayerInputs:
        """The inputs that are rounded."""
        forms = {path: self.qat.form_of(path) for path in self.served.layers}
        rounded = {
            path: form
            for path, form in forms.items()
            if form is not None and form.name == self.qat.activations
        }
        return LayerInputs(rounded, self.input_amax, is_fixed=self.qat.fixes_inputs)

    def give_scales(self, other: Record) -> None:
        """Fix the scales of inputs of another model."""
        if other.rounding is not None and other.rounding.inputs is not None:
            other.rounding.inputs.amax = dict(self.input_amax)

    def entry(self) -> dict[str, Any]:
        """Return plain values, with the inputs of the last step."""
        scales = None if self.rounding is None else self.rounding.inputs
        if scales is not None and not scales.is_shared:
            scales.take()
        stacks = {path: list(names) for path, names in self.served.stacks.items()}
        dtype = str(self.dtype).removeprefix("torch.")
        entry = {**asdict(self.qat), "layers": self.served.layers, "stacks": stacks, "dtype": dtype}
        return {**entry, "input_amax": dict(self.input_amax)} if self.input_amax else entry


@dataclass(frozen=True)
class QAT:
    """Rounded weights in the forward of a training, with gradients passed on.

    Args:
        weights: Format of the weights.
        group_size: Values of a scale of layers in int4: 128, 64 or 32.
        modules: Pattern of layer paths in the model -> another format, or "bf16": not rounded. The
            first pattern that matches a path decides.
        fake_quant_after_n_steps: Optimizer steps until a training rounds. Evaluations always round.
            Until then scales of inputs in ``nvfp4`` and ``fp8_tensor`` are found.
        activations: Format of the inputs of the layers with weights in the same format. None: none
            is rounded.

    Raises:
        ConfigError: If a format is unknown, or the number of steps is negative.
    """

    weights: ServedName = "nvfp4"
    group_size: int | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    fake_quant_after_n_steps: int = 0
    activations: InputName | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        names = [self.weights, *self.modules.values()]
        for pattern, value in self.modules.items():
            if value not in (_BF16, *NAMES):
                raise ConfigError(
                    f"modules of qat gives {pattern!r} the value {value!r}, which is no format of "
                    f"servers here. Set one of {_BF16}, {', '.join(NAMES)}."
                )
        if "int4" not in names or self.weights == "int4":
            ServedFormat.of(self.weights, self.group_size)
        if "int4" in names:
            ServedFormat.of("int4", self.group_size)
        if self.activations is not None:
            check_inputs(self.activations, names)
        steps = self.fake_quant_after_n_steps
        if steps == 0 and self.fixes_inputs:
            raise ConfigError(
                f"activations={self.activations} has scales that the first steps find, and "
                "fake_quant_after_n_steps of qat is 0. Set it to the steps that find them, such as "
                "100."
            )
        if steps != 0 and not is_count(steps):
            raise ConfigError(
                f"fake_quant_after_n_steps of qat is {steps!r}; it is a "
                "number of optimizer steps. Set it to 0 or more."
            )

    @classmethod
    def of(cls, value: QAT | Mapping[str, Any] | str | None) -> QAT | None:
        """Return the options of a user's value: a format's name, or fields."""
        if value is None or isinstance(value, QAT):
            return value
        return cls(weights=value) if isinstance(value, str) else cls(**value)  # type: ignore[arg-type]

    @property
    def fixes_inputs(self) -> bool:
        """Whether the first steps find scales of inputs, which then stay."""
        return self.activations is not None and ServedFormat.of(self.activations).is_of_matrix

    def form_of(self, path: str) -> ServedFormat | None:
        """Return the format of a layer's weight. None: not rounded."""
        rows = ((compile_pattern(pattern), value) for pattern, value in self.modules.items())
        name = next((value for pattern, value in rows if pattern.fullmatch(path)), self.weights)
        if name == _BF16:
            return None
        return ServedFormat.of(name, self.group_size if name == "int4" else None)

    @staticmethod
    def follow(model: nn.Module, step: int | None) -> None:
        """Begin to round, or not yet. A LightningModule under ``MegatronStrategy``, and those of
        this library, do this by themselves.

        Args:
            model: A model to which a QAT was applied, or a module that holds one.
            step: Optimizer steps taken before the next one. None: an evaluation.
        """
        for record in qat_of(model).values():
            rounding = record.rounding
            if rounding is None:
                continue
            rounding.is_on = step is None or step >= record.qat.fake_quant_after_n_steps
            if rounding.inputs is not None and step is not None:
                if not rounding.inputs.is_shared:
                    rounding.inputs.take()
                if rounding.is_on and (line := rounding.inputs.complete(step)):
                    rank_zero_info(line)

    def apply(self, model: nn.Module, *, rounded_as: torch.dtype | None = None) -> nn.Module:
        """Round the weights of a full model's layers in its forward, in place. Return the model.

        Args:
            model: A model on any device, before a strategy divides it.
            rounded_as: Dtype of weights before they are rounded. None: that of the GEMM. Weights of
                an untouched model's stacked experts are always cast to that of the GEMM.

        Raises:
            ConfigError: If a pattern matches nothing, no layer is rounded, or a layer does not fit
                the format.
        """
        if adapted_layers(model):
            raise ConfigError(
                f"{described(self)} is applied to a model with adapters, which would be added "
                "behind the rounding. Apply it before LoRA."
            )
        served = self._chosen(model)
        rounding = Rounding(self._input_scales(served))
        modules = dict(model.named_modules())
        for path, form in self._forms(served.layers).items():
            layer: Any = modules[path]
            check_layer(path, layer, form)
            fused = (modules[other] for other in fused_paths(path) if other in served.layers)
            layers = (layer, *(other for other in fused if other is not layer))
            one_by_one = layer.gemm.one_by_one if isinstance(layer, GroupedLinear) else False
            gemm = ServedGemm(
                form,
                path,
                layers,
                rounding,
                one_by_one=one_by_one,
                rounded_as=rounded_as,
                rounds_inputs=form.name == self.activations,
            )
            adapt(layer, gemm=gemm)
        for path, form in self._forms(served.stacks).items():
            names = served.stacks[path]
            if form.name == self.activations:
                raise ConfigError(
                    f"qat has activations in {form.name}, and {path} multiplies its stacked "
                    "experts itself, so that their inputs cannot be rounded. Train the folder as a "
                    "GPTModel (GPTLightningModule with init_from_hf), or leave activations out."
                )
            for name in names:
                weight = modules[path]._parameters[name]
                check_columns(f"{path}.{name}", weight, form)
                check_halves(f"{path}.{name}", weight, form)
            ServedStack(form, path, names, rounding).attach(modules[path])
        model.__dict__[_APPLIED] = Record(self, served, torch.float32, rounding)
        return model

    def _input_scales(self, served: Served) -> InputScales | None:
        """Return a place for fixed scales of inputs. None: servers find scales at run time."""
        if not self.fixes_inputs:
            return None
        forms = self._forms(served.layers).items()
        return InputScales(path for path, form in forms if form.name == self.activations)

    def _forms(self, paths: Iterable[str]) -> dict[str, ServedFormat]:
        forms = {path: self.form_of(path) for path in paths}
        return {path: form for path, form in forms.items() if form is not None}

    def _chosen(self, model: nn.Module) -> Served:
        served = served_in(model)
        unused = describe_unused(list(self.modules), [path for path, _ in model.named_modules()])
        if unused:
            raise ConfigError(
                f"modules of qat has patterns that match no module of {type(model).__name__}: "
                f"{'; '.join(unused)}. Correct or remove them."
            )
        check_fused(served.layers, self.form_of)
        layers = list(self._forms(served.layers))
        stacks = {path: served.stacks[path] for path in self._forms(served.stacks)}
        if not layers and not stacks:
            raise ConfigError(
                f"qat rounds no layer of {type(model).__name__}. Leave qat out, or remove rows of "
                "its modules."
            )
        return Served(layers, stacks)


def qat_of(module: nn.Module) -> dict[str, Record]:
    """Return path -> record of the models in a module to which a QAT was applied."""
    records: dict[str, Any] = {path: vars(m).get(_APPLIED) for path, m in module.named_modules()}
    return {path: record for path, record in records.items() if record is not None}


def write_qat(module: Any, checkpoint: dict[str, Any]) -> None:
    """Describe the rounding of a LightningModule in its checkpoint, unless already described.

    Args:
        module: The LightningModule, of a Trainer.
        checkpoint: Lightning's dict.
    """
    records = {} if QAT_RECORD in checkpoint else qat_of(module)
    if records:
        dtype = _gemm_dtype(module)
        entries = {path: record._replace(dtype=dtype) for path, record in records.items()}
        checkpoint[QAT_RECORD] = {path: record.entry() for path, record in entries.items()}


def trained_qat(module: Any, model: nn.Module) -> Record | None:
    """Return the record of a model in a LightningModule of a Trainer. None: it is not rounded."""
    record = qat_of(model).get("")
    return None if record is None else record._replace(dtype=_gemm_dtype(module))


def _gemm_dtype(module: Any) -> torch.dtype:
    """Return the dtype in which the layers of a LightningModule multiply."""
    precision = str(module.trainer.precision)
    if "bf16" in precision:
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def read_qat(state: Mapping[str, Any], where: str = "the checkpoint") -> dict[str, Record]:
    """Return path -> record of a checkpoint's state.

    Raises:
        CheckpointError: If an entry is damaged.
    """
    try:
        return {path: _record(entry) for path, entry in (state.get(QAT_RECORD) or {}).items()}
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{where}: what it says of qat is damaged ({error!r}).") from error


def _record(entry: Mapping[str, Any]) -> Record:
    qat = QAT(
        entry["weights"],
        entry["group_size"],
        dict(entry["modules"]),
        entry.get("fake_quant_after_n_steps", 0),
        entry.get("activations"),
    )
    stacks = {path: tuple(names) for path, names in entry["stacks"].items()}
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    served, amax = Served(list(entry["layers"]), stacks), dict(entry.get("input_amax", {}))
    return Record(qat, served, dtypes[entry["dtype"]], saved_amax=amax)


def resume_qat(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Check that a module rounds as the checkpoint's did, and take over fixed scales of inputs. A
    checkpoint without rounding may go on with one.

    Raises:
        ConfigError: If the module rounds otherwise, naming both.
    """
    records = qat_of(module)
    own = {path: record.qat for path, record in records.items()}
    for path, record in read_qat(checkpoint).items():
        # Another first step of the rounding is no other rounding.
        begin = own.get(path, record.qat).fake_quant_after_n_steps
        if own.get(path) != replace(record.qat, fake_quant_after_n_steps=begin):
            found = own.get(path)
            raise ConfigError(
                f"the checkpoint was trained with {described(record.qat)}, and this module has "
                f"{'no qat' if found is None else described(found)}: its forward would be another "
                "one. Set the checkpoint's; to train on from its weights otherwise, export it "
                "(megatron-lightning convert export --quantize none) and start from the folder."
            )
        record.give_scales(records[path])


def described(qat: QAT) -> str:
    """Return the settings for messages."""
    parts = [f"qat={qat.weights}"]
    if qat.activations is not None:
        parts.append(f"activations={qat.activations}")
    if qat.group_size is not None:
        parts.append(f"group_size={qat.group_size}")
    if qat.modules:
        parts.append(f"modules={dict(qat.modules)}")
    return ", ".join(parts)

"""Logits of a folder's model beside the logits of ``transformers``, with a block in memory at a
time.

Both models run with parameters that exist only while their block runs, in fp32. Ours are read from
the folder. The parameters of ``transformers`` come from ``from_pretrained`` in the folder's dtype:
from the mapped files, except for tensors merged by loading. The outputs of the blocks are compared,
so that the first different block is known.

A parameter outside of a running block is NaN. A model that reads one there, or that cannot run in
parts, is compared with all weights in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.hf_models.sample_inputs import first_output, sample_inputs
from megatron_lightning.bridge.hf_models.transformers_model import fill_weights, lazy_parameters
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.transformer import GPTModel

TOLERANCE = 1e-4
"""Of a difference, relative to the largest value: the same operations in fp32, in equal order."""

Values = Mapping[str, Callable[[], Tensor]]
"""Name of a parameter -> function that reads the values in fp32."""


@dataclass(frozen=True)
class Comparison:
    """Difference of logits."""

    difference: float
    """Largest difference, relative to the largest logit."""
    block: str | None
    """Path of the first block with other outputs. None: no block, or not known."""
    by_block: bool
    """Whether one block at a time was in memory."""

    @property
    def is_equal(self) -> bool:
        """Whether logits are equal, up to rounding. NaN is not."""
        return self.difference <= TOLERANCE


@torch.no_grad()
def compare_logits(
    bridge: AutoBridge, *, is_gpt: bool, reference: AutoBridge | None = None
) -> Comparison:
    """Compare the logits of a folder's model with the logits of ``transformers``.

    Args:
        bridge: The folder.
        is_gpt: Whether our model is a :class:`GPTModel`, not the untouched model.
        reference: The folder that ``transformers`` reads. None: the same folder, whose damages both
            models share.

    Raises:
        CheckpointError: If a buffer differs.
        ConfigError: If ``transformers`` cannot load or run the folder's model here.
    """
    reference = reference or bridge
    are_plain = bridge.is_plain_folder and reference.is_plain_folder
    comparison = _by_block(bridge, reference, is_gpt=is_gpt) if are_plain else None
    if comparison is None or math.isnan(comparison.difference):
        comparison = _whole(bridge, reference, is_gpt=is_gpt)
    return comparison


@torch.no_grad()
def logits_of(bridge: AutoBridge, tokens: Tensor, *, is_gpt: bool) -> Tensor:
    """Return the logits [b, s, v] of a folder's model in fp32, with a block in memory at a time.

    Args:
        bridge: The folder.
        tokens: Token ids [b, s].
        is_gpt: Whether the model is a :class:`GPTModel`, not the untouched model.
    """
    model = _gpt(bridge) if is_gpt else _untouched(bridge)
    logits, _ = model.run({"tokens" if is_gpt else "input_ids": tokens})
    return logits


def _by_block(bridge: AutoBridge, reference: AutoBridge, *, is_gpt: bool) -> Comparison | None:
    """Return the comparison. None: a model does not run in parts."""
    theirs = _stock(reference)
    inputs = sample_inputs(reference.config, theirs.model)
    ours = _gpt(bridge) if is_gpt else _untouched(bridge)
    try:
        their_logits, blocks = theirs.run(inputs)
        logits, our_blocks = ours.run({"tokens": inputs["input_ids"]} if is_gpt else inputs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        return None
    difference = relative(logits, their_logits)
    return Comparison(
        difference, _first_different(our_blocks, blocks, is_gpt=is_gpt), by_block=True
    )


def _any_width(model: Any) -> Any:
    """Set a model of ``transformers`` to compute experts one by one. torch's grouped GEMM refuses
    experts of a width that is no multiple of 16 bytes.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _whole(bridge: AutoBridge, reference: AutoBridge, *, is_gpt: bool) -> Comparison:
    """Compare models with all weights in memory."""
    theirs = _any_width(reference.reference_model().eval())
    inputs = sample_inputs(reference.config, theirs)
    try:
        their_logits = first_output(theirs(**inputs))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"transformers cannot run the model of {reference.origin} here ({reason}) with "
            f"{', '.join(inputs)}, so that there are no logits to compare with. All tensors come "
            "back equal."
        ) from error
    if is_gpt:
        ours = bridge.to_model("gpt", dtype=torch.float32).eval()
        our_logits = ours(inputs["input_ids"])
    else:
        ours = _any_width(fill_weights(bridge.lazy_model(dtype=torch.float32)).eval())
        our_logits = first_output(ours(**inputs))
    return Comparison(relative(our_logits, their_logits), None, by_block=False)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value.

    Raises:
        CheckpointError: If the shapes differ.
    """
    if found.shape != expected.shape:
        raise CheckpointError(
            f"logits are {tuple(found.shape)} here and {tuple(expected.shape)} there: the models "
            "have other vocabularies."
        )
    return float((found - expected).abs().max() / expected.abs().max())


def _first_different(
    own: Mapping[str, Sequence[Tensor]], theirs: Mapping[str, Sequence[Tensor]], *, is_gpt: bool
) -> str | None:
    """Return the path of the first block with other outputs, in the order of the calls."""
    if is_gpt:  # by number, and [s, b, h] beside [b, s, h]
        mine, their = ([p for p in x if p.rpartition(".")[2].isdecimal()] for x in (own, theirs))
        pairs = list(zip(mine, their, strict=False)) if len(mine) == len(their) else []
    else:
        pairs = [(path, path) for path in own if path in theirs]
    for path, their_path in pairs:
        for x, y in zip(own[path], theirs[their_path], strict=False):
            hidden = x.transpose(0, 1) if is_gpt else x
            if hidden.shape != y.shape or not relative(hidden, y) <= TOLERANCE:
                return their_path
    return None


# ------------------------------------------------------------------------------------------- models


def _stock(bridge: AutoBridge) -> Streamed:
    """Return the model of ``from_pretrained``, with the buffers of a model in fp32.

    Raises:
        CheckpointError: If the buffers of the model differ from ours.
    """
    model = bridge.stock_model()
    values = {name: _in_fp32(parameter.detach()) for name, parameter in model.named_parameters()}
    _check_buffers(bridge, model)
    in_fp32 = dict(bridge.lazy_model(dtype=torch.float32).named_buffers())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            value = in_fp32.get(f"{path}.{name}" if path else name)
            if buffer is not None and value is not None:
                module._buffers[name] = value.read() if isinstance(value, Lazy) else value
    return Streamed(model, values)


def _check_buffers(bridge: AutoBridge, stock: nn.Module) -> None:
    """Check that the buffers of ``from_pretrained`` are ours."""
    ours = dict(bridge.lazy_model(dtype="auto").named_buffers())
    for name, buffer in stock.named_buffers():
        value = ours.get(name)
        value = value.read() if isinstance(value, Lazy) else value
        if value is None or not torch.equal(value.nan_to_num(), buffer.nan_to_num()):
            raise CheckpointError(
                f"buffer {name} of {bridge.path} differs from that of transformers. A buffer that "
                "the folder does not hold follows from the configuration."
            )


def _untouched(bridge: AutoBridge) -> Streamed:
    model = bridge.lazy_model(dtype=torch.float32)
    return Streamed(model, {name: lazy.read for name, lazy in lazy_parameters(model).items()})


def _gpt(bridge: AutoBridge) -> Streamed:
    config, tensors, _ = bridge.gpt_parts(None)
    with torch.device("meta"):
        model = GPTModel(config)
    return Streamed(model, {name: _in_fp32(lazy) for name, lazy in tensors.items()})


def _in_fp32(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the values of a tensor, lazy or not."""

    def read() -> Tensor:
        value = tensor.read() if isinstance(tensor, Lazy) else tensor
        return value.float() if value.is_floating_point() else value

    return read


# ------------------------------------------------------------------------------------------- stream


class Streamed:
    """A model whose parameters are in memory only while their block runs.

    Args:
        model: The model, with tensors of any kind as parameters.
        values: Values of the parameters and saved buffers, each by the first name.
    """

    def __init__(self, model: nn.Module, values: Values) -> None:
        self.model = model.eval()
        self._values = values
        self._outputs: dict[str, list[Tensor]] = {}
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._holders = {
            id(module): {n: self._names[id(p)] for n, p in parameters.items() if p is not None}
            for module in model.modules()
            if (parameters := module._parameters)
        }
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                full_name = f"{path}.{name}" if path else name
                if buffer is not None and full_name in values:
                    module._buffers[name] = values[full_name]()
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    # The model holds no weights. Hooks load the weights of one unit before its
                    # call, and drop them after.
                    module._parameters[name] = _nothing(parameter)
        units = dict(_units(model))
        unit_ids = {id(child) for unit in units.values() for child in unit.modules()}
        for module in model.modules():
            if id(module) not in unit_ids:
                self._load(module)  # its code reads its own parameters
        for path, unit in units.items():
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leaver(path))

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Return logits [b, s, v], and the outputs of every block in the order of the calls."""
        self._outputs.clear()
        out: Any = self.model(**inputs)
        return first_output(out), dict(self._outputs)

    def _load(self, module: nn.Module, read: dict[str, nn.Parameter] | None = None) -> None:
        """Read the parameters of a module, without modules inside."""
        read = {} if read is None else read
        for name, full_name in self._holders.get(id(module), {}).items():
            if full_name not in read:
                read[full_name] = nn.Parameter(self._values[full_name](), requires_grad=False)
            module._parameters[name] = read[full_name]

    def _enter(self, unit: nn.Module, args: Any) -> None:
        parameters: dict[str, nn.Parameter] = {}
        for module in unit.modules():
            self._load(module, parameters)

    def _leaver(self, path: str) -> Callable[..., None]:
        def leave(unit: nn.Module, args: Any, output: Any) -> None:
            for module in unit.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = _nothing(parameter)
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                self._outputs.setdefault(path, []).append(first)

        return leave


def _units(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that are in memory together: items of lists, and layers outside of lists."""
    for name, child in module.named_children():
        full_name = f"{path}.{name}" if path else name
        is_item = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_item or not any(True for _ in child.children()):
            yield full_name, child
        else:
            yield from _units(child, full_name)


def _nothing(parameter: Tensor) -> nn.Parameter:
    """Return a parameter of the same shape without memory, whose values are NaN."""
    is_floating = parameter.dtype.is_floating_point
    dtype = torch.float32 if is_floating else parameter.dtype
    value = torch.full((), float("nan") if is_floating else 0, dtype=dtype)
    return nn.Parameter(value.expand(parameter.shape), requires_grad=False)

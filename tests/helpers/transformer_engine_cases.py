"""Models whose Transformer Engine modules are described: by the real package once, recorded in
``tests/oracles/te_modules.json``, and by the fake one in every test run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lightning.compat import set_grad_dtype
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel import ParallelContext, ParallelLayout, parallelize
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.quantized_data import Range
from megatron_lightning.precision.transformer_engine.backend import TransformerEngine
from megatron_lightning.precision.transformer_engine.library import Library
from tests.helpers.layouts import tiny_config

LLAMA: dict[str, Any] = {"num_query_groups": 2, "add_bias_linear": False}
GPT: dict[str, Any] = {
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
}
MOE: dict[str, Any] = {"moe": MoEConfig(num_experts=4), **LLAMA}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": (LLAMA, {}),
    "tp2": (GPT, {"tensor_model_parallel_size": 2, "sequence_parallel": False}),
    "tp2 sp": (LLAMA, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2 sp biases": (GPT, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "experts": (MOE, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "exact gelu": (GPT | {"activation": "gelu"}, {}),
    "codes": (LLAMA, {"fp8_param_gather": True}),
    "codes of experts": (MOE, {"fp8_param_gather": True}),
}
"""Options of the model, and the layout; ``fp8_param_gather``: on two data ranks."""
ATTRIBUTES = (
    "in_features", "out_features", "tp_size", "parallel_mode", "sequence_parallel", "use_bias",
    "eps", "normalization", "zero_centered_gamma", "activation", "set_parallel_mode",
    "size_per_partition", "num_gemms",
)  # fmt: skip


def config(**options: Any) -> TransformerConfig:
    """Return a small model whose sizes have whole tiles on two ranks."""
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 96,
        "vocab_size": 40, "max_sequence_length": 32, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }  # fmt: skip
    return tiny_config(**{**sizes, **options})


def describe(module: Any) -> dict[str, Any]:
    """Return the class of a module, its parameters, and what it was built with."""
    return {
        "class": type(module).__name__,
        "parameters": {
            name: [list(parameter.shape), str(parameter.dtype)]
            for name, parameter in module._parameters.items()
            if parameter is not None
        },
        "attributes": {name: getattr(module, name) for name in ATTRIBUTES if hasattr(module, name)},
    }


def describe_cases(library: Library) -> dict[str, Any]:
    """Return the modules of every case by the path of their layer, as built: on ``meta``."""
    found = {}
    for name, (options, layout) in CASES.items():
        layout = dict(layout)
        keeps_quantized = layout.pop("fp8_param_gather", False)
        size = 2 if keeps_quantized else layout.get("tensor_model_parallel_size", 1)
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        try:
            context = ParallelContext(ParallelLayout(**layout), device="cpu")
            model = GPTModel(config(**options))
            parallelize(model, context, model.sharding_plan())
            recipe = FP8Recipe(scaling="current", fp8_param_gather=keeps_quantized)
            backend = TransformerEngine(recipe, library)
            backend.attach(model, context, caches_weights=True)
            found[name] = _codes(model, backend) if keeps_quantized else _engines(model)
        finally:
            dist.destroy_process_group()
    return found


def _codes(model: GPTModel, backend: TransformerEngine) -> dict[str, Any]:
    """Return what modules are given when weights are kept as codes: tensors that are views of the
    parameter, by which its gradient comes back.
    """
    found: dict[str, Any] = {}
    for name, quantizer in backend.weight_quantizers(model).items():
        layer = model.get_submodule(name.rpartition(".")[0])
        parameter: nn.Parameter = layer._parameters["weight"]  # type: ignore[assignment]
        buffer = torch.zeros(parameter.shape, dtype=torch.uint8)
        parameter.data = buffer.view(quantizer.dtype)
        set_grad_dtype(parameter, None)
        start = len(parameter[0].flatten()) - 8  # of experts, the end of one and more of the next
        parts = quantizer.parts(
            [Range(start, torch.zeros(32), buffer.view(-1)[start : start + 32])]
        )
        buffer.fill_(5)
        bound: dict[str, Any] = quantizer.bound()
        gradients = [torch.full(one.shape, float(i)) for i, one in enumerate(bound.values(), 1)]
        torch.autograd.backward(list(bound.values()), gradients)
        assert parameter.grad is not None
        found[name] = {
            "own": [[None if v is None else len(v), start] for _, v, start in parts],
            "bound": {
                key: [type(one).__name__, list(one.shape), str(one.dtype), one.requires_grad]
                for key, one in bound.items()
            },
            "codes": [
                [t.unique().tolist() for t in (o._data, o._transpose)] for o in bound.values()
            ],
            "gradient": parameter.grad.flatten(1).mean(1).unique().tolist(),
        }
    return found


def _engines(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, layer in model.named_modules():
        engine: Any = vars(layer).get("engine")
        if isinstance(layer, CoreAttention):
            engine._build((2, 1), (16, 16), 0.25)
            found[path] = "DotProductAttention"
        elif engine is not None:
            module = getattr(engine, "module", None)
            found[path] = "passed" if module is None else describe(module)
            if module is not None:
                bound = {name: list(value.shape) for name, value in engine._parameters().items()}
                built = {n: shape for n, (shape, _) in found[path]["parameters"].items()}
                assert bound == built, f"{path} binds {bound} to a module with {built}"
    return found

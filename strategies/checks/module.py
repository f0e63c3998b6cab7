"""Checks of the LightningModule, before any process group exists if the layers are known by then.

For layers built in ``configure_model``, every rank checks after the build. The layers of
:class:`GPTLightningModule` follow from the configuration, and the layers of
:class:`HuggingFaceModule` from the headers of the folder. Both kinds are known before.
"""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from megatron_lightning.bridge.hf_models.meta_models import deferred_weights
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.plans.hf_context import finds_mixers
from megatron_lightning.models.plans.hf_plans import is_transformers_model
from megatron_lightning.optim.param_groups import check_rows
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.strategies.checks.kinds import (
    has_hook_of_gpt_module,
    has_hook_of_hugging_face_module,
    is_folder_module,
    is_gpt_module,
    is_objective,
)

_LIGER_MODELS = "liger_kernel.transformers.model."


def planned_module(module: pl.LightningModule) -> pl.LightningModule | None:
    """Return the module with all layers, on ``meta`` if need be. None: hooks will build layers
    unknown until then.
    """
    if not is_built_later(module):
        return module
    if is_objective(module):
        parts = [planned_module(template) for template in module.templates()]
        modules = [part for part in parts if part is not None]
        return module.with_models(modules) if len(modules) == len(parts) else None
    # The setup of HuggingFaceModule builds nothing.
    if is_overridden("setup", module) and not has_hook_of_hugging_face_module(module, "setup"):
        return None
    if has_hook_of_hugging_face_module(module, "configure_model"):
        return _configured(module)
    if not has_hook_of_gpt_module(module, "configure_model"):
        return None
    with torch.device("meta"):
        return _configured(module)


def built_module(module: pl.LightningModule) -> pl.LightningModule:
    """Return the module with all layers: the module itself, or a copy after
    ``configure_model``, under ``meta`` if possible.
    """
    if not is_overridden("configure_model", module):
        return module
    planned = planned_module(module)
    if planned is not None:
        return planned
    try:
        with torch.device("meta"):
            return _configured(module)
    except Exception:  # reads weights from files, say
        return _configured(module)


def _configured(module: pl.LightningModule) -> pl.LightningModule:
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    with deferred_weights():
        shell.configure_model()
    return shell


def is_built_later(module: pl.LightningModule) -> bool:
    """Return whether hooks of the module may build or change layers."""
    return is_overridden("configure_model", module) or is_overridden("setup", module)


def check_module(
    module: pl.LightningModule,
    layout: ParallelLayout,
    micro_batch_size: int | None,
    *,
    fitting: bool,
) -> None:
    """Check the steps of the LightningModule against the layout.

    Raises:
        ConfigError: For steps that a schedule of micro-batches cannot run.
    """
    if layout.num_stages == layout.cp == 1 and micro_batch_size is None:
        return
    for hook in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, hook)
        # None: switched off.
        if step is not None and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{type(module).__name__}.{hook} takes the iterator of the data (dataloader_iter), "
                "and what it draws from it cannot be split into micro-batches (pipeline "
                f"{layout.pp}, micro_batch_size {micro_batch_size}). Take batch and batch_idx "
                "instead, or set pipeline_model_parallel_size=1 and micro_batch_size=None."
            )
    if not fitting:
        return
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), and with "
            "a schedule of micro-batches the strategy runs the backward passes (pipeline "
            f"{layout.pp}, micro_batch_size {micro_batch_size}). Set automatic_optimization=True, "
            "or pipeline_model_parallel_size=1 and micro_batch_size=None."
        )
    if is_overridden("backward", module):
        raise ConfigError(
            f"{type(module).__name__} overrides backward(), which a schedule of micro-batches does "
            "not call. Remove the override, or set pipeline_model_parallel_size=1 and "
            "micro_batch_size=None."
        )


def check_one_backward(module: pl.LightningModule, num_replicas: int) -> None:
    """Check that a step has a single backward pass, as required by FSDP2.

    Raises:
        ConfigError: For manual optimization.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), and with "
            'data_parallel="fsdp" the '
            f"gradients of the {num_replicas} data-parallel ranks are reduced by the backward pass "
            "that ends a step. Set "
            'automatic_optimization=True, or data_parallel="zero1".'
        )


def check_fused_losses(
    module: pl.LightningModule, layout: ParallelLayout, *, sharded: bool
) -> None:
    """Check that no forward of Liger's (https://github.com/linkedin/Liger-Kernel) computes a loss
    from a sharded output layer. Liger's forward reads the weight without calling the layer.

    Args:
        module: The LightningModule, with all its layers.
        layout: Sizes of the axes.
        sharded: Whether data-parallel ranks hold shards of parameters.

    Raises:
        ConfigError: If a forward does so.
    """
    if layout.tp == layout.num_stages == 1 and not sharded:
        return
    for path, child in module.named_modules():
        if getattr(child.forward, "__module__", "").startswith(_LIGER_MODELS):
            raise ConfigError(
                f"{path or 'the module'} ({type(child).__name__}) has the forward of Liger's fused "
                "loss, which reads the weight of the output layer itself, and here a rank holds a "
                f"part of it or of the layers (tensor {layout.tp}, pipeline {layout.pp}"
                f"{', fsdp' if sharded else ''}). "
                "Apply Liger with fused_linear_cross_entropy=False, or set "
                "tensor_model_parallel_size=1, pipeline_model_parallel_size=1 and "
                'data_parallel="zero1".'
            )


def check_param_groups(module: pl.LightningModule) -> None:
    """Check the named optimizer of a module of this package, and the table of parameter groups and
    the learning-rate schedule of a :class:`GPTLightningModule`.

    Raises:
        ConfigError: If optimizer, table or schedule do not fit the module's layers.
    """
    if is_folder_module(module):
        module.check_optimizer()
    if is_gpt_module(module):
        check_rows(module, module.param_groups)
        if has_hook_of_gpt_module(module, "configure_optimizers"):
            module.configure_optimizers()  # raises for contradicting rates


def check_whole_graphs(module: nn.Module) -> None:
    """Check that the mixers of tokens of each model whose blocks are whole graphs are known:
    exchanges of mixers that are found make no graph.

    Raises:
        ConfigError: If there is a model whose mixers are found.
    """
    for child in module.modules():
        if is_transformers_model(child) and finds_mixers(child):
            raise ConfigError(
                "compile_options has fullgraph=True, and context_parallel_size is above 1: what "
                f"mixes the tokens of {type(child).__name__} is found before the first step, and "
                "its exchanges make no graph. Set fullgraph to False."
            )

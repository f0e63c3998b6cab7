"""Optimizer, schedule and precision of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.recipe_reading.from_megatron.options import Options
from megatron_lightning.recipe_reading.from_megatron.sizes import Sizes

_NO_DECAY: Mapping[str, Any] = {"name": "no_decay", "max_dims": 1, "wd_mult": 0.0}
_EMBEDDINGS = ("**word_embeddings.weight", "**output_layer.weight")
_SCALINGS: Mapping[str, str] = {"tensorwise": "current"}
_FP8_OPTIONS: Mapping[str, str] = {
    "fp8_margin": "margin",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
    "fp8_param_gather": "fp8_param_gather",
    "num_layers_at_start_in_bf16": "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16": "num_layers_at_end_in_bf16",
}


def convert_optimizer(options: Options, sizes: Sizes) -> dict[str, Any]:
    """Return the values of optimizer and schedule, by Megatron's names."""
    if options.look("optimizer") == "adam":
        options.take("optimizer")
    options.leave("optimizer", "initial_loss_scale", "delay_wgrad_compute", "cpu_offloading")
    values: dict[str, Any] = {
        "adam_beta1": [options.take("adam_beta1"), options.take("adam_beta2")],
        "clip_grad": options.take("clip_grad") or None,
    }
    rate = options.take("decoupled_lr")
    least = options.take("decoupled_min_lr", options.look("min_lr"))
    if rate is not None:
        row = {"name": "embeddings", "params": list(_EMBEDDINGS), "lr": rate, "min_lr": least}
        values["decoupled_lr"] = [row, dict(_NO_DECAY)]
    return values | _schedule(options, sizes)


def _schedule(options: Options, sizes: Sizes) -> dict[str, Any]:
    style = options.take("lr_decay_style")
    decay, warmup = options.take("lr_decay_iters"), options.take("lr_warmup_iters")
    samples = options.take("lr_decay_samples")
    if decay is None:
        decay = sizes.steps if samples is None else sizes.steps_of(samples)
    if samples := options.take("lr_warmup_samples"):
        warmup = sizes.steps_of(samples)
    fraction = options.take("lr_warmup_fraction")
    if fraction is not None:
        warmup = round(fraction * (sizes.steps_of(sizes.samples or 0) if decay is None else decay))
    tail, tail_samples = options.take("lr_wsd_decay_iters"), options.take("lr_wsd_decay_samples")
    tail_style = options.take("lr_wsd_decay_style", "exponential")
    if style in ("linear", "cosine", "constant"):
        if style == "constant":
            options.take("min_lr")  # of no effect
            return {"lr_warmup_iters": warmup}
        decay = "max" if decay is None else decay
        return {"lr_warmup_iters": warmup, "lr_decay_iters": decay, "lr_decay_style": style}
    arguments = {
        "lr_decay_style": style,
        "lr_decay_steps": decay,
        "lr_warmup_steps": warmup,
        "min_lr": options.take("min_lr"),
    }
    if style == "WSD":
        arguments["lr_wsd_decay_style"] = tail_style
        arguments["wsd_decay_steps"] = tail or sizes.steps_of(tail_samples or 0)
    schedule = {"class_path": "megatron_lightning.optim.LRSchedule", "init_args": arguments}
    return {"lr_decay_style": schedule}


def convert_precision(options: Options) -> dict[str, Any]:
    """Return the values of precision, recomputation and checks of gradients."""
    half = "bf16" if options.take("bf16") else "16" if options.take("fp16") else None
    values: dict[str, Any] = {}
    form = options.take("fp8_format")
    if options.take("fp8_hybrid"):
        form = "hybrid"
    scaling = options.take("fp8_recipe", "delayed")
    details = {new: options.take(old) for old, new in _FP8_OPTIONS.items()}
    if form is not None:
        recipe = {"format": form, "scaling": _SCALINGS.get(scaling, scaling)}
        recipe |= {name: value for name, value in details.items() if value is not None}
        values["fp8_format"] = [
            {
                "class_path": "megatron_lightning.strategies.MegatronFP8Precision",
                "init_args": {"recipe": recipe},
            }
        ]
    else:
        values["bf16"] = f"{half or 32}-true"
    finite = options.take("no_check_for_nan_in_loss_and_grad") or half == "16"
    options.take("check_for_nan_in_loss_and_grad")
    options.take("rerun_mode")  # its check is the same
    if not finite:
        values["check_for_nan_in_loss_and_grad"] = "raise"
    modules = options.take("recompute_modules")
    if modules is not None:
        values["recompute_modules"] = modules if isinstance(modules, list) else [modules]
    if options.take("checkpoint_activations"):
        values |= {
            "recompute_granularity": "full",
            "recompute_method": options.take("recompute_method", "uniform"),
            "recompute_num_layers": options.take("recompute_num_layers", 1),
        }
    return values

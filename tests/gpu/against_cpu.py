"""Train the same steps on a GPU and on the CPU.

Weights are drawn on the CPU before a training begins: a GPU's generator gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.layouts import Fit, fit

ACCELERATOR = "gpu"
"""Of the trainings that the CPU's are compared with."""
STEPS = 3
RTOL = 1e-4
"""fp32 without TF32 (torch's default): kernels add up in another order, and steps of Adam amplify
the last bits."""
NORM_RTOL = 1e-3
"""Of gradient norms, at weights that have differed since the first step."""
BF16_RTOL = 2e-2
"""bf16 has 8 bits of mantissa, 4e-3 a rounding; losses are means over some hundred tokens."""
Make = Callable[[], pl.LightningModule]
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def device() -> torch.device:
    """Return the device of the trainings on the GPU."""
    return torch.device("cuda:0" if ACCELERATOR == "gpu" else "cpu")


def accelerators() -> tuple[str, str]:
    """Return the Trainer's accelerators: of the CPU and of the GPU."""
    return "cpu", ACCELERATOR


class _Precision(pl.Callback):
    """Sees what the steps compute in: a precision that is not in use would pass every bound."""

    def __init__(self) -> None:
        self.autocast: set[torch.dtype | None] = set()
        self.parameters: set[torch.dtype] = set()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Watch the modules that have parameters of their own."""
        for each in module.modules():
            if next(each.parameters(recurse=False), None) is not None:
                each.register_forward_pre_hook(self._note)
        self.parameters = {p.dtype for p in module.parameters() if p.is_floating_point()}

    def _note(self, *_: Any) -> None:
        kind = device().type
        enabled = torch.is_autocast_enabled(kind)
        self.autocast.add(torch.get_autocast_dtype(kind) if enabled else None)

    def check(self, precision: str) -> None:
        """Fail where the precision was not in use."""
        half = torch.bfloat16 if precision.startswith("bf16") else torch.float16
        if precision.endswith("-mixed"):
            assert half in self.autocast, f"{precision}: steps computed in {self.autocast}"
        elif precision.endswith("-true") and precision != "32-true":
            assert half in self.parameters, f"{precision}: parameters are {self.parameters}"
        else:
            assert self.autocast == {None}, f"{precision}: steps computed in {self.autocast}"


def train(
    accelerator: str,
    make: Make,
    layout: Any = None,
    data: Any = None,
    *,
    built: bool = True,
    **options: Any,
) -> Fit:
    """Train a new module on one device.

    Args:
        accelerator: Of the Trainer.
        make: Returns the module, from the same seed each time.
        layout: Options of the strategy. None: defaults.
        data: A loader or a data module.
        built: Whether the module builds its model before the Trainer calls for it.
        options: Further options of :func:`tests.helpers.layouts.fit`.
    """
    pl.seed_everything(3, verbose=False)
    torch._dynamo.reset()
    module = make()
    if built:
        module.configure_model()
    pl.seed_everything(4, verbose=False)
    options = {"steps": STEPS, "gradient_clip_val": 1.0, **options}
    return fit(layout or {}, module, data, accelerator=accelerator, devices=1, **options)


def on_gpu(make: Make, layout: Any = None, data: Any = None, **options: Any) -> Fit:
    """Train as :func:`train` does, on the GPU, and see that the precision is in use."""
    seen = _Precision()
    callbacks = [*options.pop("callbacks", ()), seen]
    run = train(ACCELERATOR, make, layout, data, callbacks=callbacks, **options)
    if "plugins" not in options:
        seen.check(options.get("precision", "32-true"))
    if ACCELERATOR == "gpu":
        assert torch.cuda.max_memory_allocated() > 0
        assert run.trainer.strategy.root_device.type == "cuda"
    return run


def assert_equals_cpu(
    make: Make,
    layout: Any = None,
    data: Any = None,
    *,
    rtol: float = RTOL,
    of_cpu: dict[str, Any] | None = None,
    **options: Any,
) -> Fit:
    """Compare losses, gradient norms and metrics with a training on the CPU.

    Args:
        make: Returns the module.
        layout: Options of the strategy on the GPU.
        data: A loader, or a function that returns one.
        rtol: Relative difference of losses; norms may differ by ten times as much.
        of_cpu: Other options of the training on the CPU, which is in fp32.
        options: Options of both trainings.

    Returns:
        The training on the GPU.
    """

    def loader() -> Any:
        return data() if callable(data) else data

    plain = {**options, "precision": "32-true", "layout": layout, **(of_cpu or {})}
    expected = train("cpu", make, data=loader(), **plain)
    found = on_gpu(make, layout, loader(), **options)
    assert found.losses == pytest.approx(expected.losses, rel=rtol)
    assert found.norms == pytest.approx(expected.norms, rel=10 * rtol)
    assert found.logged.keys() == expected.logged.keys()
    assert found.losses[0] != found.losses[-1]
    return found

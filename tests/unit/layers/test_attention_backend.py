"""Kernels of attention by name: what runs, what is refused, and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers import CoreAttention, SequenceInfo
from megatron_lightning.layers.attention.attention_backend import chosen_backend
from megatron_lightning.layers.context import kernels
from megatron_lightning.layers.context.blocks import Block
from megatron_lightning.layers.context.kernel_choice import kernel_for
from megatron_lightning.precision.transformer_engine.engines import AttentionEngine
from megatron_lightning.rules import check_attention_backend
from tests.helpers.layouts import tiny_config

CPU_KERNELS = {"flash": "_scaled_dot_product_flash_attention_for_cpu", "math": "softmax"}


def _kernels(run: Callable[[], object]) -> set[str]:
    """Return the kernels of attention that ``run`` calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    names = [event.key for event in profiled.key_averages()]
    return {kernel for kernel, name in CPU_KERNELS.items() if any(name in n for n in names)}


def _inputs(groups: int = 4, value_size: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 2, 4, 8), (12, 2, groups, 8), (12, 2, groups, value_size)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _run(backend: Any, groups: int, value_size: int, sequence: SequenceInfo) -> list[Tensor]:
    q, k, v = _inputs(groups, value_size)
    out = CoreAttention(0.0, backend=backend)(q, k, v, sequence)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize(("groups", "value_size"), [(4, 8), (2, 8), (1, 8), (4, 5)])
@pytest.mark.parametrize(
    "sequence", [SequenceInfo(), SequenceInfo(causal=False), SequenceInfo(window=3)]
)
def test_backends_agree(groups: int, value_size: int, sequence: SequenceInfo) -> None:
    """fp32, other orders of sums: 2e-6."""
    expected = _run("auto", groups, value_size, sequence)
    for backend in ("flash", "math"):
        for found, full in zip(_run(backend, groups, value_size, sequence), expected, strict=True):
            torch.testing.assert_close(found, full, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_named_kernel_runs(backend: Any) -> None:
    core = CoreAttention(0.0, backend=backend)
    assert _kernels(lambda: core(*_inputs())) == {backend}
    q, k, v = (x.permute(1, 2, 0, 3) for x in _inputs())
    assert chosen_backend(q, k, v, backend=backend, dropout_p=0.0, causal=True) == backend


def test_torch_chooses_among_those_that_take_the_inputs() -> None:
    q, k, v = (x.permute(1, 2, 0, 3) for x in _inputs())
    assert chosen_backend(q, k, v, backend="auto", dropout_p=0.0, causal=True) == "flash"
    assert chosen_backend(q, k, v, backend="auto", dropout_p=0.5, causal=True) == "math"


def test_a_device_that_does_not_tell_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.permute(1, 2, 0, 3) for x in _inputs())
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 4)  # SDPBackend.OVERRIDEABLE
    assert chosen_backend(q, k, v, backend="auto", dropout_p=0.0, causal=True) == "default"

    def missing(*_: Any, **__: Any) -> int:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_fused_sdp_choice", missing)
    assert chosen_backend(q, k, v, backend="auto", dropout_p=0.0, causal=True) == "default"


@pytest.mark.spread(1)
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_compiled_layer_is_one_graph_with_the_named_kernel(backend: Any) -> None:
    core, (q, k, v) = CoreAttention(0.0, backend=backend), _inputs(groups=2)
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), core(q, k, v))
    assert _kernels(lambda: compiled(q, k, v)) == {backend}
    torch._dynamo.reset()


def test_kernels_that_cannot_compute_it_are_refused_with_the_reasons_of_torch() -> None:
    with pytest.raises(ConfigError, match=r"not support non-zero dropout.* that can: math"):
        CoreAttention(0.5, backend="flash")(*_inputs())
    for backend in ("cudnn", "efficient"):
        message = rf"{backend}.*4 query heads and 2 key heads of size 8.*on cpu.*: flash, math\."
        with pytest.raises(ConfigError, match=message):
            CoreAttention(0.0, backend=backend)(*_inputs(groups=2))


def test_another_error_stays_what_it_is() -> None:
    q, k, v = _inputs()
    with pytest.raises(RuntimeError, match=r"[Ss]ize|shape"):
        CoreAttention(0.0, backend="math")(q, k, v[:5])


def test_blocks_have_kernels_of_their_own() -> None:
    assert kernel_for(torch.device("cpu"), "flash").name == "flash attention of the CPU"
    assert kernel_for(torch.device("cuda"), "math").name == "matrix products and a softmax"
    with pytest.raises(
        ConfigError, match=r"cudnn has no form for blocks.* auto or flash or efficient or math"
    ):
        kernel_for(torch.device("cuda"), "cudnn")
    with pytest.raises(
        ConfigError, match=r"efficient is a kernel of GPUs.* auto or flash or math or chunked"
    ):
        kernel_for(torch.device("cpu"), "efficient")


@pytest.mark.parametrize(
    ("model", "ranks", "device", "precision", "message"),
    [
        ({"attention_backend": "cudnn"}, 1, "cpu", None, "GPUs, and this is a CPU.* auto or flash"),
        ({"attention_backend": "flash", "attention_dropout": 0.1}, 1, "cpu", None,
         "attention_dropout is 0.1. Set it to auto or math"),
        ({"attention_backend": "flash"}, 1, "cuda", "32-true",
         "computed in float32.* Set it to auto or efficient or math"),
        ({"attention_backend": "cudnn", "attention_softmax_in_fp32": True}, 1, "cuda", "bf16-true",
         "attention_softmax_in_fp32=False"),
        ({"attention_backend": "cudnn"}, 2, "cuda", "bf16-mixed", "context_parallel_size=2"),
        ({"attention_backend": "flash", "window_size": (8, 0)}, 1, "cuda", "bf16-true",
         r"takes no mask, as window_size=\(8, 0\).* auto or efficient or math"),
        ({"attention_backend": "flash"}, 4, "cuda", "bf16-mixed", None),
        ({"attention_backend": "flash", "window_size": (8, 0)}, 2, "cpu", "32-true", None),
        ({"attention_backend": "cudnn"}, 1, "cuda", "bf16-true", None),
        ({"attention_backend": "cudnn"}, 1, "mps", None, None),  # torch says it
        ({"attention_dropout": 0.1}, 1, "cpu", None, None),
    ],
)  # fmt: skip
def test_what_options_tell_is_refused_before_a_process_group_exists(
    model: dict[str, Any], ranks: int, device: str, precision: str | None, message: str | None
) -> None:
    config = tiny_config(**model)
    if message is None:
        check_attention_backend(config, ranks, device=device, precision=precision)
        return
    with pytest.raises(
        ConfigError, match=f"attention_backend={config.attention_backend}.*{message}"
    ):
        check_attention_backend(config, ranks, device=device, precision=precision)


def test_unknown_names_are_refused() -> None:
    names = re.escape("'fused', which is unknown. Set it to one of auto, flash, cudnn, efficient")
    with pytest.raises(ConfigError, match=names):
        tiny_config(attention_backend="fused")


def test_transformer_engine_leaves_named_kernels_to_torch() -> None:
    def no_module(*_: Any) -> Any:
        raise AssertionError

    q = torch.zeros(4, 1, 2, 8)
    for backend, taken in (("auto", True), ("flash", False), ("math", False)):
        engine = AttentionEngine(CoreAttention(0.0, backend=backend), no_module)
        assert engine.takes(q, SequenceInfo()) is taken


@pytest.mark.parametrize(("size", "value_size"), [(12, 12), (8, 5), (16, 16)])
def test_heads_are_padded_for_kernels_of_cuda(size: int, value_size: int) -> None:
    """Zeros change no sum, but its order: an output may be rounded the other way (2^-8)."""
    q, k = torch.randn(2, 2, 4, 6, size, dtype=torch.bfloat16)
    v = torch.randn(2, 4, 6, value_size, dtype=torch.bfloat16)
    inputs, plain = kernels.Inputs(q, k, v), kernels.PlainProducts()
    seen: list[int] = []

    class Recorded:
        name = "recorded"

        def forward(self, inputs: Any, *rest: Any) -> Any:
            seen.extend(x.shape[-1] for x in inputs)
            return plain.forward(inputs, *rest)

        def backward(self, grad: Tensor, inputs: Any, output: Any, *rest: Any) -> Any:
            seen.extend(x.shape[-1] for x in (grad, *inputs, output.out))
            return plain.backward(grad, inputs, output, *rest)

    padded = kernels.Padded(Recorded())
    block = Block(slice(0, 6), slice(0, 6), "band", 0, 3)
    expected, found = (x.forward(inputs, block, 0.3) for x in (plain, padded))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)
    grads = [x.backward(found.out, inputs, found, block, 0.3) for x in (plain, padded)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
    assert len(seen) == 8 and {x % 8 for x in seen} == {0}

"""The table of attention kernels: each row supports what it says, and nothing else; layers, the
line at the start, refusals and plans read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.config import attention_kernels as table
from megatron_lightning.config.attention_kernels import KERNELS, KernelForm, choose_kernel
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.attention_backend import chosen_backend
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.layers.context import chunked_kernel
from megatron_lightning.layers.context.kernel_choice import BLOCK_KERNELS, kernel_for
from megatron_lightning.layers.context.kernels import PlainProducts
from megatron_lightning.layers.context.local import LocalAttention
from megatron_lightning.rules import check_attention_backend
from tests.helpers.attention_forms import complaint, computed, forms, inputs_of
from tests.helpers.layouts import tiny_config

FORMS = list(forms("cpu", "float32"))
TOLERANCE = 1e-5
"""fp32 against fp64."""
LIMITS_OF_CPUS: dict[str, list[Callable[[KernelForm], str | None]]] = {
    "flash": [table._no_dropout_on_cpus, table._no_caps],
    "cudnn": [table._no_cpus],
    "efficient": [table._no_cpus],
    "chunked": [table._no_dropout],
    "flex": [table._no_backward_on_cpus, table._no_sinks],
}


def _complaint(name: Any) -> str | None:
    """Return the first form for which a row is not true."""
    found = (complaint(name, form, TOLERANCE) for form in FORMS)
    return next((text for text in found if text), None)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference kernel has several chunks. Choices by a changed table are forgotten."""
    monkeypatch.setattr(chunked_kernel, "CHUNK", 8)
    kernel_for.cache_clear()
    yield
    kernel_for.cache_clear()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_row_is_true(name: Any) -> None:
    assert _complaint(name) is None


@pytest.mark.parametrize(
    ("name", "limit"),
    [(name, limit) for name, limits in LIMITS_OF_CPUS.items() for limit in limits],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_row_that_lies_is_found(
    name: Any, limit: Callable[[KernelForm], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = KERNELS[name]
    limits = tuple(other for other in row.limits if other is not limit)
    assert len(limits) == len(row.limits) - 1
    monkeypatch.setitem(KERNELS, name, replace(row, limits=limits))  # type: ignore[arg-type]
    assert _complaint(name)


def test_a_row_that_refuses_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    modest = replace(KERNELS["math"], limits=(table._no_caps,))
    monkeypatch.setitem(KERNELS, "math", modest)  # type: ignore[arg-type]
    assert all(complaint("math", form, TOLERANCE) is None for form in FORMS if not form.softcap)
    # The layers read the same row, so they refuse, too: the definition of "auto" breaks.
    with pytest.raises(AssertionError):
        test_auto_is_the_first_row_that_supports_the_form()


def test_a_kernel_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: Any = BLOCK_KERNELS
    monkeypatch.setitem(makers, "math", lambda _: PlainProducts())  # without the cap
    assert _complaint("math")


def test_auto_is_the_first_row_that_supports_the_form() -> None:
    for form in FORMS:
        expected = next((n for n, row in KERNELS.items() if row.supports(form) is None), None)
        if expected is None:
            with pytest.raises(
                ConfigError, match=r"attention_dropout=0\.5 cannot be combined with"
            ):
                choose_kernel("auto", form)
            continue
        assert choose_kernel("auto", form) == expected
        assert expected in ("flash", "math"), "chunked and flex are chosen by name"
        if not form.dropout:
            for one, other in zip(computed("auto", form), computed(expected, form), strict=True):
                assert torch.equal(one, other)
        if not form.in_blocks:  # torch chooses, and the table agrees
            q, k, v = (x.permute(1, 2, 0, 3) for x in inputs_of(form))
            dropout = form.dropout
            found = chosen_backend(q, k, v, backend="auto", dropout_p=dropout, causal=True)
            assert found == expected


def test_the_reference_kernel_has_gradients_of_its_forward() -> None:
    kernel = BLOCK_KERNELS["chunked"](KernelForm(softcap=1.3))
    assert kernel.name == "plain products in chunks"
    form = KernelForm(device="cpu", dtype="float64", window=4, softcap=1.3)
    for found, expected in zip(computed("chunked", form), computed("math", form), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("trained", range(3), ids=["queries", "keys", "values"])
def test_flex_attention_drops_no_gradient_on_a_cpu(trained: int) -> None:
    """Also not that of adapters of values over frozen queries and keys."""
    inputs = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    inputs[trained].requires_grad_()
    with pytest.raises(ConfigError, match="flex has no backward on a CPU"):
        LocalAttention()(*inputs, SequenceInfo(window=3), 0.5, backend="flex")


def test_flex_attention_trains_on_gpus_only() -> None:
    config = tiny_config(attention_backend="flex", window_size=(8, 0))
    with pytest.raises(ConfigError, match=r"flex has no backward on a CPU.* auto or flash or math"):
        check_attention_backend(config, 1, device="cpu", precision="32-true")
    check_attention_backend(config, 1, device="cpu", precision="32-true", training=False)
    check_attention_backend(config, 1, device="cuda", precision="bf16-true")
    with pytest.raises(ConfigError, match=r"flex needs full sequences.* auto or efficient"):
        check_attention_backend(config, 2, device="cuda", precision="bf16-true")


def test_dropout_in_blocks_is_refused() -> None:
    for options, name in (
        ({"window_size": (8, 0)}, r"window_size=\(8, 0\)"),
        ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
    ):
        with pytest.raises(ConfigError, match=f"0.1 cannot be combined with {name}. Set it to 0"):
            tiny_config(**options, attention_dropout=0.1)
    config = tiny_config(attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"cannot be combined with context_parallel_size=2"):
        check_attention_backend(config, 2, device="cuda", precision="bf16-true")
    check_attention_backend(config, 2, device="cuda", precision="bf16-true", training=False)


def test_the_docs_list_every_kernel() -> None:
    page = (Path(__file__).parents[3] / "docs" / "speed.md").read_text()
    section = page.split("## Attention kernels")[1].split("```")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == ["auto", *KERNELS]

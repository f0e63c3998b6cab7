"""The engine's path for GPUs on a CPU: the kernel's arguments, with the kernel computed by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning import compat
from megatron_lightning.compat import ragged_attention
from megatron_lightning.config import TransformerConfig
from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.inference.engine import step_inputs as steps_module
from megatron_lightning.layers.state import key_cache
from megatron_lightning.models.transformer import GPTModel
from tests.helpers.attention import exact_attention

PROMPTS = [[1, 2, 3], [7], list(range(1, 38)), [11, 12] * 6]
GREEDY = Sampling(max_new_tokens=16, temperature=0.0)


class Kernel:
    """Attention of each request by itself, in fp32, with the arguments of torch's kernel."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        boundaries: Tensor,
        key_boundaries: Tensor,
        longest: int,
        most_keys: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        self.num_calls += 1
        # Flash attention 2 asks for both boundaries, over pages as well.
        for ends in (boundaries, key_boundaries):
            assert ends.dtype == torch.int32 and ends.is_contiguous()
        contexts = []
        for index, (first, end) in enumerate(pairwise(boundaries)):
            if block_table is None:
                own = slice(key_boundaries[index], key_boundaries[index + 1])
                k, v = keys[own], values[own]
            else:
                assert seqused_k is not None and num_splits == 1
                assert torch.equal(key_boundaries.diff(), seqused_k)
                pages = block_table[index].long()
                k, v = (x[pages].flatten(0, 1)[: seqused_k[index]] for x in (keys, values))
            assert end - first <= longest and len(k) <= most_keys
            assert enable_gqa or block_table is None
            own = exact_attention(q[first:end], k, v, scale=scale, window=window_size[0])
            contexts.append(own)
        return torch.cat(contexts).to(q.dtype)


@pytest.mark.spread(2)
@pytest.mark.parametrize("reads_pages", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_the_kernel_gets_the_requests_keys(
    reads_pages: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=2,
        ffn_hidden_size=96, vocab_size=67, max_sequence_length=96, init_method_std=0.4,
        window_size=None if window is None else (window, 0),
    )  # fmt: skip
    model = GPTModel(config).eval()
    size = 256 if reads_pages else 4
    runs = Engine.of(model, options=EngineOptions(max_tokens=7, max_requests=3, storage="runs"))
    options = EngineOptions(max_tokens=7, max_requests=3, storage="pages", block_size=size)
    expected = _texts(runs)
    kernel = Kernel()
    new = frozenset({"enable_gqa"})
    monkeypatch.setattr(ragged_attention, "varlen_attn", kernel)
    monkeypatch.setattr(ragged_attention, "_parameters", lambda: new if reads_pages else ())
    monkeypatch.setattr(compat, "reads_pages", lambda: reads_pages)
    monkeypatch.setattr(steps_module, "takes_pages", lambda device: True)
    has_kernel = key_cache._has_kernel

    def in_fp32(store: Any, q: Tensor, form: Any) -> bool:
        assert not has_kernel(store, q, form)  # fp32 has no kernel
        return True

    monkeypatch.setattr(key_cache, "_has_kernel", in_fp32)
    assert _texts(Engine.of(model, options=options)) == expected
    assert kernel.num_calls > 0
    monkeypatch.setattr(key_cache, "_has_kernel", has_kernel)
    calls = kernel.num_calls
    assert _texts(Engine.of(model, options=options)) == expected  # request by request
    assert kernel.num_calls == calls


@pytest.mark.parametrize(
    ("version", "hip", "expected"),
    [("2.11.0", None, False), ("2.12.1+cu130", None, False), ("2.13.0+cu130", None, True),
     ("2.13.0", "7.2", False)],
)  # fmt: skip
def test_only_a_kernel_of_pages_reads_pages(
    version: str, hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert ragged_attention.reads_pages() == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True)])
def test_gpus_before_ampere_have_no_kernel(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert key_cache.takes_pages(torch.device("cuda")) == expected


def _texts(engine: Engine) -> list[list[list[int]]]:
    found = engine.generate(PROMPTS, GREEDY, num_samples=2)
    return [[one.tokens for one in row] for row in found]

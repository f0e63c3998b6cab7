"""Routes of experts: recorded on every layout as an uncached forward chooses them, and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Engine, EngineOptions, Sampling
from megatron_lightning.layers.moe import Router
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.layout import ParallelLayout
from tests.distributed.test_generate import save_plain
from tests.distributed.test_inference_engine import LAYOUTS, SIZES
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks

MOE: dict[str, Any] = {
    "num_experts": 8,
    "router_topk": 2,
    "shared_expert_intermediate_size": 24,
    "layer_freq": (1, 0, 1, 1),
}
CONFIG = tiny_config(**SIZES, moe=MoEConfig(**MOE))
# Logits near 1, whose rounding is below 1e-5.
MILD = replace(CONFIG, init_method_std=0.1)
PROMPTS = [[1, 2, 3], [7], list(range(1, 38)), [5, 4, 3, 2, 1, 0, 9], [60, 61]]
DRAWN = Sampling(max_new_tokens=12, seed=5)
# Prompts in chunks, and samples that share the keys of their prompt.
OPTIONS = EngineOptions(max_tokens=20, max_requests=4, record_routes=True)
Found = list[tuple[list[int], list[float], Tensor]]


def written(engine: Engine) -> Found:
    rows = engine.generate(PROMPTS, DRAWN, 2)
    found = []
    for prompt, samples in zip(PROMPTS, rows, strict=True):
        for one in samples:
            assert one.routes is not None
            found.append((prompt + one.tokens, one.logprobs, one.routes))
    return found


def chosen_by(model: GPTModel, text: list[int]) -> Tensor:
    """Return the experts [t, m, k] of an uncached forward, in order."""
    seen: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Router)]
    handles = [
        router.register_forward_hook(lambda _m, _a, out: seen.append(out.chosen))
        for router in routers
    ]
    with torch.no_grad():
        model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    return torch.stack([chosen.nonzero()[:, 1].view(len(text), -1) for chosen in seen], 1)


def check(found: Found, config: TransformerConfig = CONFIG) -> None:
    model = GPTModel(config).eval()
    for text, _, routes in found:
        assert routes.shape == (len(text), 3, 2)
        assert bool((routes[-1] == -1).all())
        assert torch.equal(routes[:-1].sort(-1).values, chosen_by(model, text[:-1]).int())


def on_layouts(
    path: str, names: list[str]
) -> dict[str, list[tuple[list[int], list[float], list[Any]]]]:
    return {
        name: [
            (text, logprobs, routes.tolist())
            for text, logprobs, routes in written(
                Engine.load(path, ParallelLayout(**sizes), options=OPTIONS)
            )
        ]
        for name, sizes in LAYOUTS.items()
        if name in names
    }


@pytest.mark.parametrize(
    "names",
    [
        ["tp2 ep2"],
        pytest.param(["pp2 vpp2", "tp2", "tp2 sp", "pp2"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_two_ranks_record_the_experts_of_the_uncached_forward(
    names: list[str], tmp_path: Path
) -> None:
    first, second = run_ranks(2, on_layouts, save_plain(tmp_path / "model", CONFIG), names)
    assert list(first) == names
    for name, rows in first.items():
        assert len(rows) == 2 * len(PROMPTS), name
        assert [row[::2] for row in second[name]] == [row[::2] for row in rows], name
        check([(text, logprobs, torch.tensor(routes)) for text, logprobs, routes in rows])


def changed_model() -> GPTModel:
    """Return the model after an update of all weights."""
    model = GPTModel(MILD)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def logprobs_of(model: GPTModel, text: list[int], routes: Tensor | None) -> Tensor:
    rows = torch.tensor([text])
    given = None if routes is None else routes[None, : len(text) - 1]
    return -model(rows[:, :-1], labels=rows[:, 1:], routes=given)[0]


def test_a_replay_has_the_probabilities_of_the_text_and_trains_the_router() -> None:
    model = GPTModel(MILD)
    found = written(Engine.of(model, options=OPTIONS))
    check(found, MILD)
    changed, num_other = changed_model(), 0
    for text, logprobs, routes in found:
        replayed = logprobs_of(model, text, routes)[-len(logprobs) :]
        torch.testing.assert_close(replayed, torch.tensor(logprobs), rtol=0, atol=1e-5)
        # The experts are the text's, and their weights are those of the changed router.
        num_other += int((chosen_by(changed, text[:-1]) != routes[:-1].sort(-1).values).sum())
        own, given = logprobs_of(changed, text, None), logprobs_of(changed, text, routes)
        assert not torch.equal(own, given)
        same = logprobs_of(changed, text, torch.full_like(routes, -1))
        assert torch.equal(own, same)
        given.sum().backward()
    assert num_other > 50
    routers = [module for module in changed.modules() if isinstance(module, Router)]
    assert all(bool(router.weight.grad.any()) for router in routers)  # type: ignore[union-attr]


def test_what_cannot_be_recorded_or_replayed_is_refused() -> None:
    dense = GPTModel(tiny_config(**SIZES))
    with pytest.raises(ConfigError, match="no layers of experts"):
        Engine.of(dense, options=OPTIONS)
    tokens, routes = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, 3, 2).int()
    with pytest.raises(ConfigError, match="0 layers of experts"):
        dense(tokens, routes=routes)
    with pytest.raises(ConfigError, match="Pass the routes of these tokens"):
        GPTModel(CONFIG)(tokens, routes=routes[:, :, :2])
    engine = Engine.of(GPTModel(CONFIG), options=OPTIONS)
    with pytest.raises(ConfigError, match="longest sequence"):
        engine.generate([[1] * 90], DRAWN)
    for option, value in (
        ("expert_capacity_factor", 1.0),
        ("router_force_load_balancing", True),
    ):
        moe = MoEConfig(**{**MOE, option: value})
        with pytest.raises(ConfigError, match=option):
            GPTModel(tiny_config(**SIZES, moe=moe))(tokens, routes=routes)

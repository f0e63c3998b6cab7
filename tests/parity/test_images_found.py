"""Models with images that no plan describes, on ranks that share sequences: what mixes tokens is
found, and proven with the first rows that have images. Training equals one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import CompileOptions
from megatron_lightning.errors import MegatronLightningError
from megatron_lightning.layers.shared_rows import media, mixers
from megatron_lightning.layers.shared_rows.entry import shared_models
from megatron_lightning.layers.shared_rows.probed_call import ProbedCall
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import CP, TP, fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

pytest.importorskip("transformers")

from tests.helpers.image_models import FLAT, IMAGE_TOKEN, MERGED, PATCH, SIZE
from tests.parity.test_images_context import BATCH, LENGTH, STEPS, Reader

CP2: dict[str, Any] = {CP: 2}
EAGER = CompileOptions(backend="aot_eager")
PACKED = ("gemma3-packed",)
"""Models whose rows hold two conversations."""
NUM_TOKENS = {"qwen3.5": 1, "granite4": 3}
"""Of an image."""


class Found(Reader):
    """A model of any family."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows(name: str, kinds: str = "i" * STEPS) -> list[dict[str, Tensor]]:
    """Return rows with an image (i), or of text (t), by optimizer step."""
    draw, count = torch.Generator().manual_seed(2), len(kinds) * BATCH
    tokens = torch.randint(3, 60, (count, LENGTH + 1), generator=draw)
    found = []
    for row in range(count):
        data = {"input_ids": tokens[row, :-1].clone(), "labels": tokens[row, 1:].clone()}
        if row % 2 == 0:
            data["labels"][-3:] = -100
        # On CP 2 the ranks' parts begin and end within some images, and one has no token of others.
        first, num_tokens = (2, 6, 10)[row % 3], NUM_TOKENS.get(name, MERGED)
        image = slice(first, first + num_tokens)
        types = torch.zeros_like(data["input_ids"])
        if kinds[row // BATCH] == "i":
            data["input_ids"][image] = IMAGE_TOKEN
            data["labels"][image] = -100
            types[image] = 1
            if name in FLAT:
                data["pixel_values"] = torch.randn(4, 3 * 2 * PATCH**2, generator=draw)
                data["image_grid_thw"] = torch.tensor([1, 2, 2])
            else:
                shape = (2, 3, SIZE, SIZE) if name == "granite4" else (3, SIZE, SIZE)
                data["pixel_values"] = torch.randn(shape, generator=draw)
            if name == "granite4":
                data["image_sizes"] = torch.tensor([SIZE, SIZE])
        if name in FLAT:
            data["mm_token_type_ids"] = types
        if name.startswith("gemma3"):
            data["token_type_ids"] = types
        if name in PACKED:
            data["position_ids"] = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
        found.append(data)
    return found


def train(name: str, options: dict[str, Any] | None, kinds: str, replicas: int = 1) -> Any:
    module = Found(name.removesuffix("-packed"))
    samples: Any = rows(name, kinds)
    run = fit(options, module, DataLoader(samples, BATCH // replicas), steps=len(kinds))
    strategy = run.trainer.strategy
    is_ours = isinstance(strategy, MegatronStrategy)
    state = strategy.full_state_dict() if is_ours else module.state_dict()
    ways = [shared.kinds for shared in shared_models(module).values()]
    return run.norms, {k: v.numpy() for k, v in state.items() if v.is_floating_point()}, ways


def train_all(cases: list[Any]) -> list[Any]:
    return [train(*case) for case in cases]


MODELS = {
    "cohere2": ("iii", ["ring"]),
    "gemma3": ("tii", ["rows"]),
    "gemma3-packed": ("tii", ["rows"]),
    "granite4": ("tii", ["ring"]),
    "qwen3.5": ("iti", ["exchange", "ring"]),
}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, CP2),
    "cp4": (4, {CP: 4}),
    "cp2-zero1": (4, CP2),
    "cp2-fsdp": (4, {**CP2, "data_parallel": "fsdp"}),
    "cp2-compiled": (2, {**CP2, "compile": "block", "compile_options": EAGER}),
    "tp2-cp2": (4, {TP: 2, **CP2}),
}
FAST = [pytest.param("cp2", ["gemma3", "granite4"], id="cp2-usual")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "names"),
    FAST + [pytest.param(x, list(MODELS), id=x, marks=pytest.mark.slow) for x in LAYOUTS],
)
def test_training_equals_one_process(layout: str, names: list[str]) -> None:
    """Gradient norms and weights; fp32, sums in another order."""
    world, options = LAYOUTS[layout]
    replicas = world // (options.get(TP, 1) * options[CP])
    cases = [(name, options, MODELS[name][0], replicas) for name in names]
    found = run_ranks(world, train_all, cases, timeout_s=280)
    (alone,) = run_ranks(1, train_all, [(name, None, MODELS[name][0]) for name in names])
    for index, name in enumerate(names):
        norms, weights, _ = alone[index]
        ways = MODELS[name][1]
        if (name, layout) == ("qwen3.5", "cp4"):  # its convolution reads more than segments of 2
            ways = ["gather", "ring"]
        for rank in found:
            own_norms, own_weights, [kinds] = rank[index]
            assert sorted(set(kinds.values())) == ways, (name, kinds)
            assert own_norms == pytest.approx(norms, rel=1e-5), name
            for key in weights if own_weights else ():
                assert np.allclose(own_weights[key], weights[key], rtol=0, atol=1e-5), key


class Placed(Found):
    """Passes positions of height and width, which a collator may have made."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        positions = torch.arange(LENGTH).expand(3, BATCH, LENGTH).clone()
        positions[1:, :, 4:] += 2
        return super().training_step({**batch, "position_ids": positions}, batch_idx)


def _placed(options: dict[str, Any] | None) -> list[float]:
    samples: Any = rows("qwen3.5", "it")
    return fit(options, Placed("qwen3.5"), DataLoader(samples, BATCH), steps=2).norms


def test_positions_of_images_are_no_documents() -> None:
    (alone,) = run_ranks(1, _placed, None)
    for norms in run_ranks(2, _placed, CP2):
        assert norms == pytest.approx(alone, rel=1e-5)


class Evaluated(Found):
    """Enters inference mode, as Lightning does around evaluation on GPUs."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        with torch.inference_mode():
            loss = self.training_step(batch, batch_idx)
        self.log("loss", loss, batch_size=int(self.num_items(batch)))


def _validate(options: dict[str, Any] | None, folder: str) -> list[float]:
    losses = []
    for name in ("gemma3", "granite4"):
        strategy = "auto" if options is None else MegatronStrategy(**options)
        own: Any = trainer(strategy, default_root_dir=folder)
        samples: Any = rows(name, "i")
        found = own.validate(Evaluated(name), DataLoader(samples, BATCH), verbose=False)
        losses.append(found[0]["loss"])
    return losses


def test_first_images_in_evaluation(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, _validate, None, str(tmp_path))
    for losses in run_ranks(2, _validate, CP2, str(tmp_path)):
        assert losses == pytest.approx(alone, rel=1e-5)


def _predict(options: dict[str, Any], folder: str) -> int:
    own: Any = trainer(MegatronStrategy(**options), default_root_dir=folder)
    samples: Any = rows("granite4", "ti")[:3]
    return len(own.predict(Evaluated("granite4"), DataLoader(samples, 1)))


def test_replicas_with_other_numbers_of_calls(tmp_path: Path) -> None:
    """One has a row with an image more."""
    assert run_ranks(4, _predict, CP2, str(tmp_path), timeout_s=60) == [2, 2, 1, 1]


# ------------------------------------------------------------------------------------------ mutants


def _no_types(self: Any, rows: Tensor) -> dict[str, Tensor]:
    return {}


def _not_proven(self: Any, call: Any, brings: frozenset[str], *_: Any) -> None:
    self._joined[brings] = frozenset()


def _not_joined(self: Any, block: Any, args: Any, kwargs: Any, output: Any) -> Any:
    return output


def _causal_alone(self: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return _ROWS(self, forward, *args, **kwargs | {"attention_mask": None})


def _other_part(part: Tensor, group: Any, dim: int, _: Any) -> Tensor:
    return torch.cat([part] * group.size, dim)


_ROWS = mixers.DividedRows.__call__
PROVEN, TYPES = (media.Media, "_prove", _not_proven), (ProbedCall, "_types", _no_types)
NOT_JOINED = (media.Media, "joined", _not_joined)
OTHER_PART = (media, "full_rows", _other_part)
MASK_DROPPED = (mixers.DividedRows, "__call__", _causal_alone)
MUTANTS: dict[str, tuple[str, list[Any], str | list[str]]] = {
    "images are first seen with images": ("gemma3", [TYPES], ["rows"]),
    "no ring in silence": ("gemma3", [TYPES, PROVEN], "causal mask with one of its own"),
    "mask of images dropped": ("gemma3", [TYPES, MASK_DROPPED], ["gather"]),
    "features not joined": ("granite4", [NOT_JOINED], "called with .* does not give on ranks"),
    "features of another part": ("granite4", [OTHER_PART], "called with .* does not give on ranks"),
}
"""Model, what is replaced, and the ways that are found, or the error."""


def _mutant(case: str) -> Any:
    name, faults, _ = MUTANTS[case]
    with pytest.MonkeyPatch.context() as patched:
        for fault in faults:
            patched.setattr(*fault)
        try:
            norms, _, [kinds] = train(name, CP2, "ti")
        except (MegatronLightningError, RuntimeError) as error:
            return str(error)
    return norms, sorted(set(kinds.values()))


@pytest.mark.slow
@pytest.mark.parametrize("case", MUTANTS)
def test_what_differs_with_images_is_not_taken(case: str) -> None:
    name, _, expected = MUTANTS[case]
    ranks = run_ranks(2, _mutant, case)
    if isinstance(expected, str):
        assert all(isinstance(x, str) and re.search(expected, x) for x in ranks), ranks
        return
    ((alone,),) = run_ranks(1, train_all, [(name, None, "ti")])
    for norms, ways in ranks:
        assert ways == expected and norms == pytest.approx(alone[0], rel=1e-5)

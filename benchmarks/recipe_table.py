"""Print the table of ``docs/recipes.md``: every recipe in ``configs/`` for pretraining, at its
number of ranks, planned for H100s. No torch, and a second a recipe at most.

    python benchmarks/recipe_table.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lightning.recipe_reading.plan_command import plan

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = (
    "llama31_8b", "llama31_70b", "llama31_405b", "llama32_1b", "llama32_3b", "qwen3_8b",
    "qwen3_30b_a3b", "qwen3_235b_a22b", "mixtral_8x7b", "deepseek_v3", "gpt2_small", "gpt3_175b",
)  # fmt: skip
_FP8 = "clusters/fp8"
_DEVICE = "h100"


class RecipeFiles(NamedTuple):
    """Files of one recipe, without ``.yaml``."""

    model: str
    cluster: str | None

    def paths(self, *, fp8: bool = False) -> list[str]:
        """Return the configuration files."""
        names = [self.model, self.cluster, _FP8 if fp8 else None]
        return [str(CONFIGS / f"{name}.yaml") for name in names if name is not None]


def recipes() -> Iterator[RecipeFiles]:
    """Yield every model, alone and with each of its cluster files."""
    for model in MODELS:
        yield RecipeFiles(model, None)
        for path in sorted((CONFIGS / "clusters").glob(f"{model}_*.yaml")):
            yield RecipeFiles(model, f"clusters/{path.stem}")


def described(files: RecipeFiles, *, fp8: bool = False) -> dict[str, Any]:
    """Return the plan of a recipe."""
    text, _ = plan(config=files.paths(fp8=fp8), device=_DEVICE, json=True)
    found: dict[str, Any] = json.loads(text)
    return found


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        "| recipe | ranks | tp | pp x chunks | cp | ep | dp | global batch | GiB, bf16 | "
        "GiB, FP8 | bubble |"
    )
    yield f"|---|{'---|' * 10}"
    for files in recipes():
        found, quantized = described(files), described(files, fp8=True)
        grid = found["grid"]
        chunks = len(found["stages"]) // grid["pp"]
        name = files.model if files.cluster is None else f"+ {files.cluster}"
        memory = [
            f"{one['bytes']['fullest_rank']['total'] / 2**30:.1f}" for one in (found, quantized)
        ]
        cells = [
            f"`{name}`", f"{grid['world_size']:,}", grid["tp"], f"{grid['pp']} x {chunks}",
            grid["cp"], grid["ep"], grid["dp"], f"{found['flops']['global_batch_size']:,}",
            *memory, f"{found['bubble']['share']:.1%}",
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print("\n".join(table()))

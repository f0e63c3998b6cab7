"""A spread of families of transformers: their folders are read lazily and given back.

``python -m benchmarks.hf_bridge`` does the same for all of them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", "5")

from benchmarks import hf_bridge, hf_families

# Renamings, stacks of experts, saved buffers, tied heads, loops over parameters, encoders.
USUAL = ("bart", "deepseek_v3", "gpt_oss", "mamba2", "qwen3_5_text")
MORE = (
    "afmoe", "bloom", "falcon_h1", "gemma3n_text", "glm4_moe", "gpt_neox", "granitemoehybrid",
    "hrm_text", "jamba", "lfm2_moe", "mllama_text_model", "nemotron_h", "olmo_hybrid", "phimoe",
    "recurrent_gemma", "rwkv", "zamba2",
)  # fmt: skip


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_a_familys_folder_is_read_and_given_back(name: str) -> None:
    found = {family.name: family for family in hf_families.families()}
    if name not in found:
        pytest.skip(f"this transformers has no {name}")
    row = hf_bridge.measure(found[name])
    assert row == dict.fromkeys(hf_bridge.COLUMNS, "equal")


def test_a_difference_is_seen() -> None:
    """The program would say so."""
    family = next(f for f in hf_families.families() if f.name == "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_bridge, "_equal", lambda *_: False)
        row = hf_bridge.measure(family)
    assert row["load"].startswith("wrong")
    assert row["boxes"].startswith("wrong")

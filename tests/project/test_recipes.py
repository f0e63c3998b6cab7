"""Recipes for pretraining fit at their number of ranks, have the published sizes, and are the table
of the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipe_table import RecipeFiles, described, recipes, table
from megatron_lightning.cli import main, trainer_cli
from megatron_lightning.mistakes import Errors
from megatron_lightning.models import num_parameters
from megatron_lightning.planning.search.devices import planned_device
from megatron_lightning.recipe_reading import recipe_files
from megatron_lightning.recipe_reading.recipe_reader import read_recipe
from megatron_lightning.strategies import MegatronStrategy

CONFIGS = Path(__file__).parents[2] / "configs"
DOCS = Path(__file__).parents[2] / "docs"
RECIPES = list(recipes())
IDS = [files.cluster or files.model for files in RECIPES]
RANKS = {
    "llama31_8b": {8, 64}, "llama31_70b": {64, 512}, "llama31_405b": {512, 1024},
    "deepseek_v3": {1024},
}  # fmt: skip
PUBLISHED = {
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
}
"""Parameters of the folders on the Hub."""


@pytest.mark.spread(7)
@pytest.mark.parametrize("files", RECIPES, ids=IDS)
def test_a_recipe_fits_at_its_number_of_ranks(files: RecipeFiles) -> None:
    usable = planned_device("h100").usable_bytes
    for fp8 in (False, True):
        found = described(files, fp8=fp8)
        assert found["errors"] == [] and found["device"]["fits"]
        assert found["bytes"]["fullest_rank"]["total"] <= usable
    world_size = found["grid"]["world_size"]
    assert world_size % 8 == 0
    if files.cluster is not None:
        assert files.cluster.removeprefix(f"clusters/{files.model}_").split("_")[0] == str(
            world_size
        )


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_is_planned() -> None:
    text = (DOCS / "recipes.md").read_text()
    assert text.endswith("\n".join(table()) + "\n"), "run: python benchmarks/recipe_table.py"
    for model, expected in RANKS.items():
        worlds = {described(one)["grid"]["world_size"] for one in RECIPES if one.model == model}
        assert worlds == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    errors = Errors()
    recipe = read_recipe(RecipeFiles(name, None).paths(), [], None, errors)
    assert recipe is not None, errors.found
    assert num_parameters(recipe.model) == PUBLISHED[name]


@pytest.mark.spread(1)
@pytest.mark.parametrize("files", RECIPES, ids=IDS)
def test_the_command_takes_the_files(
    files: RecipeFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"--config={path}" for path in files.paths()]
    cli = trainer_cli([*options, "--trainer.accelerator=cpu", "--trainer.logger=false"], run=False)
    strategy, found = cli.trainer.strategy, described(files)["grid"]
    assert isinstance(strategy, MegatronStrategy)
    assert cli.trainer.num_nodes * cli.trainer.num_devices == found["world_size"]
    sizes = (strategy.layout.tp, strategy.layout.pp, strategy.layout.cp, strategy.layout.ep)
    assert sizes == tuple(found[axis] for axis in ("tp", "pp", "cp", "ep"))
    recipe = read_recipe(files.paths(), [], None, Errors())
    assert recipe is not None and cli.model.config == recipe.model
    assert strategy.options.data == recipe.data and strategy.options.pipeline == recipe.pipeline
    assert cli.datamodule.sequence_length == recipe.sequence_length


def test_names_are_files_of_the_checkout_and_of_the_package() -> None:
    files = {path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.rglob("*.yaml")}
    assert set(recipe_files.recipes()) == {name.as_posix() for name in files}


def test_a_recipe_is_named_and_a_file_here_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(recipe_files.recipes()["llama32_1b"])
    for name in ("llama32_1b", "llama32_1b.yaml", "configs/llama32_1b.yaml"):
        assert recipe_files.with_recipes(["fit", "--config", name, "--x", name]) == [
            "fit", "--config", path, "--x", name
        ]  # fmt: skip
    both = ["plan", "--config", "llama31_8b", "clusters/llama31_8b_64"]
    assert [Path(word).stem for word in recipe_files.with_recipes(both)[2:]] == [
        "llama31_8b", "llama31_8b_64"
    ]  # fmt: skip
    assert recipe_files.with_recipes(["--config=none.yaml"]) == ["--config=none.yaml"]
    (tmp_path / "llama32_1b").mkdir()  # such as a folder of results
    main(["plan", "--config", "llama32_1b"])
    assert "dp 8" in capsys.readouterr().out

    main(["recipe", "copy", "llama32_1b"])
    own = tmp_path / "llama32_1b.yaml"
    assert own.read_text() == Path(path).read_text()
    own.write_text(own.read_text().replace("devices: 8", "devices: 4"))
    capsys.readouterr()
    main(["plan", "--config=llama32_1b"])
    assert "dp 4" in capsys.readouterr().out
    cli = trainer_cli(["--config", "llama32_1b", "--trainer.accelerator=cpu"], run=False)
    assert cli.trainer.num_devices == 4

    main(["recipe", "show", "llama32_1b"])
    assert capsys.readouterr().out == Path(path).read_text()
    main(["recipe", "list"])
    assert "Llama 3.2 1B (https://huggingface.co/meta-llama/Llama-3.2-1B) from scratch.\n" in (
        capsys.readouterr().out
    )
    for arguments, message in (
        (["copy", "llama32_1b"], "llama32_1b.yaml exists already. Name another file by --output."),
        (["show", "lama32_1b"], "there is no recipe 'lama32_1b'. Did you mean 'llama32_1b'?"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["recipe", *arguments])
        assert message in capsys.readouterr().err

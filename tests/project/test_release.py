"""The wheel, installed into an environment of its own, works from outside of the checkout."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

import megatron_lightning
from megatron_lightning.recipe_reading import recipe_files

ROOT = Path(__file__).parents[2]
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  enable_progress_bar: false
  strategy:
    class_path: megatron_lightning.strategies.MegatronStrategy
    init_args: {tensor_model_parallel_size: 2}
model:
  class_path: megatron_lightning.modules.GPTLightningModule
  init_args:
    config:
      num_layers: 2
      hidden_size: 32
      num_attention_heads: 4
      vocab_size: 64
      max_sequence_length: 16
data:
  class_path: megatron_lightning.modules.PretrainDataModule
  init_args: {mock: true, sequence_length: 16, batch_size: 2}
"""


def run(*command: str | Path, cwd: Path) -> str:
    # No PYTHONPATH: the checkout would be found before the wheel.
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(cwd)}
    found = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    names = (
        "megatron_lightning strategies callbacks configs setup.cfg pyproject.toml README.md LICENSE"
    )
    source.mkdir()
    for name in names.split():
        path = ROOT / name
        if path.is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, source, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    assert cited["version"] == megatron_lightning.__version__
    assert f"\n## [{cited['version']}] - 20" in (ROOT / "CHANGELOG.md").read_text()
    assert (cited["title"], cited["license"]) == (
        metadata["metadata"]["name"], metadata["metadata"]["license"],
    )  # fmt: skip
    assert {"cff-version", "message", "authors", "type"} <= cited.keys()


def test_a_release_is_built_tried_and_then_published() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert (jobs["try"]["needs"], jobs["publish"]["needs"]) == ("build", "try")
    # Trusted publishing needs one permission, in one job, and no secret.
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and "secrets." not in text
    assert text.count("id-token") == 1
    [check] = [step["run"] for step in jobs["build"]["steps"] if "GITHUB_REF_NAME" in str(step)]
    for tag, code in ((f"v{megatron_lightning.__version__}", 0), ("v99.0.0", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        command = check.replace("python ", f"{sys.executable} ")
        run_of_check = subprocess.run(
            ["bash", "-ec", command], cwd=ROOT, env=environment, capture_output=True, check=False
        )
        assert run_of_check.returncode == code, run_of_check.stderr
    [demo] = [step["run"] for step in jobs["try"]["steps"] if "demo.sh" in str(step)]
    copied = re.findall(r"cp -r (.*) \"\$RUNNER_TEMP", demo)[0].split()
    assert copied == ["examples", "configs"] and all((ROOT / name).is_dir() for name in copied)


@pytest.mark.slow
def test_the_wheel_holds_each_module_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert max(Counter(names).values()) == 1
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "megatron_lightning"
    }
    sources = {
        f"megatron_lightning/{folder}{path.relative_to(ROOT / parent).as_posix()}"
        for parent, folder in (
            ("megatron_lightning", ""),
            ("strategies", "strategies/"),
            ("callbacks", "callbacks/"),
        )
        for path in (ROOT / parent).rglob("*.py")
    }
    assert sources <= set(names) and "megatron_lightning/py.typed" in names
    recipes = {f"megatron_lightning/recipes/{name}.yaml" for name in recipe_files.recipes()}
    assert len(recipes) > 30 and recipes <= set(names)
    page = {"index.html", "page.css", "page.js"}
    assert {f"megatron_lightning/inference/serving/static/{file}" for file in page} <= set(names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_trains_plans_and_converts(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    found = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path)
    site = Path(found.strip())
    # torch and Lightning from here; a path in a .pth file does not run the .pth files there, so
    # that the checkout stays unknown.
    (site / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
    run(*pip, wheel, cwd=tmp_path)
    code = "import megatron_lightning.strategies as s; print(s.__file__)"
    where = run(python, "-c", code, cwd=tmp_path)
    assert where.strip().startswith(str(site))
    command = [python, "-m", "megatron_lightning"]
    (tmp_path / "run.yaml").write_text(CONFIG)
    run(*command, "fit", "--config", "run.yaml", cwd=tmp_path)
    [checkpoint] = tmp_path.rglob("*.ckpt")
    assert "parameters" in run(*command, "plan", "--config", "run.yaml", cwd=tmp_path)
    assert "parameters" in run(*command, "plan", "--config", "llama32_1b", cwd=tmp_path)
    assert "tiny_cpu" in run(*command, "recipe", "list", cwd=tmp_path)
    run(*command, "convert", "export", checkpoint, tmp_path / "folder", cwd=tmp_path)
    assert (tmp_path / "folder" / "config.json").is_file()

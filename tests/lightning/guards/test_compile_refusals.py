"""Uses of ``compile="block"`` that cannot work are refused before any process group exists."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from megatron_lightning.assembly.checks.compiler import check_compiler
from megatron_lightning.config import CompileOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.launch.popen_launcher import ScriptLauncher
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import small_gpt
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

PP, CPU = "pipeline_model_parallel_size", torch.device("cpu")


def _options(**options: Any) -> Callable[[], object]:
    return lambda: CompileOptions(**options)


def _strategy(**options: Any) -> Callable[[], object]:
    return lambda: MegatronStrategy(**options)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_strategy(compile="model"), r"compile is 'model', which is unknown. Set it to \"block\""),
        (_strategy(compile_options=CompileOptions()), "nothing is compiled. Set compile to"),
        (_options(mode="reduce-overhead"), "replays CUDA graphs .* Set \"default\""),
        (_options(mode="max-autotune"), "replays CUDA graphs .* Set \"default\""),
        (_options(mode="fast"), "mode of compile_options is 'fast'"),
        (
            _options(mode="max-autotune-no-cudagraphs", backend="eager"),
            r"is a mode of inductor, and backend is 'eager'. Leave one of them out",
        ),
    ],
)  # fmt: skip
def test_options_are_refused_when_they_are_set(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    strategy = MegatronStrategy(
        compile="block", compile_options=CompileOptions(backend="inductr")
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"'inductr', which torch does not .* one of .*inductor"):
        trainer(strategy)


def test_inductor_without_its_tools_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    options = CompileOptions()
    check_compiler(options, CPU)
    with monkeypatch.context() as without:
        without.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(ConfigError, match=r"has no Python\.h. Install the headers of Python 3"):
            check_compiler(options, CPU)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"Triton, which is not installed\. Install"):
            check_compiler(options, torch.device("cuda"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"there is no compiler here \(looked for .*Install g\+\+"
    ):
        trainer(MegatronStrategy(compile="block"))
    check_compiler(CompileOptions(backend="aot_eager"), CPU)  # needs none


class _Blockless(ToyModule):
    """Nothing in it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 8)

    configure_model = pl.LightningModule.configure_model


class _OfLinears(ToyModule):
    """Its units repeat, and are one operation each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    configure_model = pl.LightningModule.configure_model


@pytest.mark.parametrize("module", [_Blockless, _OfLinears])
def test_a_model_without_blocks_is_refused_before_any_process_starts(
    module: Callable[[], pl.LightningModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptLauncher, "_start", lambda self: pytest.fail("a process is started"))
    options = CompileOptions(backend="aot_eager")
    refused = trainer(MegatronStrategy(compile="block", compile_options=options), devices=2)
    message = rf"compiles the repeated blocks .* {module.__name__} has none.* Name units in Pipe"
    with pytest.raises(ConfigError, match=message):
        refused.fit(module(), datamodule=ToyData())


@pytest.mark.parametrize(
    ("options", "devices"),
    [({PP: 2, "pipeline_schedule": "zb-h1"}, 4), ({"pipeline_schedule": ["0F0 0I0 0W0"]}, 2)],
)
def test_sharded_weights_with_a_split_backward_are_refused(
    options: dict[str, Any], devices: int
) -> None:
    """Where weights are sharded over one rank only, they stay, and nothing is refused."""
    common = {"compile": "block", "data_parallel": "fsdp", "micro_batch_size": 1, **options}
    common["compile_options"] = CompileOptions(backend="aot_eager")
    with pytest.raises(ConfigError, match=r'defers weight gradients, .* Set data_parallel to "zer'):
        trainer(MegatronStrategy(**common), devices=devices)
    trainer(MegatronStrategy(**common), devices=devices // 2)


def test_a_language_model_is_not_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class _StartedError(Exception):
        pass

    def start(self: Any) -> None:
        raise _StartedError

    monkeypatch.setattr(ScriptLauncher, "_start", start)
    options = CompileOptions(backend="aot_eager")
    allowed = trainer(MegatronStrategy(compile="block", compile_options=options), devices=2)
    with pytest.raises(_StartedError):
        allowed.fit(GPTLightningModule(small_gpt(2)), [])

"""``pytorch_lightning`` beside ``lightning.pytorch``: ours says what to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytorch_lightning")

# In a process of its own: the other package would be imported for the other tests, too.
PROGRAM = """
import pytorch_lightning as other
import lightning.pytorch as pl
from megatron_lightning.strategies import MegatronStrategy
from tests.lightning.vectors import VectorModule

try:
    other.Trainer(strategy=MegatronStrategy(), accelerator="cpu", logger=False)
except ValueError as error:
    print(error)
quiet = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
trainer = pl.Trainer(strategy=MegatronStrategy(), callbacks=[other.callbacks.Timer()], **quiet)
try:
    trainer.fit(VectorModule(), [])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_the_import_to_write_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert "pytorch_lightning is imported beside lightning.pytorch" in run.stderr
    assert "Write `import lightning.pytorch as pl` for" in run.stderr
    assert "ConfigError Timer is a Timer of pytorch_lightning, and the Trainer is" in run.stdout

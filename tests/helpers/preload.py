"""Imported once by the fork server, so that every rank starts with the package and what tests use
of Lightning loaded: a rank that imports these itself needs longer for that than for a fit."""

import contextlib
import gc
import importlib
import io
import logging
import os
import pkgutil
import tempfile
import warnings
from types import ModuleType

import rich.progress  # noqa: F401
import torch
import torch.utils.tensorboard
import transformers

import megatron_lightning.strategies.megatron
import tests.helpers
import tests.lightning.vectors
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer

with contextlib.suppress(ImportError):
    import peft  # noqa: F401


OPTIONAL = ("__main__", "harness", "evaluate", "serving", "record_")
"""In names of modules that import what takes long, or starts threads, which no fork may meet."""


def _import_all(*packages: ModuleType) -> None:
    """Import the modules of the packages, but those of optional packages."""
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(name in module.name for name in OPTIONAL):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)


def _import_models() -> None:
    """Import what transformers imports on first use."""
    for family in ("Bert", "Gemma3", "GptOss", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3"):
        getattr(transformers, f"{family}Model")
    transformers.GPT2LMHeadModel  # noqa: B018
    transformers.AutoModelForCausalLM  # noqa: B018
    transformers.AutoTokenizer  # noqa: B018


def _validate_once() -> None:
    """Fill the caches that every run of a Trainer fills: of abstract base classes, of versions of
    packages and of regular expressions. Nothing is trained: no thread of autograd may exist before
    a fork."""
    variables = dict(os.environ)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),  # a rank shows its first warning, as any process
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        torch.random.fork_rng([]),
    ):
        warnings.simplefilter("ignore")
        strategy = megatron_lightning.strategies.megatron.MegatronStrategy()
        logging.disable(logging.INFO)
        once = trainer(strategy, default_root_dir=folder, limit_val_batches=1)
        once.validate(ToyModule(), datamodule=ToyData(), verbose=False)
        logging.disable(logging.NOTSET)
    os.environ.clear()
    os.environ.update(variables)


_import_all(megatron_lightning, tests.helpers)
_import_models()
_validate_once()
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # a rank's collections neither walk nor copy what it shares with the server

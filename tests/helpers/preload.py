"""Imported once by the fork server, so that every rank starts with the package and what tests use
of Lightning loaded."""

import gc

import rich.progress  # noqa: F401
import torch
import torch.utils.tensorboard

import megatron_lightning.strategies.megatron  # noqa: F401
import tests.helpers.toy  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # a rank's collections neither walk nor copy what it shares with the server

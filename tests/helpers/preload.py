"""Imported once by the fork server, so that every rank starts with the package loaded."""

import torch

torch.set_num_threads(1)

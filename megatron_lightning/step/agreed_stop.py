"""The exception with which all ranks end a run together."""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import SIGTERMException


class AgreedStop(SIGTERMException):
    """All ranks end the run here in agreement: no rank has failed, and no rank waits for
    another.
    """

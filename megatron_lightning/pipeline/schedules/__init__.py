"""Pipeline schedules as data: pure functions from sizes to tables. No torch here.

Each generator names the paper. All generators place the last stage on pp rank 0 (see
:class:`~megatron_lightning.pipeline.schedules.actions.Placement`).
:func:`megatron_lightning.pipeline.schedules.simulate.validate` proves a table. The executor runs
the table, and decides nothing.
"""

from megatron_lightning.pipeline.schedules.choice import (
    SCHEDULES,
    Generator,
    ScheduleChoice,
    forward_only,
    make_schedule,
    resolve,
)
from megatron_lightning.pipeline.schedules.one_f_one_b import gpipe, interleaved, one_f_one_b, sweep
from megatron_lightning.pipeline.schedules.tables import FixedTable, read_csv, read_rows, write_csv
from megatron_lightning.pipeline.schedules.zero_bubble import zb_h1, zbv

__all__ = [
    "SCHEDULES",
    "FixedTable",
    "Generator",
    "ScheduleChoice",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "read_csv",
    "read_rows",
    "resolve",
    "sweep",
    "write_csv",
    "zb_h1",
    "zbv",
]

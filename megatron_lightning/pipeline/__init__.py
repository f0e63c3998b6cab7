"""Pipeline parallelism: schedules as data, a validator, and an executor of schedules."""

from megatron_lightning._lazy import lazy_attributes

__getattr__, __dir__ = lazy_attributes(
    __name__, {"simulate": "megatron_lightning.pipeline.schedules"}
)

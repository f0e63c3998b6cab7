"""Pipeline parallelism: schedules as data, a validator, and one executor that runs them."""

from megatron_lightning._lazy import lazy_attributes

__getattr__, __dir__ = lazy_attributes(
    __name__, {"simulate": "megatron_lightning.pipeline.schedules"}
)

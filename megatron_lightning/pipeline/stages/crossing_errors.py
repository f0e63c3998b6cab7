"""Errors of steps and models that a pipeline cannot run, found while a stage is crossed.

A ``unit`` is the unit's path in the pipelined module, a ``hook`` the name of the user's step.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lightning.errors import PipelineError
from megatron_lightning.pipeline.stages.structure import Structure


def second_call(hook: str, stage: int, microbatch: int) -> PipelineError:
    """Return the error of a step that calls the module twice."""
    return PipelineError(
        f"{hook} called the pipelined module twice on stage {stage}, micro-batch {microbatch}. A "
        "pipelined step calls it exactly once; put the inputs into one batch, or set "
        "pipeline_model_parallel_size=1."
    )


def unexpected_call(hook: str, stage: int) -> PipelineError:
    """Return the error of a call on a stage without received outputs."""
    return PipelineError(
        f"{hook} called the pipelined module on stage {stage} and not on the stage before. Whether "
        "a step calls it must follow from the batch and its index alone."
    )


def missing_unit(hook: str, unit: str) -> PipelineError:
    """Return the error of a forward that ends before all units were called."""
    return PipelineError(
        f"{hook} did not call unit {unit!r} of the pipelined module. A pipelined forward calls "
        "every unit exactly once, in order. Name other units in PipelineOptions(units=[...])."
    )


def wrong_order(hook: str, units: Sequence[str], called: int, expected: int) -> PipelineError:
    """Return the error of a unit called in the place of another unit, or at the end."""
    place = units[expected] if expected < len(units) else "the end of the forward"
    return PipelineError(
        f"{hook} called unit {units[called]!r} of the pipelined module in the place of {place!r}. "
        "A pipelined forward calls every unit exactly once, in the order "
        f"{', '.join(units[:4])}, … . Units count as called in the order in which they are "
        "registered, unless the model can be tried before it is partitioned: give the "
        "LightningModule an example_input_array, or name the units in their order in "
        "PipelineOptions(units=[...]). "
        "Layers that are called again, or skipped at random, cannot be units."
    )


def no_graph(unit: str) -> PipelineError:
    """Return the error of a trained unit that runs without gradients."""
    return PipelineError(
        f"pipeline unit {unit!r} runs without a graph in a step that is trained. A reentrant "
        "checkpoint around units loses their gradients: set use_reentrant=False "
        "(gradient_checkpointing_kwargs of transformers). Set requires_grad=False for units that "
        "are not trained."
    )


def changed_argument(unit: str, kind: str) -> PipelineError:
    """Return the error of a unit that hands state on by a list or dict, missing on other stages."""
    return PipelineError(
        f"pipeline unit {unit!r} changes a {kind} that it was given, and units of other stages "
        "would not see it. Return what it hands on, or let the forward keep it."
    )


def other_output(unit: str, structure: Structure, known: Structure) -> PipelineError:
    """Return the error of an output for which the next stage is not prepared."""
    return PipelineError(
        f"pipeline unit {unit!r} returns other plain values or shapes ({structure}) than in an "
        f"earlier micro-batch with the same signature ({known}). Return what varies as a tensor, "
        "or set variable_seq_lengths of pipeline_options."
    )


def late_prelude(hook: str, name: str) -> PipelineError:
    """Return the error of a prelude that is called behind the first stage."""
    return PipelineError(
        f"{hook} called {name!r} behind the first pipeline stage, which alone holds it: modules "
        "outside of the units that are registered before the units, and that the example inputs do "
        "not reach, count as called before the units. Set "
        f"PipelineOptions(replicated_modules=[{name!r}]), or give the LightningModule an "
        "example_input_array that shows the call."
    )


def other_calls(name: str) -> PipelineError:
    """Return the error of a prelude that is called more or less often than before."""
    return PipelineError(
        f"{name!r} is called in some micro-batches, and not in others with the same names and "
        "shapes. Set variable_seq_lengths of pipeline_options, so that every message carries "
        "what it holds."
    )


def late_write(unit: str) -> PipelineError:
    """Return the error of a write into an output handed out without a copy."""
    return PipelineError(
        f"the forward writes into the output of {unit!r} in place, and did not when this kind of "
        "step ran first. Write into a copy."
    )


def unsent_output(stage: int) -> PipelineError:
    """Return the error of a forward that uses a placeholder."""
    return PipelineError(
        f"the result of stage {stage} depends on the output of a pipeline unit that was not sent "
        "to it, in a way that was not found (by a list, an attribute or another module's memory). "
        "Hand it from unit to unit as an argument, or keep these units on one stage "
        "(pipeline_options)."
    )


def recorded_placeholder(hook: str, unit: str) -> PipelineError:
    """Return the error of a step that uses a placeholder, recorded by a hook."""
    return PipelineError(
        f"{hook} returned NaN, and the pipelined module did not: it uses the output of {unit!r} "
        "that a hook has recorded, which is on an earlier stage. Let the forward return what the "
        "step uses."
    )

"""The list of the tasks on which models are trained, and of the probes that are only for evaluation."""

from collections.abc import Callable, Mapping
from typing import Any

from whatwhere.position_base import suggest

from . import alice, counting, flip_flop, indirect_indexing, selective_copy
from .common import SampleConfig, TaskBuilder, check_names

TASKS: dict[str, type[TaskBuilder]] = {
    "flip_flop": flip_flop.FlipFlop,
    "selective_copy": selective_copy.SelectiveCopy,
    "counting": counting.Counting,
    "indirect_indexing": indirect_indexing.IndirectIndexing,
}
PROBES: dict[str, type[TaskBuilder]] = {"alice": alice.Alice}
# Each takes the text up to an answer and the configuration, and returns the answer.
SOLVERS: dict[str, Callable[[str, Any], str]] = {
    "flip_flop": flip_flop.solve,
    "selective_copy": selective_copy.solve,
    "counting": counting.solve,
    "indirect_indexing": indirect_indexing.solve,
    "alice": alice.solve,
}


def task_config(task: str, parameters: Mapping[str, Any]) -> Any:
    """Returns the configuration (`SampleConfig`) of a task or probe with these parameters, and defaults for the rest.

    Raises:
        ValueError: the task or a parameter is unknown, or a parameter is of the wrong type or out of range.
    """
    builders = {**TASKS, **PROBES}
    if task not in builders:
        raise ValueError(f"task={task!r} is not valid. {suggest(task, builders)}")
    cls: type[SampleConfig] = builders[task].BUILDER_CONFIG_CLASS
    check_names(cls, parameters)
    return cls(**parameters)

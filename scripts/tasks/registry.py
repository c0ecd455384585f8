"""The list of the tasks on which models are trained."""

from collections.abc import Mapping
from typing import Any

from whatwhere.position_encoding import suggest

from . import counting, flip_flop, indirect_indexing, selective_copy
from .common import TaskBuilder, TaskConfig, own_fields

TASKS: dict[str, type[TaskBuilder]] = {
    "flip_flop": flip_flop.FlipFlop,
    "selective_copy": selective_copy.SelectiveCopy,
    "counting": counting.Counting,
    "indirect_indexing": indirect_indexing.IndirectIndexing,
}
SOLVERS = {
    "flip_flop": flip_flop.solve,
    "selective_copy": selective_copy.solve,
    "counting": counting.solve,
    "indirect_indexing": indirect_indexing.solve,
}


def task_config(task: str, parameters: Mapping[str, Any]) -> TaskConfig:
    """Returns the configuration of a task with these parameters, and its defaults for the rest.

    Raises:
        ValueError: the task or a parameter is unknown, or a parameter is of the wrong type or out of range.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not valid. {suggest(task, TASKS)}")
    cls = TASKS[task].BUILDER_CONFIG_CLASS
    names = [field.name for field in own_fields(cls)]
    for name, value in parameters.items():
        if name not in names:
            raise ValueError(f"unknown parameter {name!r} (given: {value!r}). {suggest(name, names)}")
    return cls(**parameters)

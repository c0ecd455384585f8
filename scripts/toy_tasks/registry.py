"""The registry of tasks for training, and of probes for evaluation only."""

from collections.abc import Mapping
from typing import Any

from whatwhere.validation import suggest

from ..checks import parse
from . import alice, counting, flip_flop, indirect_indexing, selective_copy
from .common import SampleConfig, TaskConfig

TASKS: dict[str, type[TaskConfig]] = {
    "flip_flop": flip_flop.FlipFlopConfig,
    "selective_copy": selective_copy.SelectiveCopyConfig,
    "counting": counting.CountingConfig,
    "indirect_indexing": indirect_indexing.IndirectIndexingConfig,
}
PROBES: dict[str, type[SampleConfig]] = {"alice": alice.AliceConfig}


def task_config(task: str, parameters: Mapping[str, Any]) -> Any:
    """Returns the configuration (`SampleConfig`) of a task or probe; raises ValueError if something is not valid."""
    configs: dict[str, type[SampleConfig]] = {**TASKS, **PROBES}
    if task not in configs:
        raise ValueError(f"task={task!r} is not valid. {suggest(task, configs)}")
    return parse(configs[task], parameters)

"""The choice of tile sizes by measurement: a file for the environment variable WHATWHERE_TILES."""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from ..writing import write_json
from .report import append_row


@contextlib.contextmanager
def chosen_by(choose: Callable[..., Any]) -> Iterator[None]:
    """Within it, this function replaces `kernel_launch.choose`."""
    from whatwhere import kernel_launch

    kernel_launch.CHOSEN.clear()
    try:
        with mock.patch.object(kernel_launch, "choose", choose):
            yield
    finally:
        kernel_launch.CHOSEN.clear()


def measured(file: pathlib.Path) -> contextlib.AbstractContextManager:
    """Within it, tile sizes are chosen by measurement: each kind of kernel is timed with all of them at its first call.

    The fastest are written to the JSON file, and all times to a CSV file with the same stem; a kind that the JSON file
    has is not timed again. A kernel that adds to its results (`launch(repeatable=False)`) cannot run several times: it
    gets the first tiles that compile.
    """
    import triton

    from whatwhere.kernel_launch import Tiles
    from whatwhere.kernel_launch import choose as original

    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def choose(name: str, candidates: Sequence[Tiles], compiles: Callable[[Tiles], Any], run: Any) -> Tiles:
        fitting = [tiles for tiles in candidates if compiles(tiles) is None]
        for tiles in fitting:
            if list(dataclasses.astuple(tiles)) == list(known.get(name, ())):
                return tiles
        if run is None or len(fitting) < 2:
            return original(name, candidates, compiles, run)
        times = {tiles: triton.testing.do_bench(functools.partial(run, tiles), warmup=5, rep=20) for tiles in fitting}
        for tiles, time in times.items():
            row = {"kernel": name, "tiles": str(tiles), "milliseconds": f"{time:.4f}"}
            append_row(file.with_suffix(".csv"), row)
        fastest = min(fitting, key=lambda tiles: times[tiles])
        known[name] = dataclasses.astuple(fastest)
        write_json(file, known)
        return fastest

    return chosen_by(choose)

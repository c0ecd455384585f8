"""Preparation and reading of text: speed, memory, start and waiting; see docs/kernels.md."""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Megabytes of text: the two sizes whose memory is compared; a small and a large number with `--quick`.
SIZES, QUICK_SIZES = (120, 1200), (40, 80)
STEPS, QUICK_STEPS = 30, 6
# Measurements of the speed with one and with two processes.
ROUNDS = 4
VOCABULARY = 4096

# Times the start of a run after imports, up to its first batch, and the steps that follow.
RUN = """
import json, sys, time
from whatwhere.scripts.training.loop import TrainingRun
from whatwhere.scripts.training.recipe import load_recipe

recipe = load_recipe(sys.argv[1], json.loads(sys.argv[2]), train_file=[sys.argv[3]], validation_file=[sys.argv[4]])
begun = time.monotonic()
run = TrainingRun(recipe, sys.argv[5])
batches = run.batches()
batch = next(batches)
start, waited, worked = time.monotonic() - begun, 0.0, 0.0
for step in range(recipe.training.steps - 1):
    begun = time.monotonic()
    run.train_step(batch)
    middle = time.monotonic()
    batch = next(batches)
    # The first step is slower.
    if step:
        worked, waited = worked + middle - begun, waited + time.monotonic() - middle
print(json.dumps({"start": start, "waited": waited, "worked": worked}))
run.accelerator.end_training()
"""


def line(what: str, value: float, unit: str, aim: float, *, at_least: bool = False) -> str:
    """Returns a line with a figure, what it should be (at most, or at least, `aim`), and whether it is."""
    bound, met = ("at least", value >= aim) if at_least else ("at most", value <= aim)
    return f"{what:<72} {value:8.2f} {unit:<3} {bound} {aim:g}: {'met' if met else 'NOT MET'}"


def _documents(seed: int) -> Iterator[str]:
    """Yields texts of words of a made-up language, some frequent and most rare; every document is a different one."""
    draw = random.Random(seed)
    syllables = [first + vowel + last for first in "bdfklmnprstvz" for vowel in "aeiou" for last in ("", "n", "s", "r")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    pages = [" ".join(draw.choices(words, weights, k=400)) for _ in range(2000)]
    for number, page in enumerate(itertools.cycle(pages), 1):
        yield f"{number} {page}"


def write_text(file: Path, megabytes: float, seed: int = 0) -> None:
    """Writes a jsonl file of at least this size."""
    size = 0
    with file.open("w", encoding="utf-8") as content:
        for text in _documents(seed):
            size += content.write(json.dumps({"text": text}) + "\n")
            if size >= megabytes * 1e6:
                return


class _Workplace:
    """A temporary folder with texts, a tokenizer and caches, and the commands that use them."""

    def __init__(self, root: Path) -> None:
        from ..data.tokenize import train_bpe

        self.root, self.held_out = root, root / "held_out.jsonl"
        write_text(self.held_out, 1, seed=1)
        texts = itertools.islice(_documents(1), 400)
        train_bpe(VOCABULARY, texts).save_pretrained(root / "tokenizer")
        self.settings = [f"data.tokenizer={root / 'tokenizer'}", "data.vocab_size=null"]

    def text(self, megabytes: int) -> Path:
        file = self.root / f"{megabytes}.jsonl"
        if not file.exists():
            write_text(file, megabytes)
        return file

    def python(self, *arguments: str) -> tuple[str, float]:
        """Runs Python with our caches; returns what it wrote, and MB of the largest of its processes."""
        cache, log = self.root / "cache", self.root / "log"
        environment = {
            **os.environ,
            "HF_DATASETS_CACHE": str(cache / "datasets"),
            "WHATWHERE_CACHE": str(cache / "tokens"),
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        said = log.read_text(encoding="utf-8")
        if process.returncode:
            raise RuntimeError(f"a process failed: {said[-2000:]}")
        # Linux gives KiB, macOS bytes.
        return said, usage.ru_maxrss / (1e3 if sys.platform != "darwin" else 1e6)

    def prepare(self, megabytes: int, processes: int) -> tuple[float, float]:
        """Runs `whatwhere prepare` with empty caches; returns tokens a second, and MB of its largest process."""
        shutil.rmtree(self.root / "cache", ignore_errors=True)
        files = ["--train-file", str(self.text(megabytes)), "--validation-file", str(self.held_out)]
        settings = [word for setting in self.settings for word in ("--set", setting)]
        command = ["-m", "whatwhere", "prepare", "wikitext103_small", *files, *settings]
        said, memory = self.python(*command, "--processes", str(processes))
        speed = re.findall(r"tokenised the train split: .*\(([\d,]+) tokens/s", said)[0]
        return float(speed.replace(",", "")), memory

    def run(self, megabytes: int, steps: int) -> dict[str, float]:
        """Starts a run of `wikitext103_small` on prepared text, and takes a few steps."""
        settings = [*self.settings, f"training.steps={steps}", "training.warmup_steps=0"]
        files = [str(self.text(megabytes)), str(self.held_out), str(self.root / "run")]
        said, _ = self.python("-c", RUN, "wikitext103_small", json.dumps(settings), *files)
        return json.loads(re.findall(r"^\{.*\}$", said, re.MULTILINE)[-1])


def benchmark_data(quick: bool) -> Iterator[str]:
    """Yields the figures as they come. Everything is written into a temporary folder, of about 5 GB without `quick`."""
    (small, large), steps, rounds = (QUICK_SIZES, QUICK_STEPS, 1) if quick else (SIZES, STEPS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="whatwhere-benchmark-") as folder:
        place = _Workplace(Path(folder))
        # In turn; the best of each, because other work on the machine only makes them slower.
        measured = [[place.prepare(small, processes) for processes in (1, 2)] for _ in range(rounds)]
        (one, _), (two, memory) = (max(column) for column in zip(*measured))
        name = f"tokenising {small} MB, {one / 1e6:.2f} million tokens/s, with 2 processes"
        yield line(name, two / one, "x", 1.7, at_least=True)
        _, more = place.prepare(large, 2)
        name = f"peak memory: {memory:.0f} MB for {small} MB of text, {more:.0f} MB for {large} MB"
        yield line(name, abs(more / memory - 1) * 100, "%", 10)
        took = place.run(large, steps)
        yield line(f"start of a run on {large} MB of prepared text, after imports", took["start"], "s", 10)
        share = took["waited"] / (took["waited"] + took["worked"]) * 100
        step = took["worked"] / (steps - 2)
        yield line(f"waiting for data in a step of wikitext103_small ({step:.2f} s)", share, "%", 2)

"""`whatwhere demo`: its help is in `cli/demo.py`."""

import concurrent.futures
import contextlib
import importlib
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from whatwhere_cli.demo import parser

from ...model_card import weights_fingerprint
from ..errors import TrainingError, program
from ..evaluation.results import lm_eval_tasks, provenance
from ..progress import without_bars
from ..writing import check_writable, write_json

ENCODINGS = ("rope", "pope", "cope")
# The checkpoint that is evaluated with lm-eval and loaded without the package.
CHOSEN = "pope"
# The task of lm-eval.
TASK = "whatwhere_code"
PROMPT = "import os\n\n\ndef main("

# Runs in a separate process, in which the package and Triton cannot be imported.
CONTINUE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("whatwhere", "triton"):
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)

sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(prompt, return_tensors="pt")
torch.manual_seed(0)
output = model.generate(**inputs, max_new_tokens=120, do_sample=True, top_k=20, temperature=0.7)
assert not any(name.partition(".")[0] == "whatwhere" for name in sys.modules), "the package was imported"
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Prints the name and the duration of a stage."""
    print(f"\n=== {name}", flush=True)
    start = time.perf_counter()
    yield
    print(f"=== {name}: {time.perf_counter() - start:.1f} s", flush=True)


def processes() -> int:
    """Returns how many models are trained in parallel; on CPUs, two processes are faster than two threads."""
    import torch

    return 1 if torch.cuda.is_available() else max(1, min(len(ENCODINGS), os.cpu_count() or 1))


def train(folders: dict[str, pathlib.Path], overrides: list[str]) -> None:
    """Trains each encoding in its own process, `processes()` at a time, unless it is finished; continues runs."""
    threads = max(1, (os.cpu_count() or 1) // processes())
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}

    def run(encoding: str) -> int:
        command = [sys.executable, "-m", "whatwhere", "train", f"demo_{encoding}", "--output", str(folders[encoding])]
        command += [argument for override in overrides for argument in ("--set", override)]
        command += ["--resume", "auto"]
        # A pipe, so that each writes lines and not a progress bar.
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
        with subprocess.Popen(command, env=environment, **streams) as job:
            for line in job.stdout or ():
                print(f"{encoding}: {line}", end="", flush=True)
        return job.returncode

    with concurrent.futures.ThreadPoolExecutor(processes()) as pool:
        statuses = dict(zip(folders, pool.map(run, folders)))
    failed = [encoding for encoding, status in statuses.items() if status]
    if failed:
        raise TrainingError(f"training failed: {', '.join(failed)}")


def measure_lengths(folders: list[pathlib.Path], output: pathlib.Path) -> None:
    """Measures all checkpoints on the same tokens; writes the comparison, and each checkpoint's part to its folder."""
    from ..evaluation import length, length_report
    from ..evaluation.data_description import measured_text

    arguments = [*map(str, folders), "--output", str(output), "--metric", "bits_per_byte"]
    (output / "length.json").unlink(missing_ok=True)
    results = length.run(length.parser().parse_args(arguments), provenance("length", arguments))
    for folder in folders:
        results.write(folder, own=True)
        own = [entry for entry in results.checkpoints if entry["name"] == folder.name]
        length_report.draw(own, folder / "length", title=measured_text(results.data, own))


def run_lm_eval(folder: pathlib.Path, origin: dict[str, Any]) -> None:
    """Scores a checkpoint on short held-out documents with lm-eval; writes `lm_eval.json` to its folder."""
    import datasets
    import lm_eval

    from ..data.source import load_text
    from ..evaluation.zero_shot import quiet

    with without_bars():
        rows = load_text()["test"].filter(lambda row: len(row["text"]) < 8000)
    task = {
        "task": TASK,
        "custom_dataset": lambda **_: datasets.DatasetDict(test=rows),
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
        "metadata": {"version": 1.0},
    }
    # An absolute path, since lm-eval looks up others on the Hub.
    options: dict[str, Any] = {"model_args": {"pretrained": str(folder.resolve())}, "device": "cpu", "batch_size": 16}
    with quiet():
        report = lm_eval.simple_evaluate("hf", tasks=[task], bootstrap_iters=0, log_samples=False, **options)
    tasks = lm_eval_tasks(report)
    write_json(folder / "lm_eval.json", {"weights_sha256": weights_fingerprint(folder), "tasks": tasks, **origin})
    score = tasks[TASK]["metrics"]["bits_per_byte"]["value"]
    print(f"{TASK}, {tasks[TASK]['samples']} documents: {score:.3f} bits per byte")


def continue_prompt(folder: pathlib.Path, prompt: str) -> str:
    """Generates a continuation of a prompt in a process with remote code, without the package and without network."""
    with tempfile.TemporaryDirectory() as modules:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": modules}
        command = [sys.executable, "-I", "-X", "utf8", "-c", CONTINUE, str(folder.resolve()), prompt]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8"}
        done = subprocess.run(command, env=environment, check=False, **streams)
    if done.returncode:
        raise TrainingError(f"loading {folder} in a clean process failed:\n{done.stderr[-2000:]}")
    return done.stdout


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    steps = options.steps
    # As in the recipes, warm-up takes a twentieth of the steps.
    overrides = [f"training.steps={steps}", f"training.warmup_steps={steps // 20}"] if steps is not None else []
    overrides += options.set
    folders = {encoding: options.output / encoding for encoding in ENCODINGS}
    begin = time.perf_counter()
    check_writable(options.output)
    # Raises ImportError now if an extra is not installed.
    from ..cards.folder import write_card
    from ..training import loop  # noqa: F401

    options.output.mkdir(parents=True, exist_ok=True)
    importlib.import_module("lm_eval")
    with stage("train"):
        train(folders, overrides)
    with stage("length extrapolation"):
        measure_lengths(list(folders.values()), options.output)
    with stage(f"lm-eval {CHOSEN}"):
        run_lm_eval(folders[CHOSEN], provenance("demo", arguments))
    with stage("model cards"):
        for folder in folders.values():
            print(write_card(folder))
    with stage(f"{CHOSEN} in a clean process"):
        print(continue_prompt(folders[CHOSEN], PROMPT))
    print(f"\nThe demo took {time.perf_counter() - begin:.0f} s. Written: {options.output}")
    print(f"Next: {shlex.join([*program(), 'compare', *map(str, folders.values())])}")

"""The training loop, on accelerate: from a recipe to a folder with the trained model.

The folder of a finished run contains the model and its tokenizer (for `from_pretrained(folder)`), `recipe.yaml` (with
all defaults), `metrics.jsonl`, `results.json` and `checkpoints/` (see `run_folder.py`). The commands add its card.
Resuming never executes code from a folder: tensors are read as safetensors, everything else as JSON and YAML.

A run is determined by its recipe, its data and its processes. A resumed run gives bitwise the same metrics and weights
as an uninterrupted run, on the same processes and kind of machine, if the device's operations are deterministic. On
other processes or with another layout (`distributed.py`) the batches are the same, and sums are rounded differently.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object, set_seed

from whatwhere.model_card import weights_fingerprint

from ..data.folder import DATA_DIR_VARIABLE
from ..data.pack import IGNORED
from ..data.source import find_files
from ..data.tokenize import added_tokens, begins_with_bos, token_unit
from ..errors import Interrupted, Refused, TrainingError
from ..evaluation.results import provenance
from ..families import model_class
from ..progress import Progress
from ..writing import write_json, write_text
from .checkpoint import (
    Checkpoints,
    load_checkpoint,
    parameter_groups,
    random_state,
    set_random_state,
    training_tensors,
    weights,
)
from .data import load_data
from .distributed import (
    accumulating,
    build_accelerator,
    check_layout,
    clip_gradients,
    distribute,
    whole,
)
from .flops import flops_per_token, peak_flops
from .held_out import about_task, about_text, evaluate, held_out_text, prompt_of
from .model import build_config, build_model, build_optimizer, count_parameters, set_vocabulary
from .monitoring import Speed, peak_memory, stop_signals
from .recipe import RunSettings, RunText
from .run_folder import RunFolder, step_of

# Parts of error messages of gloo and NCCL.
_TIMED_OUT = ("Timed out waiting", "timed out", "timeout")
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def train(
    recipe: Any,
    output: str | os.PathLike[str],
    *,
    resume: bool | Literal["auto"] = False,
    resume_from: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    arguments: list[str] | None = None,
    kind: type["TrainingRun"] | None = None,
) -> dict[str, Any]:
    """Trains the recipe's model into the folder `output` and returns the contents of its `results.json`.

    With several processes the process group is kept for another run; end it with
    `torch.distributed.destroy_process_group()`, as the command line does.

    Args:
        recipe: a `Recipe`, or the settings of another `kind` of run.
        output: a folder that does not exist or is empty, or with `resume` the folder of the interrupted run.
        resume: continue from the newest checkpoint. "auto" also begins a new run, and only returns the results of a
            finished one.
        resume_from: continue from the checkpoint after this step, and delete later ones.

    Raises:
        TrainingError: the folder has another run or cannot be used, or training has diverged.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 arrived; a checkpoint has been written.
        ValueError: the recipe's model or data are not valid.
    """
    kind = kind or TrainingRun
    folder = RunFolder(Path(output), kind.record)
    with folder.lock():
        resume, results = folder.begin(resume_from is not None or resume, recipe.resolved())
        if results is not None:
            return results
        return kind(recipe, folder.path, data_dir, resume=resume, resume_from=resume_from).execute(arguments)


def file_problems(data: RunText, data_dir: str | os.PathLike[str] | None) -> Iterator[str]:
    """Yields what is wrong with the local files of a text, or of the texts of a mixture."""
    for index, text in enumerate(data.texts()):
        try:
            if text.source == "local":
                find_files(text, data_dir)
        except ValueError as error:
            yield f"mixture[{index}].{error}" if data.mixture else str(error)


class TrainingRun:
    """The state of one training run."""

    command, record = "train", "recipe.yaml"

    def __init__(
        self,
        recipe: RunSettings,
        output: Path,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        resume_from: int | None = None,
    ) -> None:
        # A `Recipe`, unless a subclass defines `settings`, `build_config` and `build_model`.
        self.recipe: Any = recipe
        self.output, self.folder = output, RunFolder(output, self.record)
        self.data_dir = data_dir or os.environ.get(DATA_DIR_VARIABLE)
        self.step, self.seconds = 0, 0.0
        # Loss and step of the lowest validation loss so far, if the recipe keeps the best model.
        self.best: dict[str, Any] | None = None
        training = recipe.training
        self.config = self.build_config()
        self.accelerator = build_accelerator(training, output)
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        self.processes = check_layout(recipe, self.config, count, rank)
        self.checkpoints = Checkpoints(self.folder, training.keep_checkpoints, training.ddp_timeout)
        self.micro_batch_size = training.micro_batch_size or training.batch_size // self.processes.data_share[1]
        self.resume = resume
        with self.explaining_errors():
            # The `run.json` of the checkpoint to continue from.
            self.state = self._read_checkpoint(resume_from) if resume else None
            self._load_data_and_model()

    def settings(self) -> dict[str, Any]:
        """Returns what is saved in the record, and in `results.json`."""
        return self.recipe.resolved()

    def build_config(self) -> Any:
        """Returns the model's configuration, before its vocabulary is known; raises Refused with all problems."""
        problems = [f"data.{problem}" for problem in file_problems(self.recipe.data, self.data_dir)]
        try:
            config = build_config(self.recipe)
        except Refused as error:
            problems = [*error.problems, *problems]
        if problems:
            raise Refused(*problems)
        return config

    def build_model(self) -> Any:
        set_vocabulary(self.config, self.recipe, self.data.tokenizer)
        return build_model(self.config, self.recipe.training)

    def build_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        return build_optimizer(self.whole_model, self.recipe.training)

    def _load_data_and_model(self) -> None:
        recipe, training = self.recipe, self.recipe.training
        self.say("reading and tokenising the data")
        self.data = load_data(recipe, self.data_dir)
        if self.state is not None:
            old = self.state["splits_sha256"]
            if changed := [name for name, digest in self.data.splits_sha256.items() if old.get(name) != digest]:
                earlier = ""
                if added_tokens(self.data.tokenizer)[0]:
                    earlier = ", or an earlier version wrote no BOS token, which this tokenizer adds"
                raise TrainingError(
                    f"the run in {str(self.output)!r} was trained on other text: the corpus, the Python version or the "
                    f"tokenizer has changed{earlier}. Changed splits: {', '.join(changed)}."
                )
        set_seed(recipe.seed)
        # The model without a data-parallel wrapper, and the model to train.
        self.whole_model = self.build_model()
        self.parameters = count_parameters(self.whole_model)
        self.model = distribute(self.whole_model, self.processes, self.accelerator, training)
        self.optimizer, self.scheduler = self.build_optimizer()
        self.say(
            f"{self.parameters:,} parameters, {training.steps:,} steps on {self.accelerator.device}"
            + (f", {self.processes}" if self.accelerator.num_processes > 1 else "")
        )

    def say(self, message: str) -> None:
        """Prints a line about the run, once for all processes, to standard error."""
        if self.processes.is_first:
            print(f"{self.recipe.name}: {message}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Converts errors of communication between processes into a TrainingError."""
        try:
            yield
        except RuntimeError as error:
            text, processes = str(error), self.accelerator.num_processes
            if processes == 1 or isinstance(error, TrainingError):
                raise
            if any(words in text for words in _TIMED_OUT):
                what = f"has not answered for {self.recipe.training.ddp_timeout} seconds (training.ddp_timeout)"
            elif any(words in text for words in _GONE):
                what = "has ended"
            else:
                raise
            raise TrainingError(
                f"another of {processes} processes {what}. Process {self.accelerator.process_index} stops after step "
                f"{self.step}. {self.checkpoints.advice()} ({text.splitlines()[0]})"
            ) from error

    def execute(self, arguments: list[str] | None = None) -> dict[str, Any]:
        """Begins or resumes the run, trains, and returns the results."""
        with self.explaining_errors():
            try:
                self.begin()
                self.train()
                return self.finish(arguments)
            except Exception:
                self.checkpoints.wait(failed=True)
                raise

    def begin(self) -> None:
        """Prepares the folder, and loads the checkpoint if the run is resumed."""
        if self.resume:
            self._load_checkpoint()
        self.write_settings()
        if self.recipe.training.trackers:
            self.accelerator.init_trackers(self.recipe.name, config={"recipe": json.dumps(self.settings())})
        self.accelerator.wait_for_everyone()

    def write_settings(self) -> None:
        """Writes the settings into the folder, after deleting incomplete files of a killed run."""
        if self.processes.is_first:
            self.output.mkdir(parents=True, exist_ok=True)
            self.folder.remove_leftovers()
            with self.checkpoints.writing(self.output / self.record):
                self.folder.write_record(self.settings())

    def train(self) -> None:
        """Trains from the current step to the last one."""
        training, every, unit = self.recipe.training, self.recipe.evaluation.every, self.data.unit
        # Samples of tasks and separate documents have different lengths.
        per_step = training.batch_size * (self.recipe.data.sequence_length if unit == "tokens" else 1)
        progress = Progress(
            self.recipe.name,
            training.steps * per_step,
            unit=unit,
            done=self.step * per_step,
            shown=self.processes.is_first,
        )
        measured = Speed(self.step, per_step)
        batches = self.batches()
        started, waited = time.monotonic() - self.seconds, 0.0
        with progress, stop_signals() as received:
            while self.step < training.steps:
                rate = self.scheduler.get_last_lr()[0]
                waiting = time.monotonic()
                batch = next(batches)
                waited += time.monotonic() - waiting
                loss, norm = self.train_step(batch)
                self.step += 1
                last = self.step == training.steps
                if last or self.step % training.log_every == 0:
                    values = self._check_divergence(loss, norm)
                    speed = measured.until(self.step)
                    costs = {"data_wait_seconds": waited, "peak_memory_gb": peak_memory() / 1e9, **self.costs(speed)}
                    counts = {unit: self.step * per_step, f"{unit}_per_second": speed}
                    self.log({**values, "learning_rate": rate, **counts, **costs})
                    waited = 0.0
                progress.advance(per_step, functools.partial(self._state, loss))
                improved = False
                if every and (last or self.step % every == 0):
                    improved = self._validate(progress)
                    measured.mark(self.step)
                stop = bool(received) or self.checkpoints.has_failed
                if self.accelerator.num_processes > 1:
                    # All processes leave the loop at the same step.
                    if stop:
                        self.accelerator.set_trigger()
                    stop = self.accelerator.check_trigger()
                self.seconds = time.monotonic() - started
                due = training.checkpoint_every and self.step % training.checkpoint_every == 0
                if due or improved or last or stop:
                    self._check_divergence(loss, norm)
                    self.save_checkpoint()
                if stop or last:
                    # Until it is written, signals must not end the process.
                    self.checkpoints.wait()
                if stop and not last:
                    raise Interrupted(gather_object(received[:1])[0], self.step)

    def costs(self, speed: float) -> dict[str, float]:
        """Returns the speed for each device, and on a known GPU the model FLOPs utilisation (see `flops_per_token`)."""
        if self.data.unit != "tokens":
            return {}
        each = speed / self.accelerator.num_processes
        costs = {"tokens_per_second_per_device": each}
        if peak := peak_flops(self.accelerator.device):
            costs["model_flops_utilisation"] = each * self._flops_per_token / peak
        return costs

    @functools.cached_property
    def _flops_per_token(self) -> float:
        return flops_per_token(self.whole_model.config, self.recipe.data.sequence_length)

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Returns an iterator over this process's share of the batches from the current step on, read ahead of time."""
        batches, data, on_gpu = self.data.batches, self.recipe.data, self.accelerator.device.type != "cpu"
        default = 2 if on_gpu else int(data.streaming)
        options = {"workers": default if data.workers is None else data.workers, "pin_memory": on_gpu}
        if data.streaming:
            return batches.loader(self.processes.data_share, **options)
        return batches.loader(self.processes.data_share, range(self.step, self.recipe.training.steps), **options)

    def train_step(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Performs one step on this process's share of a batch, with `labels`.

        Returns the mean loss of the whole batch, and the gradient norm before clipping.
        """
        self.model.train()
        # The loss is normalised by the number of predictions in the global batch, for any division of the batch.
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        predictions = int(self.processes.summed(count))
        rows = range(len(batch["labels"]))
        parts = [rows[i : i + self.micro_batch_size] for i in rows[:: self.micro_batch_size]]
        total = torch.zeros((), device=self.accelerator.device)
        for part in parts:
            with accumulating(self.model, self.processes, self.accelerator, last=part is parts[-1]):
                inputs = {
                    name: tensor[part.start : part.stop].to(self.accelerator.device, non_blocking=True)
                    for name, tensor in batch.items()
                }
                loss = self.loss(inputs, predictions)
                total += loss.detach()
                # Data-parallel training averages gradients over processes, but the sum is needed here.
                (loss * self.processes.data_share[1]).backward()
        norm = clip_gradients(self.whole_model.parameters(), self.recipe.training.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self.processes.summed(total), norm

    def loss(self, inputs: dict[str, torch.Tensor], predictions: int) -> torch.Tensor:
        """Returns the loss of a part of a batch: its share in the mean over this number of predictions."""
        return self.model(**inputs, num_items_in_batch=predictions, use_cache=False).loss

    def _check_divergence(self, loss: torch.Tensor, norm: torch.Tensor) -> dict[str, float]:
        """Returns both values; raises TrainingError if one is not finite, or the loss is far above that of guessing."""
        values = {"loss": loss.item(), "gradient_norm": norm.item()}
        limits = {"loss": self.largest_loss(), "gradient_norm": math.inf}
        for name, value in values.items():
            if not math.isfinite(value) or value > limits[name]:
                self.checkpoints.wait()
                raise TrainingError(
                    f"{name}={value!r} at step {self.step}: training has diverged. Lower the learning rate or lengthen "
                    f"the warm-up. {self.checkpoints.advice()}"
                )
        return values

    def largest_loss(self) -> float:
        """Returns the loss above which training has diverged: three times that of a uniform guess."""
        return 3 * math.log(self.whole_model.config.vocab_size)

    def _validate(self, progress: Progress) -> bool:
        """Evaluates on the validation split; returns whether the recipe keeps the model, as the best so far."""
        scores = evaluate(self, "validation", self.recipe.evaluation.blocks)
        self.log({f"validation_{name}": value for name, value in scores.items()})
        loss, keep = scores["loss"], self.recipe.evaluation.keep
        improved = keep == "best" and (self.best is None or loss < self.best["validation_loss"])
        if improved:
            self.best = {"step": self.step, "validation_loss": loss}
        if self.processes.is_first:
            shown = ("token_error", "bits_per_byte", "loss", "perplexity")
            report = ", ".join(f"{name} {scores[name]:.4f}" for name in shown if name in scores)
            progress.bar.write(f"{self.recipe.name} step {self.step}: validation {report}")
        return improved

    def _state(self, loss: torch.Tensor) -> str:
        """Returns what a line of progress says."""
        return f"step {self.step:,} of {self.recipe.training.steps:,}, loss {loss.item():.3f}"

    def log(self, values: dict[str, float]) -> None:
        """Appends a line to `metrics.jsonl`, and logs to the trackers."""
        if self.processes.is_first:
            path = self.output / "metrics.jsonl"
            with self.checkpoints.writing(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")
        if self.recipe.training.trackers:
            self.accelerator.log(values, step=self.step)

    def save_checkpoint(self) -> None:
        """Begins to write a checkpoint after the current step."""
        # Tensor-parallel processes read the same share.
        streams = gather_object([self.data.batches.state_dict()]) if self.recipe.data.streaming else None
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "layout": dataclasses.asdict(self.processes),
            "splits_sha256": self.data.splits_sha256,
            "random": gather_object([random_state(self.accelerator.device)]),
            "streams": streams and streams[:: self.processes.tp],
            "parameter_groups": parameter_groups(self.whole_model, self.optimizer),
            "best": self.best,
            **self.more_state(),
        }
        self.checkpoints.save(training_tensors(self.whole_model, self.optimizer), state)

    def more_state(self) -> dict[str, Any]:
        """Returns what `run.json` also has."""
        return {}

    def _read_checkpoint(self, step: int | None) -> dict[str, Any] | None:
        """Returns what `Checkpoints.read` does, read by one process for all and checked by each."""
        found: Any = None
        if self.processes.is_first:
            try:
                found = self.checkpoints.read(step)
            except TrainingError as error:
                found = error
        found = self.processes.of_first(found)
        if isinstance(found, TrainingError):
            raise found
        if found is not None:
            self._check_origin(found, f"the run in {str(self.output)!r} was trained")
        return found

    def _check_origin(self, state: dict[str, Any], made: str) -> None:
        """Raises a TrainingError, which begins with `made`, if the checkpoint cannot be continued here exactly."""
        device = state["random"][0]["device_type"]
        if device != self.accelerator.device.type:
            raise TrainingError(
                f"{made} on {device!r} and cannot be resumed exactly on {self.accelerator.device.type!r}."
            )

    def _load_checkpoint(self) -> None:
        """Continues from the checkpoint; without one, the run starts at step 0."""
        if self.state is None:
            self.say("no checkpoint yet, starting from the beginning")
        else:
            state = self.state
            self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
            if self.recipe.data.streaming:
                self.data.batches.load_state_dict(state["streams"], self.processes.data_share)
            folder = self.checkpoints.path_of(state)
            load_checkpoint(folder, self.whole_model, self.optimizer, self.scheduler, state)
            self.say(f"resuming after step {self.step:,}")
            if {**state["layout"], "rank": None} == {**dataclasses.asdict(self.processes), "rank": None}:
                set_random_state(state["random"][self.accelerator.process_index], self.accelerator.device)
            else:
                set_seed(self.recipe.seed + self.step)
                self.say("resuming with another layout: random numbers of dropout differ")
        # Wait until all processes have read the checkpoint.
        self.accelerator.wait_for_everyone()
        if self.processes.is_first:
            self.checkpoints.remove([folder for folder in self.folder.checkpoints() if step_of(folder) > self.step])
            self._cut_metrics()

    def _cut_metrics(self) -> None:
        """Removes the lines of steps after the checkpoint; the last line may be incomplete."""
        metrics = self.output / "metrics.jsonl"
        if not metrics.exists():
            return
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingError(
                f"{str(metrics)!r} is damaged: not every line is JSON with a step ({error}). Remove that line, and "
                "resume again."
            ) from error
        with self.checkpoints.writing(metrics):
            write_text(metrics, "".join(kept))

    def scores(self) -> dict[str, Any]:
        """Returns the data and scores of `results.json`."""
        data, samples = self.recipe.data, self.step * self.recipe.training.batch_size
        if self.data.unit == "samples":
            scores = {name: evaluate(self, f"test set {name}") for name in data.test_sets or {}}
            return {**about_task(data, self.data.tokenizer, scores), "samples_trained": samples}
        split = "test" if "test" in self.data.held_out else "validation"
        about = about_text(
            data, split, evaluate(self, split, self.recipe.evaluation.final_blocks), local=bool(self.data_dir)
        )
        if changed := self.data.held_out[split].changed:
            about["changed_documents"] = changed
        about["data"]["prompt"] = prompt_of(self.data.texts[split][0], data.sequence_length)
        # A name does not say which text it is: that of a file, or of a corpus of which there are versions.
        about["tokens_sha256"] = self.data.splits_sha256[split]
        if self.data.unit == "sequences":
            return {**about, "samples_trained": samples}
        return {**about, "tokens_trained": samples * data.sequence_length}

    def _full_weights(self) -> dict[str, torch.Tensor]:
        """Returns the whole weights of a sharded model, in the memory of the first process."""
        result = {}
        for name, tensor in weights(self.whole_model).items():
            full = whole(tensor)
            if self.processes.is_first:
                result[name] = full.cpu()
        return result

    def save(self, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
        """Saves the trained model, in the first process; `state_dict` are the weights of a sharded model."""
        model = self.whole_model
        if state_dict is not None:
            # FSDP changes the class of a model.
            dtype = next(iter(state_dict.values())).dtype
            with torch.device("meta"):
                model = model_class(model.config)._from_config(model.config, dtype=dtype)
            model.generation_config = self.whole_model.generation_config
        model.save_pretrained(folder, state_dict=state_dict)

    def more_results(self) -> dict[str, Any]:
        """Returns what `results.json` also has."""
        return {}

    def more_about_text(self, split: str) -> dict[str, Any]:
        """Returns the unit of the loss on text, `bos` if documents begin with it, and what the run held out.

        It is empty for a toy task.
        """
        if self.data.unit == "samples":
            return {}
        tokenizer = self.data.tokenizer
        about: dict[str, Any] = {"unit": token_unit(tokenizer), **({"bos": True} if begins_with_bos(tokenizer) else {})}
        return {**about, "held_out": held_out_text(self.data, split, self.output)}

    def finish(self, arguments: list[str] | None = None) -> dict[str, Any]:
        """Evaluates the last model, or the best one if the recipe keeps it, and saves it with the results."""
        recipe, model = self.recipe, self.whole_model
        self.checkpoints.wait()
        if self.best is not None:
            self.checkpoints.load_best(model, self.best)
        scores = self.scores()
        state_dict = self._full_weights() if self.processes.is_sharded else None
        results: dict[str, Any] = {}
        if self.processes.is_first:
            with self.checkpoints.writing(self.output), self.folder.draft() as draft:
                self.save(draft, state_dict)
                self.data.tokenizer.save_pretrained(draft)
                results = {
                    **scores,
                    **self.more_about_text(scores["data"]["split"]),
                    "recipe": self.settings(),
                    "seed": recipe.seed,
                    "steps": self.step,
                    **({"kept": self.best} if self.best is not None else {}),
                    "parameters": self.parameters,
                    "seconds": self.seconds,
                    "processes": self.accelerator.num_processes,
                    **({"layout": str(self.processes)} if self.processes.is_sharded else {}),
                    "device": str(self.accelerator.device),
                    "text_sha256": self.data.splits_sha256["train"],
                    **self.more_results(),
                    "weights_sha256": weights_fingerprint(draft),
                    "commit": _commit(),
                    **provenance(self.command, arguments),
                }
                write_json(draft / "results.json", results)
        # All processes must still exist: gloo can wait forever for one that has ended.
        del model, self.whole_model, self.model, self.optimizer
        self.accelerator.free_memory()
        self.accelerator.wait_for_everyone()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return results


def _commit() -> str | None:
    """Returns the commit of this code, with a mark if it was changed; None if no repository tracks this file."""
    file = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        # An installed package may lie inside the repository of another project.
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--abbrev=40", "--dirty")
    return None

"""The training loop, on accelerate: from a recipe to a folder with the trained model.

A finished folder holds the model and its tokenizer at the top (`from_pretrained(folder)` loads it), `README.md` (the
card), `recipe.yaml` (every key resolved), `metrics.jsonl`, `results.json` and `checkpoints/`.

A folder is locked as long as a run writes to it, and its files are replaced as a whole: a reader, or a run that was
killed, never leaves half of one. Nothing in it is executed when a run is resumed: tensors are read as safetensors, the
rest as JSON and YAML.

A run is a function of its recipe, its corpus and the number of processes. Interrupted and resumed, it gives the same
metrics and the same weights, bit for bit, as if it had not been interrupted (on one kind of machine, and as far as the
device's operations are deterministic).
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from tqdm.auto import tqdm

from whatwhere.model_card import weights_fingerprint

from ..cards.command import write_card
from ..data.corpus import DATA_DIR_VARIABLE, find_files, load_text
from ..data.pack import IGNORED, ShuffledBatches, StreamedBatches, add_labels, blocks_sha256, make_blocks
from ..data.samples import TaskBatches, TaskSamples
from ..data.tokenize import WORD_TOKENIZERS, build_tokenizer, bytes_per_token
from ..evaluation.answers import count_errors, summarise
from ..evaluation.data_description import describe_data
from ..evaluation.results import provenance, write_json, write_text
from ..tasks.common import build_tokenizer as build_task_tokenizer
from .checkpoint import (
    DamagedCheckpoint,
    file_sha256,
    load_checkpoint,
    random_state,
    read_checkpoint,
    set_random_state,
    write_checkpoint,
)
from .lock import LOCK, OWNER, TrainingError, lock_folder
from .model import build_config, build_model, build_optimizer
from .recipe import Recipe, RecipeError, differences

try:
    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedType,
        InitProcessGroupKwargs,
        broadcast_object_list,
        gather_object,
        set_seed,
    )
except ImportError as error:
    raise ImportError('training needs `accelerate`: pip install "whatwhere[train]"') from error


# Nats a token; its exponential still fits a float.
HOPELESS = 700.0

# Seconds before the first progress line in a log, and between two lines.
_FIRST_LINE, _NEXT_LINE = 10.0, 60.0

# Files that a killed run may leave in its folder.
_LEFTOVERS = (".recipe.yaml.partial", ".metrics.jsonl.partial", ".final")

# Words in the error messages of gloo and NCCL.
_TIMED_OUT = ("Timed out waiting", "timed out", "timeout")
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


class Interrupted(Exception):
    """A run that was asked to stop, and has written a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name} received: stopped after step {step}, with a checkpoint")
        self.number = number


def train(
    recipe: Recipe,
    output: str | os.PathLike[str],
    *,
    resume: bool = False,
    resume_from: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    arguments: list[str] | None = None,
    end: bool = True,
) -> dict[str, Any]:
    """Trains the recipe's model into the folder `output` and returns the contents of its `results.json`.

    Args:
        recipe: see `load_recipe`.
        output: a folder that does not exist or is empty, or with `resume` that of the interrupted run.
        resume: go on from the newest checkpoint.
        resume_from: go on from the checkpoint after this step, and delete those after it.
        data_dir: the folder of `data.source: local`.
        arguments: the command line, for the records; by default that of this process.
        end: whether this is the last run of these processes; otherwise their group stays, for the next one.

    Raises:
        TrainingError: the folder is not usable, the run to resume is another one, or the loss is not finite.
        Interrupted: SIGINT or SIGTERM arrived.
        ValueError: the recipe's model or data are not valid.
    """
    output = Path(output)
    resume = resume or resume_from is not None
    with lock_folder(output):
        check_folder(output, resume=resume, record="recipe.yaml")
        if resume:
            check_recipe(output, recipe)
        check_text_and_model(recipe, data_dir)
        run = Run(recipe, output, data_dir)
        with run.explaining_errors():
            run.begin(resume=resume, resume_from=resume_from)
            run.train()
            return run.finish(arguments, end=end)


def check_folder(output: Path, *, resume: bool, record: str) -> None:
    """Refuses a folder that holds something already, or that holds no run to resume.

    Args:
        output: the folder, which need not exist.
        resume: whether a run in it is to go on.
        record: the file in which a run in this folder says what it is.

    Raises:
        TrainingError: the folder is refused.
    """
    # `runs/..` is the present folder, whether `runs` exists or not.
    found = {path.name for path in output.resolve().iterdir()} if output.resolve().exists() else set()
    if not resume and (found := {name for name in found if not _is_ours(name)}):
        raise TrainingError(f"output={str(output)!r} is not empty. Choose another folder, or go on with --resume.")
    if resume and record not in found:
        raise TrainingError(f"output={str(output)!r} holds no run to resume: it has no {record}.")
    if resume and "results.json" in found:
        raise TrainingError(f"output={str(output)!r} holds a finished run: there is nothing to resume.")


def _is_ours(name: str) -> bool:
    """Whether a file of an output folder is the lock, or was left behind when a run was killed."""
    return name in (LOCK, OWNER, *_LEFTOVERS)


def check_recipe(output: Path, recipe: Recipe) -> None:
    """Refuses to resume a run with another recipe than it was started with; raises TrainingError."""
    file = output / "recipe.yaml"
    try:
        old = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise ValueError("it holds no recipe.")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TrainingError(
            f"{str(file)!r} cannot be read: {error} The run in this folder cannot be resumed without it: write the "
            "recipe of the run to it, or start again in another folder."
        ) from error
    # How long processes wait changes nothing about the run.
    changed = [line for line in differences(old, recipe.resolved()) if not line.startswith("training.ddp_timeout:")]
    if changed:
        raise TrainingError(
            f"output={str(output)!r} holds a run of another recipe, which cannot be resumed with this one. Different "
            f"(before → now): {'; '.join(changed)}."
        )


def check_text_and_model(recipe: Recipe, data_dir: str | os.PathLike[str] | None) -> None:
    """Refuses a recipe whose model is not valid or whose local files are not there, before anything is read.

    Raises:
        RecipeError: with all reasons.
    """
    problems: list[str] = []
    try:
        build_config(recipe)
    except RecipeError as error:
        problems += error.problems
    data = recipe.data
    if data.source == "local":
        try:
            find_files(data_dir, data.splits, data.train_file, data.validation_file, streaming=data.streaming)
        except ValueError as error:
            problems.append(f"data.{error}")
    if problems:
        raise RecipeError(*problems)


class Run:
    """One training run: everything that it needs, and where it is."""

    def __init__(self, recipe: Recipe, output: Path, data_dir: str | os.PathLike[str] | None = None) -> None:
        self.recipe, self.output = recipe, output
        self.data_dir = data_dir or os.environ.get(DATA_DIR_VARIABLE)
        self.step, self.seconds = 0, 0.0
        # Of the lowest validation loss so far, if that model is to be kept: the loss, and the step it was seen at.
        self.best: dict[str, Any] | None = None
        training = recipe.training
        self.accelerator = Accelerator(
            mixed_precision=training.mixed_precision,
            log_with=training.trackers or None,
            project_dir=str(output),
            # Without this, each of several processes on a machine without a GPU would believe that it is alone.
            cpu=not torch.accelerator.is_available(),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=training.ddp_timeout))],
        )
        if self.accelerator.distributed_type in (
            DistributedType.DEEPSPEED,
            DistributedType.FSDP,
            DistributedType.MEGATRON_LM,
        ):
            raise TrainingError(
                f"accelerate's distributed_type={self.accelerator.distributed_type.value!r} is not valid: training is "
                "data-parallel only, and checkpoints hold whole models."
            )
        processes = self.accelerator.num_processes
        if training.batch_size % (processes * (training.micro_batch_size or 1)):
            raise TrainingError(
                f"training.batch_size={training.batch_size!r} is not valid: it must be a multiple of "
                f"training.micro_batch_size={training.micro_batch_size!r} times the number of processes, {processes}."
            )
        for tracker in training.trackers:
            # accelerate leaves out what is not installed.
            if tracker not in [str(name) for name in self.accelerator.log_with]:
                raise TrainingError(
                    f"training.trackers={training.trackers!r} is not valid: {tracker!r} is not installed."
                )
        self.micro_batch_size = training.micro_batch_size or training.batch_size // processes
        self.batches: ShuffledBatches | StreamedBatches | TaskBatches
        self.held_out: dict[str, Any]
        # A fingerprint of each split: a resumed run must read the same text. None for a stream.
        self.splits_sha256: dict[str, str | None] = {}
        # Of a toy task the answers are scored, of text the bits per byte, of words that are no text the loss alone.
        self.is_task = recipe.data.source == "task"
        self.bytes_per_token: torch.Tensor | None = None
        self.say("reading and tokenising the data")
        if self.is_task:
            self._prepare_task()
        else:
            self._prepare_data()
        set_seed(recipe.seed)
        model = build_model(recipe, build_config(recipe, self.tokenizer))
        optimizer, self.scheduler = build_optimizer(model, training)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.say(f"{parameters:,} parameters, {training.steps:,} steps on {self.accelerator.device}")

    @property
    def text_sha256(self) -> str | None:
        """The fingerprint of the training text or samples; None for a stream."""
        return self.splits_sha256["train"]

    def say(self, message: str) -> None:
        """Prints a line about the run, once for all processes, to standard error."""
        if self.accelerator.is_main_process:
            print(f"{self.recipe.name}: {message}", file=sys.stderr, flush=True)

    def begin(self, *, resume: bool = False, resume_from: int | None = None) -> None:
        """Prepares the folder, and goes to the checkpoint from which the run is resumed.

        Args:
            resume: go on from the newest checkpoint.
            resume_from: go on from the checkpoint after this step, and delete those after it.

        Raises:
            TrainingError: see `load_checkpoint`.
        """
        if resume:
            self.load_checkpoint(resume_from)
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            text = yaml.safe_dump(self.recipe.resolved(), sort_keys=False, allow_unicode=True)
            with self._writing(self.output / "recipe.yaml"):
                write_text(self.output / "recipe.yaml", text)
        if self.recipe.training.trackers:
            config = {"recipe": json.dumps(self.recipe.resolved())}
            self.accelerator.init_trackers(self.recipe.name, config=config)
        self.accelerator.wait_for_everyone()

    def _remove_leftovers(self) -> None:
        """Deletes the unfinished files of a killed run."""
        found = [self.output / name for name in _LEFTOVERS]
        if (self.output / "recipe.yaml").exists():
            # Temporary files of safetensors.
            found += [path for path in self.output.glob(".tmp??????") if path.is_file()]
        for path in [*found, *self._checkpoint_folder.glob(".*")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def _checkpoint_folder(self) -> Path:
        return self.output / "checkpoints"

    def _prepare_data(self) -> None:
        data, training, evaluation = self.recipe.data, self.recipe.training, self.recipe.evaluation
        corpus = load_text(
            data.source,
            data_dir=self.data_dir,
            dataset=data.dataset,
            dataset_config=data.dataset_config,
            splits=data.splits,
            text_field=data.text_field,
            train_file=data.train_file,
            validation_file=data.validation_file,
            streaming=data.streaming,
            pieces=True,
        )
        if data.train_file and not data.validation_file:
            self.accelerator.print(f"{self.recipe.name}: {corpus['validation'].info.description}")
        texts = corpus["train"]["text"] if data.tokenizer == "bpe" else None
        self.tokenizer = build_tokenizer(data.tokenizer, vocab_size=data.vocab_size, texts=texts)
        if data.tokenizer not in WORD_TOKENIZERS:
            self.bytes_per_token = bytes_per_token(self.tokenizer)
        length, pack = data.sequence_length, data.pack
        limit = (
            max(evaluation.blocks, evaluation.final_blocks) if evaluation.blocks and evaluation.final_blocks else None
        )
        self.held_out = {
            split: make_blocks(
                corpus[split], self.tokenizer, sequence_length=length, pack=pack, limit=limit, name=f"the {split} split"
            )
            for split in ("validation", "test")
            if split in corpus
        }
        if data.streaming:
            self.batches = StreamedBatches(
                corpus["train"],
                self.tokenizer,
                sequence_length=length,
                pack=pack,
                batch_size=training.batch_size,
                seed=self.recipe.seed,
                shuffle_buffer=data.shuffle_buffer,
            )
        else:
            blocks = make_blocks(
                corpus["train"], self.tokenizer, sequence_length=length, pack=pack, name="the train split"
            )
            self.batches = ShuffledBatches(blocks, training.batch_size, self.recipe.seed)
            self.splits_sha256["train"] = blocks_sha256(blocks)
        self.splits_sha256.setdefault("train", None)
        self.splits_sha256 |= {split: blocks_sha256(blocks) for split, blocks in self.held_out.items()}

    def _prepare_task(self) -> None:
        data, seed = self.recipe.data, self.recipe.seed
        config = data.task_config(seed=seed)
        self.tokenizer = build_task_tokenizer(config)
        block = data.sequence_length if config.may_be_cut else None
        samples = TaskSamples(
            config,
            self.tokenizer,
            "train",
            count=data.train_samples,
            block=block,
            loss=data.loss or "answer",
            keep=data.train_samples is not None,
        )
        self.batches = TaskBatches(samples, self.recipe.training.batch_size, seed)
        # The same samples for every seed of a run: what differs between seeds is the model.
        held_out = data.task_config()
        self.held_out = {
            "validation": TaskSamples(
                held_out, self.tokenizer, "validation", count=held_out.validation_samples, block=block, keep=True
            )
        }
        for name in data.test_sets or {}:
            tested = data.task_config(test_set=name)
            self.held_out[f"test set {name}"] = TaskSamples(
                tested, self.tokenizer, "test", count=tested.test_samples, block=block
            )
        # Samples are drawn as they are needed. The first ones tell whether a resumed run draws the same.
        for split, drawn in {"train": samples, **self.held_out}.items():
            digest = hashlib.sha256(json.dumps(drawn.config.symbols).encode())
            for index in range(min(8, 8 if drawn.count is None else drawn.count)):
                digest.update(drawn.row(index)[0].tobytes())
            self.splits_sha256[split] = digest.hexdigest()

    def train(self) -> None:
        """Trains from the present step to the last one.

        Raises:
            TrainingError: the loss is not finite.
            Interrupted: SIGINT or SIGTERM arrived; a checkpoint has been written.
        """
        training, every = self.recipe.training, self.recipe.evaluation.every
        # Samples of a task differ in length, and most of their tokens are not scored; separate documents are padded.
        unit = "samples" if self.is_task else "sequences" if self.is_padded else "tokens"
        per_step = training.batch_size * (self.recipe.data.sequence_length if unit == "tokens" else 1)
        # On a terminal only: a log gets a line a minute.
        hidden = None if self.accelerator.is_main_process else True
        bar = tqdm(total=training.steps, initial=self.step, desc=self.recipe.name, unit="step", disable=hidden)
        started, marked, marked_step = time.monotonic() - self.seconds, time.monotonic(), self.step
        begun, first_step, next_line = marked, self.step, marked + _FIRST_LINE
        with bar, stop_signals() as received:
            while self.step < training.steps:
                rate = self.scheduler.get_last_lr()[0]
                loss, norm = self.train_step(self.batches(self.step))
                self.step += 1
                last = self.step == training.steps
                bar.update()
                if last or self.step % training.log_every == 0:
                    values = {"loss": loss.item(), "gradient_norm": norm.item()}
                    self._require_finite(values)
                    now = time.monotonic()
                    speed = (self.step - marked_step) * per_step / (now - marked)
                    self.log(
                        {
                            **values,
                            "learning_rate": rate,
                            unit: self.step * per_step,
                            f"{unit}_per_second": speed,
                        }
                    )
                    marked, marked_step = now, self.step
                    bar.set_postfix({"loss": f"{values['loss']:.3f}", f"{unit}/s": f"{speed:,.0f}"})
                if bar.disable and self.accelerator.is_main_process and (now := time.monotonic()) >= next_line:
                    next_line = now + _NEXT_LINE
                    speed = (self.step - first_step) / (now - begun)
                    left = tqdm.format_interval((training.steps - self.step) / speed)
                    self.say(
                        f"step {self.step:,} of {training.steps:,}, loss {loss.item():.3f}, "
                        f"{speed * per_step:,.0f} {unit}/s, {left} left"
                    )
                if every and (last or self.step % every == 0):
                    scores = self.evaluate("validation", self.recipe.evaluation.blocks)
                    self.log({f"validation_{name}": value for name, value in scores.items()})
                    if self.recipe.evaluation.keep == "best":
                        self._keep_if_best(scores["loss"])
                    if self.accelerator.is_main_process:
                        shown = ("token_error", "bits_per_byte", "loss", "perplexity")
                        report = ", ".join(f"{name} {scores[name]:.4f}" for name in shown if name in scores)
                        bar.write(f"{self.recipe.name} step {self.step}: validation {report}")
                    marked, marked_step = time.monotonic(), self.step
                stop = self._agree(received)
                self.seconds = time.monotonic() - started
                due = training.checkpoint_every and self.step % training.checkpoint_every == 0
                if due or last or stop:
                    self._require_finite({"loss": loss.item(), "gradient_norm": norm.item()})
                    self.save_checkpoint()
                if stop and not last:
                    raise Interrupted(received[0] if received else signal.SIGTERM, self.step)

    @property
    def is_padded(self) -> bool:
        """Whether sequences are documents of different lengths."""
        return self.recipe.data.pack == "separate"

    def _keep_if_best(self, loss: float) -> None:
        """Saves the weights if the validation loss is the lowest so far."""
        if self.best is not None and loss >= self.best["validation_loss"]:
            return
        self.best = {"step": self.step, "validation_loss": loss}
        if self.accelerator.is_main_process:
            file = self._best_file(self.best)
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f".{file.name}")
            with self._writing(file):
                save_model(self.accelerator.unwrap_model(self.model), str(draft))
                draft.replace(file)
            self._forget_other_bests()
        self.accelerator.wait_for_everyone()

    def _best_file(self, best: dict[str, Any]) -> Path:
        return self._checkpoint_folder / f"best-{int(best['step']):08d}.safetensors"

    def _forget_other_bests(self) -> None:
        """Deletes the weights of all best models but the present one and those that checkpoints know of."""
        wanted = {self._best_file(self.best)} if self.best is not None else set()
        for folder in self._checkpoints():
            with contextlib.suppress(OSError, ValueError):
                state = json.loads((folder / "run.json").read_text(encoding="utf-8"))
                if state["best"] is not None:
                    wanted.add(self._best_file(state["best"]))
        for file in self._checkpoint_folder.glob("best-*"):
            if file not in wanted:
                file.unlink()

    def _agree(self, received: list[int]) -> bool:
        """Returns whether any process was asked to stop: all of them must leave the loop at the same step."""
        if self.accelerator.num_processes == 1:
            return bool(received)
        if received:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()

    def _require_finite(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise TrainingError(
                    f"{name}={value!r} at step {self.step}: training has diverged. Nothing was saved after the "
                    "last checkpoint. Lower training.learning_rate, or lengthen training.warmup_steps."
                )

    def train_step(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes one step on a global batch; returns its mean loss and the norm of its gradient before clipping."""
        self.model.train()
        batch = add_labels(batch)
        # The whole batch is normalised by its own number of predictions, however it is divided.
        predictions = int((batch["labels"][:, 1:] != IGNORED).sum())
        rows = list(range(self.recipe.training.batch_size))
        with self.accelerator.split_between_processes(rows) as mine:
            parts = [mine[i : i + self.micro_batch_size] for i in range(0, len(mine), self.micro_batch_size)]
        total = torch.zeros((), device=self.accelerator.device)
        for part in parts:
            # Gradients are exchanged once, in the last backward pass.
            last = part is parts[-1]
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                inputs = {name: rows[part].to(self.accelerator.device) for name, rows in batch.items()}
                loss = self.model(**inputs, num_items_in_batch=predictions, use_cache=False).loss
                total += loss.detach()
                # Data-parallel training averages gradients over processes; each has its share of the sum here.
                self.accelerator.backward(loss * self.accelerator.num_processes)
        limit = self.recipe.training.clip_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self.accelerator.reduce(total, reduction="sum"), norm

    @torch.no_grad()
    def evaluate(self, split: str, limit: int | None = None) -> dict[str, float]:
        """Scores `limit` blocks of a held-out split, spread evenly over it; by default all.

        Returns:
            of a toy task, `loss` (nats per answer token) and what `summarise` returns. Of text, `bits_per_byte`: all
            nats, end-of-text tokens included, over ln 2 times the bytes of the predicted text; `perplexity` per token,
            `loss` (nats per token) and `tokens`, the number of predictions. Words that are no text have no
            `bits_per_byte`.
        """
        # Without its data-parallel wrapper, which would wait for processes that have no block left.
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        blocks = self.held_out[split]
        count = min(limit or len(blocks), len(blocks))
        chosen = [i * len(blocks) // count for i in range(count)]
        size = self.micro_batch_size * self.accelerator.num_processes
        sums = torch.zeros(5 if self.is_task else 3, dtype=torch.float64)
        for start in range(0, count, size):
            with self.accelerator.split_between_processes(chosen[start : start + size]) as mine:
                if not mine:
                    continue
                batch = add_labels(blocks[mine])
                inputs = {name: rows.to(self.accelerator.device) for name, rows in batch.items()}
                # `num_items_in_batch=1` turns the mean into the sum.
                outputs = model(**inputs, num_items_in_batch=1, use_cache=False)
                if self.is_task:
                    sums[0] += outputs.loss.item()
                    sums[1:] += count_errors(outputs.logits, batch["labels"]).cpu()
                    continue
                labels = batch["labels"][:, 1:]
                labels = labels[labels != IGNORED]
                stood_for = 0 if self.bytes_per_token is None else self.bytes_per_token[labels].sum().item()
                sums += torch.tensor([outputs.loss.item(), labels.numel(), stood_for])
        nats, *counts = self.accelerator.reduce(sums.to(self.accelerator.device), reduction="sum").tolist()
        tokens = counts[0]
        if not nats / tokens < HOPELESS:
            raise TrainingError(
                f"a loss of {nats / tokens!r} nats a token on the {split} split at step {self.step}: training has "
                "diverged."
            )
        if self.is_task:
            return {"loss": nats / tokens, **summarise(counts)}
        scores = {} if self.bytes_per_token is None else {"bits_per_byte": nats / (math.log(2) * counts[1])}
        return {**scores, "perplexity": math.exp(nats / tokens), "loss": nats / tokens, "tokens": int(tokens)}

    def log(self, values: dict[str, float]) -> None:
        """Appends a line to `metrics.jsonl` and tells the trackers."""
        if self.accelerator.is_main_process:
            path = self.output / "metrics.jsonl"
            with self._writing(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")
        if self.recipe.training.trackers:
            self.accelerator.log(values, step=self.step)

    def save_checkpoint(self) -> None:
        """Writes model, optimiser, random states and position; a checkpoint is there whole or not at all.

        Raises:
            TrainingError: a file cannot be written.
        """
        folder = self._checkpoint_folder / f"step-{self.step:08d}"
        draft = folder.with_name(f".{folder.name}")
        random = gather_object([random_state(self.accelerator.device)])
        failure: list[TrainingError | None] = [None]
        if self.accelerator.is_main_process:
            try:
                with self._writing(folder):
                    draft.mkdir(parents=True)
                    state = {
                        "step": self.step,
                        "seconds": self.seconds,
                        "processes": self.accelerator.num_processes,
                        "splits_sha256": self.splits_sha256,
                        "best": self.best,
                        "best_sha256": None if self.best is None else file_sha256(self._best_file(self.best)),
                        "random": random,
                    }
                    model = self.accelerator.unwrap_model(self.model)
                    write_checkpoint(draft, model, self.optimizer.optimizer, state)
                    draft.rename(folder)
            except TrainingError as error:
                shutil.rmtree(draft, ignore_errors=True)
                failure = [error]
            else:
                for old in self._checkpoints()[: -self.recipe.training.keep_checkpoints]:
                    self._remove(old)
                self._forget_other_bests()
        # If the checkpoint failed, every process stops.
        broadcast_object_list(failure)
        if failure[0] is not None:
            raise failure[0]

    def _checkpoints(self) -> list[Path]:
        return sorted(self._checkpoint_folder.glob("step-*"))

    @staticmethod
    def _remove(folder: Path) -> None:
        """Deletes a checkpoint; a process killed meanwhile leaves no incomplete one."""
        draft = folder.with_name(f".{folder.name}")
        folder.rename(draft)
        shutil.rmtree(draft)

    def load_checkpoint(self, step: int | None = None) -> None:
        """Goes to the newest checkpoint, or to that after `step`; without any, the run starts from its beginning.

        Raises:
            TrainingError: there is no such checkpoint, it is damaged, or it was made by another number of processes,
                on another kind of device, or on other text.
        """
        folders = self._checkpoints()
        if step is not None:
            folders = [folder for folder in folders if folder.name <= f"step-{step:08d}"]
            if not folders or folders[-1].name != f"step-{step:08d}":
                allowed = ", ".join(str(int(folder.name[5:])) for folder in self._checkpoints()) or "none"
                raise TrainingError(
                    f"--resume-from {step!r} is not valid: there is no checkpoint after this step. Allowed: {allowed}."
                )
        state: dict[str, Any] = {"step": 0, "seconds": 0.0, "best": None}
        if not folders:
            self.say("no checkpoint yet, starting from the beginning")
        else:
            state = self._read_checkpoint(folders)
            model = self.accelerator.unwrap_model(self.model)
            load_checkpoint(folders[-1], model, self.optimizer.optimizer, self.scheduler, state)
            set_random_state(state["random"][self.accelerator.process_index], self.accelerator.device)
            self.say(f"resuming after step {state['step']:,}")
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        # All processes have read their checkpoint.
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for newer in self._checkpoints()[len(folders) :]:
                self._remove(newer)
            self._forget_other_bests()
            self._cut_metrics()

    def _read_checkpoint(self, folders: list[Path]) -> dict[str, Any]:
        """Checks the newest of these checkpoints and returns the contents of its `run.json`."""
        try:
            state = self._check(folders[-1])
        except DamagedCheckpoint as error:
            raise TrainingError(f"{error}. {self._advice(folders[:-1])}") from error
        if state["processes"] != self.accelerator.num_processes:
            raise TrainingError(
                f"the run in {str(self.output)!r} was made by {state['processes']} processes and cannot be resumed "
                f"exactly by {self.accelerator.num_processes}."
            )
        made_on = state["random"][0]["device_type"]
        if made_on != self.accelerator.device.type:
            raise TrainingError(
                f"the run in {str(self.output)!r} was made on {made_on!r} and cannot be resumed exactly on "
                f"{self.accelerator.device.type!r}."
            )
        if changed := [
            name for name, digest in self.splits_sha256.items() if state["splits_sha256"].get(name) != digest
        ]:
            raise TrainingError(
                f"the run in {str(self.output)!r} was made on other text: the corpus, the Python version or the "
                f"tokenizer has changed since. Different: {', '.join(changed)}."
            )
        return state

    def _check(self, folder: Path) -> dict[str, Any]:
        """Returns what `read_checkpoint` does; checks the weights of the best model too."""
        state = read_checkpoint(folder)
        if state["best"] is not None:
            file = self._best_file(state["best"])
            if not file.exists() or file_sha256(file) != state["best_sha256"]:
                raise DamagedCheckpoint(f"{str(file)!r}, the best model of {folder.name!r}, is missing or damaged")
        return state

    def _advice(self, folders: list[Path]) -> str:
        """Returns how to go on from the newest of these checkpoints that is whole."""
        for folder in reversed(folders):
            with contextlib.suppress(DamagedCheckpoint):
                self._check(folder)
                return f"{folder.name!r} is whole: go on from it with --resume-from {int(folder.name[5:])}."
        return "No earlier checkpoint is whole: start again in another folder."

    def _cut_metrics(self) -> None:
        """Removes the lines of steps that are made again; the last line may have been cut off."""
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
        with self._writing(metrics):
            write_text(metrics, "".join(kept))

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Turns an error of writing a file (a full disk, most often) into a TrainingError that says how to go on."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TrainingError(f"{str(path)!r} cannot be written: {reason}. {self._last_checkpoint()}") from error

    def _last_checkpoint(self) -> str:
        """Returns where the run can go on."""
        if not (folders := self._checkpoints()):
            return "There is no checkpoint yet."
        return f"The last checkpoint, {folders[-1].name!r}, is whole: go on from it with --resume."

    @contextlib.contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Turns an error of waiting for another process into a TrainingError."""
        try:
            yield
        except RuntimeError as error:
            text, processes = str(error), self.accelerator.num_processes
            if processes == 1 or isinstance(error, TrainingError):
                raise
            if any(words in text for words in _TIMED_OUT):
                seconds = self.recipe.training.ddp_timeout
                what = f"has not answered for {seconds} seconds (training.ddp_timeout): it may be frozen"
            elif any(words in text for words in _GONE):
                what = "has ended"
            else:
                raise
            raise TrainingError(
                f"another of {processes} processes {what}. Process {self.accelerator.process_index} stops after step "
                f"{self.step}. {self._last_checkpoint()} ({text.splitlines()[0]})"
            ) from error

    def _score_text(self) -> dict[str, Any]:
        """Returns what `results.json` says about a model of text alone."""
        data = self.recipe.data
        split = "test" if "test" in self.held_out else "validation"
        scores = self.evaluate(split, self.recipe.evaluation.final_blocks)
        about: dict[str, Any] = {"source": data.source, "dataset": data.dataset, "splits": data.splits, "split": split}
        if data.train_file:
            about |= {"train_file": data.train_file, "validation_file": data.validation_file}
        if data.source == "corpus":
            about["place"] = "local files" if self.data_dir else "the Hub"
        sequences = self.step * self.recipe.training.batch_size
        return {
            "metrics": {
                name: {"value": scores[name]} for name in ("bits_per_byte", "perplexity", "loss") if name in scores
            },
            "data": describe_data(about),
            "length": data.sequence_length,
            "tokens": scores["tokens"],
            **(
                {"samples_trained": sequences}
                if self.is_padded
                else {"tokens_trained": sequences * data.sequence_length}
            ),
        }

    def _score_task(self) -> dict[str, Any]:
        """Returns what `results.json` says about a model of a toy task alone."""
        data = self.recipe.data
        config = data.task_config()
        # For the card: the shortest prompt of a few.
        rows = (config.row(config.sample("test", index)) for index in range(8))
        row = min(rows, key=lambda row: len(row["prompt"]))
        tokens = len(self.tokenizer(row["answer"])["input_ids"])
        example = {"prompt": row["prompt"], "answer": row["answer"], "tokens": tokens}
        return {
            "metrics": {"test_sets": {name: self.evaluate(f"test set {name}") for name in data.test_sets or {}}},
            "data": describe_data({"source": data.source, "task": data.task, "split": "test", "example": example}),
            "length": data.sequence_length,
            "samples_trained": self.step * self.recipe.training.batch_size,
        }

    def finish(self, arguments: list[str] | None = None, *, end: bool = True) -> dict[str, Any]:
        """Evaluates on the test split (validation, if there is none) and saves the model, the results and the card.

        A toy task's model is evaluated on every test set. If the best model is to be kept, it is that of the lowest
        validation loss, and not the last one, that is evaluated and saved.
        """
        recipe = self.recipe
        if self.best is not None:
            file = self._best_file(self.best)
            try:
                load_model(self.accelerator.unwrap_model(self.model), str(file))
            except (OSError, SafetensorError, RuntimeError) as error:
                raise TrainingError(f"{str(file)!r}, the best model, cannot be read: {error}") from error
        scored = self._score_task() if self.is_task else self._score_text()
        results: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            # `results.json` comes last: with it, the run is finished.
            draft = self.output / ".final"
            with self._writing(draft):
                model = self.accelerator.unwrap_model(self.model)
                model.save_pretrained(draft)
                self.tokenizer.save_pretrained(draft)
            results = {
                **scored,
                "recipe": recipe.resolved(),
                "seed": recipe.seed,
                "steps": self.step,
                **({"kept": self.best} if self.best is not None else {}),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "seconds": self.seconds,
                "processes": self.accelerator.num_processes,
                "device": str(self.accelerator.device),
                "text_sha256": self.text_sha256,
                "weights_sha256": weights_fingerprint(draft),
                "commit": _commit(),
                **provenance("whatwhere.scripts.train", arguments),
            }
            with self._writing(draft):
                write_json(draft / "results.json", results)
                write_card(draft, name=self.output.resolve().name)
                for file in sorted(draft.iterdir(), key=lambda file: file.name == "results.json"):
                    file.replace(self.output / file.name)
                draft.rmdir()
        # Freed while all processes are there: gloo can wait for ever for a neighbour that has gone.
        self.model, self.optimizer = self.accelerator.free_memory(self.model, self.optimizer)
        self.accelerator.wait_for_everyone()
        if end:
            self.accelerator.end_training()
        else:
            for tracker in self.accelerator.trackers:
                tracker.finish()
        return results


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in the list that it gives; a second SIGINT is a KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    # Python lets only the main thread handle signals.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _commit() -> str | None:
    """Returns the commit of this code, with a mark if it was changed; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--abbrev=40", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None

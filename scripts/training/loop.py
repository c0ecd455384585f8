"""The training loop, on accelerate: from a recipe to a folder with the trained model.

A finished folder holds the model and its tokenizer at the top (`from_pretrained(folder)` loads it), `README.md` (the
card), `recipe.yaml` (every key resolved), `metrics.jsonl`, `results.json` and `checkpoints/`.

A run is a function of its recipe, its corpus and the number of processes. Interrupted and resumed, it gives the same
metrics and the same weights, bit for bit, as if it had not been interrupted (on one kind of machine, and as far as the
device's operations are deterministic).
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from safetensors.torch import load_model, save_model
from tqdm.auto import tqdm

from whatwhere.model_card import weights_fingerprint

from ..data.corpus import DATA_DIR_VARIABLE, find_files, load_text
from ..data.pack import IGNORED, ShuffledBatches, StreamedBatches, add_labels, blocks_sha256, make_blocks
from ..data.samples import TaskBatches, TaskSamples
from ..data.tokenize import WORD_TOKENIZERS, build_tokenizer, bytes_per_token
from ..evaluation.answers import count_errors, summarise
from ..evaluation.card import write_card
from ..evaluation.results import check_writable, provenance, write_json
from ..tasks.common import build_tokenizer as build_task_tokenizer
from .model import build_config, build_model, build_optimizer
from .recipe import Recipe, RecipeError, differences

try:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
except ImportError as error:
    raise ImportError('training needs `accelerate`: pip install "whatwhere[train]"') from error


# Nats a token; its exponential still fits a float.
HOPELESS = 700.0


class TrainingError(RuntimeError):
    """A run that cannot start or go on, with the reason."""


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
    data_dir: str | os.PathLike[str] | None = None,
    arguments: list[str] | None = None,
    end: bool = True,
) -> dict[str, Any]:
    """Trains the recipe's model into the folder `output` and returns the contents of its `results.json`.

    Args:
        recipe: see `load_recipe`.
        output: a folder that does not exist or is empty, or with `resume` that of the interrupted run.
        resume: go on from the newest checkpoint.
        data_dir: the folder of `data.source: local`.
        arguments: the command line, for the records; by default that of this process.
        end: whether this is the last run of these processes; otherwise their group stays, for the next one.

    Raises:
        TrainingError: the folder is not usable, the run to resume is another one, or the loss is not finite.
        Interrupted: SIGINT or SIGTERM arrived.
        ValueError: the recipe's model or data are not valid.
    """
    output = Path(output)
    check_folder(output, resume=resume, record="recipe.yaml")
    if resume:
        check_recipe(output, recipe)
    check_text_and_model(recipe, data_dir)
    run = Run(recipe, output, data_dir)
    if resume:
        run.load_newest_checkpoint()
    run.train()
    return run.finish(arguments, end=end)


def check_folder(output: Path, *, resume: bool, record: str) -> None:
    """Refuses a folder that cannot be written, that holds something already, or that holds no run to resume.

    Args:
        output: the folder, which need not exist.
        resume: whether a run in it is to go on.
        record: the file in which a run in this folder says what it is.

    Raises:
        TrainingError: the folder is refused.
    """
    try:
        check_writable(output)
    except OSError as error:
        raise TrainingError(str(error)) from error
    if not resume and output.exists() and any(output.iterdir()):
        raise TrainingError(f"output={str(output)!r} is not empty. Choose another folder, or go on with --resume.")
    if resume and not (output / record).exists():
        raise TrainingError(f"output={str(output)!r} holds no run to resume: it has no {record}.")
    if resume and (output / "results.json").exists():
        raise TrainingError(f"output={str(output)!r} holds a finished run: there is nothing to resume.")


def check_recipe(output: Path, recipe: Recipe) -> None:
    """Refuses to resume a run with another recipe than it was started with; raises TrainingError."""
    old = yaml.safe_load((output / "recipe.yaml").read_text(encoding="utf-8"))
    if changed := differences(old, recipe.resolved()):
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
        self._best_at_checkpoint: int | None = None
        training = recipe.training
        self.accelerator = Accelerator(
            mixed_precision=training.mixed_precision,
            log_with=training.trackers or None,
            project_dir=str(output),
            # Without this, each of several processes on a machine without a GPU would believe that it is alone.
            cpu=not torch.accelerator.is_available(),
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
        # Says whether a resumed run reads the same text. A stream is not known before it was read.
        self.text_sha256: str | None = None
        # Of a toy task the answers are scored, of text the bits per byte, of words that are no text the loss alone.
        self.is_task = recipe.data.source == "task"
        self.bytes_per_token: torch.Tensor | None = None
        if self.is_task:
            self._prepare_task()
        else:
            self._prepare_data()
        set_seed(recipe.seed)
        model = build_model(recipe, build_config(recipe, self.tokenizer))
        optimizer, self.scheduler = build_optimizer(model, training)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_for_checkpointing(self.scheduler)
        if self.accelerator.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
            (output / "recipe.yaml").write_text(text, encoding="utf-8")
        if training.trackers:
            self.accelerator.init_trackers(recipe.name, config={"recipe": json.dumps(recipe.resolved())})

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
            split: make_blocks(corpus[split], self.tokenizer, sequence_length=length, pack=pack, limit=limit)
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
            blocks = make_blocks(corpus["train"], self.tokenizer, sequence_length=length, pack=pack)
            self.batches = ShuffledBatches(blocks, training.batch_size, self.recipe.seed)
            self.text_sha256 = blocks_sha256(blocks)

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
        digest = hashlib.sha256(json.dumps(config.symbols).encode())
        for index in range(8):
            digest.update(samples.row(index)[0].tobytes())
        self.text_sha256 = digest.hexdigest()

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
        # On a terminal only: a log file gets one line an evaluation.
        hidden = None if self.accelerator.is_main_process else True
        bar = tqdm(total=training.steps, initial=self.step, desc=self.recipe.name, unit="step", disable=hidden)
        started, marked, marked_step = time.monotonic() - self.seconds, time.monotonic(), self.step
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
                    self.log(
                        {
                            **values,
                            "learning_rate": rate,
                            unit: self.step * per_step,
                            f"{unit}_per_second": (self.step - marked_step) * per_step / (now - marked),
                        }
                    )
                    marked, marked_step = now, self.step
                    bar.set_postfix(loss=f"{values['loss']:.3f}")
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
        before, self.best = self.best, {"step": self.step, "validation_loss": loss}
        if self.accelerator.is_main_process:
            file = self._best_file(self.best)
            draft = file.with_name(f".{file.name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            save_model(self.accelerator.unwrap_model(self.model), str(draft))
            draft.replace(file)
            # A run that is resumed from the newest checkpoint needs the best weights that it knew of.
            if before is not None and before["step"] != self._best_at_checkpoint:
                self._best_file(before).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()

    def _best_file(self, best: dict[str, Any]) -> Path:
        return self.output / "checkpoints" / f"best-{best['step']:08d}.safetensors"

    def _forget_other_bests(self) -> None:
        """Deletes the weights of all best models but the present one, which the newest checkpoint knows."""
        self._best_at_checkpoint = self.best["step"] if self.best is not None else None
        if self.accelerator.is_main_process:
            for pattern in ("best-*", ".best-*"):
                for file in (self.output / "checkpoints").glob(pattern):
                    if self.best is None or file != self._best_file(self.best):
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
            with (self.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")
        if self.recipe.training.trackers:
            self.accelerator.log(values, step=self.step)

    def save_checkpoint(self) -> None:
        """Writes model, optimiser, schedule, random states and position; a checkpoint is there whole or not at all."""
        folder = self.output / "checkpoints" / f"step-{self.step:08d}"
        draft = folder.with_name(f".{folder.name}")
        if self.accelerator.is_main_process:
            # what a killed run left unfinished
            for stale in folder.parent.glob(".step-*"):
                shutil.rmtree(stale)
            draft.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        # Of a head that shares the embeddings' weight, accelerate warns each time; loading ties it again.
        logger = logging.getLogger("accelerate.utils.other")
        level = logger.level
        logger.setLevel(logging.ERROR)
        self.accelerator.save_state(str(draft))
        logger.setLevel(level)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_json(
                draft / "run.json",
                {
                    "step": self.step,
                    "seconds": self.seconds,
                    "processes": self.accelerator.num_processes,
                    "text_sha256": self.text_sha256,
                    "best": self.best,
                },
            )
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
            for old in self._checkpoints()[: -self.recipe.training.keep_checkpoints]:
                shutil.rmtree(old)
        self._forget_other_bests()
        self.accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.output / "checkpoints").glob("step-*"))

    def load_newest_checkpoint(self) -> None:
        """Goes to the newest checkpoint; without one, the run starts from its beginning.

        Raises:
            TrainingError: the checkpoint was made by another number of processes, or on other text.
        """
        folder = self._checkpoints()[-1] if self._checkpoints() else None
        state: dict[str, Any] = {"step": 0, "seconds": 0.0}
        if folder is None:
            self.accelerator.print(f"{self.recipe.name}: no checkpoint yet, starting from the beginning")
        else:
            state = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            if state["processes"] != self.accelerator.num_processes:
                raise TrainingError(
                    f"the run in {str(self.output)!r} was made by {state['processes']} processes and cannot be resumed "
                    f"exactly by {self.accelerator.num_processes}."
                )
            if state["text_sha256"] != self.text_sha256:
                raise TrainingError(
                    f"the run in {str(self.output)!r} was made on other text: the corpus, the Python version or the "
                    "tokenizer has changed since."
                )
            self.accelerator.load_state(str(folder))
            self.accelerator.print(f"{self.recipe.name}: resuming after step {state['step']}")
        self.step, self.seconds, self.best = state["step"], state["seconds"], state.get("best")
        self._forget_other_bests()
        metrics = self.output / "metrics.jsonl"
        if self.accelerator.is_main_process and metrics.exists():
            # Steps after the checkpoint are made again; the last line may have been cut off.
            lines = [
                line for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
            ]
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            metrics.write_text("".join(kept), encoding="utf-8")
        self.accelerator.wait_for_everyone()

    def _score_text(self) -> dict[str, Any]:
        """Returns what `results.json` says about a model of text alone."""
        data = self.recipe.data
        split = "test" if "test" in self.held_out else "validation"
        scores = self.evaluate(split, self.recipe.evaluation.final_blocks)
        about = {"source": data.source, "dataset": data.dataset, "splits": data.splits, "split": split}
        if data.train_file:
            about |= {"train_file": data.train_file, "validation_file": data.validation_file}
        if data.source == "corpus":
            about["place"] = "local files" if self.data_dir else "the Hub"
        sequences = self.step * self.recipe.training.batch_size
        return {
            "metrics": {
                name: {"value": scores[name]} for name in ("bits_per_byte", "perplexity", "loss") if name in scores
            },
            "data": about,
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
            "data": {"source": data.source, "task": data.task, "split": "test", "example": example},
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
            load_model(self.accelerator.unwrap_model(self.model), str(self._best_file(self.best)))
        scored = self._score_task() if self.is_task else self._score_text()
        results: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            model = self.accelerator.unwrap_model(self.model)
            model.save_pretrained(self.output)
            self.tokenizer.save_pretrained(self.output)
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
                "weights_sha256": weights_fingerprint(self.output),
                "commit": _commit(),
                **provenance("whatwhere.scripts.train", arguments),
            }
            write_json(self.output / "results.json", results)
            write_card(self.output)
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

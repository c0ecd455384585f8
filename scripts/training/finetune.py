"""Fine-tuning with Transformers' own `Trainer`: fully or with LoRA, with the checkpoint's encoding or a new one.

What the output folder holds at its top: without `lora`, or with `merge`, a whole model; with `lora` alone the adapter,
and if the encoding is new or the checkpoint is a stock one also `base/`, the converted model that the adapter is for.
(The card of an adapter is peft's own; that of a whole model is ours.)

Checkpoints are Trainer's own. Resuming executes nothing that they hold: weights are read as safetensors, the optimiser,
the schedule and the random states by `torch.load(weights_only=True)`, and `training_args.bin`, a pickle that Trainer
writes, is never read. (Do not load it yourself from a folder that you do not trust.)
"""

import json
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import peft
import torch
from accelerate import PartialState
from pydantic import Field
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

from whatwhere.model_card import weights_fingerprint
from whatwhere.position_registry import max_length

from ..cards.command import write_card
from ..checks import Checked, Count, Fraction, NotNegative, NotNegativeFloat, Positive, Refused
from ..data.corpora import CORPORA, load_corpus
from ..data.corpus import load_text
from ..data.pack import add_labels, endless_blocks, make_blocks
from ..data.rows import data_folder
from ..data.source import SOURCES, TextSource, find_files
from ..data.tokenize import build_tokenizer, bytes_per_token
from ..evaluation.data_description import describe_data
from ..evaluation.results import provenance, write_json
from .errors import Interrupted, TrainingError
from .held_out import HOPELESS
from .model import FAMILIES
from .progress import stop_signals
from .run_folder import RunFolder

# The name before Transformers renamed it.
_CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


class FinetuneError(Refused):
    """A fine-tuning that cannot run, with the reasons."""

    what = "the command"


class Settings(Checked):
    """What makes a run what it is: `finetune.json` holds it. The command `whatwhere finetune` explains the fields."""

    checkpoint: str
    position_encoding: str | None = None
    position_encoding_parameters: dict | None = None
    rope_parameters: dict | None = None
    train_file: list[str] | None = None
    validation_file: list[str] | None = None
    data: str = "stdlib"
    dataset: str | None = None
    dataset_config: str | None = None
    splits: dict | None = None
    text_field: str = "text"
    streaming: bool = False
    shuffle_buffer: Count = 256
    tokenizer: str | None = None
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    evaluation_blocks: Count = 256
    steps: Count = 500
    batch_size: Count = 8
    accumulation: Count = 1
    learning_rate: Positive | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NotNegative = 0
    weight_decay: NotNegativeFloat = 0.0
    save_every: Count = 100
    seed: NotNegative = 0
    bf16: bool = False
    activation_checkpointing: bool = False
    cpu: bool = False
    lora: bool = False
    lora_rank: Count = 16
    lora_alpha: Positive = 32.0
    lora_dropout: Fraction = 0.0
    merge: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with the fields together."""
        if self.data in CORPORA:
            for name in set(TextSource.model_fields) - {"source", "streaming"}:
                if getattr(self, name) != TextSource.model_fields[name].default:
                    yield name, f"it has no effect with data={self.data!r}"
        elif self.data in SOURCES:
            yield from self.text().problems()
        else:
            yield "data", f"allowed: {', '.join((*SOURCES, *CORPORA))}"
        if self.merge and not self.lora:
            yield "merge", "it has no effect without lora"

    def text(self) -> TextSource:
        """Returns where the text comes from, unless it is a corpus that is known by name."""
        options = {name: getattr(self, name) for name in TextSource.model_fields if name != "source"}
        return TextSource.model_construct(**{**options, "source": self.data})


def model_class(checkpoint: str) -> Any:
    """Returns the class of ours that loads a checkpoint: one of our own, or a stock GPT-2 or Llama.

    Raises:
        FinetuneError: there is no such checkpoint, or it is of another kind.
    """
    if os.path.exists(checkpoint) and not os.path.exists(os.path.join(checkpoint, "config.json")):
        raise FinetuneError(f"checkpoint={checkpoint!r} is not valid: it has no config.json.")
    try:
        model_type = PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")
    except OSError as error:
        raise FinetuneError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error
    family = str(model_type).removeprefix("whatwhere_")
    if family not in FAMILIES:
        allowed = [*FAMILIES, *(f"whatwhere_{name}" for name in FAMILIES)]
        raise FinetuneError(
            f"checkpoint={checkpoint!r} is not valid: its model_type is {model_type!r}. Allowed: "
            f"{', '.join(map(repr, allowed))}."
        )
    return FAMILIES[family]


def load_model(
    checkpoint: str,
    position_encoding: str | None = None,
    position_encoding_parameters: dict | None = None,
    rope_parameters: dict | None = None,
) -> tuple[Any, set[str]]:
    """Loads one of our models, or a stock GPT-2 or Llama as one of ours; None keeps what the checkpoint has.

    Returns:
        the model, and the names of the parameters that the checkpoint does not have.

    Raises:
        FinetuneError: there is no such checkpoint, it is of another kind, or the encoding is not possible.
    """
    loader = model_class(checkpoint)
    asked = {
        "position_encoding": position_encoding,
        "position_encoding_parameters": position_encoding_parameters,
        "rope_parameters": rope_parameters,
    }
    changes = {key: value for key, value in asked.items() if value is not None}
    try:
        model, report = loader.from_pretrained(checkpoint, output_loading_info=True, **changes)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise FinetuneError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error
    return model, set(report["missing_keys"])


def finetune(
    settings: Settings,
    output: str | os.PathLike[str],
    *,
    resume: bool = False,
    data_dir: str | None = None,
    arguments: list[str] | None = None,
) -> dict[str, Any]:
    """Fine-tunes a checkpoint into the folder `output` and returns the contents of `results.json`.

    Args:
        settings: of the run.
        output: a folder that does not exist or is empty, or with `resume` that of the interrupted run.
        resume: continue from the newest checkpoint.
        data_dir: the folder of local data.
        arguments: the command line, for the records; by default that of this process.

    Raises:
        ValueError: the checkpoint, the data or a setting is not valid.
        TrainingError: the output folder is not usable.
        Interrupted: SIGINT or SIGTERM arrived; a checkpoint has been written.
    """
    if settings.data == "local":
        if settings.train_file and data_dir:
            raise FinetuneError(f"data_dir={data_dir!r} has no effect with train_file.")
        find_files(settings.text(), data_dir)
    folder = RunFolder(Path(output), "finetune.json")
    with folder.lock():
        folder.check(settings.model_dump(), resume=resume)
        return _finetune(settings, folder, resume, data_dir, arguments)


def _finetune(
    options: Settings, folder: RunFolder, resume: bool, data_dir: str | None, arguments: list[str] | None
) -> dict[str, Any]:
    output = folder.path
    processes = PartialState(cpu=options.cpu or not torch.accelerator.is_available())
    set_seed(options.seed)
    model, fresh = load_model(
        options.checkpoint, options.position_encoding, options.position_encoding_parameters, options.rope_parameters
    )
    tokenizer, blocks, split, note = _load_data(options, model.config, data_dir)
    if processes.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        folder.write_record(options.model_dump())
        if options.train_file and not options.validation_file:
            print(note)
        if fresh:
            print(f"newly initialised: {', '.join(sorted(fresh))}")
    if options.lora:
        converted = options.position_encoding is not None or not _is_ours(options.checkpoint)
        if converted and processes.is_main_process and not resume:
            model.save_pretrained(output / "base")
            tokenizer.save_pretrained(output / "base")
        processes.wait_for_everyone()
        model = _add_adapter(
            model, options, base=str(output / "base") if converted else options.checkpoint, fresh=fresh
        )

    with stop_signals() as received:
        trainer = _trainer(model, options, output, blocks, received)
        last = _newest_checkpoint(folder, processes.num_processes) if resume else None
        # The same numbers are drawn in training as without this evaluation.
        with torch.random.fork_rng():
            before = trainer.evaluate()["eval_loss"]
        trainer.train(resume_from_checkpoint=last)
    if received and trainer.state.global_step < options.steps:
        raise Interrupted(received[0], trainer.state.global_step)

    loss = trainer.evaluate()["eval_loss"]
    if not loss < HOPELESS:
        raise TrainingError(f"eval_loss={loss!r}: training has diverged. Nothing was saved after the last checkpoint.")
    if not processes.is_main_process:
        return {}
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if options.merge:
        trained.save_pretrained(output / "adapter")
        trained = trained.merge_and_unload()
    trained.save_pretrained(output)
    tokenizer.save_pretrained(output)
    labels = blocks["test"][:]["input_ids"][:, 1:].flatten()
    size = int(bytes_per_token(tokenizer)[labels].sum())

    def metrics(loss: float) -> dict[str, Any]:
        perplexity = {"perplexity": {"value": math.exp(loss)}} if loss < HOPELESS else {}
        return {"bits_per_byte": {"value": loss * len(labels) / (math.log(2) * size)}, **perplexity}

    whole = not options.lora or options.merge
    results = {
        "metrics": metrics(loss),
        "metrics_before": metrics(before) if math.isfinite(before) else {},
        "data": describe_data(
            {"source": options.data, "dataset": options.dataset, "splits": options.splits, "split": split}
        ),
        "length": blocks["test"][0]["input_ids"].shape[0],
        "tokens": len(labels),
        "base_model": None if os.path.exists(options.checkpoint) else options.checkpoint,
        "base_weights_sha256": weights_fingerprint(options.checkpoint) if os.path.exists(options.checkpoint) else None,
        "recipe": options.model_dump(),
        "seed": options.seed,
        "steps": trainer.state.global_step,
        "newly_initialised": sorted(fresh),
        **({"weights_sha256": weights_fingerprint(output)} if whole else {}),
        **provenance("finetune", arguments),
    }
    write_json(output / "results.json", results)
    if whole:
        write_card(output)
    return results


def _load_data(options: Settings, config: Any, data_dir: str | None) -> tuple[Any, dict[str, Any], str, str]:
    """Returns the tokenizer, the blocks of `train` and `test`, the split that serves as `test`, and what it is."""
    length = config.max_position_embeddings if options.sequence_length is None else options.sequence_length
    limit = max_length(config)
    if limit is not None and length > limit:
        raise FinetuneError(
            f"sequence_length={length!r} is not valid: position_encoding={config.position_encoding!r} reaches "
            f"{limit} tokens."
        )
    try:
        tokenizer = build_tokenizer(options.tokenizer or options.checkpoint)
    except ValueError as error:
        raise FinetuneError(f"no tokenizer: give one with --tokenizer. ({error})") from error
    if len(tokenizer) > config.vocab_size:
        raise FinetuneError(
            f"tokenizer={options.tokenizer!r} is not valid: it has {len(tokenizer)} tokens, the model has "
            f"{config.vocab_size}."
        )
    corpus = _load_corpus(options, data_dir)
    split = "test" if "test" in corpus else "validation"
    train: Any
    if options.streaming:
        train = datasets.IterableDataset.from_generator(
            endless_blocks,
            gen_kwargs={"documents": corpus["train"], "tokenizer": tokenizer, "sequence_length": length},
        )
        train = train.shuffle(seed=options.seed, buffer_size=options.shuffle_buffer).with_format("torch")
    else:
        train = make_blocks(corpus["train"], tokenizer, sequence_length=length, name="the train split")
    test = make_blocks(
        corpus[split], tokenizer, sequence_length=length, limit=options.evaluation_blocks, name=f"the {split} split"
    )
    return tokenizer, {"train": train, "test": test}, split, corpus[split].info.description


def _load_corpus(options: Settings, data_dir: str | None) -> dict[str, Any]:
    """Returns the splits of the text; of a corpus that is known by name, `train` and one held-out split."""
    if options.data not in CORPORA:
        return load_text(options.text(), data_dir=data_dir, pieces=True)
    known = CORPORA[options.data].local if data_folder(data_dir) else CORPORA[options.data].hub
    splits = ("train", "test" if "test" in known else "validation")
    return {split: load_corpus(options.data, split, data_dir=data_dir, streaming=options.streaming) for split in splits}


def _add_adapter(model: Any, options: Settings, *, base: str, fresh: set[str]) -> Any:
    """Returns the model with low-rank adapters on its linear layers; `base` is where the model itself is saved."""
    # peft writes this name down as that of the adapter's base: a folder must be found from anywhere.
    model.name_or_path = os.path.abspath(base) if os.path.exists(base) else base
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        # peft takes fractions, too.
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules="all-linear",
        # GPT-2's layers hold their weights transposed.
        fan_in_fan_out=model.config.model_type == "whatwhere_gpt2",
        # Weights that hold nothing yet are trained in full. They are named by their modules: peft passes over a name
        # that is not one.
        modules_to_save=sorted({name.rpartition(".")[0] for name in fresh}) or None,
    )
    return peft.get_peft_model(model, config)


def _trainer(model: Any, options: Settings, output: Path, blocks: dict[str, Any], received: list[int]) -> Trainer:
    class StopOnSignal(TrainerCallback):
        """Saves and stops after the step in which a signal arrives."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if received:
                control.should_save = control.should_training_stop = True

    renamed: dict[str, Any] = {_CHECKPOINTING: options.activation_checkpointing}
    default_rate = 2e-4 if options.lora else 5e-5
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output / "checkpoints"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=default_rate if options.learning_rate is None else options.learning_rate,
            lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
            warmup_steps=options.warmup_steps,
            weight_decay=options.weight_decay,
            logging_steps=10,
            save_steps=options.save_every,
            save_total_limit=2,
            seed=options.seed,
            bf16=options.bf16,
            **renamed,
            use_cpu=options.cpu or not torch.accelerator.is_available(),
            report_to="none",
        ),
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        data_collator=lambda rows: add_labels({"input_ids": torch.stack([row["input_ids"] for row in rows])}),
        callbacks=[StopOnSignal()],
    )


def _newest_checkpoint(folder: RunFolder, processes: int) -> str | None:
    """Returns the newest of Trainer's checkpoints after checking its files; None if there is none.

    Trainer itself continues silently if the states of the optimiser or of the random numbers are missing.

    Raises:
        FinetuneError: a file is missing, cut or changed.
    """
    folders = folder.checkpoints()
    while folders:
        try:
            # Trainer writes this file last.
            json.loads((folders[-1] / "trainer_state.json").read_text(encoding="utf-8"))
            break
        except (OSError, ValueError):
            print(f"{str(folders.pop())!r} was not written to its end: looking for an earlier checkpoint")
    if not folders:
        return None
    ranks = [""] if processes == 1 else [f"_{rank}" for rank in range(processes)]
    names = ["optimizer.pt", "scheduler.pt", *(f"rng_state{rank}.pth" for rank in ranks)]
    weights = sorted(folders[-1].glob("*.safetensors"))
    for file in (*[folders[-1] / name for name in names], *(weights or [folders[-1] / "model.safetensors"])):
        if reason := _damage(file):
            earlier = f"Delete this folder to continue from {folders[-2].name!r}" if folders[1:] else "Start again"
            raise FinetuneError(f"{str(file)!r} is damaged: {reason}. {earlier}.")
    return str(folders[-1])


def _damage(file: Path) -> str | None:
    """Returns what is wrong with a file of safetensors or `torch.save`, or None."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return None
        with zipfile.ZipFile(file) as archive:
            # The checksums of all parts.
            return "it was changed" if archive.testzip() else None
    except FileNotFoundError:
        return "it is missing"
    except (OSError, SafetensorError, zipfile.BadZipFile) as error:
        return str(error)


def _is_ours(checkpoint: str) -> bool:
    return str(PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")).startswith("whatwhere_")

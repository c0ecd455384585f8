"""Fine-tuning with Transformers' `Trainer`, fully or with LoRA, with the checkpoint's encoding or a new one.

The output folder contains a full model, or with `lora` and without `merge` an adapter. If the encoding is new or the
checkpoint is a stock model, the adapter's base model is saved in `base/`. Full models get our model card, adapters get
peft's.

Checkpoints are written by Trainer. Resuming never executes code from them: weights are read as safetensors, the states
of optimiser, schedule and random numbers with `torch.load(weights_only=True)`, and `training_args.bin`, a pickle, is
not read. Do not load that file yourself from a folder you do not trust.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import peft
import torch
from accelerate import PartialState
from pydantic import Field
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedConfig, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from whatwhere.model_card import weights_fingerprint
from whatwhere.position_registry import max_length

from ..cards.command import write_card
from ..checks import Checked, Count, Fraction, NotNegative, NotNegativeFloat, Positive, Refused
from ..conversion import RECORD, card_metadata, convert, load_source
from ..data.corpora import CORPORA, load_corpus
from ..data.corpus import load_text
from ..data.pack import IGNORED, add_labels
from ..data.prepared import TextBlocks
from ..data.rows import data_folder
from ..data.source import SOURCES, TextSource, find_files
from ..data.tokenize import build_tokenizer
from ..evaluation.checkpoints import checked_loading
from ..evaluation.data_description import describe_data
from ..evaluation.results import provenance, read_json, write_json
from .data import TrainingData, tokenise
from .distillation import AttentionTargets, LogitTargets, logit_loss
from .errors import Interrupted, TrainingError
from .held_out import HOPELESS
from .model import FAMILIES
from .progress import stop_signals
from .recipe import DataRecipe
from .run_folder import RunFolder

# The name before Transformers renamed it.
_CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


# The place of each process in a stream, beside Trainer's files.
STREAM = "stream-{}-of-{}.json"
# Tokens drawn from a source's predictions; deleted at the end.
TARGETS = "targets.bin"

Length = Annotated[int, Field(ge=2)]


class FinetuneError(Refused):
    """Fine-tuning cannot run; the message gives the reasons."""

    what = "the command"


class Settings(Checked):
    """The settings of a run, saved in `finetune.json`; the options of `whatwhere finetune` are made from them."""

    checkpoint: str = Field(description="folder or Hub id")
    position_encoding: str | list[str] | None = Field(
        None, description="a name, or a list such as '[rope, cope]'; default: the checkpoint's own"
    )
    position_encoding_parameters: dict | None = Field(None, description="parameters of the encoding")
    rope_parameters: dict | None = Field(None, description="default: the checkpoint's own")
    train_file: list[str] | None = Field(None, description="your text: text, jsonl or parquet files, folders, patterns")
    validation_file: list[str] | None = Field(None, description="text to evaluate on; default: a part of --train-file")
    data: str = Field("stdlib", description="stdlib (default), hub, local, or a corpus such as pg19")
    dataset: str | None = Field(None, description="data set of --data hub")
    dataset_config: str | None = Field(None, description="its configuration")
    splits: dict | None = Field(None, description="the source's part for each of our splits (scripts/data/corpus.py)")
    text_field: str = Field("text", description="column of the documents; default text")
    streaming: bool = Field(False, description="stream the training text")
    shuffle_buffer: Count = Field(256, description="documents in the shuffle buffer of --streaming; default 256")
    tokenizer: str | None = Field(None, description="default: the checkpoint's own")
    sequence_length: Length | None = Field(None, description="default: the model's max_position_embeddings")
    evaluation_blocks: Count = Field(256, description="sequences to evaluate on; default 256")
    steps: Count = Field(500, description="optimiser steps; default 500")
    batch_size: Count = Field(8, description="sequences per device; default 8")
    accumulation: Count = Field(1, description="batches per step; default 1")
    learning_rate: Positive | None = Field(None, description="default 5e-5, with --lora 2e-4")
    new_learning_rate: Positive | None = Field(
        None, description="of parameters that a new encoding adds; default: --learning-rate"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="cosine (default), linear, constant"
    )
    warmup_steps: NotNegative = Field(0, description="default 0")
    weight_decay: NotNegativeFloat = Field(0.0, description="default 0")
    save_every: Count = Field(100, description="steps between checkpoints; default 100")
    seed: NotNegative = Field(0, description="default 0")
    bf16: bool = Field(False, description="mixed precision")
    activation_checkpointing: bool = Field(False, description="use less memory and more time")
    dp_shard: Count = Field(1, description="processes that share the model and the optimiser (FSDP2); default 1")
    cpu: bool = Field(False, description="do not use a GPU")
    lora: bool = Field(False, description="train low-rank adapters (peft)")
    lora_rank: Count = Field(16, description="default 16")
    lora_alpha: Positive = Field(32.0, description="default 32")
    lora_dropout: Fraction = Field(0.0, description="default 0")
    merge: bool = Field(False, description="with --lora: save a full model")
    distill_from: str | None = Field(None, description="the source of a conversion, to learn from as well")
    distill: Literal["logits", "attention"] = Field(
        "logits", description="logits (default): its predictions; attention: its attention outputs, by layer"
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields (field, reason) for problems across fields."""
        if self.data in CORPORA:
            for name in set(TextSource.model_fields) - {"source", "streaming"}:
                if getattr(self, name) != TextSource.model_fields[name].default:
                    yield name, f"it has no effect with data={self.data!r}"
        elif self.data in SOURCES:
            for name, reason in TextSource.problems(self.data_recipe()):
                yield name, reason.replace("source=", "data=")
        else:
            yield "data", f"allowed: {', '.join((*SOURCES, *CORPORA))}"
        for needed, names in (
            ("lora", ("merge", "lora_rank", "lora_alpha", "lora_dropout")),
            ("streaming", ("shuffle_buffer",)),
            ("distill_from", ("distill",)),
        ):
            for name in names:
                if not getattr(self, needed) and getattr(self, name) != Settings.model_fields[name].default:
                    yield name, f"it has no effect without {needed}"
        if self.warmup_steps >= self.steps:
            yield "warmup_steps", f"it must be below steps={self.steps!r}"
        if self.distill_from is not None and self.streaming:
            yield "distill_from", "it needs text that is not streamed"
        if self.distill == "attention" and (self.dp_shard > 1 or self.activation_checkpointing):
            yield "distill", "it needs whole weights and activations. Allowed with dp_shard and checkpointing: 'logits'"
        if self.lora and self.dp_shard > 1:
            yield "dp_shard", "adapters are not sharded. Allowed with lora: 1"

    def data_recipe(self, **changes: Any) -> DataRecipe:
        """Returns the settings of the data, for `load_text` if they are not of a named corpus."""
        options = {name: getattr(self, name) for name in DataRecipe.model_fields if name in Settings.model_fields}
        return DataRecipe.model_construct(**{**options, "source": self.data, **changes})


def _model_type(checkpoint: str) -> str:
    with checked_loading(checkpoint):
        return str(PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type"))


def load_model(settings: Settings, distributed_config: Any = None) -> tuple[Any, set[str]]:
    """Loads one of our models, or a stock model as one of ours, with the position encoding of the settings.

    Returns:
        the model, and the names of its new parameters, also of those that `whatwhere convert` has added.

    Raises:
        ValueError: there is no such checkpoint, it has another model type, or the encoding is not valid.
    """
    checkpoint, model_type = settings.checkpoint, _model_type(settings.checkpoint)
    family = FAMILIES.get(model_type.removeprefix("whatwhere_"))
    encoding = (settings.position_encoding, settings.position_encoding_parameters)
    record = Path(checkpoint) / RECORD
    known = set(read_json(record)["new_parameters"] if record.is_file() else ())
    if family is None or encoding != (None, None):
        if distributed_config is not None:
            raise FinetuneError(
                f"dp_shard={settings.dp_shard!r} is not valid with another position encoding. Use `whatwhere convert` "
                "first."
            )
        model, new, _ = convert(load_source(checkpoint), *encoding, settings.rope_parameters)
        return model, {*new, *known.intersection(dict(model.named_parameters()))}
    changes = {} if settings.rope_parameters is None else {"rope_parameters": settings.rope_parameters}
    if distributed_config is not None:
        changes["distributed_config"] = distributed_config
    with checked_loading(checkpoint):
        model, report = family.from_pretrained(checkpoint, output_loading_info=True, **changes)
    return model, {*report["missing_keys"], *known}


def finetune(
    settings: Settings,
    output: str | os.PathLike[str],
    *,
    resume: bool | Literal["auto"] = False,
    data_dir: str | None = None,
    arguments: list[str] | None = None,
) -> dict[str, Any]:
    """Fine-tunes a checkpoint into the folder `output` and returns the contents of `results.json`.

    Args:
        output: a folder that does not exist or is empty, or with `resume` the folder of the interrupted run.
        resume: continue from the newest checkpoint. "auto" also begins a new run, and only returns the results of a
            finished one.

    Raises:
        ValueError: the checkpoint, the data or a setting is not valid.
        TrainingError: the output folder is not usable.
        Interrupted: SIGINT or SIGTERM arrived; a checkpoint has been written.
    """
    if settings.data == "local":
        if settings.train_file and data_dir:
            raise FinetuneError(f"data_dir={data_dir!r} has no effect with train_file.")
        find_files(settings.data_recipe(), data_dir)
    folder = RunFolder(Path(output), "finetune.json")
    with folder.lock():
        resume, results = folder.begin(resume, settings.model_dump())
        if results is not None:
            return results
        if resume and settings.dp_shard > 1:
            raise FinetuneError(
                f"resume={resume!r} is not valid with dp_shard={settings.dp_shard!r}: Trainer saves no optimiser state "
                "of sharded models. Use `whatwhere train`, or choose another folder."
            )
        return _finetune(settings, folder, resume, data_dir, arguments)


def _finetune(
    options: Settings, folder: RunFolder, resume: bool, data_dir: str | None, arguments: list[str] | None
) -> dict[str, Any]:
    output = folder.path
    processes = PartialState(cpu=options.cpu or not torch.accelerator.is_available())
    set_seed(options.seed)
    sharding = _sharding(options, processes.num_processes)
    model, fresh = load_model(options, sharding)
    data = _load_data(options, model.config, data_dir)
    ((split, held_out),) = data.held_out.items()
    if options.new_learning_rate is not None and not fresh:
        raise FinetuneError(f"new_learning_rate={options.new_learning_rate!r} is not valid: no parameter is new.")
    if options.distill_from is not None:
        with checked_loading(options.distill_from):
            vocabulary = AutoConfig.from_pretrained(options.distill_from).vocab_size
        if vocabulary != model.config.vocab_size:
            raise FinetuneError(
                f"distill_from={options.distill_from!r} is not valid: it has {vocabulary} tokens, the checkpoint has "
                f"{model.config.vocab_size}."
            )
    attention = None
    if options.distill == "attention":
        attention = AttentionTargets(str(options.distill_from), model.to(processes.device))
    if processes.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        folder.write_record(options.model_dump())
        if data.note:
            print(data.note)
        if fresh:
            print(f"new parameters: {', '.join(sorted(fresh))}")
    if options.distill_from is not None and options.distill == "logits":
        # The source and the model are not in memory at the same time.
        del model
        count = options.steps * options.batch_size * options.accumulation * processes.num_processes
        targets = LogitTargets(data.batches.blocks, count, options.seed, output / TARGETS, vocabulary)
        targets.write(options.distill_from, options.batch_size, options.seed, processes)
        data.batches.blocks = targets
        set_seed(options.seed)
        model, fresh = load_model(options, sharding)
    if options.lora:
        stock = not _model_type(options.checkpoint).startswith("whatwhere_")
        converted = options.position_encoding is not None or options.position_encoding_parameters is not None or stock
        if converted and processes.is_main_process and not resume:
            model.save_pretrained(output / "base")
            data.tokenizer.save_pretrained(output / "base")
        processes.wait_for_everyone()
        model = _add_adapter(
            model, options, base=str(output / "base") if converted else options.checkpoint, fresh=fresh
        )

    with stop_signals() as received:
        trainer = _trainer(model, options, output, data.batches, held_out, received, fresh, attention)
        last = _newest_checkpoint(folder, options.streaming) if resume else None
        if last and options.streaming:
            states = [json.loads(file.read_text(encoding="utf-8")) for file in _stream_files(Path(last))]
            data.batches.load_state_dict(states, (processes.process_index, processes.num_processes))
        # Keeps the random numbers of training independent of this evaluation.
        with torch.random.fork_rng():
            before = trainer.evaluate()["eval_loss"]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The optimiser must not be given the whole weights that an evaluation leaves.
                module.reshard()
        trainer.train(resume_from_checkpoint=last)
    if received and trainer.state.global_step < options.steps:
        raise Interrupted(received[0], trainer.state.global_step)

    loss = trainer.evaluate()["eval_loss"]
    if not loss < HOPELESS:
        raise TrainingError(f"eval_loss={loss!r}: training has diverged. Nothing was saved after the last checkpoint.")
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if options.dp_shard > 1:
        # All processes have a part of the weights.
        trained.save_pretrained(output)
    if not processes.is_main_process:
        return {}
    whole = not options.lora or options.merge
    if options.merge:
        trained.save_pretrained(output / "adapter")
        trained = trained.merge_and_unload()
    if options.dp_shard == 1:
        trained.save_pretrained(output)
    data.tokenizer.save_pretrained(output)
    (output / TARGETS).unlink(missing_ok=True)
    if options.distill == "attention" and whole:
        # The next run may still give these their own learning rate.
        write_json(output / RECORD, {"new_parameters": sorted(fresh)})
    tokens = held_out[range(len(held_out))]["input_ids"]
    labels = tokens[:, 1:].flatten()
    size = None if data.bytes_per_token is None else int(data.bytes_per_token[labels].sum())

    def metrics(loss: float) -> dict[str, Any]:
        bits = {"bits_per_byte": {"value": loss * len(labels) / (math.log(2) * size)}} if size else {}
        return bits | ({"perplexity": {"value": math.exp(loss)}} if loss < HOPELESS else {})

    stated = card_metadata(options.checkpoint)
    local = Path(options.checkpoint) if os.path.exists(options.checkpoint) else None
    results: dict[str, Any] = {
        "metrics": metrics(loss),
        "metrics_before": metrics(before) if math.isfinite(before) else {},
        "data": describe_data(
            {"source": options.data, "dataset": options.dataset, "splits": options.splits, "split": split}
        ),
        "length": held_out.sequence_length,
        "tokens": len(labels),
        "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "base_model": stated.get("base_model") if local else options.checkpoint,
        "base_folder": local.resolve().name if local else None,
        "base_weights_sha256": weights_fingerprint(local) if local else None,
        "licence": stated.get("license"),
        **{key: stated[key] for key in ("license_name", "license_link") if key in stated},
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


def _sharding(options: Settings, processes: int) -> DistributedConfig | None:
    """Returns the layout of a sharded model, for `from_pretrained`; None if each process has the whole model."""
    if options.dp_shard == 1:
        return None
    if processes % options.dp_shard:
        raise FinetuneError(
            f"dp_shard={options.dp_shard!r} is not valid: it must divide the number of processes, {processes}."
        )
    copies = processes // options.dp_shard
    if copies == 1:
        return DistributedConfig(fsdp_size=options.dp_shard)
    if "dp_replicate_size" not in DistributedConfig.__dataclass_fields__:
        raise FinetuneError(
            f"dp_shard={options.dp_shard!r} is not valid: with this version of Transformers, it must be the number of "
            f"processes, {processes}."
        )
    return DistributedConfig(fsdp_size=options.dp_shard, dp_replicate_size=copies)


def _load_data(options: Settings, config: Any, data_dir: str | None) -> TrainingData:
    """Returns the data of the run."""
    length = config.max_position_embeddings if options.sequence_length is None else options.sequence_length
    limit = max_length(config)
    if limit is not None and length > limit:
        raise FinetuneError(
            f"sequence_length={length!r} is not valid: position_encoding={config.position_encoding!r} supports at "
            f"most {limit} tokens."
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
    data = options.data_recipe(sequence_length=length, tokenizer=options.tokenizer or options.checkpoint)
    texts = _load_corpus(options, data_dir)
    batch_size = options.batch_size * PartialState().num_processes
    return tokenise(data, [texts], tokenizer, limit=options.evaluation_blocks, batch_size=batch_size, seed=options.seed)


def _load_corpus(options: Settings, data_dir: str | None) -> dict[str, Any]:
    """Returns the splits of the text; for a named corpus, `train` and one held-out split."""
    if options.data not in CORPORA:
        texts = load_text(options.data_recipe(), data_dir=data_dir, pieces=True)
        return {split: rows for split, rows in texts.items() if split != "validation" or "test" not in texts}
    known = CORPORA[options.data].local if data_folder(data_dir) else CORPORA[options.data].hub
    splits = ("train", "test" if "test" in known else "validation")
    return {split: load_corpus(options.data, split, data_dir=data_dir, streaming=options.streaming) for split in splits}


def _add_adapter(model: Any, options: Settings, *, base: str, fresh: set[str]) -> Any:
    """Returns the model with low-rank adapters on its linear layers; `base` is where the model itself is saved."""
    # peft saves this as the name of the base model; an absolute path is valid from every folder.
    model.name_or_path = os.path.abspath(base) if os.path.exists(base) else base
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        # peft accepts floats.
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules="all-linear",
        # The weights of GPT-2's Conv1D layers are transposed.
        fan_in_fan_out=model.config.model_type == "whatwhere_gpt2",
        # Newly initialised parameters are trained in full. peft takes names of modules, not of parameters.
        modules_to_save=sorted({name.rpartition(".")[0] for name in fresh}) or None,
    )
    return peft.get_peft_model(model, config)


def _trainer(
    model: Any,
    options: Settings,
    output: Path,
    batches: Any,
    held_out: TextBlocks,
    received: list[int],
    fresh: set[str],
    attention: AttentionTargets | None,
) -> Trainer:
    class StopOnSignal(TrainerCallback):
        """Saves and stops after the step in which a signal arrives."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if received:
                control.should_save = control.should_training_stop = True

    class SaveStream(TrainerCallback):
        """Writes each process's place in the stream into the checkpoint."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(folder / STREAM.format(args.process_index, args.world_size), batches.state_dict())

    new = {id(parameter) for name, parameter in model.named_parameters() if original_name(name) in fresh}
    if attention is not None:
        attention.freeze(model, new)

    class FinetuneTrainer(Trainer):
        """Gives new parameters their learning rate, distils, and takes the batches of a stream as they are."""

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            targets = inputs.pop("targets", None)
            if not model.training or options.distill_from is None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if attention is not None:
                loss = attention.loss(model, {name: inputs[name] for name in inputs if name != "labels"})
            else:
                text, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                loss = logit_loss(outputs.logits, targets)
            if num_items_in_batch is not None:
                # The last step of an epoch has fewer parts, and a smaller one. Otherwise, Trainer divides by itself.
                part = inputs["labels"][:, 1:].ne(IGNORED).sum()
                loss = loss * part * self.accelerator.num_processes / num_items_in_batch
            return loss if attention is not None else (text + loss) / 2

        def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
            optimizer = super().create_optimizer(*args)
            if options.new_learning_rate is not None:
                for group in list(optimizer.param_groups):
                    moved = [p for p in group["params"] if id(p) in new]
                    group["params"] = [p for p in group["params"] if id(p) not in new]
                    if moved:
                        optimizer.add_param_group({**group, "params": moved, "lr": options.new_learning_rate})
            return optimizer

        def get_train_dataloader(self) -> Any:
            if not options.streaming:
                return super().get_train_dataloader()
            # Each process has its own batches.
            share = (self.args.process_index, self.args.world_size)
            return batches.loader(share, workers=1, pin_memory=not self.args.use_cpu)

    renamed: dict[str, Any] = {_CHECKPOINTING: options.activation_checkpointing}
    default_rate = 2e-4 if options.lora else 5e-5
    return FinetuneTrainer(
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
            # Trainer has no checkpoints of the optimiser of a sharded model.
            save_only_model=options.dp_shard > 1,
            use_cpu=options.cpu or not torch.accelerator.is_available(),
            report_to="none",
            # The stream continues at its place by itself.
            ignore_data_skip=options.streaming,
            remove_unused_columns=False,
        ),
        train_dataset=batches if options.streaming else batches.blocks,
        eval_dataset=held_out,
        data_collator=lambda rows: add_labels({name: torch.stack([row[name] for row in rows]) for name in rows[0]}),
        callbacks=[StopOnSignal(), *([SaveStream()] if options.streaming else [])],
    )


def original_name(name: str) -> str:
    """Returns the name that a parameter has without peft."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".base_layer", "")


def _stream_files(checkpoint: Path) -> list[Path]:
    """Returns the files with the places of all processes in the stream, by rank; empty if one is missing."""
    found = next(checkpoint.glob(STREAM.format("*", "*")), None)
    if found is None:
        return []
    count = int(found.stem.rpartition("-")[2])
    files = [checkpoint / STREAM.format(rank, count) for rank in range(count)]
    return files if all(file.exists() for file in files) else []


def _newest_checkpoint(folder: RunFolder, streaming: bool) -> str | None:
    """Returns the newest complete one of Trainer's checkpoints, which does not check that itself; None without one."""
    for path in reversed(folder.checkpoints()):
        # Trainer writes the last of these files last, and then we write the place in the stream.
        names = ["optimizer.pt", "scheduler.pt", "rng_state*.pth", "*.safetensors", "trainer_state.json"]
        if all(any(path.glob(name)) for name in names) and (not streaming or _stream_files(path)):
            return str(path)
        print(f"{str(path)!r} is incomplete: looking for an earlier checkpoint")
    return None

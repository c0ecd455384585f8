"""Fine-tunes a checkpoint with Transformers' own `Trainer`: fully or with LoRA, with its encoding or a new one.

On a laptop, without a download (continues a model that `python -m whatwhere.scripts.train demo_pope` made):

    python -m whatwhere.scripts.finetune runs/demo_pope --steps 50 --output runs/demo_pope_finetuned

On your own text, files of which a part is held out (what is a document, and which part: see whatwhere.scripts.train):

    python -m whatwhere.scripts.finetune runs/demo_pope --train-file mytext/*.txt --output runs/mine

On a GPU, GPT-2 with CoPE in place of its absolute positions, LoRA on every linear layer, the new position parameters
trained in full, the result merged into one model:

    python -m whatwhere.scripts.finetune openai-community/gpt2 --position-encoding cope --lora --merge \\
        --sequence-length 1024 --batch-size 8 --accumulation 4 --bf16 --activation-checkpointing --output runs/gpt2_cope

On a GPU, a RoPE model trained at 1,024 tokens to 4,096 by YaRN, on books that are read as they are needed:

    python -m whatwhere.scripts.finetune runs/rope --data pg19 --streaming --sequence-length 4096 --batch-size 8 \\
        --accumulation 8 --learning-rate 6e-5 --schedule constant --warmup-steps 20 --output runs/rope_yarn \\
        --rope-parameters \\
        '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "rope_theta": 10000}'

CHECKPOINT is a folder or Hub id of one of our models or of a stock GPT-2 or Llama. Weights that keep their meaning
under a new encoding are loaded; the rest starts anew, and is listed. On several processes, start it with torchrun.

What the output folder holds at its top: without --lora or with --merge a whole model; with --lora alone the adapter,
and if the encoding is new or the checkpoint is a stock one also `base/`, the converted model that the adapter is for.
(The card of an adapter is peft's own; that of a whole model is ours.)
Ctrl-C or SIGTERM writes a checkpoint before the run stops; `--resume` goes on from the newest one.

Checkpoints are Trainer's own. Resuming executes nothing that they hold: weights are read as safetensors, the optimiser,
the schedule and the random states by `torch.load(weights_only=True)`, and `training_args.bin`, a pickle that Trainer
writes, is never read. (Do not load it yourself from a folder that you do not trust.)
"""

import argparse
import itertools
import json
import math
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

from whatwhere.model_card import weights_fingerprint
from whatwhere.position_registry import max_length

from .extras import fail_import

try:
    import datasets
    import peft
    from accelerate import PartialState

    from .data.corpora import CORPORA, load_corpus
    from .data.corpus import DATA_DIR_VARIABLE, SOURCES, find_files, load_text
    from .data.pack import add_labels, iterate_blocks, make_blocks
    from .data.tokenize import build_tokenizer, bytes_per_token
    from .evaluation.card import write_card
    from .evaluation.results import provenance, write_json
    from .training.lock import lock_folder
    from .training.loop import HOPELESS, Interrupted, TrainingError, check_folder, stop_signals
    from .training.model import FAMILIES
    from .training.recipe import differences
except ImportError as error:
    fail_import(__name__, error)

# The name before Transformers renamed it.
_CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


class FinetuneError(ValueError):
    """A fine-tuning that cannot run, with the reason."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m whatwhere.scripts.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("checkpoint", help="folder or Hub id of one of our models, or of a stock GPT-2 or Llama")
    result.add_argument("--output", required=True, metavar="DIR", help="where the run goes")
    result.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the output folder")
    result.add_argument("--position-encoding", metavar="NAME", help="default: the checkpoint's own")
    result.add_argument("--position-encoding-parameters", type=json.loads, metavar="JSON", help="default: none")
    result.add_argument(
        "--rope-parameters", type=json.loads, metavar="JSON", help="in place of the checkpoint's own, as a whole"
    )
    result.add_argument(
        "--train-file",
        nargs="+",
        metavar="FILE",
        help="your own text: text (UTF-8), jsonl or parquet files, folders or patterns",
    )
    result.add_argument(
        "--validation-file",
        nargs="+",
        metavar="FILE",
        help="text to evaluate on; default: a part of --train-file, which is held out",
    )
    result.add_argument(
        "--data",
        choices=(*SOURCES, *CORPORA),
        metavar="SOURCE",
        help=f"{', '.join(SOURCES)}, or a corpus by its name ({', '.join(CORPORA)}); default stdlib, with --train-file "
        "local",
    )
    result.add_argument("--dataset", metavar="ID", help="the Hub dataset of --data hub")
    result.add_argument("--dataset-config", metavar="NAME", help="its configuration")
    result.add_argument("--splits", type=json.loads, metavar="JSON", help="see whatwhere.scripts.data.corpus.load_text")
    result.add_argument(
        "--text-field", default="text", metavar="NAME", help="the documents' column; default %(default)s"
    )
    result.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    result.add_argument("--streaming", action="store_true", help="read the training text as it is needed")
    result.add_argument(
        "--shuffle-buffer",
        type=int,
        default=256,
        metavar="N",
        help="sequences, with --streaming: each step's are drawn from so many; default %(default)s",
    )
    result.add_argument("--tokenizer", metavar="ID", help="default: the checkpoint's own")
    result.add_argument("--sequence-length", type=int, metavar="N", help="default: the model's max_position_embeddings")
    result.add_argument(
        "--evaluation-blocks", type=int, default=256, metavar="N", help="held-out sequences; default 256"
    )
    result.add_argument("--steps", type=int, default=500, metavar="N", help="optimiser steps; default %(default)s")
    result.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="sequences a device; default %(default)s"
    )
    result.add_argument("--accumulation", type=int, default=1, metavar="N", help="batches a step; default %(default)s")
    result.add_argument("--learning-rate", type=float, metavar="X", help="default 5e-5, with --lora 2e-4")
    result.add_argument(
        "--schedule",
        default="cosine",
        choices=("cosine", "linear", "constant"),
        help="of the learning rate after the warm-up; default %(default)s",
    )
    result.add_argument("--warmup-steps", type=int, default=0, metavar="N", help="default %(default)s")
    result.add_argument("--weight-decay", type=float, default=0.0, metavar="X", help="default %(default)s")
    result.add_argument("--save-every", type=int, default=100, metavar="N", help="steps; default %(default)s")
    result.add_argument("--seed", type=int, default=0, metavar="N", help="default %(default)s")
    result.add_argument("--bf16", action="store_true", help="mixed precision")
    result.add_argument("--activation-checkpointing", action="store_true", help="less memory, more time")
    result.add_argument("--cpu", action="store_true", help="use no GPU")
    result.add_argument("--lora", action="store_true", help="train low-rank adapters of all linear layers (peft)")
    result.add_argument("--lora-rank", type=int, default=16, metavar="N", help="default %(default)s")
    result.add_argument("--lora-alpha", type=float, default=32.0, metavar="X", help="default %(default)s")
    result.add_argument("--lora-dropout", type=float, default=0.0, metavar="X", help="default %(default)s")
    result.add_argument(
        "--merge", action="store_true", help="with --lora: save a whole model with the adapter merged in"
    )
    return result


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that make a run what it is, as `finetune.json` holds them."""
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "resume", "data_dir")}
    settings["data"] = _source(options)
    return json.loads(json.dumps(settings))


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
    return FAMILIES[family][1]


def load_model(
    checkpoint: str,
    position_encoding: str | None = None,
    position_encoding_parameters: dict | None = None,
    rope_parameters: dict | None = None,
) -> tuple[Any, set[str]]:
    """Loads one of our models, or a stock GPT-2 or Llama as one of ours.

    Args:
        checkpoint: a folder or Hub id.
        position_encoding: another encoding; None for the checkpoint's own.
        position_encoding_parameters: its parameters; None for the checkpoint's own, or the defaults of another one.
        rope_parameters: Transformers' parameters of RoPE; None for the checkpoint's own.

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


def finetune(options: argparse.Namespace, arguments: list[str] | None = None) -> dict[str, Any]:
    """Fine-tunes as the parsed command line says and returns the contents of `results.json`.

    Raises:
        ValueError: the checkpoint, the data or an option is not valid.
        TrainingError: the output folder is not usable.
        Interrupted: SIGINT or SIGTERM arrived; a checkpoint has been written.
    """
    _check_ranges(options)
    _check_text(options)
    with lock_folder(Path(options.output)):
        return _finetune(options, arguments)


def _finetune(options: argparse.Namespace, arguments: list[str] | None) -> dict[str, Any]:
    output = Path(options.output)
    settings = settings_of(options)
    check_folder(output, resume=options.resume, record="finetune.json")
    if options.resume:
        old = json.loads((output / "finetune.json").read_text(encoding="utf-8"))
        if changed := differences(old, settings):
            raise FinetuneError(
                f"output={str(output)!r} holds a run with other options. Different (before → now): "
                f"{'; '.join(changed)}."
            )
    if options.merge and not options.lora:
        raise FinetuneError("--merge has no effect without --lora.")

    processes = PartialState(cpu=options.cpu or not torch.accelerator.is_available())
    set_seed(options.seed)
    model, fresh = load_model(
        options.checkpoint, options.position_encoding, options.position_encoding_parameters, options.rope_parameters
    )
    tokenizer, blocks, split, note = _load_data(options, model.config)
    if processes.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "finetune.json", settings)
        if options.train_file and not options.validation_file:
            print(note)
        if fresh:
            print(f"newly initialised: {', '.join(sorted(fresh))}")
    if options.lora:
        converted = options.position_encoding is not None or not _is_ours(options.checkpoint)
        if converted and processes.is_main_process and not options.resume:
            model.save_pretrained(output / "base")
            tokenizer.save_pretrained(output / "base")
        processes.wait_for_everyone()
        model = _add_adapter(
            model, options, base=str(output / "base") if converted else options.checkpoint, fresh=fresh
        )

    with stop_signals() as received:
        trainer = _trainer(model, options, blocks, received)
        last = _newest_checkpoint(output / "checkpoints", processes.num_processes) if options.resume else None
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
        "data": {"source": settings["data"], "dataset": options.dataset, "splits": options.splits, "split": split},
        "length": blocks["test"][0]["input_ids"].shape[0],
        "tokens": len(labels),
        "base_model": None if os.path.exists(options.checkpoint) else options.checkpoint,
        "base_weights_sha256": weights_fingerprint(options.checkpoint) if os.path.exists(options.checkpoint) else None,
        "recipe": settings,
        "seed": options.seed,
        "steps": trainer.state.global_step,
        "newly_initialised": sorted(fresh),
        **({"weights_sha256": weights_fingerprint(output)} if whole else {}),
        **provenance("whatwhere.scripts.finetune", arguments),
    }
    write_json(output / "results.json", results)
    if whole:
        write_card(output)
    return results


def _check_ranges(options: argparse.Namespace) -> None:
    least = {
        **dict.fromkeys(("steps", "batch_size", "accumulation", "save_every", "evaluation_blocks", "lora_rank"), 1),
        "shuffle_buffer": 1,
        "sequence_length": 2,
        **dict.fromkeys(("warmup_steps", "weight_decay", "seed"), 0),
    }
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise FinetuneError(f"--{name.replace('_', '-')}={value!r} is not valid: it must be at least {minimum}.")
    if options.learning_rate is not None and not options.learning_rate > 0:
        raise FinetuneError(f"--learning-rate={options.learning_rate!r} is not valid: it must be greater than 0.")
    if not 0 <= options.lora_dropout < 1:
        raise FinetuneError(f"--lora-dropout={options.lora_dropout!r} is not valid: it must be in [0, 1).")


def _source(options: argparse.Namespace) -> str:
    return options.data or ("local" if options.train_file else "stdlib")


def _check_text(options: argparse.Namespace) -> None:
    """Refuses options of the text that do not fit together, and local files that are not there; reads nothing."""
    source = _source(options)
    useless: tuple[str, ...]
    if source in CORPORA:
        useless = ("dataset", "dataset_config", "splits", "text_field", "train_file", "validation_file")
    elif source == "local":
        useless = ("dataset", "dataset_config", *(("data_dir",) if options.train_file else ()))
    else:
        useless = ("train_file", "validation_file")
    for name in useless:
        value = getattr(options, name)
        if value is not None and (name, value) != ("text_field", "text"):
            what = "--train-file" if name == "data_dir" else f"--data {source}"
            raise FinetuneError(f"--{name.replace('_', '-')}={value!r} has no effect with {what}.")
    if options.streaming and source == "stdlib":
        raise FinetuneError("--streaming has no effect with --data stdlib.")
    if source == "local":
        find_files(
            options.data_dir,
            options.splits,
            options.train_file,
            options.validation_file,
            streaming=options.streaming,
        )


def _load_data(options: argparse.Namespace, config: Any) -> tuple[Any, dict[str, Any], str, str]:
    """Returns the tokenizer, the blocks of `train` and `test`, the split that serves as `test`, and what it is."""
    length = config.max_position_embeddings if options.sequence_length is None else options.sequence_length
    limit = max_length(config)
    if limit is not None and length > limit:
        raise FinetuneError(
            f"--sequence-length={length!r} is not valid: position_encoding={config.position_encoding!r} reaches "
            f"{limit} tokens."
        )
    try:
        tokenizer = build_tokenizer(options.tokenizer or options.checkpoint)
    except ValueError as error:
        raise FinetuneError(f"no tokenizer: give one with --tokenizer. ({error})") from error
    if len(tokenizer) > config.vocab_size:
        raise FinetuneError(
            f"--tokenizer={options.tokenizer!r} is not valid: it has {len(tokenizer)} tokens, the model has "
            f"{config.vocab_size}."
        )
    corpus = _load_corpus(options)
    split = "test" if "test" in corpus else "validation"
    train: Any
    if options.streaming:
        train = datasets.IterableDataset.from_generator(
            _endless_blocks, gen_kwargs={"documents": corpus["train"], "tokenizer": tokenizer, "length": length}
        )
        train = train.shuffle(seed=options.seed, buffer_size=options.shuffle_buffer).with_format("torch")
    else:
        train = make_blocks(corpus["train"], tokenizer, sequence_length=length, name="the train split")
    test = make_blocks(
        corpus[split], tokenizer, sequence_length=length, limit=options.evaluation_blocks, name=f"the {split} split"
    )
    return tokenizer, {"train": train, "test": test}, split, corpus[split].info.description


def _load_corpus(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the splits of the text; of a corpus that is known by name, `train` and one held-out split."""
    source = _source(options)
    if source not in CORPORA:
        return load_text(
            source,
            data_dir=options.data_dir,
            dataset=options.dataset,
            dataset_config=options.dataset_config,
            splits=options.splits,
            text_field=options.text_field,
            train_file=options.train_file,
            validation_file=options.validation_file,
            streaming=options.streaming,
            pieces=True,
        )
    local = options.data_dir or os.environ.get(DATA_DIR_VARIABLE)
    known = CORPORA[source].local if local else CORPORA[source].hub
    splits = ("train", "test" if "test" in known else "validation")
    return {
        split: load_corpus(source, split, data_dir=options.data_dir, streaming=options.streaming) for split in splits
    }


def _endless_blocks(documents: Any, tokenizer: Any, length: int) -> Iterator[dict[str, Any]]:
    """Yields blocks of documents in their order, from the beginning again when they end."""
    for epoch in itertools.count():
        documents.set_epoch(epoch)
        found = False
        for block in iterate_blocks(documents, tokenizer, length, "concat"):
            found = True
            yield block
        if not found:
            raise FinetuneError(f"--sequence-length={length!r} is not valid: the text holds fewer tokens.")


def _add_adapter(model: Any, options: argparse.Namespace, *, base: str, fresh: set[str]) -> Any:
    """Returns the model with low-rank adapters on its linear layers; `base` is where the model itself is saved."""
    # peft writes this name down as that of the adapter's base: a folder must be found from anywhere.
    model.name_or_path = os.path.abspath(base) if os.path.exists(base) else base
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear",
        # GPT-2's layers hold their weights transposed.
        fan_in_fan_out=model.config.model_type == "whatwhere_gpt2",
        # Weights that hold nothing yet are trained in full. They are named by their modules: peft passes over a name
        # that is not one.
        modules_to_save=sorted({name.rpartition(".")[0] for name in fresh}) or None,
    )
    return peft.get_peft_model(model, config)


def _trainer(model: Any, options: argparse.Namespace, blocks: dict[str, Any], received: list[int]) -> Trainer:
    class StopOnSignal(TrainerCallback):
        """Saves and stops after the step in which a signal arrives."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if received:
                control.should_save = control.should_training_stop = True

    default_rate = 2e-4 if options.lora else 5e-5
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=os.path.join(options.output, "checkpoints"),
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
            **{_CHECKPOINTING: options.activation_checkpointing},
            use_cpu=options.cpu or not torch.accelerator.is_available(),
            report_to="none",
        ),
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        data_collator=lambda rows: add_labels({"input_ids": torch.stack([row["input_ids"] for row in rows])}),
        callbacks=[StopOnSignal()],
    )


def _newest_checkpoint(checkpoints: Path, processes: int) -> str | None:
    """Returns the newest of Trainer's checkpoints after checking its files; None if there is none.

    Trainer itself goes on without a word if the states of the optimiser or of the random numbers are missing.

    Raises:
        FinetuneError: a file is missing, cut or changed.
    """
    folders = sorted(checkpoints.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
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
            earlier = f"Delete this folder to go on from {folders[-2].name!r}" if folders[1:] else "Start again"
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


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        results = finetune(options, arguments)
    except (ValueError, OSError, TrainingError) as error:
        sys.exit(f"error: {error}")
    except (Interrupted, KeyboardInterrupt) as stop:
        begun = os.path.exists(os.path.join(options.output, "finetune.json"))
        advice = "Go on with the same command and --resume." if begun else "Nothing was written yet: start again."
        print(f"{str(stop).strip() or 'interrupted'}. {advice}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", 2))
    if results:
        for when, key in (("before", "metrics_before"), ("after", "metrics")):
            scores = ", ".join(f"{name} {score['value']:.4f}" for name, score in results[key].items())
            print(f"{options.output}, {when} fine-tuning: {scores}")


if __name__ == "__main__":
    main()

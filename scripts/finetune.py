"""Fine-tunes a checkpoint with Transformers' own `Trainer`: fully or with LoRA, with its encoding or a new one.

On a laptop, without a download (continues a model that `python -m whatwhere.scripts.train demo_pope` made):

    python -m whatwhere.scripts.finetune runs/demo_pope --steps 50 --output runs/demo_pope_finetuned

On a GPU, GPT-2 with CoPE in place of its absolute positions, LoRA on every linear layer, the new position parameters
trained in full, the result merged into one model:

    python -m whatwhere.scripts.finetune openai-community/gpt2 --position-encoding cope --lora --merge \\
        --sequence-length 1024 --batch-size 8 --accumulation 4 --bf16 --activation-checkpointing --output runs/gpt2_cope

CHECKPOINT is a folder or Hub id of one of our models or of a stock GPT-2 or Llama. Weights that keep their meaning
under a new encoding are loaded; the rest starts anew, and is listed. On several processes, start it with torchrun.

What the output folder holds at its top: without --lora or with --merge a whole model; with --lora alone the adapter,
and if the encoding is new or the checkpoint is a stock one also `base/`, the converted model that the adapter belongs to.
Ctrl-C or SIGTERM writes a checkpoint before the run stops; `--resume` goes on from the newest one.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any


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
    result.add_argument("--data", default="stdlib", choices=("stdlib", "hub", "local"), help="default %(default)s")
    result.add_argument("--dataset", metavar="ID", help="the Hub dataset of --data hub")
    result.add_argument("--dataset-config", metavar="NAME", help="its configuration")
    result.add_argument("--splits", type=json.loads, metavar="JSON", help="see whatwhere.scripts.data.corpus.load_text")
    result.add_argument(
        "--text-field", default="text", metavar="NAME", help="the documents' column; default %(default)s"
    )
    result.add_argument("--data-dir", metavar="DIR", help="the folder of --data local; default $WHATWHERE_DATA_DIR")
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


def load_model(
    checkpoint: str, position_encoding: str | None = None, position_encoding_parameters: dict | None = None
) -> tuple[Any, set[str]]:
    """Loads one of our models, or a stock GPT-2 or Llama as one of ours.

    Returns:
        the model, and the names of the parameters that the checkpoint does not have.

    Raises:
        FinetuneError: there is no such checkpoint, it is of another kind, or the encoding is not possible.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import PreTrainedConfig

    from .training.model import FAMILIES

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
    asked = {
        "position_encoding": position_encoding,
        "position_encoding_parameters": position_encoding_parameters,
    }
    changes = {key: value for key, value in asked.items() if value is not None}
    try:
        model, report = FAMILIES[family][1].from_pretrained(checkpoint, output_loading_info=True, **changes)
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        raise FinetuneError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error
    return model, set(report["missing_keys"])


def finetune(options: argparse.Namespace, arguments: list[str] | None = None) -> dict[str, Any]:
    """Fine-tunes as the parsed command line says and returns the contents of `results.json`.

    Raises:
        FinetuneError: the checkpoint, the output folder or an option is not valid.
        Interrupted: SIGINT or SIGTERM arrived; a checkpoint has been written.
    """
    try:
        import peft
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError('fine-tuning needs `accelerate` and `peft`: pip install "whatwhere[train]"') from error
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    from whatwhere.model_card import weights_fingerprint
    from whatwhere.position_encodings import reach

    from .data.corpus import load_text
    from .data.pack import add_labels, make_blocks
    from .data.tokenize import build_tokenizer, bytes_per_token
    from .evaluation.card import write_card
    from .evaluation.results import provenance, write_json
    from .training.loop import Interrupted, stop_signals

    output = Path(options.output)
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "resume", "data_dir")}
    check_output(output, settings, resume=options.resume)
    if options.merge and not options.lora:
        raise FinetuneError("--merge has no effect without --lora.")
    state = PartialState(cpu=options.cpu)

    set_seed(options.seed)
    model, fresh = load_model(options.checkpoint, options.position_encoding, options.position_encoding_parameters)
    length = options.sequence_length or model.config.max_position_embeddings
    limit = reach(model.config)
    if limit is not None and length > limit:
        raise FinetuneError(
            f"--sequence-length={length!r} is not valid: position_encoding={model.config.position_encoding!r} reaches "
            f"{limit} tokens."
        )
    try:
        tokenizer = build_tokenizer(options.tokenizer or options.checkpoint)
    except ValueError as error:
        raise FinetuneError(f"no tokenizer: give one with --tokenizer. ({error})") from error
    if len(tokenizer) > model.config.vocab_size:
        raise FinetuneError(
            f"--tokenizer={options.tokenizer!r} is not valid: it has {len(tokenizer)} tokens, the model has "
            f"{model.config.vocab_size}."
        )
    corpus = load_text(
        options.data,
        data_dir=options.data_dir,
        dataset=options.dataset,
        dataset_config=options.dataset_config,
        splits=options.splits,
        text_field=options.text_field,
    )
    split = "test" if "test" in corpus else "validation"
    train_blocks = make_blocks(corpus["train"], tokenizer, sequence_length=length)
    test_blocks = make_blocks(corpus[split], tokenizer, sequence_length=length, limit=options.evaluation_blocks)

    if state.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "finetune.json", settings)
    if fresh and state.is_main_process:
        print(f"newly initialised: {', '.join(sorted(fresh))}")
    if options.lora:
        base = options.checkpoint
        if fresh or options.position_encoding or not _is_ours(options.checkpoint):
            # The adapter belongs to the converted model, not to the checkpoint on the disk.
            base = str(output / "base")
            if state.is_main_process and not options.resume:
                model.save_pretrained(base)
                tokenizer.save_pretrained(base)
            state.wait_for_everyone()
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                base_model_name_or_path=base,
                r=options.lora_rank,
                lora_alpha=options.lora_alpha,
                lora_dropout=options.lora_dropout,
                target_modules="all-linear",
                # Low-rank changes of weights that hold nothing yet are of no use: they are trained in full.
                modules_to_save=sorted({name.rpartition(".")[0] for name in fresh}) or None,
            ),
        )

    class StopOnSignal(TrainerCallback):
        """Saves and stops after the step in which a signal arrives."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if received:
                control.should_save = control.should_training_stop = True

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output / "checkpoints"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=options.learning_rate or (2e-4 if options.lora else 5e-5),
            lr_scheduler_type="cosine",
            warmup_steps=options.warmup_steps,
            weight_decay=options.weight_decay,
            logging_steps=10,
            save_steps=options.save_every,
            save_total_limit=2,
            seed=options.seed,
            bf16=options.bf16,
            activation_checkpointing=options.activation_checkpointing,
            use_cpu=options.cpu,
            report_to="none",
        ),
        train_dataset=train_blocks,
        eval_dataset=test_blocks,
        data_collator=lambda rows: add_labels({"input_ids": torch.stack([row["input_ids"] for row in rows])}),
        callbacks=[StopOnSignal()],
    )
    last = (
        get_last_checkpoint(str(output / "checkpoints"))
        if options.resume and (output / "checkpoints").exists()
        else None
    )
    with stop_signals() as received:
        trainer.train(resume_from_checkpoint=last)
    if received and trainer.state.global_step < options.steps:
        raise Interrupted(received[0], trainer.state.global_step)

    loss = trainer.evaluate()["eval_loss"]
    labels = torch.cat([rows["input_ids"][:, 1:].flatten() for rows in test_blocks.iter(batch_size=64)])
    size = int(bytes_per_token(tokenizer)[labels].sum())
    results: dict[str, Any] = {}
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)
        if options.merge:
            trained.save_pretrained(output / "adapter")
            trained = trained.merge_and_unload()
        trained.save_pretrained(output)
        tokenizer.save_pretrained(output)
        whole = not options.lora or options.merge
        results = {
            "metrics": {
                "bits_per_byte": {"value": loss * len(labels) / (math.log(2) * size)},
                "perplexity": {"value": math.exp(loss)},
            },
            "data": {"source": options.data, "dataset": options.dataset, "splits": options.splits, "split": split},
            "length": length,
            "tokens": len(labels),
            "base_model": None if os.path.exists(options.checkpoint) else options.checkpoint,
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


def check_output(output: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Refuses a folder that is not usable, or to resume a run with other options."""
    from .training.loop import check_folder
    from .training.recipe import differences

    check_folder(output, resume=resume, record="finetune.json")
    if resume:
        old = json.loads((output / "finetune.json").read_text(encoding="utf-8"))
        if changed := differences(old, json.loads(json.dumps(settings))):
            raise FinetuneError(
                f"output={str(output)!r} holds a run with other options. Different (before → now): "
                f"{'; '.join(changed)}."
            )


def _is_ours(checkpoint: str) -> bool:
    from transformers import PreTrainedConfig

    return str(PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")).startswith("whatwhere_")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    from .training.loop import Interrupted, TrainingError

    try:
        results = finetune(options, arguments)
    except (ValueError, TrainingError) as error:
        sys.exit(f"error: {error}")
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"{stop or 'interrupted'}. Go on with the same command and --resume.", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", 2))
    if results:
        scores = ", ".join(f"{name} {score['value']:.4f}" for name, score in results["metrics"].items())
        print(f"{options.output}: {scores}")


if __name__ == "__main__":
    main()

"""Fine-tuning by the training loop (`loop.py`), fully or with LoRA, with the checkpoint's encoding or a new one.

The output folder contains a full model, or with `lora` and without `merge` an adapter. If the encoding is new or the
checkpoint is a stock model, the adapter's base model is saved in `base/`.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
from accelerate.utils import set_seed
from pydantic import Field
from transformers import PreTrainedConfig

from whatwhere.model_card import weights_fingerprint

from ..checks import Checked, Count, Fraction, NotNegative, NotNegativeFloat, Positive, parse
from ..conversion.encoding import fit_message
from ..conversion.folder import convert_checkpoint, fit_tokenizer
from ..conversion.record import card_metadata, conversion_of
from ..data.corpora import CORPORA
from ..data.folder import data_folder
from ..data.prepared import file_sha256
from ..data.source import SOURCES, TextSource
from ..data.tokenize import WORD_TOKENIZERS, build_tokenizer, load_tokenizer, why_not_loaded
from ..errors import Refused, TrainingError
from ..evaluation.checkpoints import check_vocabulary
from ..writing import writing
from .loop import TrainingRun, file_problems, train
from .model import build_optimizer, check_length, count_parameters, prepare_model
from .recipe import (
    DataRecipe,
    DistributedRecipe,
    EvaluationRecipe,
    Mixture,
    RunSettings,
    RunText,
    Schedule,
    TrainingRecipe,
)

Length = Annotated[int, Field(ge=2)]


class FinetuneSettings(Checked):
    """The settings of `finetune`, saved in `finetune.json`; `cli/finetune.py` describes them, as its options."""

    checkpoint: str
    position_encoding: str | list[str] | None = None
    position_encoding_parameters: dict | None = None
    rope_parameters: dict | None = None
    train_file: list[str] | None = None
    validation_file: list[str] | None = None
    data: str = "stdlib"
    dataset: str | None = None
    dataset_config: str | None = None
    splits: dict | None = None
    mixture: Mixture | None = None
    text_field: str = "text"
    streaming: bool = False
    shuffle_buffer: Count = 256
    tokenizer: str | None = None
    sequence_length: Length | None = None
    evaluation_blocks: Count = 256
    steps: Count = 500
    batch_size: Count = 8
    accumulation: Count = 1
    learning_rate: Positive | None = None
    new_learning_rate: Positive | None = None
    schedule: Schedule = "cosine"
    warmup_steps: NotNegative = 0
    weight_decay: NotNegativeFloat = 0.0
    save_every: Count = 100
    seed: NotNegative = 0
    bf16: bool = False
    activation_checkpointing: bool = False
    dp_shard: Count = 1
    lora: bool = False
    lora_rank: Count = 16
    lora_alpha: Positive = 32.0
    lora_dropout: Fraction = 0.0
    merge: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.data in CORPORA:
            for name in {*TextSource.model_fields, "mixture"} - {"source", "streaming"}:
                if getattr(self, name) != DataRecipe.model_fields[name].default:
                    yield name, f"it has no effect with data={self.data!r}"
        elif self.data in (*SOURCES, "mixture"):
            for name, reason in RunText.problems_of(self._text_fields()):
                reason = reason.replace("data.mixture[", "mixture[").replace("source=", "data=")
                yield "data" if name == "source" else name, reason
        else:
            yield "data", f"allowed: {', '.join((*SOURCES, 'mixture', *CORPORA))}"
        for needed, names in (
            ("lora", ("merge", "lora_rank", "lora_alpha", "lora_dropout")),
            ("streaming", ("shuffle_buffer",)),
        ):
            for name in names:
                if not getattr(self, needed) and getattr(self, name) != FinetuneSettings.model_fields[name].default:
                    yield name, f"it has no effect without {needed}"
        if self.tokenizer in ("bpe", *WORD_TOKENIZERS):
            yield "tokenizer", "it is made by a recipe (`whatwhere train`): give a folder or a Hub id"
        if self.warmup_steps >= self.steps:
            yield "warmup_steps", f"it must be below steps={self.steps!r}"
        if self.lora and self.dp_shard > 1:
            yield "dp_shard", "adapters are not sharded. Allowed with lora: 1"

    def resolved(self) -> dict[str, Any]:
        return self.model_dump()

    def text(self, data_dir: str | os.PathLike[str] | None = None) -> RunText:
        fields = self._text_fields()
        if self.data in CORPORA:
            known = CORPORA[self.data].local if data_folder(data_dir) else CORPORA[self.data].hub
            held_out = "test" if "test" in known else "validation"
            splits = {"train": f"{self.data}:train", "validation": f"{self.data}:{held_out}"}
            fields |= {"source": "corpus", "splits": splits}
        return parse(RunText, fields)

    def _text_fields(self) -> dict[str, Any]:
        names = RunText.model_fields.keys() & FinetuneSettings.model_fields.keys()
        return {"source": self.data} | {name: getattr(self, name) for name in names}


def finetune(settings: FinetuneSettings, output: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Fine-tunes a checkpoint into the folder `output`; the other arguments, result and errors are those of `train`."""
    return train(settings, output, **options, kind=Finetuning)


class Finetuning(TrainingRun):
    """The state of a run that begins with a checkpoint."""

    command, record = "finetune", "finetune.json"

    def __init__(self, options: FinetuneSettings, output: Path, data_dir: str | None, **resume: Any) -> None:
        if problems := list(file_problems(options.text(data_dir), data_dir)):
            raise Refused(*problems)
        set_seed(options.seed)
        self.options = options
        self._load()
        self.before: dict[str, Any] = {}
        if options.new_learning_rate is not None and not self.fresh:
            raise Refused(f"new_learning_rate={options.new_learning_rate!r} is not valid: no parameter is new.")
        super().__init__(_run_settings(options, self.loaded.config, data_dir), output, data_dir, **resume)

    def settings(self) -> dict[str, Any]:
        return self.options.resolved()

    def build_config(self) -> Any:
        return self.loaded.config

    def _encoding(self) -> tuple[Any, ...]:
        options = self.options
        return options.position_encoding, options.position_encoding_parameters, options.rope_parameters

    def _load(self) -> None:
        """Loads the model, with weights of the dtype that they are trained in."""
        converted = convert_checkpoint(self.options.checkpoint, *self._encoding())
        self.loaded, self.fresh = converted.model, set(converted.new)
        self.fit_errors = converted.errors
        self.dtypes = {name: parameter.dtype for name, parameter in self.loaded.named_parameters()}
        if not self.options.lora or self.fresh:
            # Small updates of bfloat16 weights would be rounded away.
            self.loaded.float()

    def _load_data_and_model(self) -> None:
        checkpoint, tokenizer = self.options.checkpoint, self.options.tokenizer
        if tokenizer is not None and _has_other_tokens(checkpoint, tokenizer):
            self.say(
                f"warning: tokenizer={tokenizer!r} has other tokens than the tokenizer of checkpoint={checkpoint!r}, "
                "whose embeddings do not fit them"
            )
        if self.fit_errors:
            self.say(fit_message(self.fit_errors))
        super()._load_data_and_model()

    def build_model(self) -> Any:
        options, training = self.options, self.recipe.training
        model, self.loaded = self.loaded, None
        if options.rope_parameters is not None:
            fit_tokenizer(self.data.tokenizer, model)
        self.write_settings()
        if self.fresh:
            # One name for all layers.
            names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in sorted(self.fresh))
            self.say(f"new parameters: {', '.join(names)}")
        prepare_model(model, training)
        if options.lora:
            model = self._add_adapter(model)
        return model

    def _restore_dtypes(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name])

    def _add_adapter(self, model: Any) -> Any:
        """Returns the model with low-rank adapters on its linear layers; saves the model itself if it is a new one."""
        options, base = self.options, self.options.checkpoint
        model_type = PreTrainedConfig.get_config_dict(base)[0]["model_type"]
        if self._encoding() != (None, None, None) or not model_type.startswith("whatwhere_"):
            base = str(self.output / "base")
            if self.accelerator.is_main_process:
                self._restore_dtypes(model)
                with writing(base):
                    model.save_pretrained(base)
                    self.data.tokenizer.save_pretrained(base)
                if self.fresh:
                    model.float()
            self.accelerator.wait_for_everyone()
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
            modules_to_save=sorted({name.rpartition(".")[0] for name in self.fresh}) or None,
        )
        return peft.get_peft_model(model, config)

    def build_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        rate, names = self.options.new_learning_rate, dict(self.whole_model.named_parameters())
        rates = {name: rate for name in names if rate is not None and original_name(name) in self.fresh}
        return build_optimizer(self.whole_model, self.recipe.training, rates)

    def begin(self) -> None:
        # A conversion can leave a model without finite scores.
        with contextlib.suppress(TrainingError):
            self.before = self.scores()["metrics"]
        super().begin()

    def more_state(self) -> dict[str, Any]:
        return {"batch_size": self.recipe.training.batch_size, "fingerprints": {"checkpoint": self._fingerprint}}

    @functools.cached_property
    def _fingerprint(self) -> str | None:
        """A fingerprint of the weights and the configuration of the folder, or the commit of the Hub id."""
        checkpoint = self.options.checkpoint
        if not os.path.exists(checkpoint):
            return PreTrainedConfig.get_config_dict(checkpoint)[0].get("_commit_hash")
        return f"{weights_fingerprint(Path(checkpoint))} {file_sha256(Path(checkpoint) / 'config.json')}"

    def _check_origin(self, state: dict[str, Any], made: str) -> None:
        super()._check_origin(state, made)
        size = self.recipe.training.batch_size
        if state["batch_size"] != size:
            raise TrainingError(
                f"{made} with {state['batch_size']} sequences a step, now these are {size}: --batch-size is for each "
                f"process. Resume on as many processes as before, {len(state['random'])}."
            )
        if state["fingerprints"]["checkpoint"] != self._fingerprint:
            raise TrainingError(f"{made} with checkpoint={self.options.checkpoint!r}, whose files have changed.")

    def largest_loss(self) -> float:
        # A conversion can leave a model with any finite loss.
        return math.inf

    def save(self, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
        if state_dict is not None:
            state_dict = {name: tensor.to(self.dtypes.get(name, tensor.dtype)) for name, tensor in state_dict.items()}
        elif self.options.merge or not self.options.lora:
            self._restore_dtypes(self.whole_model)
        super().save(folder, state_dict)

    def finish(self, arguments: list[str] | None = None) -> dict[str, Any]:
        if self.options.merge:
            if self.accelerator.is_main_process:
                with self.checkpoints.writing(self.output / "adapter"):
                    self.whole_model.save_pretrained(self.output / "adapter")
            self.whole_model = self.whole_model.merge_and_unload()
            self.parameters = count_parameters(self.whole_model)
        if self.options.merge or not self.options.lora:
            with torch.no_grad():
                for name, parameter in self.whole_model.named_parameters():
                    parameter.copy_(parameter.to(self.dtypes[name]))
        return super().finish(arguments)

    def more_results(self) -> dict[str, Any]:
        checkpoint = self.options.checkpoint
        stated = card_metadata(checkpoint)
        local = Path(checkpoint) if os.path.exists(checkpoint) else None
        origin = conversion_of(local) if local else {}
        return {
            "metrics_before": self.before,
            "base_model": stated.get("base_model") if local else checkpoint,
            "base_folder": local.resolve().name if local else None,
            "base_conversion": {key: origin[key] for key in ("source", "gguf_file") if key in origin},
            "base_weights_sha256": weights_fingerprint(local) if local else None,
            "licence": stated.get("license"),
            **{key: stated[key] for key in ("license_name", "license_link") if key in stated},
            "newly_initialised": sorted(self.fresh),
            "training": self.recipe.training.model_dump(),
            # An adapter's folder has no config.json.
            "position_encoding": self.whole_model.config.position_encoding,
        }


def _has_other_tokens(checkpoint: str, tokenizer: str) -> bool:
    """Whether a checkpoint has a tokenizer that differs from `tokenizer` in more than `get_added_vocab`."""
    try:
        own = load_tokenizer(checkpoint)
    except (OSError, ValueError):
        return False
    vocabularies = []
    for one in (own, build_tokenizer(tokenizer)):
        others = one.get_added_vocab()
        vocabularies.append({token: index for token, index in one.get_vocab().items() if token not in others})
    return vocabularies[0] != vocabularies[1]


def _run_settings(options: FinetuneSettings, config: Any, data_dir: str | None) -> RunSettings:
    length = config.max_position_embeddings if options.sequence_length is None else options.sequence_length
    check_length(config, length, "sequence_length")
    name = options.tokenizer or options.checkpoint
    try:
        tokenizer = build_tokenizer(name)
    except ValueError as error:
        if options.tokenizer is None and error.__cause__ is not None:
            reason = why_not_loaded(name, error.__cause__)
            raise Refused(f"checkpoint={name!r} is not valid: {reason}. Give one with --tokenizer.") from error
        raise
    check_vocabulary(name, tokenizer, config, "checkpoint" if options.tokenizer is None else "tokenizer")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    default_rate = 2e-4 if options.lora else 5e-5
    return RunSettings(
        name="finetune",
        data=DataRecipe(
            **dict(options.text(data_dir)),
            sequence_length=length,
            tokenizer=name,
            workers=int(options.streaming) or None,
        ),
        training=TrainingRecipe(
            **options.model_dump(
                include={"steps", "schedule", "warmup_steps", "weight_decay", "activation_checkpointing"}
            ),
            batch_size=options.batch_size * options.accumulation * processes,
            micro_batch_size=options.batch_size,
            learning_rate=default_rate if options.learning_rate is None else options.learning_rate,
            clip_norm=1.0,
            mixed_precision="bf16" if options.bf16 else "no",
            checkpoint_every=options.save_every,
        ),
        evaluation=EvaluationRecipe(blocks=options.evaluation_blocks, final_blocks=options.evaluation_blocks),
        distributed=DistributedRecipe(dp_shard=options.dp_shard),
        seed=options.seed,
    )


def original_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".base_layer", "")

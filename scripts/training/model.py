"""The model and the optimiser of a recipe."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedTokenizerBase, get_scheduler

from whatwhere.position_plan import max_length

from ..data.pack import IGNORED
from ..errors import Refused
from ..families import FAMILIES, model_class
from .distributed import by_mesh, decoder_layers
from .recipe import Recipe, TrainingRecipe, model_problem


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    """Builds the configuration of the recipe's model.

    Fields not in `model` are derived: the vocabulary from `tokenizer`, as by `set_vocabulary`, and
    `max_position_embeddings` from `data.sequence_length`, or from the longest sample of a test set if it is longer.
    """
    fields = dict(recipe.model)
    length = recipe.data.longest_input()
    if not {"max_position_embeddings", "n_positions"} & set(fields):
        fields["max_position_embeddings"] = length
    if problem := model_problem(fields):
        raise Refused(problem)
    config = FAMILIES[fields.pop("family")].config_class(**fields)
    is_longer = length > recipe.data.sequence_length
    check_length(config, length, "the longest sample of data.test_sets" if is_longer else "data.sequence_length")
    if tokenizer is not None:
        set_vocabulary(config, recipe, tokenizer)
    return config


def set_vocabulary(config: Any, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a configuration the tokenizer's size and special tokens, except for fields that the recipe sets."""
    fields = {"vocab_size": len(tokenizer)}
    fields |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value in fields.items():
        if name not in recipe.model:
            setattr(config, name, value)
    if config.vocab_size < len(tokenizer):
        key = "task" if recipe.data.source == "task" else "tokenizer"
        raise Refused(
            f"model.vocab_size={config.vocab_size!r} is not valid: data.{key}={getattr(recipe.data, key)!r} has "
            f"{len(tokenizer)} tokens."
        )


def check_length(config: Any, length: int, field: str) -> None:
    limit = max_length(config)
    if limit is not None and length > limit:
        raise Refused(
            f"{field}={length!r} is not valid: position_encoding={config.position_encoding!r} supports at most {limit} "
            "tokens. Shorten it, or use a model with a larger max_position_embeddings."
        )


def build_model(config: Any, training: TrainingRecipe) -> Any:
    model = model_class(config)(config)
    prepare_model(model, training)
    return model


def count_parameters(model: torch.nn.Module) -> int:
    """Returns the number of parameters."""
    # peft keeps the original of a module that it trains in full.
    return sum(one.numel() for name, one in model.named_parameters() if ".original_module." not in name)


def prepare_model(model: Any, training: TrainingRecipe) -> None:
    """Applies the settings of a recipe that save memory or time to a model."""
    if training.activation_checkpointing:
        # Transformers before 5.23 has the other name only.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        if training.activation_checkpointing == "selective":
            context = functools.partial(create_selective_checkpoint_contexts, _KEPT)
            enable({"use_reentrant": False, "context_fn": context})
        else:
            enable()
    if training.chunked_loss:
        _use_chunked_loss(model, liger=training.chunked_loss == "liger")
    if training.compile == "layers":
        for layer in decoder_layers(model):
            layer.compile()
    elif training.compile:
        model.compile()


# Operators whose results selective activation checkpointing keeps.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


# Tokens whose logits exist at a time with `chunked_loss`.
_CHUNK = 1024


def _use_chunked_loss(model: Any, *, liger: bool) -> None:
    """Lets the model compute its loss from the hidden states in chunks; its `logits` are then hidden states."""
    if liger:
        # Optional, and slow to import.
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    head = model.lm_head
    # The model calls both in its forward pass, where weights sharded by FSDP are whole.
    head.forward = lambda hidden_states: hidden_states

    def chunk_loss(hidden_states: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden_states, weight).float()
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    def loss(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int, **_: Any) -> torch.Tensor:
        hidden, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if liger:
            summed = liger_fused_linear_cross_entropy(
                hidden, head.weight, targets, ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32
            )
            return summed / num_items_in_batch
        # The backward pass computes the logits of a chunk again.
        parts = [
            checkpoint(chunk_loss, *chunk, head.weight, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(hidden.split(_CHUNK), targets.split(_CHUNK))
        ]
        return torch.stack(parts).sum() / num_items_in_batch

    model.loss_function = loss


def build_optimizer(
    model: torch.nn.Module, training: TrainingRecipe, rates: Mapping[str, float] | None = None
) -> tuple[torch.optim.Optimizer, Any]:
    """Returns AdamW and its learning rate schedule.

    Weight decay acts on tensors of two and more dimensions (matrices, embeddings, position tables), not on norms and
    biases.

    Args:
        rates: learning rates of parameters by name, where they are not the recipe's.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = {parameter: name for name, parameter in model.named_parameters()}
    kinds: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        name = names[parameter]
        # Norms of heads have two dimensions.
        decay = training.weight_decay if parameter.ndim >= 2 and not name.endswith("norm.weight") else 0.0
        kinds.setdefault((decay, (rates or {}).get(name)), []).append(parameter)
    groups = [
        {"params": group, "weight_decay": decay, "lr": training.learning_rate if rate is None else rate}
        for (decay, rate), chosen in kinds.items()
        for group in by_mesh(chosen)
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        # One kernel for all parameters.
        fused=parameters[0].device.type == "cuda" or None,
    )
    cosine = training.schedule == "cosine"
    scheduler = get_scheduler(
        {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}.get(training.schedule, training.schedule),
        optimizer,
        num_warmup_steps=training.warmup_steps,
        num_training_steps=training.steps,
        scheduler_specific_kwargs={"min_lr": training.minimum_learning_rate} if cosine else None,
    )
    return optimizer, scheduler

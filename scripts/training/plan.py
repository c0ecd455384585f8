"""What a recipe needs on a number of devices: memory, FLOPs and time, without allocating memory for the model."""

import contextlib
import dataclasses
import functools
import unittest.mock
import weakref
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import local_torch_dtype

from whatwhere import attention_triton

from ..data.tokenize import build_tokenizer
from ..toy_tasks.common import build_tokenizer as build_task_tokenizer
from .flops import Scalars, flops_per_token
from .model import build_config, build_model, build_optimizer
from .recipe import Recipe, RecipeError

@dataclasses.dataclass(frozen=True)
class Layout:
    """The devices along each dimension, and the division of a step's batch.

    Attributes:
        dp_replicate, dp_shard, tp, cp: see `DistributedRecipe`.
        rows: sequences that a device takes at a time.
        parts: how many times it does so in a step (gradient accumulation).
    """

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int
    rows: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device by part, when their sum is largest.

    Attributes:
        weights, gradients, optimiser: float32; the share of the device.
        activations: saved for the backward pass, and temporary.
        logits: tensors whose last axis is the vocabulary.
        communication: weights that FSDP gathers and gradients that it has not scattered yet, or DDP's buckets.
    """

    weights: float
    gradients: float
    optimiser: float
    activations: float
    logits: float
    communication: float

    @property
    def total(self) -> float:
        """The sum."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`: `parameters` of the model, and `embeddings` thereof; FLOPs are those of the model alone."""

    layout: Layout
    parameters: int
    embeddings: int
    memory: Memory
    tokens_per_step: int
    flops_per_token: float


def plan(recipe: Recipe, devices: int, *, kernels: bool = True) -> Plan:
    """Returns what a recipe needs on this number of devices.

    Args:
        recipe: see `load_recipe`. Its text is not read.
        devices: the number of processes.
        kernels: whether the devices are GPUs, where `auto` attention uses the Triton kernels.

    Raises:
        RecipeError: the recipe's model or layout is not valid, or its tokenizer cannot be read.
    """
    config = _config(recipe)
    layout = layout_of(recipe, devices)
    with FakeTensorMode():
        model = build_model(_plain(recipe), config)
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    length = recipe.data.sequence_length
    return Plan(
        layout=layout,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embeddings=sum(module.weight.numel() for module in embeddings),
        memory=memory(recipe, config, layout, kernels=kernels),
        tokens_per_step=recipe.training.batch_size * length,
        flops_per_token=flops_per_token(config, length),
    )


def _config(recipe: Recipe) -> Any:
    data = recipe.data
    tokenizer: PreTrainedTokenizerBase | None = None
    if data.source == "task":
        tokenizer = build_task_tokenizer(data.task_config())
    elif "vocab_size" not in recipe.model and data.tokenizer != "bpe":
        try:
            tokenizer = build_tokenizer(data.tokenizer)
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"data.tokenizer={data.tokenizer!r} cannot be read, so the size of the vocabulary is not known. Give "
                f"it, for example --set model.vocab_size=50257. ({str(error).splitlines()[0]})"
            ) from error
    config = build_config(recipe, tokenizer)
    if data.tokenizer == "bpe" and data.vocab_size:
        config.vocab_size = data.vocab_size
    return config


def layout_of(recipe: Recipe, devices: int) -> Layout:
    """Returns the layout of a recipe on this number of devices.

    Raises:
        RecipeError: the devices or the batch cannot be divided in this way.
    """
    given, training = recipe.distributed, recipe.training
    others = given.dp_shard * given.tp * given.cp
    replicate = given.dp_replicate or devices // others
    if replicate * others != devices or not replicate:
        raise RecipeError(
            f"devices={devices!r} is not valid: distributed.dp_replicate={given.dp_replicate!r} x "
            f"dp_shard={given.dp_shard!r} x tp={given.tp!r} x cp={given.cp!r} must be the number of devices."
        )
    shares = replicate * given.dp_shard
    if training.batch_size % (shares * (training.micro_batch_size or 1)):
        raise RecipeError(
            f"training.batch_size={training.batch_size!r} is not valid: it must be a multiple of "
            f"training.micro_batch_size={training.micro_batch_size!r} times dp_replicate x dp_shard = {shares}."
        )
    rows = training.micro_batch_size or training.batch_size // shares
    parts = training.batch_size // (shares * rows)
    return Layout(replicate, given.dp_shard, given.tp, given.cp, rows, parts)


def _plain(recipe: Recipe) -> Recipe:
    """The recipe without compilation, which needs values."""
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"compile": False})})


def _local_config(config: Any, tp: int) -> Any:
    """The configuration whose model has the shapes that one process of tensor parallelism has."""
    if tp == 1:
        return config
    if config.base_model_tp_plan is None:
        raise RecipeError(f"distributed.tp={tp!r} is not valid: only model.family='llama' supports it.")
    fields = config.to_dict()
    fields["head_dim"] = config.head_dim
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if fields[field] % tp:
            raise RecipeError(f"distributed.tp={tp!r} is not valid: it must divide model.{field}={fields[field]!r}.")
        fields[field] //= tp
    return type(config)(**fields)


def memory(recipe: Recipe, config: Any, layout: Layout, *, kernels: bool) -> Memory:
    """Returns the memory of a device when it is largest, in the second or a later step.

    A step runs on tensors without memory, and `Tracker` records which of them exist at a time. Sharded weights are counted
    by their share, and what their exchange needs is added. Not included: the program, the device's context, buffers of
    communication libraries, and fragmentation.
    """
    training, length = recipe.training, recipe.data.sequence_length // layout.cp
    bf16, sharded, accumulates = training.mixed_precision == "bf16", layout.dp_shard > 1, layout.parts > 1
    config = _local_config(config, layout.tp)
    with FakeTensorMode(), _kernels(kernels):
        # FSDP gathers the weights in this type.
        with local_torch_dtype(torch.bfloat16 if sharded and bf16 else torch.float32):
            model = build_model(_plain(recipe), config).train()
        optimizer, _ = build_optimizer(model, training)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        if not accumulates:
            optimizer.zero_grad()
        tokens = torch.zeros(layout.rows, length, dtype=torch.int64)
        with Tracker(model, optimizer) as tracker, Scalars(length - 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                count = tokens.numel()
                loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            del loss
            update = len(tracker.history)
            optimizer.step()
        # FSDP gathers the weights of a layer together, and all that are outside of the layers, the root.
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in _layers(model)]
        total = sum(parameter.numel() for parameter in model.parameters())
        head = model.get_output_embeddings().weight
        if head is not model.get_input_embeddings().weight:
            # Tensor parallelism shards it by the vocabulary, and gathers the logits.
            total -= head.numel() - head.numel() // layout.tp
    root, share = total - sum(layers), 4 / layout.dp_shard
    # Bytes of an element of a gathered weight or of its gradient.
    size = 2 if sharded and bf16 else 4
    if sharded:
        # The root stays gathered. One layer computes while the next is gathered through a buffer; the gradients of one
        # layer are whole while a float32 copy of them is scattered.
        exchange = root * size + max(layers) * (2 * size + size + 4.0)
    else:
        exchange = 4.0 * total if layout.dp_replicate * layout.cp > 1 else 0.0

    def at(step: Existing, *, updates: bool = False, scatters: bool = False) -> Memory:
        if not sharded:
            gradients = 4.0 * (step.root_gradients + step.layer_gradients)
        elif updates:
            gradients = total * share
        elif accumulates:
            # Between the parts of a batch, nothing is communicated: gradients stay whole.
            gradients = total * 4.0
        else:
            gradients = step.layer_gradients * share + step.root_gradients * size
        temporary = layout.dp_shard if updates else 1
        return Memory(
            weights=total * share,
            gradients=gradients,
            optimiser=2 * total * share,
            activations=step.activations / temporary,
            logits=step.logits / temporary,
            communication=0.0 if sharded and updates else exchange + (4.0 * root if scatters else 0.0),
        )

    found = [at(step, updates=number >= update) for number, step in enumerate(tracker.history)]
    if sharded:
        # At the end, the gradients of the root are scattered, from a float32 copy.
        found.append(at(tracker.history[update - 1], scatters=True))
    return max(found, key=lambda memory: memory.total)


def _kernels(use: bool) -> contextlib.AbstractContextManager[Any]:
    """Makes `auto` attention use the Triton kernels, as on a GPU; they have implementations without memory."""
    if not use or attention_triton.import_error():
        return contextlib.nullcontext()
    always = {"runs_by_default": lambda device: True, "runs_on": lambda device: True}
    return unittest.mock.patch.multiple(attention_triton, **always)


def _layers(model: Any) -> Any:
    base = model.base_model
    return base.layers if hasattr(base, "layers") else base.h


class Existing(NamedTuple):
    """What exists at a time: elements of gradients outside of the layers and in them, bytes of activations and logits."""

    root_gradients: int
    layer_gradients: int
    activations: int
    logits: int


class Tracker(TorchDispatchMode):
    """Records which tensors exist after each operation of a step, in `history`.

    Tensors are those that operations return, as long as anything refers to their memory: saved for the backward pass or
    temporary. Logits are tensors whose last axis has the size of the vocabulary.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.vocabulary = model.config.vocab_size
        self.history: list[Existing] = []
        self._bytes = {"activations": 0, "logits": 0}
        # Kind and size by memory; tensors that exist before are not counted.
        self._kinds: dict[int, tuple[str, int]] = {}
        inside = {id(parameter) for layer in _layers(model) for parameter in layer.parameters()}
        self._in_layers = {True: 0, False: 0}
        self._known = set()
        for tensor in (*model.buffers(), *(v for state in optimizer.state.values() for v in state.values())):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage()._cdata)
        self._hooks = []
        for parameter in model.parameters():
            self._known.add(parameter.untyped_storage()._cdata)
            if parameter.grad is None:
                count = functools.partial(self._count_gradient, id(parameter) in inside)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(count))
            else:
                self._known.add(parameter.grad.untyped_storage()._cdata)
                self._in_layers[id(parameter) in inside] += parameter.numel()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        gradients = self._in_layers[False], self._in_layers[True]
        self.history.append(Existing(*gradients, self._bytes["activations"], self._bytes["logits"]))
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._kinds:
            return
        kind = "logits" if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary else "activations"
        self._kinds[key] = kind, storage.nbytes()
        self._bytes[kind] += storage.nbytes()
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        if key in self._kinds:
            kind, size = self._kinds.pop(key)
            self._bytes[kind] -= size

    def _count_gradient(self, in_layer: bool, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        self._remove(key)
        self._known.add(key)
        self._in_layers[in_layer] += parameter.numel()

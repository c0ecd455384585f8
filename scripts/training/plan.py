"""What a recipe needs on a number of devices, without allocating memory for the model; and its duration here."""

import contextlib
import dataclasses
import functools
import time
import unittest.mock
import weakref
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import local_torch_dtype

from whatwhere import attention, attention_triton

from ..data.tokenize import build_tokenizer
from ..errors import Refused
from ..processes import Processes
from .distributed import check_layout, decoder_layers
from .flops import Scalars, flops_per_token
from .model import build_config, build_model, build_optimizer
from .recipe import Recipe

# Maximum number of floating-point operations in a timed step on a CPU (about a second).
_LARGEST = 3e10


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak memory of one device in a training step, in bytes, by what it is used for.

    Attributes:
        weights: in float32; with FSDP, the part of the weights that this device has.
        gradients: the same for their gradients.
        optimiser: the same for Adam's two averages.
        activations: tensors saved for the backward pass, and temporary ones.
        logits: the same for tensors whose last axis is the vocabulary.
        communication: with FSDP, gathered weights and gradients to be scattered; with DDP, its buckets of gradients.
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
    """What a recipe needs."""

    layout: Processes
    # Sequences that a device takes at a time, and how many times it does so in a step.
    rows: int
    parts: int
    # Embeddings are among the parameters.
    parameters: int
    embeddings: int
    # On one device.
    memory: Memory
    tokens_per_step: int
    flops_per_token: float


def plan(recipe: Recipe, devices: int = 1) -> Plan:
    """Returns what a recipe needs on this number of GPUs."""
    config = _config(recipe)
    layout = check_layout(recipe, config, devices)
    # Compilation and kernels need values.
    changes = {"compile": False, "chunked_loss": bool(recipe.training.chunked_loss)}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
    training, length = recipe.training, recipe.data.sequence_length
    share = training.batch_size // layout.data_share[1]
    rows = training.micro_batch_size or share
    with FakeTensorMode():
        model = build_model(config, training)
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return Plan(
        layout=layout,
        rows=rows,
        parts=share // rows,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embeddings=sum(module.weight.numel() for module in embeddings),
        memory=_memory(recipe, config, layout, rows, accumulates=share > rows),
        tokens_per_step=training.batch_size * length,
        flops_per_token=flops_per_token(config, length),
    )


def _config(recipe: Recipe) -> Any:
    data = recipe.data
    tokenizer: PreTrainedTokenizerBase | None = None
    if data.source == "task":
        from ..toy_tasks.common import build_tokenizer as build_task_tokenizer

        tokenizer = build_task_tokenizer(data.task_config())
    elif "vocab_size" not in recipe.model and data.tokenizer != "bpe":
        try:
            tokenizer = build_tokenizer(data.tokenizer)
        except (OSError, ValueError) as error:
            raise Refused(
                f"data.tokenizer={data.tokenizer!r} cannot be read: give its size, as --set model.vocab_size=50257."
            ) from error
    config = build_config(recipe, tokenizer)
    if data.tokenizer == "bpe" and data.vocab_size:
        config.vocab_size = data.vocab_size
        # The defaults are tokens of a larger vocabulary.
        config.bos_token_id = config.eos_token_id = None
    return config


def _local_config(config: Any, tp: int) -> Any:
    """Returns a configuration with the shapes that one process of tensor parallelism has."""
    if tp == 1:
        return config
    fields = {**config.to_dict(), "head_dim": config.head_dim}
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        fields[field] = -(-fields[field] // tp)
    return type(config)(**fields)


def _memory(recipe: Recipe, config: Any, layout: Processes, rows: int, *, accumulates: bool) -> Memory:
    """Returns the peak memory of a device. It is reached in the second step or a later one.

    The forward and the backward pass run on tensors without memory, and `Tracker` records which of them exist after
    each operation. The update of the weights needs no temporary tensors, because the optimiser is fused. The model is
    traced unsharded: with FSDP, its weights are divided by the number of shards, and the memory of gathering and
    scattering them is added. Not included are the program, the device's context, buffers of communication libraries,
    and fragmentation.
    """
    training, shards = recipe.training, layout.dp_shard
    bf16, fsdp = training.mixed_precision == "bf16", layout.is_sharded and layout.data_share[1] > 1
    # Bytes of an element of a weight or a gradient, where FSDP gathers them.
    size = 2 if bf16 and fsdp else 4
    with FakeTensorMode(), _kernels():
        with local_torch_dtype(torch.bfloat16 if size == 2 else torch.float32):
            model = build_model(_local_config(config, layout.tp), training).train()
        forward = model
        if bf16 and not fsdp:
            forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        if bf16 and not layout.is_sharded:
            # As accelerate does.
            forward = convert_outputs_to_fp32(forward)
        for parameter in model.parameters() if accumulates else ():
            parameter.grad = torch.empty_like(parameter)
        tokens = torch.zeros(rows, recipe.data.sequence_length, dtype=torch.int64)
        with Tracker(model) as tracker, Scalars(tokens.shape[1] - 1):
            count = tokens.numel()
            loss = forward(input_ids=tokens, labels=tokens, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
        # FSDP gathers the weights of a layer together, and all that are outside of the layers, the root.
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder_layers(model)]
        total = sum(parameter.numel() for parameter in model.parameters())
        head = model.get_output_embeddings().weight
        if head is not model.get_input_embeddings().weight:
            # Tensor parallelism divides it by the vocabulary, and gathers the logits.
            total -= head.numel() - head.numel() // layout.tp
    root, share = total - sum(layers), 4 / shards
    if fsdp:
        # The root stays gathered. One layer computes while the next is gathered through a buffer; the gradients of one
        # layer are whole while a float32 copy of them is scattered.
        exchange = root * size + max(layers) * (2 * size + size + 4.0)
    else:
        exchange = 4.0 * total if layout.dp_replicate > 1 else 0.0

    def at(step: dict[str, int], *, scatters: bool = False) -> Memory:
        if not fsdp:
            # The output layer is whole in this model, unlike in tensor parallelism.
            gradients = 4.0 * min(step["root"] + step["layers"], total)
        elif accumulates:
            # Until the last part of a batch, gradients stay whole.
            gradients = total * 4.0
        else:
            gradients = step["layers"] * share + step["root"] * size
        return Memory(
            weights=total * share,
            gradients=gradients,
            optimiser=2 * total * share,
            activations=step["activations"],
            logits=step["logits"],
            communication=exchange + (4.0 * root if scatters else 0.0),
        )

    found = list(map(at, tracker.history))
    if fsdp:
        # At the end, the gradients of the root are scattered, from a float32 copy.
        found.append(at(tracker.history[-1], scatters=True))
    return max(found, key=lambda memory: memory.total)


def _kernels() -> contextlib.AbstractContextManager[Any]:
    """Makes `auto` attention use the Triton kernels, as on a GPU; they have implementations without memory."""
    if attention_triton.import_error():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    functions = [(attention, "_may_have_kernels"), (attention_triton, "runs_by_default"), (attention_triton, "runs_on")]
    for module, name in functions:
        stack.enter_context(unittest.mock.patch.object(module, name, return_value=True))
    return stack


class Tracker(TorchDispatchMode):
    """Records what exists after each operation of a step, in `history`.

    That is the elements of gradients in `layers` and outside of them (`root`), and the bytes of `activations` and
    `logits`: tensors that operations return, as long as anything refers to their memory (saved for the backward pass or
    temporary). Logits are those whose last axis has the size of the vocabulary.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vocabulary = model.config.vocab_size
        self.history: list[dict[str, int]] = []
        self._existing = dict.fromkeys(("layers", "root", "activations", "logits"), 0)
        # Kind and size by memory; tensors that exist before are not counted.
        self._kinds: dict[int, tuple[str, int]] = {}
        inside = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        existing = (*model.buffers(), *model.parameters(), *gradients)
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}
        for parameter in model.parameters():
            place = "layers" if id(parameter) in inside else "root"
            if parameter.grad is None:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._count_gradient, place))
            else:
                self._existing[place] += parameter.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        self.history.append(dict(self._existing))
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._kinds:
            return
        kind = "logits" if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary else "activations"
        self._kinds[key] = kind, storage.nbytes()
        self._existing[kind] += storage.nbytes()
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        if key in self._kinds:
            kind, size = self._kinds.pop(key)
            self._existing[kind] -= size

    def _count_gradient(self, place: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        self._remove(key)
        self._known.add(key)
        self._existing[place] += parameter.numel()


def estimate_seconds(recipe: Recipe) -> float | None:
    """Estimates the seconds that training a recipe takes on this machine, in one process.

    The estimate includes steps and evaluations, but not reading and tokenising the text, and is too high if other
    processes use the machine. None if the model is too large to time a step on a CPU.
    """
    data, training, evaluation = recipe.data, recipe.training, recipe.evaluation
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        config = _config(recipe)
    except Refused:
        # Without its tokenizer, the vocabulary has the default size.
        config = build_config(recipe)
    rows, length = training.micro_batch_size or training.batch_size, data.sequence_length
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(config, training).parameters())
    if device.type == "cpu":
        rows = min(rows, int(_LARGEST / (6 * parameters * length)))
        if not rows:
            return None
    # Leaves the random state unchanged.
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, training).to(device)
        optimizer, _ = build_optimizer(model, training)
        tokens = torch.randint(config.vocab_size, (rows, length)).to(device)
        forward, update = float("inf"), float("inf")
        for _ in range(2):
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=training.mixed_precision == "bf16"):
                loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=tokens.numel(), use_cache=False).loss
            loss.backward()
            loss.item()
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            # The first step is slower.
            forward, update = min(forward, middle - start), min(update, time.perf_counter() - middle)
    held_out = (training.steps // evaluation.every if evaluation.every else 0) * (evaluation.blocks or 0)
    held_out += evaluation.final_blocks or 0
    # A forward pass is about a third of a training step.
    passes = training.steps * training.batch_size + held_out / 3
    return forward / rows * passes + update * training.steps

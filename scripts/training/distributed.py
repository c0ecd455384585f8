"""Training in several processes: their division by a recipe's `distributed` section.

| dimension | meaning | applied by |
|---|---|---|
| `dp_replicate` | copies of the model | `DistributedDataParallel`, or with `dp_shard` or `tp` by `fully_shard` |
| `dp_shard` | FSDP2: weights, gradients and optimiser state are divided | `fully_shard`, for each layer |
| `tp` | each layer is divided | the tensor-parallel plan of the model, by Transformers |

accelerate starts the processes and its own `ParallelismConfig` has the same names, but it refuses CPUs and `tp` alone.
"""

import contextlib
import datetime
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, LoggerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from whatwhere.attention_triton import runs_on
from whatwhere.position_base import suggest

from ..errors import Refused, TrainingError
from ..processes import Processes
from .recipe import RunSettings, TrainingRecipe


def check_layout(recipe: RunSettings, config: Any, processes: int, rank: int = 0) -> Processes:
    """Returns the division of this number of processes by a recipe; it must fit the model and the batch, too."""
    wanted, training = recipe.distributed, recipe.training
    if wanted.cp > 1:
        raise Refused(
            f"distributed.cp={wanted.cp!r} is not valid with position_encoding={config.position_encoding!r}: context "
            "parallelism ignores masks and biases. Allowed: 1."
        )
    if wanted.tp > 1:
        _check_tensor_parallel(recipe, config)
    fixed = wanted.dp_shard * wanted.tp
    replicas = wanted.dp_replicate or processes // fixed
    if not replicas or replicas * fixed != processes:
        raise Refused(
            f"distributed: dp_replicate={wanted.dp_replicate!r}, dp_shard={wanted.dp_shard!r} and tp={wanted.tp!r} are "
            f"not valid: their product must be the number of processes, {processes}."
        )
    shares = replicas * wanted.dp_shard
    if training.batch_size % (shares * (training.micro_batch_size or 1)):
        raise Refused(
            f"training.batch_size={training.batch_size!r} is not valid: it must be a multiple of the number of "
            f"data-parallel processes, {shares}, times micro_batch_size, {training.micro_batch_size or 1}."
        )
    return Processes(replicas, wanted.dp_shard, wanted.tp, rank)


def _check_tensor_parallel(recipe: RunSettings, config: Any) -> None:
    tp = recipe.distributed.tp
    if config.base_model_tp_plan is None:
        family = config.model_type.removeprefix("whatwhere_")
        raise Refused(f"distributed.tp={tp!r} is not valid: model.family={family!r} has no tensor-parallel plan.")
    if config.tie_word_embeddings:
        raise Refused(
            f"distributed.tp={tp!r} is not valid with model.tie_word_embeddings=True: embeddings and output layer are "
            "divided in different ways. Allowed: False."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, name) % tp:
            raise Refused(f"distributed.tp={tp!r} is not valid: it must divide {name}={getattr(config, name)!r}.")
    for name, refused in (("chunked_loss", (True, "liger")), ("compile", (True,))):
        if (value := getattr(recipe.training, name)) in refused:
            raise Refused(f"training.{name}={value!r} is not valid with distributed.tp={tp!r}. Allowed: False.")


def build_accelerator(training: TrainingRecipe, output: Path) -> Accelerator:
    """Returns the accelerator of a run; `output` is the folder for trackers."""
    known = [kind.value for kind in LoggerType if kind != LoggerType.ALL]
    if unknown := [name for name in training.trackers if name not in known]:
        raise TrainingError(
            f"training.trackers={training.trackers!r} is not valid: {unknown[0]!r} is not known. "
            f"{suggest(unknown[0], known)}"
        )
    accelerator = Accelerator(
        mixed_precision=training.mixed_precision,
        log_with=training.trackers or None,
        project_dir=str(output),
        # Without a GPU, accelerate would otherwise not set up the process group.
        cpu=not torch.accelerator.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=training.ddp_timeout))],
    )
    if training.chunked_loss == "liger":
        refused, device = "training.chunked_loss='liger' is not valid", accelerator.device
        if not runs_on(device):
            raise TrainingError(f"{refused} on device={device.type!r}: its kernel needs a GPU. Allowed: True, False.")
        if not importlib.util.find_spec("liger_kernel"):
            raise TrainingError(f'{refused}: liger-kernel is not installed. pip install "whatwhere[liger]"')
    kind = accelerator.distributed_type
    shards = kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
    if shards or getattr(accelerator, "parallelism_config", None) is not None:
        raise TrainingError(
            f"accelerate's distributed_type={kind.value!r} is not valid: the recipe's `distributed` section shards the "
            "model. Launch with a configuration for several GPUs, or with torchrun."
        )
    # accelerate silently ignores trackers that are not installed.
    if missing := set(training.trackers) - {str(name) for name in accelerator.log_with}:
        raise TrainingError(f"training.trackers={training.trackers!r} is not valid: {min(missing)!r} is not installed.")
    return accelerator


def distribute(model: Any, layout: Processes, accelerator: Accelerator, training: TrainingRecipe) -> Any:
    """Divides a model, which is equal in all processes, among them. Returns the model to call.

    `mixed_precision` "bf16" means autocast; FSDP gathers weights in bfloat16 and sums gradients in float32.
    """
    if not layout.is_sharded:
        return accelerator.prepare_model(model)
    if layout.tp > 1:
        # FSDP moves one layer after the other to the device.
        model.to(accelerator.device)
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    mesh = init_device_mesh(accelerator.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if layout.tp > 1:
        _apply_tensor_parallel(model, mesh["tp"])
    if layout.dp_replicate * layout.dp_shard > 1:
        half = training.mixed_precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None,
            reduce_dtype=torch.float32 if half else None,
            # Angles and masks keep their type.
            cast_forward_inputs=False,
        )
        data = mesh["dp_shard"] if layout.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"]
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=data, mp_policy=policy)
        fully_shard(model, mesh=data, mp_policy=policy)
    elif training.mixed_precision == "bf16":
        model.forward = accelerator.autocast()(model.forward)
    return model


def _apply_tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    from transformers.distributed import tensor_parallel

    # Transformers' function as it is called in `from_pretrained`; before 5.19, it expanded the plan itself.
    expand = getattr(model, "_expand_parallel_plan", None)
    plan = () if expand is None else (expand(model.tp_plan),)
    tensor_parallel.apply_tensor_parallelism(model, mesh, *plan)


def decoder_layers(model: Any) -> Iterable[torch.nn.Module]:
    """Returns the decoder layers of a model of either family."""
    base = model.base_model
    return base.layers if hasattr(base, "layers") else base.h


@contextlib.contextmanager
def accumulating(model: Any, layout: Processes, accelerator: Accelerator, *, last: bool) -> Iterator[None]:
    """The forward and backward pass of a part of a batch; gradients are communicated in that of the last part.

    With tensor parallelism, Transformers adds up the gradients of undivided parameters over processes after each
    backward pass, so those of earlier parts must not be among them. FSDP then communicates in each part.
    """
    if layout.tp > 1:
        earlier = {} if isinstance(model, FSDPModule) else {p: p.grad for p in model.parameters()}
        for parameter in earlier:
            parameter.grad = None
        yield
        for parameter, gradient in earlier.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    else:
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            yield


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[Any]]:
    """Divides parameters into groups that an operation on many tensors can take together."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a tensor that may be sharded; all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float | None) -> torch.Tensor:
    """Scales the gradients down to the norm `limit`; returns their norm before, in all processes."""
    groups = by_mesh(parameter for parameter in parameters if parameter.grad is not None)
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in group])) for group in groups]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if limit is not None:
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, limit, norm)
    return norm

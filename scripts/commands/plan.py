"""`whatwhere plan`: see `training/plan.py`."""

import argparse
import dataclasses
from typing import Any

from whatwhere_cli.plan import parser

# The part of a device's memory that tensors can have; the rest is for its context, communication and fragmentation.
USABLE = 0.9


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    from ..training.plan import plan
    from ..training.recipe import load_recipe

    for name in ("devices", "device_memory", "device_tflops", "utilisation"):
        value = getattr(options, name)
        if value is not None and not (0 < value <= 1 if name == "utilisation" else value > 0):
            allowed = "above 0 and at most 1" if name == "utilisation" else "above 0"
            raise ValueError(f"--{name.replace('_', '-')}={value!r} is not valid: it must be {allowed}.")
    peak = _peak(options)
    recipe = load_recipe(options.recipe, options.set)
    print("\n".join(_report(recipe, plan(recipe, options.devices), options, peak)))


def _peak(options: argparse.Namespace) -> float | None:
    from ..training.flops import PEAK_TFLOPS, peak_flops

    if options.device is None:
        return options.device_tflops and options.device_tflops * 1e12
    if options.device_tflops:
        raise ValueError(f"--device-tflops={options.device_tflops!r} has no effect with --device.")
    peak = peak_flops(options.device)
    if peak is None:
        raise ValueError(
            f"--device={options.device!r} is not known. Give --device-tflops instead, or one of "
            f"{', '.join(PEAK_TFLOPS)}."
        )
    return peak


def _report(recipe: Any, found: Any, options: argparse.Namespace, peak: float | None) -> list[str]:
    from ..progress import describe_seconds

    training, memory, devices = recipe.training, found.memory, options.devices
    tokens, layout = found.tokens_per_step, found.layout
    settings = [f"mixed_precision {training.mixed_precision}"]
    for name in ("activation_checkpointing", "chunked_loss"):
        if getattr(training, name):
            settings.append(f"{name} {str(getattr(training, name)).lower()}")
    lines = [
        f"{recipe.name} on {devices} device{'s' * (devices > 1)}: {layout}; {', '.join(settings)}",
        "",
        f"parameters          {found.parameters:,} (embeddings {found.embeddings:,}, "
        f"without {found.parameters - found.embeddings:,})",
        f"tokens a step       {tokens:,} ({training.batch_size:,} sequences of {recipe.data.sequence_length:,}; a "
        f"device takes {found.parts} x {found.rows})",
        f"tokens in all       {tokens * training.steps:,} in {training.steps:,} steps",
        "",
        "memory of a device, GB",
        *(f"  {name:<18}{size / 1e9:8.2f}" for name, size in dataclasses.asdict(memory).items()),
        f"  {'total':<18}{memory.total / 1e9:8.2f}",
    ]
    # FSDP divides one layer after the other; tensor parallelism needs the whole model first.
    start = found.parameters * 4 if found.layout.tp > 1 else 0
    if start:
        lines.append(f"  {'at the start':<18}{start / 1e9:8.2f} (all weights, before they are divided)")
    if options.device_memory is not None:
        needed, usable = max(memory.total, start) / 1e9, USABLE * options.device_memory
        lines.append(
            f"fits in {options.device_memory:g} GB: {'yes' if needed <= usable else 'no'} ({needed:.1f} of the "
            f"{usable:g} GB that are left for tensors)"
        )
    flops = found.flops_per_token
    lines += [
        "",
        f"FLOPs a token       {flops:.3e} (forward and backward; attention to all pairs of tokens)",
        f"FLOPs a step        {flops * tokens:.3e}",
        f"FLOPs in all        {flops * tokens * training.steps:.3e}",
    ]
    if peak is not None:
        speed = peak * options.utilisation * devices
        lines += [
            f"time                {describe_seconds(flops * tokens * training.steps / speed)} at "
            f"{options.utilisation:.0%} of {peak / 1e12:g} TFLOP/s, {speed / flops:,.0f} tokens/s",
        ]
    return lines

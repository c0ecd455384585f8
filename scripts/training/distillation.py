"""Distillation from the source of a converted model, for `finetune`.

* `attention`: each attention layer whose encoding has changed learns to give the source's output for the source's
  input, by the mean squared error relative to the mean square of the output. Only these layers are trained. The other
  weights are equal in both models, and share memory.
* `logits`: before training, the source reads the training text, and `SAMPLES` tokens are drawn from each of its
  predictions and kept on disk. The model then minimises the mean of two cross-entropies, with the text and with these
  tokens. The latter is an unbiased estimate of that with the source's whole distribution (Anshumann et al. 2025,
  2503.16870). During training the source is not in memory.

Axes: B batch, T tokens of a sequence, S samples of a prediction.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import nn
from tqdm.auto import tqdm

from whatwhere.attention_block import AttentionBlock
from whatwhere.position_plan import layer_plan

from ..conversion import load_source
from ..data.prepared import TextBlocks

SAMPLES = 32


class AttentionTargets:
    """Attention outputs of a source as targets of a converted model."""

    def __init__(self, source: str, model: nn.Module) -> None:
        """Loads the source, a folder or a Hub id, and lets it share its weights with a model converted from it."""
        self.source = load_source(source, "distill_from").to(model.device, model.dtype).eval()
        config: Any = model.config
        before, after = layer_plan(self.source.config), layer_plan(config)
        layers = [index for index, pair in enumerate(zip(before, after)) if pair[0] != pair[1]]
        # Positions that are added to the embeddings are in the source's inputs of all layers.
        added = [{cls for layer in plan for cls, _ in layer if cls.overrides("embedding")} for plan in (before, after)]
        sizes = [(len(plan), one.hidden_size) for plan, one in ((before, self.source.config), (after, config))]
        reason = ""
        if sizes[0] != sizes[1]:
            reason = "it has {} layers of size {}, the model {} of size {}".format(*sizes[0], *sizes[1])
        elif added[0] != added[1]:
            reason = "it and the model must have the same positions in their embeddings (absolute, sinusoidal)"
        elif not layers:
            reason = "it has the model's position encoding in every layer, so there is nothing to learn"
        if reason:
            raise ValueError(f"distill_from={source!r} is not valid with distill='attention': {reason}.")
        ours = dict(model.named_parameters())
        blocks = [_attention_blocks(one) for one in (self.source, model)]
        changed = {id(parameter) for index in layers for parameter in blocks[0][index].parameters()}
        for name, parameter in self.source.named_parameters():
            if id(parameter) in changed:
                continue
            own = ours.get(name)
            if own is None or not torch.equal(own, parameter):
                raise ValueError(
                    f"distill_from={source!r} is not valid with distill='attention': its {name} is not the model's. "
                    "All weights except those of changed attention must be equal, as after `whatwhere convert`."
                )
            parameter.data = own.data
        self._source: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._losses: list[torch.Tensor] = []
        for index in layers:
            blocks[0][index].register_forward_hook(self._keep(index))
            blocks[1][index].register_forward_pre_hook(self._replace(index))
            blocks[1][index].register_forward_hook(self._compare(index))
        self._trained = [blocks[1][index] for index in layers]

    def freeze(self, model: nn.Module, new: set[int]) -> None:
        """Freezes all parameters outside of changed attention, except those with an id in `new`."""
        trained = {id(parameter) for block in self._trained for parameter in block.parameters()} | new
        for parameter in model.parameters():
            if id(parameter) not in trained:
                parameter.requires_grad_(False)

    def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the mean over the layers; `model` may be wrapped, `inputs` are those of the model without labels."""
        with torch.no_grad():
            self.source(**inputs, use_cache=False, logits_to_keep=1)
        model(**inputs, use_cache=False, logits_to_keep=1)
        loss = torch.stack(self._losses).mean()
        self._source.clear()
        self._losses.clear()
        return loss

    def _keep(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._source[index] = arguments[0], output[0]

        return hook

    def _replace(self, index: int) -> Callable[..., Any]:
        # Without the source's input this is an evaluation.
        return lambda module, arguments: (self._source[index][0], *arguments[1:]) if self._source else None

    def _compare(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._source:
                target = self._source[index][1].float()
                self._losses.append((output[0].float() - target).square().mean() / target.square().mean())

        return hook


def _attention_blocks(model: nn.Module) -> list[AttentionBlock]:
    return [module for module in model.modules() if isinstance(module, AttentionBlock)]


class LogitTargets:
    """Blocks for training, with tokens in `file` drawn from a source's predictions of the `chosen` blocks."""

    def __init__(self, blocks: TextBlocks, chosen: np.ndarray, file: Path, vocab_size: int) -> None:
        self.blocks, self.chosen, self.file = blocks, chosen, file
        # The places of the texts of a mixture.
        self.starts = getattr(blocks, "starts", None)
        self._shape = (len(self.chosen), blocks.sequence_length - 1, SAMPLES)
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "int32"

    def write(self, source: Any, batch_size: int, seed: int, processes: Accelerator | PartialState) -> None:
        """Draws the tokens from a model's predictions, in all processes."""
        device = processes.device
        source.to(device).eval()
        draft = self.file.with_suffix(".partial")
        if processes.is_main_process:
            draft.write_bytes(b"")
        processes.wait_for_everyone()
        generator = torch.Generator(device).manual_seed(seed + processes.process_index)
        mine = range(processes.process_index, len(self.chosen), processes.num_processes)
        # Not through a memory map: a full disk would end the process without an error.
        with draft.open("r+b") as file:
            for start in tqdm(range(0, len(mine), batch_size), desc="reading by the source", disable=None):
                places = list(mine[start : start + batch_size])
                input_ids = self.blocks[[int(self.chosen[place]) for place in places]]["input_ids"].to(device)
                with torch.no_grad():
                    logits = source(input_ids, use_cache=False).logits[:, :-1].float()
                tokens = torch.multinomial(logits.softmax(-1).flatten(0, 1), SAMPLES, True, generator=generator)
                rows = tokens.view(len(places), -1, SAMPLES).cpu().numpy().astype(self._dtype)
                for place, row in zip(places, rows):
                    file.seek(place * row.nbytes)
                    file.write(row)
        processes.wait_for_everyone()
        if processes.is_main_process:
            draft.rename(self.file)
        processes.wait_for_everyone()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Returns `input_ids`, int64 (B, T), and `targets`, int64 (B, T - 1, S), of blocks among `chosen`."""
        drawn = np.memmap(self.file, self._dtype, "r", shape=self._shape)
        targets = torch.from_numpy(drawn[np.searchsorted(self.chosen, indices)].astype(np.int64))
        return {**self.blocks[indices], "targets": targets}


def logit_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of logits (B, T, V) with drawn tokens (B, T - 1, S)."""
    return -logits[:, :-1].float().log_softmax(-1).gather(-1, targets).mean()

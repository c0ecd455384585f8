"""The check of the first prompt that vLLM serves: its log-probabilities are those of the plain model."""

import copy
import itertools
import os
from typing import Any

import torch
import vllm
from transformers.utils import logging
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.forward_context import get_forward_context

from .vllm_plugin import TESTED

logger = logging.get_logger(__name__)

# The variable that turns the check off.
VARIABLE = "WHATWHERE_VLLM_CHECK"
# Tokens of the prompt that are compared.
LONGEST = 512
# The mean difference that rounding errors explain.
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1


def is_checked(vllm_config: Any) -> bool:
    """Returns True if vLLM computes what the plain model of the folder does.

    Quantised weights and caches, adapters, and models that are split into stages are not checked.

    Raises:
        ValueError: the variable WHATWHERE_VLLM_CHECK is not 0 or 1.
    """
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={wanted!r} is not supported; use 0 or 1.")
    plain = vllm_config.quant_config is None and vllm_config.cache_config.cache_dtype in ("auto", "float32")
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return wanted == "1" and plain and vllm_config.lora_config is None and stages == 1


class FirstPrompt:
    """Compares the first prompt, and the next step of its sequence, which reads the cache, with the plain model.

    Args:
        served: the model of vLLM.
        auto_class: the class of Transformers that loads the plain model from the folder.
    """

    def __init__(self, served: Any, auto_class: Any) -> None:
        self.served, self.auto_class = served, auto_class
        self.tokens: list[int] = []
        self.next_slot: int | None = None
        self.plain: Any = None

    def compare(self, input_ids: torch.Tensor | None, positions: torch.Tensor, hidden: torch.Tensor) -> bool:
        """Compares what one step of vLLM computes; returns True when the check has ended.

        Args:
            input_ids: int64 (T,), the new tokens of all sequences.
            positions: int64 (T,).
            hidden: (T, channels), the hidden states after the last layer.

        Raises:
            RuntimeError: the model computes something else than the plain model.
        """
        context = get_forward_context()
        # A run that measures memory has no cache.
        if context.attn_metadata is None or not isinstance(context.slot_mapping, dict) or input_ids is None:
            return False
        slots = next(iter(context.slot_mapping.values())).tolist()
        given, places = input_ids.tolist(), positions.tolist()
        first = bool(self.tokens)
        start = self._continued(slots, places) if self.tokens else _prompt(slots, places)
        if start is None:
            return first
        end = start + 1
        while end < len(slots) and slots[end] >= 0 and places[end] == places[end - 1] + 1:
            end += 1
        cut = min(end, start + LONGEST - len(self.tokens))
        self._compare(given[start:cut], hidden[start:cut])
        self.next_slot = slots[cut - 1] + 1
        # A sequence is followed into its second step, in which it reads the cache.
        return first or cut < end

    def _continued(self, slots: list[int], places: list[int]) -> int | None:
        """Returns where the sequence goes on, in the same block.

        Another sequence that was given the block has the token before it in this step, too.
        """
        for start, slot in enumerate(slots):
            if slot == self.next_slot and places[start] == len(self.tokens):
                return start if start == 0 or slots[start - 1] != slot - 1 else None
        return None

    def _compare(self, tokens: list[int], hidden: torch.Tensor) -> None:
        self.tokens += tokens
        # On every rank, because vLLM gathers log-probabilities of a vocabulary that is divided.
        scores = hidden
        is_generative = hasattr(self.served, "compute_logits")
        if is_generative:
            scores = self.served.compute_logits(hidden)
        if self.served.tp_group.rank_in_group:
            return
        if self.plain is None:
            self.plain = self._load()
        ids = torch.tensor([self.tokens])
        if is_generative:
            expected, scores = (one.float().log_softmax(-1) for one in (self.plain(ids).logits, scores.cpu()))
        else:
            expected, scores = self.plain.base_model(ids).last_hidden_state.float(), scores.float().cpu()
        difference = (expected[0, -len(tokens) :] - scores).abs().mean().item()
        dtype = self.served.model_config.dtype
        allowed = TOLERANCE.get(dtype, HALF_TOLERANCE)
        # False for NaN.
        if not difference <= allowed:
            what = "log-probabilities" if is_generative else "hidden states"
            raise RuntimeError(
                f"vLLM {vllm.__version__} computes other {what} for the first prompt than the plain model "
                f"(mean difference {difference:.2g}, allowed {allowed} in {dtype}; position_encoding="
                f"{self.plain.config.position_encoding!r}). This package was tested with vLLM {', '.join(TESTED)}. "
                f"{VARIABLE}=0 turns this check off."
            )
        logger.info(f"The first prompt was checked: mean difference {difference:.2g}.")

    def _load(self) -> Any:
        """Returns the model of the folder, on the CPU."""
        model_config = self.served.model_config
        config = copy.deepcopy(self.served.text_config)
        # vLLM's decorator for compiled models wants a configuration.
        current = copy.copy(self.served.vllm_config)
        current.compilation_config = copy.copy(current.compilation_config)
        current.compilation_config.mode = CompilationMode.NONE
        with set_current_vllm_config(current), torch.device("cpu"):
            model = self.auto_class.from_pretrained(
                model_config.model,
                config=config,
                revision=model_config.revision,
                dtype=model_config.dtype,
                attn_implementation="auto",
                trust_remote_code=model_config.trust_remote_code,
            )
        return model.eval()


def _prompt(slots: list[int], places: list[int]) -> int | None:
    """Returns where the first new prompt of two or more tokens begins."""
    for index, (one, other) in enumerate(itertools.pairwise(places)):
        if one == 0 and other == 1 and slots[index] >= 0 and slots[index + 1] >= 0:
            return index
    return None

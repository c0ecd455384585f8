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
# The mean difference that rounding errors explain. In half precision it may also be three times the difference between
# the plain model in half precision and in float32: CoPE before training makes errors larger.
TOLERANCE = 1e-3
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
    is_read = vllm_config.load_config.load_format != "dummy"
    plain = is_read and vllm_config.quant_config is None and vllm_config.cache_config.cache_dtype in ("auto", "float32")
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
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        name, slot_mapping = next(iter(context.slot_mapping.items()))
        limits = [int(limit) for limit in context.attn_metadata[name].query_start_loc]
        slots, places = slot_mapping.tolist(), positions.tolist()
        is_second = bool(self.tokens)
        for start, end in itertools.pairwise(limits):
            if places[start] == len(self.tokens) and (slots[start] == self.next_slot if is_second else end > start + 1):
                break
        else:
            return is_second
        cut = min(end, start + LONGEST - len(self.tokens))
        if cut == start:
            return True
        self._compare(input_ids[start:cut].tolist(), hidden[start:cut])
        self.next_slot = slots[cut - 1] + 1
        # The second step reads the cache. With CUDA graphs it may never come, and the plain model would stay in memory.
        return is_second or cut < end or hidden.is_cuda or self.plain is None

    def _compare(self, tokens: list[int], hidden: torch.Tensor) -> None:
        self.tokens += tokens
        # On every rank, because vLLM gathers log-probabilities of a vocabulary that is divided.
        is_generative = self.served.model_config.runner_type == "generate"
        scores = self.served.compute_logits(hidden) if is_generative else hidden
        if self.plain is None:
            self.plain = self._load()
        if self.plain is None or self.served.tp_group.rank_in_group:
            return
        scores = _comparable(scores.cpu(), is_generative)
        expected = self._expected(len(tokens), is_generative)
        difference = (expected - scores).abs().mean().item()
        dtype = self.served.model_config.dtype
        allowed = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
        if not difference <= allowed and dtype != torch.float32:
            self.plain.float()
            error = (self._expected(len(tokens), is_generative) - expected).abs().mean().item()
            self.plain.to(dtype)
            allowed = max(allowed, 3 * error)
        # False for NaN.
        if not difference <= allowed:
            what = "log-probabilities" if is_generative else "hidden states"
            raise RuntimeError(
                f"vLLM {vllm.__version__} computes other {what} for the first prompt than the plain model "
                f"(mean difference {difference:.2g}, allowed {allowed:.2g} in {dtype}; position_encoding="
                f"{self.plain.config.position_encoding!r}). This package was tested with vLLM {', '.join(TESTED)}. "
                f"{VARIABLE}=0 turns this check off."
            )
        logger.info(f"The first prompt was checked: mean difference {difference:.2g}.")

    def _expected(self, number: int, is_generative: bool) -> torch.Tensor:
        """Returns what the plain model computes for the last `number` tokens."""
        ids = torch.tensor([self.tokens])
        found = self.plain(ids).logits if is_generative else self.plain.base_model(ids).last_hidden_state
        return _comparable(found[0, -number:], is_generative)

    def _load(self) -> Any:
        """Returns the model of the folder, on the CPU, or None, with a warning, if it cannot be loaded."""
        model_config = self.served.model_config
        config = copy.deepcopy(self.served.text_config)
        # vLLM's decorator for compiled models wants a configuration.
        current = copy.copy(self.served.vllm_config)
        current.compilation_config = copy.copy(current.compilation_config)
        current.compilation_config.mode = CompilationMode.NONE
        try:
            with set_current_vllm_config(current), torch.device("cpu"):
                model = self.auto_class.from_pretrained(
                    model_config.model,
                    config=config,
                    revision=model_config.revision,
                    code_revision=model_config.code_revision,
                    token=model_config.hf_token,
                    cache_dir=current.load_config.download_dir,
                    dtype=model_config.dtype,
                    attn_implementation="auto",
                    trust_remote_code=model_config.trust_remote_code,
                )
        except (OSError, MemoryError) as error:
            logger.warning(f"The first prompt is not checked: the plain model cannot be loaded ({error}).")
            return None
        return model.eval()


def _comparable(scores: torch.Tensor, is_generative: bool) -> torch.Tensor:
    """Returns log-probabilities of logits, or hidden states, in float32."""
    return scores.float().log_softmax(-1) if is_generative else scores.float()

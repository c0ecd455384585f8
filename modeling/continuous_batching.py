"""Transformers' continuous batching for every encoding: its scheduler and its pages, and the model's own forward pass.

Transformers writes the new tokens of all sequences into one row, and its attention functions see keys of all sequences
at once. Encodings that read more than queries and keys (which keys are a sequence's, their positions, what was cached
beside them) need sequences apart. So each step runs the model on groups of sequences that have as many new tokens: an
ordinary batch with left padding, whose cache is read from the pages and written to them. What an encoding caches beside
its keys is in further channels of the keys; pages are as wide as that.

A checkpoint's folder does not have this file; it uses that of the installed package.

Axes: N sequences of a group, Q new tokens, K tokens, G key heads, T new tokens of all sequences.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .forward_arguments import CACHE
from .pretrained_model import minor_version, refusal

# Sequences of up to so many tokens are one group; longer ones only with those at least half as long.
SHORT = 512


def init_continuous_batching(model: Any, supported: list[str], reason: str | None, *args: Any, **kwargs: Any) -> Any:
    """Returns Transformers' manager for a model; see `ContinuousMixin.init_continuous_batching`.

    `supported` and `reason` are the model's `supported_implementations` and `batch_dependence`: this package may not
    have an encoding of which a folder has the code.

    Encodings that need nothing but queries and keys run as Transformers' own models do. Raises ValueError for what is
    not supported; so does the manager's `add_request`, for prompts that are too long.
    """
    encoding, limit = (
        model.config.position_encoding,
        min(model.base_model.shared_encodings.max_lengths.values(), default=None),
    )
    if reason not in (None, "key_value_shift=True"):
        raise ValueError(
            f"Continuous batching does not support {reason} (position_encoding={encoding!r}): keys would depend on the "
            "longest sequence. Use generate()."
        )
    if hints := kwargs.get("workload_hints"):
        _check_length(encoding, limit, hints.max_prompt_length, hints.max_generated_length)
    if "flash_attention_2" in supported and reason is None:
        manager = ContinuousMixin.init_continuous_batching(model, *args, **kwargs)
    else:
        # Versions before have other steps and other pages.
        if minor_version(transformers.__version__) < (5, 23):
            raise ValueError(
                f"Continuous batching of position_encoding={encoding!r} needs transformers 5.23 or newer; installed: "
                f"{transformers.__version__}. Use generate()."
            )
        manager = ContinuousMixin.init_continuous_batching(SequenceModel(model), *args, **kwargs)  # type: ignore
        settings = manager.continuous_batching_config
        if any(settings.cuda_graph_booleans) or settings.varlen_compile_config or settings.decode_compile_config:
            raise ValueError(
                f"Continuous batching of position_encoding={encoding!r} runs groups of sequences: use_cuda_graph must "
                "be None or False, and there can be no compile configuration."
            )
        # Only "sdpa" and flash attention may start; with "sdpa", masks of all tokens by all pages would be made.
        manager.model.config._attn_implementation_internal = "by sequence"
    # In a step, the error would reach the requests of all others.
    add_request = type(manager).add_request

    def checked(input_ids: Any, request_id: str | None = None, max_new_tokens: int | None = None, **kwargs: Any) -> Any:
        if not len(input_ids):
            raise refusal("The prompt has no tokens; allowed: at least one token.")
        max_new_tokens = manager.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if max_new_tokens is None and limit is not None:
            max_new_tokens = max(1, limit - len(input_ids) + 1)
        _check_length(encoding, limit, len(input_ids), max_new_tokens or 0)
        return add_request(manager, input_ids, request_id, max_new_tokens, **kwargs)

    manager.add_request = checked  # type: ignore[method-assign, assignment]
    return manager


def _check_length(encoding: str | list[str], limit: int | None, prompt: int, new: int) -> None:
    # The last token is not run.
    if limit is not None and prompt + new - 1 > limit:
        raise refusal(
            f"A prompt of {prompt} tokens and max_new_tokens={new} are more than position_encoding="
            f"{encoding!r} supports ({limit} tokens). Shorten them, or use an encoding other than "
            "'absolute' and 'relative'."
        )


class SequenceModel:
    """A model as the manager sees it: the model, but for the forward pass and what the pages are made from."""

    _supports_flash_attn = False

    def __init__(self, model: Any) -> None:
        config = copy.copy(model.config)
        config._attn_implementation_internal = "sdpa"
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            layers = model.base_model(token, use_cache=True)[CACHE].layers
        # The paged cache has one width for keys and values of all layers.
        config.head_dim = max(states.shape[-1] for layer in layers for states in (layer.keys, layer.values))
        vars(self).update(_model=model, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Transformers keeps a manager for further calls.
        setattr(self._model, name, value)

    def eval(self) -> "SequenceModel":
        self._model.eval()
        return self

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seq_lens_q: torch.Tensor,
        logits_to_keep: torch.Tensor,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Runs a step on tokens (1, T), a sequence's from one of `cu_seq_lens_q` on; `kwargs` are for the cache."""
        (key_starts,) = kwargs["cu_seq_lens_k"].values()
        hidden = None
        for pages in groups(cu_seq_lens_q, key_starts, kwargs):
            outputs = self.base_model(
                input_ids=input_ids[0, pages.rows],
                attention_mask=pages.mask,
                position_ids=position_ids[0, pages.rows].long(),
                cache=pages,
                use_cache=True,
            ).last_hidden_state
            if hidden is None:
                hidden = outputs.new_zeros(input_ids.shape[1], outputs.shape[-1])
            hidden[pages.rows] = outputs
        assert hidden is not None, "Transformers runs no step without tokens"
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[logits_to_keep])[None])


class Pages:
    """Keys and values of the sequences of a group, as the cache of a model.

    Attributes:
        rows: int64 (N, Q), the new tokens in the row of all sequences.
        mask: int64 (N, K), 0 for left padding, or None.
    """

    is_compileable = False

    def __init__(self, rows: torch.Tensor, key_starts: torch.Tensor, keys: list[int], arguments: dict) -> None:
        """Takes where the keys of each sequence begin, int64 (N,), their numbers, and the step's `kwargs`."""
        self.rows, self.K, self.cache = rows, max(keys), arguments["cache"]
        columns = torch.arange(self.K, device=rows.device) - torch.tensor([[self.K - K] for K in keys]).to(rows.device)
        self.mask = (columns >= 0).long() if min(keys) < self.K else None
        (read,), (write,) = arguments["read_index"], arguments["write_index"]
        # No pages are read in a step of whole prompts.
        slots = read[(key_starts[:, None] + columns.clamp(min=0)).flatten()] if read.numel() else read
        self.arguments = {**arguments, "read_index": [slots], "write_index": [write[rows.flatten()]]}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.K - self.rows.shape[1]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.K, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys (N, G, Q, width) and values to the pages; returns all, (N, G, K, width)."""
        N, G, Q, _ = key.shape
        width = self.cache.layer_to_allocator[layer_idx].head_dim
        new = [
            F.pad(states, (0, width - states.shape[-1])).transpose(0, 1).reshape(1, G, N * Q, width)
            for states in (key, value)
        ]
        found = self.cache.update(*new, layer_idx, dict(self.arguments))
        keys, values = (states.view(G, N, self.K, width).transpose(0, 1) for states in found)
        return keys[..., : key.shape[-1]], values[..., : value.shape[-1]]


def groups(starts: torch.Tensor, key_starts: torch.Tensor, arguments: dict) -> Iterator[Pages]:
    """Yields the sequences of a step by groups, from where their new tokens and their keys begin, (sequences + 1)."""
    first, first_key = starts.long(), key_starts.long()
    lengths = torch.stack((first.diff(), first_key.diff()), dim=1).tolist()
    # A copy of a request may have no new tokens.
    order = sorted((Q, K, index) for index, (Q, K) in enumerate(lengths) if Q)
    while order:
        Q, shortest, _ = order[0]
        longest = max(2 * shortest, SHORT)
        group = [(keys, index) for new, keys, index in order if new == Q and keys <= longest]
        order = order[len(group) :]
        chosen = torch.tensor([index for _, index in group], device=starts.device)
        rows = first[chosen, None] + torch.arange(Q, device=starts.device)
        yield Pages(rows, first_key[chosen], [keys for keys, _ in group], arguments)

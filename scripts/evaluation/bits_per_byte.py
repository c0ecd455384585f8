"""Bits per byte in Transformers' `Trainer`: a metric of Hugging Face `evaluate` for `compute_metrics`."""

import math
from collections.abc import Sequence

import datasets
import evaluate
import torch
from torch.nn import functional

_DESCRIPTION = """
How many bits a language model needs for a byte of text: comparable between models with different tokenizers, which
perplexity per token is not, unless a tokenizer changes the text (by normalisation, or for lack of a token): what it
drops is not predicted. Lower is better; 8 is a uniform guess over bytes.
"""

_INPUTS = """
Args:
    predictions (list of float): for each text, the negative log-likelihood that the model gives it, in nats, summed
        over all its tokens.
    references (list of str): the texts, as they were before tokenisation. Their lengths are counted in bytes of UTF-8.

Returns:
    bits_per_byte (float): the sum of `predictions` over ln 2 times the sum of bytes.
    bytes (int): the sum of bytes.
"""


def text_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the negative log-likelihood of each text, in nats, (B); for `preprocess_logits_for_metrics`.

    The first token of a text is not predicted: begin with the end-of-text token, unless the tokenizer adds BOS.
    """
    return functional.cross_entropy(logits[:, :-1].mT.float(), labels[:, 1:], reduction="none").sum(1)


class BitsPerByte(evaluate.Metric):
    """Sums over all texts first: long texts weigh more than short ones."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[str]) -> dict[str, float]:
        size = sum(len(text.encode()) for text in references)
        if size == 0:
            raise ValueError(f"references={references!r} is not valid: it must hold at least one byte of text.")
        return {"bits_per_byte": sum(predictions) / (math.log(2) * size), "bytes": size}

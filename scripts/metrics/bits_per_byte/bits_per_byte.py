"""Bits per byte, as a module of Hugging Face `evaluate` that loads by path and works offline."""

import math

import datasets
import evaluate

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

Example:
    >>> metric = evaluate.load("scripts/metrics/bits_per_byte")
    >>> metric.compute(predictions=[2.0794415416798357], references=["abc"])
    {'bits_per_byte': 1.0, 'bytes': 3}
"""


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

    def _compute(self, predictions: list[float], references: list[str]) -> dict[str, float]:
        size = sum(len(text.encode()) for text in references)
        if size == 0:
            raise ValueError(f"references={references!r} is not valid: it must hold at least one byte of text.")
        return {"bits_per_byte": sum(predictions) / (math.log(2) * size), "bytes": size}

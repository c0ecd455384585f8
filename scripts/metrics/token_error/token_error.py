"""Token error, as a module of Hugging Face `evaluate` that loads by path and works offline."""

import datasets
import evaluate

_DESCRIPTION = """
The fraction of tokens that are predicted wrongly, in percent, as toy tasks (counting, flip-flop, selective copy) report
it, and the fraction of sequences with at least one wrong token. Lower is better.
"""

_INPUTS = """
Args:
    predictions (list of lists of int): for each sequence, the predicted token ids.
    references (list of lists of int): the right ones, of the same lengths; tokens with a reference of `ignore_index` do
        not count.
    ignore_index (int, default -100): the reference of a token that does not count.

Returns:
    token_error (float): wrong tokens in percent of those that count.
    sequence_error (float): sequences with a wrong token in percent of those with a token that counts.

Example:
    >>> metric = evaluate.load("scripts/metrics/token_error")
    >>> metric.compute(predictions=[[1, 2], [3, 4]], references=[[1, 2], [-100, 5]])
    {'token_error': 33.33333333333333, 'sequence_error': 50.0}
"""


class TokenError(evaluate.Metric):
    """Counts over all sequences first: long sequences weigh more than short ones."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(
        self, predictions: list[list[int]], references: list[list[int]], ignore_index: int = -100
    ) -> dict[str, float]:
        counted = wrong = counted_sequences = wrong_sequences = 0
        for row, (predicted, right) in enumerate(zip(predictions, references)):
            if len(predicted) != len(right):
                raise ValueError(
                    f"predictions[{row}] has {len(predicted)} tokens and references[{row}] has {len(right)}: they must "
                    "have the same length."
                )
            errors = [p != r for p, r in zip(predicted, right) if r != ignore_index]
            counted += len(errors)
            wrong += sum(errors)
            counted_sequences += bool(errors)
            wrong_sequences += any(errors)
        if counted == 0:
            raise ValueError(f"references: every token is {ignore_index!r} (ignore_index): none is left to count.")
        return {"token_error": 100 * wrong / counted, "sequence_error": 100 * wrong_sequences / counted_sequences}

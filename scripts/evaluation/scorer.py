"""lm-eval's model, with the requests divided among processes."""

from typing import Any

from ..data.tokenize import added_tokens
from ..processes import Processes


def scorer(processes: Processes, *arguments: Any, **options: Any) -> Any:
    """Returns lm-eval's `HFLM`, with the requests divided among the processes; each process gets all answers.

    lm-eval's own division fails if a task has fewer questions than processes, and on CPUs it does not divide.

    Raises:
        ValueError: the tokenizer ends texts with a token. lm-eval would score answers that follow an end of text.
    """
    from lm_eval.models.huggingface import HFLM

    class Scorer(HFLM):
        # Requests (of all processes) that were too long.
        truncated = 0

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            self.truncated += sum(len(start) + len(end) > self.max_length + 1 for _, start, end in requests)
            mine, quiet = processes.share(requests), disable_tqdm or not processes.is_first
            answers = super()._loglikelihood_tokens(mine, quiet, override_bs) if mine else []
            return processes.joined(answers, len(requests))

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            mine = processes.share(requests)
            answers = super().generate_until(mine, disable_tqdm or not processes.is_first) if mine else []
            return processes.joined(answers, len(requests))

    model = Scorer(*arguments, **options)
    if ends := added_tokens(model.tokenizer)[1]:
        raise ValueError(
            f"tokenizer={model.tokenizer.name_or_path!r} is not valid for scoring with lm-eval: it ends each text with "
            f"{model.tokenizer.convert_ids_to_tokens(ends)}, so answers would follow the end of a text. Allowed: a "
            "tokenizer that adds no token after a text, for example with add_eos_token=False in tokenizer_config.json."
        )
    # lm-eval divides nothing.
    model._rank, model._world_size = 0, 1
    return model

"""An lm-eval task without downloads: which of four lines continues a piece of code?

The questions are from the test split of the running Python's standard library (`whatwhere.scripts.data.corpus`). The
context is the 12 preceding lines; the three wrong choices are lines of the same file with the same indentation.
`whatwhere demo` writes the task with `write_task` and runs it:

    HF_HUB_OFFLINE=1 lm_eval --model hf --model_args pretrained=demo/pope,trust_remote_code=True \
        --tasks whatwhere_code_completion --include_path demo/tasks --device cpu
"""

import json
import pathlib
import random
import re
from collections.abc import Sequence
from typing import Any

TASK = "whatwhere_code_completion"
CONTEXT_LINES = 12
CHOICES = 4


def _is_candidate(line: str) -> bool:
    """Whether a line is suitable: not blank, not only punctuation, not too long for a short context."""
    text = line.strip()
    return len(text) >= 12 and len(line) <= 80 and text[0] not in "#\"'" and any(c.isalpha() for c in text)


def questions(texts: Sequence[str], count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Draws questions from documents, deterministically for given texts, count and seed.

    Returns:
        Dictionaries with `context` (12 lines without the last line end), `choices` (4 different lines) and `answer`
        (the index of the line that follows the context).

    Raises:
        ValueError: the documents have too few suitable lines.
    """
    generator = random.Random(seed)
    documents = [text.splitlines() for text in texts]
    places = [
        (document, line)
        for document, lines in enumerate(documents)
        for line in range(CONTEXT_LINES, len(lines))
        if _is_candidate(lines[line]) and lines[line - 1].strip()
    ]
    generator.shuffle(places)
    found: list[dict[str, Any]] = []
    for document, line in places:
        if len(found) == count:
            break
        lines, right = documents[document], documents[document][line]
        # Choices must not occur in the context: such a line could be ruled out, or be correct itself.
        context = lines[line - CONTEXT_LINES : line]
        indentation = right[: len(right) - len(right.lstrip())]
        others = {other for other in lines if _is_candidate(other) and re.match(rf"{indentation}\S", other)}
        others -= {right, *context}
        if right in context or len(others) < CHOICES - 1:
            continue
        choices = [right, *generator.sample(sorted(others), CHOICES - 1)]
        generator.shuffle(choices)
        found.append({"context": "\n".join(context), "choices": choices, "answer": choices.index(right)})
    if len(found) < count:
        raise ValueError(f"questions={count!r} is not valid: the held-out documents have only {len(found)}.")
    return found


def write_task(output: str | pathlib.Path, texts: Sequence[str], count: int = 200, *, seed: int = 0) -> pathlib.Path:
    """Writes questions and the task's YAML file into a folder for `lm_eval --include_path`; returns the YAML's path."""
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    data = output / f"{TASK}.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in questions(texts, count, seed=seed)), encoding="utf-8")
    template = pathlib.Path(__file__).with_name(f"{TASK}.yaml")
    where = {"data_files": {"test": str(data.resolve())}}
    task = output / f"{TASK}.yaml"
    # JSON is YAML.
    task.write_text(template.read_text(encoding="utf-8") + f"dataset_kwargs: {json.dumps(where)}\n", encoding="utf-8")
    return task

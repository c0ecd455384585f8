"""An lm-eval task that needs no download: which of four lines continues a piece of code?

The questions come from the test split of the running Python's standard library (`whatwhere.scripts.data.corpus`): no
model trained on the train split has seen these files. The context is the 12 lines before; the three wrong choices are
lines of the same file with the same indentation. `whatwhere demo` writes the task with `write_task` and runs it:

    HF_HUB_OFFLINE=1 lm_eval --model hf --model_args pretrained=demo/pope,trust_remote_code=True \
        --tasks whatwhere_code_completion --include_path demo/tasks --device cpu
"""

import json
import pathlib
import random
from collections.abc import Sequence
from typing import Any

TASK = "whatwhere_code_completion"
CONTEXT_LINES = 12
CHOICES = 4


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_candidate(line: str) -> bool:
    """Lines that say something: not blank, not only punctuation, not so long that they fill a short context."""
    text = line.strip()
    return len(text) >= 12 and len(line) <= 80 and text[0] not in "#\"'" and any(c.isalpha() for c in text)


def questions(texts: Sequence[str], count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Draws questions from documents; the same texts, count and seed give the same questions.

    Returns:
        Dictionaries with `context` (12 lines without the last line end), `choices` (4 different lines) and `answer`
        (the index of the line that follows the context).

    Raises:
        ValueError: the documents do not hold that many questions.
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
        # A line that stands in the context could be ruled out, or be a right continuation itself.
        context = lines[line - CONTEXT_LINES : line]
        others = {other for other in lines if _is_candidate(other) and _indentation(other) == _indentation(right)}
        others -= {right, *context}
        if right in context or len(others) < CHOICES - 1:
            continue
        choices = [right, *generator.sample(sorted(others), CHOICES - 1)]
        generator.shuffle(choices)
        found.append({"context": "\n".join(context), "choices": choices, "answer": choices.index(right)})
    if len(found) < count:
        raise ValueError(f"questions={count!r}: the held-out documents hold only {len(found)}.")
    return found


def write_task(output: str | pathlib.Path, texts: Sequence[str], count: int = 200, *, seed: int = 0) -> pathlib.Path:
    """Writes the questions and the task's YAML file into a folder for `lm_eval --include_path`, and returns the YAML.

    Raises:
        ValueError: no question is asked for.
    """
    if count < 1:
        raise ValueError(f"questions={count!r} is not valid: it must be at least 1.")
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

"""Data of the zero-shot tasks: the questions of CBT, and local files in place of the Hub's data sets.

The task files beside this one name these functions; lm-eval loads this file by its path, without the package.

The folder of local files is `--metadata '{"data_dir": "data"}'` on lm-eval's command line, else WHATWHERE_DATA_DIR.
What it holds, each file in the format of its authors unless something else is said:

| task | files | rows |
|---|---|---|
| LAMBADA | `lambada/lambada_test.jsonl` | `text`: OpenAI's test set |
| BLiMP | `blimp/blimp.jsonl.gz` | the 67 files in one; `UID` is the paradigm |
| CBT | `cbt/cbtest_{CN,NE,P,V}_test_2500ex.txt` | 21 numbered lines a question |
| HellaSwag | `hellaswag/hellaswag_val.jsonl.gz` | `query`, `choices`, `gold`: already preprocessed as lm-eval does it |
| PIQA | `piqa/valid.jsonl`, `piqa/valid-labels.lst` | the labels in a file of their own |
| ARC-Easy | `arc/arc_easy_test.jsonl` | `query`, `choices`, `gold`: always four options |

The rows come out with the columns of the Hub's data sets, so that lm-eval's own task definitions ask the questions.
Two files have lost something. HellaSwag's has not the capital letter with which lm-eval begins the last, unfinished
sentence; `hellaswag` puts it back where such a sentence begins. ARC's items with three or five options were made to
have four: 7 of 2,376 repeat a wrong option. So scores on these files may differ from the Hub's in the last digits, and
the tasks' versions end in `+local`.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

DATA_DIR_VARIABLE = "WHATWHERE_DATA_DIR"
WORD_CLASSES = ("CN", "NE", "P", "V")
BLANK = "XXXXX"

FILES = {
    "lambada": ("lambada/lambada_test.jsonl",),
    "blimp": ("blimp/blimp.jsonl.gz",),
    "cbt": tuple(f"cbt/cbtest_{word_class}_test_2500ex.txt" for word_class in WORD_CLASSES),
    "hellaswag": ("hellaswag/hellaswag_val.jsonl.gz",),
    "piqa": ("piqa/valid.jsonl", "piqa/valid-labels.lst"),
    "arc_easy": ("arc/arc_easy_test.jsonl",),
}

_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
# The marks of the Penn Treebank's tokenizer, in this order: (pattern, what it becomes).
_DETOKENISE: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile("|".join(_BRACKETS)), lambda match: _BRACKETS[match[0]]),
    # Quotation marks: `` and ` open, '' and ' close.
    (re.compile(r"`` ?"), '"'),
    (re.compile(r"` ?"), "'"),
    (re.compile(r" ?''"), '"'),
    (re.compile(r" '(?=[ .,:;!?\"]|$)"), "'"),
    (re.compile(r" (n't|'(?:s|m|d|ll|re|ve))\b", re.IGNORECASE), r"\1"),
    (re.compile(r" ([.,:;!?)\]}])"), r"\1"),
    (re.compile(r"([(\[{]) "), r"\1"),
)


def detokenise(text: str) -> str:
    """Undoes the Penn Treebank's tokenisation: quotation marks, brackets, clitics, spaces before punctuation."""
    for pattern, replacement in _DETOKENISE:
        text = pattern.sub(replacement, text)
    return text


def cbt_question(row: dict[str, Any]) -> dict[str, Any]:
    """Returns what lm-eval asks about a row of the Children's Book Test.

    As for GPT-2 (Radford et al. 2019, section 3.2): the text is detokenised, and a candidate's score is the probability
    of the candidate and the rest of its sentence, given the 20 sentences and the sentence up to the blank.

    Args:
        row: `sentences` (20), `question` (with XXXXX), `options` (candidates) and `answer`, as in the Hub's data set.

    Returns:
        `context` (without a space at its end), `choices` (candidate and rest, with the space before it, if any) and
        `gold`, the index of the answer.

    Raises:
        ValueError: the question has no blank, or the answer is not among the options.
    """
    question, answer = row["question"], row["answer"]
    options = [option for option in row["options"] if option]
    if BLANK not in question:
        raise ValueError(f"question={question!r} has no {BLANK}.")
    if answer not in options:
        raise ValueError(f"answer={answer!r} is not one of the options: {', '.join(options)}.")
    text = " ".join([*row["sentences"], question])
    context = detokenise(text.partition(BLANK)[0]).rstrip()
    wholes = [detokenise(text.replace(BLANK, option)) for option in options]
    assert all(whole.startswith(context) for whole in wholes), f"detokenising changed what precedes {question!r}"
    return {
        "context": context,
        "choices": [whole[len(context) :] for whole in wholes],
        "gold": options.index(answer),
    }


def cbt_questions(dataset: datasets.Dataset) -> datasets.Dataset:
    """Returns `cbt_question` of every row."""
    return dataset.map(cbt_question, remove_columns=dataset.column_names)


def read_cbt(lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file of the Children's Book Test with the columns of the Hub's data set.

    Args:
        lines: 21 to a question, each beginning with its number: 20 sentences, then the question, the answer, an empty
            field and the candidates (`a|b|...`) with tabs between them. Empty lines between questions.
        name: of the file, for errors.

    Raises:
        ValueError: a line is not of that form; the message names it.
    """
    sentences: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place, _, text = line.strip().partition(" ")
        if place != str(len(sentences) + 1):
            raise ValueError(f"{name}, line {number}: {line!r} should begin with {len(sentences) + 1}.")
        if len(sentences) < 20:
            sentences.append(text.strip())
            continue
        fields = text.split("\t")
        if len(fields) != 4:
            raise ValueError(f"{name}, line {number}: {line!r} should be: question, answer, nothing, candidates.")
        question, answer, _, options = fields
        yield {
            "sentences": sentences,
            "question": question.strip(),
            "answer": answer.strip(),
            "options": options.strip().split("|"),
        }
        sentences = []
    if sentences:
        raise ValueError(f"{name} ends within a question, after sentence {len(sentences)}.")


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Returns the folder of local data sets: `data_dir`, else what WHATWHERE_DATA_DIR says.

    Raises:
        ValueError: neither is given.
        FileNotFoundError: it is not a folder.
    """
    name = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not name:
        raise ValueError(
            f"data_dir={data_dir!r} and {DATA_DIR_VARIABLE} is not set: one must name a folder (data_dir by lm-eval's "
            """--metadata '{"data_dir": "data"}')."""
        )
    folder = pathlib.Path(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"data_dir={str(folder)!r} is not a folder.")
    return folder


def missing_files(task: str, data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns those of a task's `FILES` that the folder lacks."""
    folder = data_folder(data_dir)
    return [name for name in FILES[task] if not (folder / name).is_file()]


def _files(task: str, data_dir: str | os.PathLike[str] | None) -> list[pathlib.Path]:
    folder, missing = data_folder(data_dir), missing_files(task, data_dir)
    if missing:
        raise FileNotFoundError(f"data_dir={str(folder)!r} lacks {', '.join(missing)}, the data of {task}.")
    return [folder / name for name in FILES[task]]


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [json.loads(line) for line in content.splitlines()]
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path.name} is broken: {error}") from error
    if not rows:
        raise ValueError(f"{path.name} holds no rows.")
    return rows


def _split(name: str, rows: list[dict[str, Any]]) -> datasets.DatasetDict:
    # The list of tasks is needed where `datasets` is not.
    import datasets

    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows)})


# lm-eval passes a task's metadata and `dataset_kwargs`: `data_dir` is ours, the rest is about the task.


def lambada(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns LAMBADA with the column of EleutherAI/lambada_openai: `text`."""
    (path,) = _files("lambada", data_dir)
    return _split("test", _read(path))


@functools.lru_cache(maxsize=1)
def _blimp_rows(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """One file for 67 tasks: it is read once."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _read(path):
        sentences = {key: row[key] for key in ("sentence_good", "sentence_bad")}
        found.setdefault(row["UID"], []).append(sentences)
    return found


def blimp(paradigm: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns one of BLiMP's 67 paradigms with columns of nyu-mll/blimp: `sentence_good`, `sentence_bad`."""
    (path,) = _files("blimp", data_dir)
    rows = _blimp_rows(path)
    if paradigm not in rows:
        raise ValueError(f"paradigm={paradigm!r} is not in {path.name}. It holds: {', '.join(sorted(rows))}.")
    return _split("train", rows[paradigm])


def cbt(word_class: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns the test split of one word class with the columns of cam-cst/cbt."""
    if word_class not in WORD_CLASSES:
        raise ValueError(f"word_class={word_class!r} is not valid. It must be one of: {', '.join(WORD_CLASSES)}.")
    path = _files("cbt", data_dir)[WORD_CLASSES.index(word_class)]
    with path.open(encoding="utf-8") as lines:
        return _split("test", list(read_cbt(lines, path.name)))


def hellaswag(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns HellaSwag as lm-eval's preprocessing leaves it: `query`, `choices`, `gold`, and `label`, its text.

    lm-eval writes `ctx_a + " " + ctx_b.capitalize()`. The file has both in one, ctx_b not capitalised. ctx_b is the
    unfinished sentence at the end: captions of videos have one, articles of WikiHow do not. It is capitalised here.
    """
    (path,) = _files("hellaswag", data_dir)
    rows = [
        {
            "query": re.sub(r"(?<=[.!?] )[a-z][^.!?]*$", lambda match: match[0].capitalize(), row["query"]),
            "choices": row["choices"],
            "gold": row["gold"],
            "label": str(row["gold"]),
        }
        for row in _read(path)
    ]
    return _split("validation", rows)


def piqa(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns PIQA's validation split with the columns of baber/piqa: `goal`, `sol1`, `sol2`, `label`."""
    questions, answers = _files("piqa", data_dir)
    rows, labels = _read(questions), answers.read_text(encoding="utf-8").split()
    if len(rows) != len(labels):
        raise ValueError(f"{questions.name} holds {len(rows)} questions and {answers.name} {len(labels)} labels.")
    return _split("validation", [{**row, "label": int(label)} for row, label in zip(rows, labels)])


def arc_easy(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns ARC-Easy's test split with columns of allenai/ai2_arc: `question`, `choices` and `answerKey`."""
    (path,) = _files("arc_easy", data_dir)
    rows = []
    for row in _read(path):
        letters = [chr(ord("A") + place) for place in range(len(row["choices"]))]
        rows.append(
            {
                "question": row["query"].removeprefix("Question: "),
                "choices": {"text": row["choices"], "label": letters},
                "answerKey": letters[row["gold"]],
            }
        )
    return _split("test", rows)

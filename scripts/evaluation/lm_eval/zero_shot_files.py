"""Data of the zero-shot tasks: the questions of CBT, and local files in place of the Hub's data sets.

The YAML files in this folder name these functions. lm-eval loads this file by its path, not as a part of the package,
which it does not import: a process with the package runs the package's code instead of the code in a model's folder.

The folder of local files is set by `--metadata '{"data_dir": "data"}'` on lm-eval's command line, else by
WHATWHERE_DATA_DIR. Its files are in the format of their authors unless noted:

| task | files | rows |
|---|---|---|
| LAMBADA | `lambada/lambada_test.jsonl` | `text`: OpenAI's test set |
| BLiMP | `blimp/blimp.jsonl.gz` | the 67 files in one; `UID` is the paradigm |
| CBT | `cbt/cbtest_{CN,NE,P,V}_test_2500ex.txt` | 21 numbered lines a question |
| HellaSwag | `hellaswag/hellaswag_val.jsonl.gz` | `query`, `choices`, `gold`: already preprocessed as lm-eval does it |
| PIQA | `piqa/valid.jsonl`, `piqa/valid-labels.lst` | the labels are in the second file |
| ARC-Easy | `arc/arc_easy_test.jsonl` | `query`, `choices`, `gold`: always four options |

The functions return rows with the columns of the Hub's data sets, for lm-eval's own task definitions (those of ARC-Easy
have other columns, which the YAML file names). Two files differ
from the Hub's. In HellaSwag's, the last, unfinished sentence does not begin with the capital letter that lm-eval gives
it; `hellaswag` restores it. In ARC-Easy's, questions with three or five options were changed to four: 7 of 2,376 repeat
a wrong option. Scores may therefore differ slightly from the Hub's, and the tasks' versions end in `+local`.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

_PATH = pathlib.Path(__file__).parents[2] / "data" / "folder.py"
_SPEC: Any = importlib.util.spec_from_file_location("whatwhere_data_folder", _PATH)
_folder_file = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_folder_file)
DATA_DIR_VARIABLE, data_folder = _folder_file.DATA_DIR_VARIABLE, _folder_file.data_folder

BLANK = "XXXXX"

FILES = {
    "lambada": ("lambada/lambada_test.jsonl",),
    "blimp": ("blimp/blimp.jsonl.gz",),
    "cbt": tuple(f"cbt/cbtest_{word_class}_test_2500ex.txt" for word_class in ("CN", "NE", "P", "V")),
    "hellaswag": ("hellaswag/hellaswag_val.jsonl.gz",),
    "piqa": ("piqa/valid.jsonl", "piqa/valid-labels.lst"),
    "arc_easy": ("arc/arc_easy_test.jsonl",),
}

_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
# (pattern, replacement) for the Penn Treebank's tokenisation, applied in this order.
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
    """Converts a row of the Children's Book Test into a question for lm-eval.

    As for GPT-2 (Radford et al. 2019, section 3.2), the text is detokenised, and a candidate's score is the probability
    of the candidate and the rest of its sentence, given the 20 sentences and the sentence up to the blank.

    Args:
        row: `sentences` (20), `question` (with XXXXX), `options` (candidates) and `answer`, as in the Hub's data set.

    Returns:
        `context` (without trailing space), `choices` (candidate and rest of the sentence, with leading space if any)
        and `gold` (the index of the answer).
    """
    question, options = row["question"], [option for option in row["options"] if option]
    text = " ".join([*row["sentences"], question])
    context = detokenise(text.partition(BLANK)[0]).rstrip()
    wholes = [detokenise(text.replace(BLANK, option)) for option in options]
    assert all(whole.startswith(context) for whole in wholes), f"detokenising changed what precedes {question!r}"
    return {
        "context": context,
        "choices": [whole[len(context) :] for whole in wholes],
        "gold": options.index(row["answer"]),
    }


def cbt_questions(dataset: datasets.Dataset) -> datasets.Dataset:
    """Returns `cbt_question` of every row."""
    return dataset.map(cbt_question, remove_columns=dataset.column_names)


def read_cbt(text: str) -> list[dict[str, Any]]:
    """Returns the rows of a file of the Children's Book Test with the columns of the Hub's data set.

    A question has 21 numbered lines: 20 sentences, and a line with the question, the answer, an empty field and the
    candidates (`a|b|...`), separated by tabs. Questions are separated by empty lines.
    """
    lines = [line.strip().partition(" ")[2].strip() for line in text.split("\n") if line.strip()]
    rows = []
    for start in range(0, len(lines), 21):
        *sentences, last = lines[start : start + 21]
        question, answer, _, options = map(str.strip, last.split("\t"))
        rows.append({"sentences": sentences, "question": question, "answer": answer, "options": options.split("|")})
    return rows


def _folder(data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    """Returns the folder of local data sets; raises ValueError if it is not given."""
    folder = data_folder(data_dir)
    if folder is None:
        raise ValueError(
            f"no data_dir is given: set {DATA_DIR_VARIABLE}, or data_dir by lm-eval's --metadata "
            """'{"data_dir": "data"}'."""
        )
    return folder


def _read(name: str, data_dir: str | None) -> str:
    path = _folder(data_dir) / name
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def _rows(name: str, data_dir: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _read(name, data_dir).split("\n") if line]


def _split(name: str, rows: list[dict[str, Any]]) -> datasets.DatasetDict:
    # The list of tasks is needed where `datasets` is not.
    import datasets

    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows)})


# lm-eval passes a task's metadata and `dataset_kwargs`: `data_dir` is ours, the rest is about the task.


def rows(file: str, split: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns the rows of a file as a split of this name."""
    return _split(split, _rows(file, data_dir))


@functools.lru_cache(maxsize=1)
def _paradigms(data_dir: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each paradigm; cached, because all 67 tasks read the same file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _rows("blimp/blimp.jsonl.gz", data_dir):
        sentences = {key: row[key] for key in ("sentence_good", "sentence_bad")}
        found.setdefault(row["UID"], []).append(sentences)
    return found


def blimp(paradigm: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns one of BLiMP's 67 paradigms with columns of nyu-mll/blimp: `sentence_good`, `sentence_bad`."""
    return _split("train", _paradigms(str(_folder(data_dir)))[paradigm])


def cbt(word_class: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns the test split of one word class (CN, NE, P or V) with the columns of cam-cst/cbt."""
    return _split("test", read_cbt(_read(f"cbt/cbtest_{word_class}_test_2500ex.txt", data_dir)))


def hellaswag(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns HellaSwag as preprocessed by lm-eval: `query`, `choices`, `gold`, and `label` (`gold` as text).

    lm-eval's query is `ctx_a + " " + ctx_b.capitalize()`. The file's query has ctx_b, the unfinished last sentence of
    video captions, without the capital letter. This function capitalises it. WikiHow articles have no ctx_b.
    """
    rows = []
    for row in _rows("hellaswag/hellaswag_val.jsonl.gz", data_dir):
        query = re.sub(r"(?<=[.!?] )[a-z][^.!?]*$", lambda match: match[0].capitalize(), row["query"])
        rows.append({"query": query, "choices": row["choices"], "gold": row["gold"], "label": str(row["gold"])})
    return _split("validation", rows)


def piqa(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Returns PIQA's validation split with the columns of baber/piqa: `goal`, `sol1`, `sol2`, `label`."""
    rows, labels = _rows("piqa/valid.jsonl", data_dir), _read("piqa/valid-labels.lst", data_dir).split()
    return _split("validation", [{**row, "label": int(label)} for row, label in zip(rows, labels, strict=True)])

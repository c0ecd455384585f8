"""What each engine or mode does with each encoding: tests take their cases from it, and docs/engines.md its table.

Run as a program (`make engines` does, after the tests) it writes that table.
"""

import dataclasses
import pathlib
import textwrap
from typing import Literal

import pytest

import whatwhere

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "engines.md"
START, END = "<!-- The next lines are written by `make engines`. -->\n", "<!-- Until here. -->\n"

Cell = Literal["works", "refused", "not run here"]


@dataclasses.dataclass(frozen=True)
class Engine:
    """One column.

    Attributes:
        title: the head of the column.
        use: a sentence on how to use it.
        default: the cells that `cells` does not name.
        cells: other cells, by encoding.
        elsewhere: where there are cells "not run here": the command that runs them where the engine is.
    """

    title: str
    use: str
    default: Cell
    cells: dict[str, Cell] = dataclasses.field(default_factory=dict)
    elsewhere: str | None = None

    def cell(self, encoding: str) -> Cell:
        return self.cells.get(encoding, self.default)


# What needs nothing beyond queries and keys.
PLAIN = ("none", "absolute", "sinusoidal", "rope")

ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM, SGLang",
        "`vllm serve FOLDER --trust-remote-code`, or `sglang` with `--model-impl transformers`.",
        "refused",
        dict.fromkeys((*PLAIN, "pope"), "not run here"),
        "vllm serve FOLDER --trust-remote-code",
    ),
    "context_parallel": Engine(
        "context parallelism",
        'accelerate\'s `ParallelismConfig(cp_size=...)` with `attn_implementation="sdpa"`, on GPUs.',
        "refused",
        dict.fromkeys((*PLAIN, "pope"), "not run here"),
        "torchrun --nproc_per_node 2 tests/context_parallel_worker.py",
    ),
    "ulysses": Engine(
        "DeepSpeed Ulysses",
        'accelerate\'s `ParallelismConfig(sp_size=..., sp_backend="deepspeed")` with `attn_implementation="sdpa"` or '
        "flash attention.",
        "refused",
        dict.fromkeys(PLAIN, "not run here"),
        "pip install deepspeed; torchrun --nproc_per_node 2 tests/ulysses_worker.py",
    ),
    "lm_eval": Engine(
        "lm-eval",
        "`lm_eval --model hf --model_args pretrained=MODEL,trust_remote_code=True`, with `peft=ADAPTER`, or under "
        "`accelerate launch -m lm_eval`; or `whatwhere zero-shot`.",
        "works",
    ),
    "continuous_batching": Engine(
        "continuous batching",
        "`model.generate_batch(prompts, ...)`, or `transformers serve --continuous-batching`.",
        "works",
    ),
    "serve": Engine(
        "`transformers serve`",
        "`transformers serve FOLDER --trust-remote-code`; one request after the other.",
        "works",
    ),
}


def for_engine(name: str):
    """Parametrises a test by `encoding` and `expected`, the cells of an engine's column.

    The test compares "works" with the plain model, finds the message of "refused", and runs a stand-in for the engine
    in cells "not run here".
    """
    encodings = whatwhere.list_position_encodings()
    return pytest.mark.parametrize(
        ("encoding", "expected"), [(one, ENGINES[name].cell(one)) for one in encodings], ids=encodings
    )


def text() -> str:
    """Returns the table, and a sentence on each engine."""
    rows = [
        ["`position_encoding`", *(engine.title for engine in ENGINES.values())],
        ["---"] * (1 + len(ENGINES)),
        *(
            [f"`{encoding}`", *(engine.cell(encoding) for engine in ENGINES.values())]
            for encoding in whatwhere.list_position_encodings()
        ),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows] + [""]
    for name, engine in ENGINES.items():
        elsewhere = f" To run it where the engine is: `{engine.elsewhere}`." if engine.elsewhere else ""
        item = f"- **{engine.title}**: {engine.use} Tests: `{test_of(name)}`.{elsewhere}"
        lines += textwrap.wrap(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def test_of(name: str) -> str:
    """Returns the test that has the cells of an engine as its cases.

    Raises:
        LookupError: there is none.
    """
    for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
        _, found, after = path.read_text(encoding="utf-8").partition(f'@for_engine("{name}")')
        if found:
            return f"tests/{path.name}::{after.partition('def ')[2].partition('(')[0]}"
    raise LookupError(f"no test has the cells of the engine {name!r}: decorate one with @for_engine({name!r}).")


if __name__ == "__main__":
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(head + START + text() + END + rest.partition(END)[2], encoding="utf-8")

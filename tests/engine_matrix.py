"""What each engine or mode does with each encoding: tests take their cases from it, and docs/engines.md its tables.

Run as a program (`make engines` does, after the tests) it writes those tables.
"""

import dataclasses
import pathlib
import textwrap
from typing import Any, Literal

import pytest

import whatwhere

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "engines.md"
START, END = "<!-- The next lines are written by `make engines`. -->\n", "<!-- Until here. -->\n"

# Those that cache a state of each token in further channels of its key.
WITH_STATE = ("fox", "token_gated_cope", "fox+rope", "token_gated_cope+rope")

Cell = Literal["works", "refused", "not run here"]


@dataclasses.dataclass(frozen=True)
class Engine:
    """One column.

    Attributes:
        part: the table that it is in.
        title: the head of the column.
        use: a sentence on how to use it.
        default: the cells that `cells` does not name.
        cells: other cells, by encoding.
        elsewhere: where there are cells "not run here": the command that runs them where the engine is.
        test: the test, if it does not take its cases from here.
    """

    part: Literal["Serving", "Inference", "Training"]
    title: str
    use: str
    default: Cell
    cells: dict[str, Cell] = dataclasses.field(default_factory=dict)
    elsewhere: str | None = None
    test: str | None = None

    def cell(self, encoding: str) -> Cell:
        return self.cells.get(encoding, self.default)


# What needs nothing beyond queries and keys.
PLAIN = ("none", "absolute", "sinusoidal", "rope")

ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "Serving",
        "vLLM",
        "`vllm serve FOLDER --trust-remote-code`, with vLLM 0.32 and this package installed ([vLLM](#vllm)).",
        "works",
        test="tests/test_vllm.py::test_vllm_generates_what_generate_does",
    ),
    "sglang": Engine(
        "Serving",
        "SGLang",
        "with `--model-impl transformers` ([SGLang](#sglang)).",
        "refused",
        dict.fromkeys(PLAIN, "not run here"),
        "python -m sglang.launch_server --model-path FOLDER --model-impl transformers --trust-remote-code",
    ),
    "context_parallel": Engine(
        "Training",
        "context parallelism",
        'accelerate\'s `ParallelismConfig(cp_size=...)` with `attn_implementation="sdpa"`, on GPUs.',
        "refused",
        dict.fromkeys((*PLAIN, "pope"), "not run here"),
        "torchrun --nproc_per_node 2 tests/context_parallel_worker.py",
    ),
    "ulysses": Engine(
        "Training",
        "DeepSpeed Ulysses",
        'accelerate\'s `ParallelismConfig(sp_size=..., sp_backend="deepspeed")` with `attn_implementation="sdpa"` or '
        "flash attention.",
        "refused",
        dict.fromkeys(PLAIN, "works"),
        test="tests/test_engines.py::test_ulysses",
    ),
    "lm_eval": Engine(
        "Inference",
        "lm-eval",
        "`lm_eval --model hf --model_args pretrained=MODEL,trust_remote_code=True`, with `peft=ADAPTER`, or under "
        "`accelerate launch -m lm_eval`; or `whatwhere zero-shot`.",
        "works",
    ),
    "continuous_batching": Engine(
        "Serving",
        "continuous batching",
        "`model.generate_batch(prompts, ...)`, or `transformers serve --continuous-batching` "
        "([continuous batching](#continuous-batching)).",
        "works",
    ),
    "serve": Engine(
        "Serving",
        "`transformers serve`",
        "`transformers serve FOLDER --trust-remote-code`; one request after the other.",
        "works",
    ),
    "assisted_generation": Engine(
        "Inference",
        "assisted generation",
        "`model.generate(..., assistant_model=...)` or `prompt_lookup_num_tokens=3`.",
        "works",
    ),
    "compiled_decoding": Engine(
        "Inference",
        "compiled decoding",
        '`model.generate(..., cache_implementation="static")`, which compiles on GPUs: one graph for 50 steps.',
        "works",
    ),
    "quantized_cache": Engine(
        "Inference",
        "quantised cache",
        '`model.generate(..., cache_implementation="quantized", cache_config={"backend": "quanto", "nbits": 4})`, '
        "with optimum-quanto. Refused for encodings that cache numbers beside keys and values: these need precision.",
        "works",
        dict.fromkeys(WITH_STATE, "refused"),
    ),
    "offloaded_cache": Engine(
        "Inference",
        "offloaded cache",
        '`model.generate(..., cache_implementation="offloaded")` or "offloaded_static", on a GPU.',
        "not run here",
        elsewhere="pytest tests/test_engines_inference.py -k offloaded_cache",
    ),
    "offloaded_weights": Engine(
        "Inference",
        "offloaded weights",
        '`from_pretrained(..., device_map="auto", offload_folder=...)`, layers on the disk.',
        "works",
    ),
    "export": Engine(
        "Inference",
        "`torch.export`",
        "`TorchExportableModuleForDecoderOnlyLM`, with `eager` attention and a static cache. Encodings that it refuses "
        "can be exported with a wider cache ([example](#export)).",
        "works",
        dict.fromkeys(WITH_STATE, "refused"),
    ),
    "onnx": Engine(
        "Inference",
        "ONNX Runtime",
        "`transformers.exporters.OnnxExporter`, with `eager` attention and a cache "
        "([example](#onnx-runtime-and-openvino)).",
        "works",
    ),
    "openvino": Engine(
        "Inference",
        "OpenVINO",
        "`transformers.exporters.OpenVINOExporter`, in the same way.",
        "works",
    ),
    "torchao": Engine(
        "Inference",
        "torchao",
        "`from_pretrained(..., quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))`, and 4 bits. It does not "
        "quantise the layers of the GPT-2 family, and gives no warning.",
        "works",
    ),
    "bitsandbytes": Engine(
        "Inference",
        "bitsandbytes",
        "`from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))`. The parameters "
        "of encodings are not quantised.",
        "works",
    ),
    "trl_sft": Engine(
        "Training",
        "TRL: SFT",
        "`SFTTrainer`, also with `padding_free=True` and `packing=True`, which do not need flash attention here.",
        "works",
    ),
    "trl_dpo": Engine("Training", "TRL: DPO", "`DPOTrainer`, of all weights or with a `peft_config`.", "works"),
    "trl_grpo": Engine(
        "Training",
        "TRL: GRPO",
        "`GRPOTrainer`, also with `use_transformers_continuous_batching=True`.",
        "works",
    ),
    "peft": Engine(
        "Training",
        "PEFT",
        '`LoraConfig(target_modules="all-linear")`, also with `use_dora`, `modules_to_save` and `target_parameters`.',
        "works",
    ),
    "tensor_parallel": Engine(
        "Training",
        "tensor parallelism",
        "`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`, or `distributed: {tp: 2}` in a "
        "recipe; Llama family only.",
        "works",
        test="tests/test_model_parallel.py::test_two_ranks_equal_one",
    ),
    "pipeline_parallel": Engine(
        "Training",
        "pipeline parallelism",
        "`from_pretrained(..., distributed_config=DistributedConfig(pp_size=2))`; Llama family and inference only.",
        "works",
        test="tests/test_model_parallel.py::test_two_ranks_equal_one",
    ),
    "fully_shard": Engine(
        "Training",
        "`fully_shard`",
        "PyTorch's FSDP2, or `distributed: {dp_shard: 2}` in a recipe.",
        "works",
        test="tests/test_model_parallel.py::test_two_ranks_equal_one",
    ),
    "zero_3": Engine(
        "Training",
        "DeepSpeed ZeRO-3",
        "`deepspeed.initialize(model=..., config=..., optimizer=...)`. It clips gradients to a norm of 1 unless its "
        "configuration sets `gradient_clipping`.",
        "works",
        test="tests/test_engines_training.py::test_zero_3",
    ),
}


def for_engine(name: str, quick: tuple[str, ...] | None = None, **modes: list[Any]):
    """Parametrises a test by `encoding` and `expected`, the cells of an engine's column.

    Encodings that are not `quick` are marked slow, if that is given. `modes` is one more argument and its values:
    encodings that are quick get all of them, the others one each, by turns; "compiled", which is slow, only the former.
    The test compares "works" with the plain model, finds the message of "refused", and runs a stand-in for the engine
    in cells "not run here".
    """
    ((argument, values),) = modes.items() or [("", [""])]
    turns = [value for value in values if value != "compiled"]
    cases = []
    for index, one in enumerate(whatwhere.list_position_encodings()):
        few = quick is None or one in quick
        for value in values if few else [turns[index % len(turns)]]:
            marks = () if few and value != "compiled" else pytest.mark.slow
            own = [value] if argument else []
            cases.append(
                pytest.param(one, ENGINES[name].cell(one), *own, id="-".join(map(str, [one, *own])), marks=marks)
            )
    return pytest.mark.parametrize(("encoding", "expected", *([argument] if argument else [])), cases)


def text() -> str:
    """Returns the tables, and a sentence on each engine."""
    return "\n".join(_table(part) for part in dict.fromkeys(engine.part for engine in ENGINES.values()))


def _table(part: str) -> str:
    engines = [engine for engine in ENGINES.values() if engine.part == part]
    cells: tuple[Cell, ...] = ("works", "refused", "not run here")
    rows = [
        ["engine or mode", *cells],
        ["---"] * (1 + len(cells)),
        *([engine.title, *(_encodings(engine, cell) for cell in cells)] for engine in engines),
    ]
    lines = [f"### {part}", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    for engine in engines:
        elsewhere = f" To run it yourself: `{engine.elsewhere}`." if engine.elsewhere else ""
        item = f"- **{engine.title}**: {engine.use}{elsewhere}"
        lines += textwrap.wrap(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _encodings(engine: Engine, cell: Cell) -> str:
    """Returns the encodings with this cell, as the table names them."""
    names = [name for name in whatwhere.list_position_encodings() if engine.cell(name) == cell]
    if len(names) == len(whatwhere.list_position_encodings()):
        return "all"
    return "all others" if cell == engine.default else ", ".join(f"`{name}`" for name in names)


def test_of(name: str) -> str:
    """Returns the test of an engine, which has its cells as cases unless `Engine.test` names it.

    Raises:
        LookupError: there is none.
    """
    if ENGINES[name].test is not None:
        return ENGINES[name].test
    for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
        _, found, after = path.read_text(encoding="utf-8").partition(f'@for_engine("{name}"')
        if found:
            return f"tests/{path.name}::{after.partition('def ')[2].partition('(')[0]}"
    raise LookupError(f"no test has the cells of the engine {name!r}: decorate one with @for_engine({name!r}).")


if __name__ == "__main__":
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(head + START + text() + END + rest.partition(END)[2], encoding="utf-8")

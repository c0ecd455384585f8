"""Position encodings from outside of the package, as docs/own_encodings.md describes them."""

import dataclasses
import os
import pathlib
import re
import shutil
import sys
import types

import pytest
import torch
import yaml
from transformers.models.t5.modeling_t5 import T5Attention

import whatwhere
import whatwhere_cli as cli
from processes import python
from runs import recipe, stop_after, write_texts
from tiny import tiny_model, tokens
from whatwhere import vllm_plugin
from whatwhere.position_alibi import ALiBi
from whatwhere.position_base import PositionContext
from whatwhere.position_registration import imported_files
from whatwhere.position_registry import POSITION_ENCODINGS
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation.results import read_json

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "own_encodings.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
SAVE = """
import sys
import torch
import whatwhere

(cls,) = whatwhere.import_position_encodings("t5_bias.py")
config = whatwhere.WhatWhereLlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    position_encoding=["t5", "rope"], position_encoding_parameters={"t5": {"buckets": 8, "longest": 16}},
)
model = whatwhere.WhatWhereLlamaForCausalLM(config).eval()
ids = torch.arange(3, 23)[None]
model.save_pretrained("saved")
# What is saved is the file that was imported.
open("t5_bias.py", "w").write("raise SystemExit")
model.save_pretrained(sys.argv[1])
torch.save([model(ids).logits, model.generate(ids, max_new_tokens=6, do_sample=False)], sys.argv[1] + "/expected")
"""
LOAD = """
import sys
import torch

sys.modules["whatwhere"] = None
from transformers import AutoModelForCausalLM

for folder in ("model", "again"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    logits, generated = torch.load("model/expected")
    ids = torch.arange(3, 23)[None]
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), generated)
    model.save_pretrained("again")
"""


# The package is imported, and its registry has no "t5".
LOAD_BESIDE = """
import shutil
import torch
import transformers
import whatwhere

ids = torch.arange(3, 23)[None]
logits, generated = torch.load("model/expected")
auto = transformers.AutoModelForCausalLM
for trust in (False, None):
    try:
        auto.from_pretrained("model", trust_remote_code=trust)
        raise SystemExit("code of the folder ran")
    except ValueError as error:
        assert "trust_remote_code=True" in str(error)
try:
    whatwhere.WhatWhereLlamaForCausalLM.from_pretrained("model")
    raise SystemExit("loaded")
except ValueError as error:
    assert "register_position_encoding" in str(error)
shutil.copytree("model", "other")
for folder in ("model", "other", "again"):
    model = auto.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), generated)
    batched = model.generate_batch(ids.tolist(), max_new_tokens=6, do_sample=False)
    assert [one.generated_tokens for one in batched.values()] == [generated[0, 20:].tolist()]
    model.save_pretrained("again")
for name, value in (("attn_implementation", "eager"), ("use_cache", False)):
    options = {name: value, "trust_remote_code": True}
    model = auto.from_pretrained("model", **options)
    assert (model.config._attn_implementation if name[0] == "a" else model.config.use_cache) == value
# The package's own models stay its own.
config = whatwhere.WhatWhereLlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
assert type(auto.from_config(config)) is whatwhere.WhatWhereLlamaForCausalLM
(cls,) = whatwhere.import_position_encodings("again/t5_bias.py")
assert whatwhere.import_position_encodings("model/t5_bias.py") == [cls]
model = auto.from_pretrained("model")
assert type(model) is whatwhere.WhatWhereLlamaForCausalLM
assert torch.equal(model(ids).logits, logits)
model.save_pretrained("third")
assert open("third/t5_bias.py").read() == open("model/t5_bias.py").read()
"""


@pytest.fixture
def registered():
    """Forgets what a test registers and imports."""
    before = dict(POSITION_ENCODINGS)
    yield POSITION_ENCODINGS
    for name in imported_files:
        sys.modules.pop(pathlib.Path(name).stem, None)
    POSITION_ENCODINGS.clear()
    POSITION_ENCODINGS.update(before)
    imported_files.clear()


def write(folder, code, name="own_bias.py"):
    path = folder / name
    path.write_text(code, encoding="utf-8")
    return str(path)


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) <= 60


def test_the_example_has_the_buckets_of_t5(tmp_path, registered):
    (cls,) = whatwhere.import_position_encodings(write(tmp_path, EXAMPLE, "t5_bias.py"))
    own = {"buckets": 16, "longest": 64}
    layer = tiny_model("llama", "t5", max_position_embeddings=256, position_encoding_parameters=own)
    encoding = layer.model.layers[0].self_attn.encodings["t5"]
    assert isinstance(encoding, cls)
    positions = torch.arange(200)
    context = PositionContext(positions[None], None, 0, 200)
    context = dataclasses.replace(context, query=torch.zeros(1, 4, 200, 8))
    with torch.no_grad():
        found = encoding.bias(torch.zeros(1, 4, 200, 200), context.query, context, 1.0)
    relative = positions[None] - positions[:, None]
    bucket = T5Attention._relative_position_bucket(relative, bidirectional=False, num_buckets=16, max_distance=64)
    torch.testing.assert_close(found[0], encoding.table.weight.detach()[:, bucket], rtol=0, atol=0)


def test_a_model_loads_elsewhere_without_the_package(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "here", EXAMPLE, "t5_bias.py")
    python("-c", SAVE, tmp_path / "elsewhere" / "model", cwd=tmp_path / "here")
    python("-c", LOAD, cwd=tmp_path / "elsewhere", env={"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""})


def test_a_model_loads_beside_the_package(tmp_path):
    (tmp_path / "here").mkdir()
    write(tmp_path / "here", EXAMPLE, "t5_bias.py")
    python("-c", SAVE, tmp_path / "model", cwd=tmp_path / "here")
    python("-c", LOAD_BESIDE, cwd=tmp_path, env={"HF_HOME": str(tmp_path / "home")})


def test_a_folder_with_its_own_encoding_on_the_command_line(tmp_path, monkeypatch, registered, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    known = dict(registered)
    whatwhere.import_position_encodings(write(tmp_path, EXAMPLE, "t5_bias.py"))
    tiny_model("llama", "t5", vocab_size=257).save_pretrained("saved")
    build_tokenizer("bytes").save_pretrained("saved")
    (tmp_path / "text.txt").write_text("some text to measure\n" * 40)
    del registered["t5"]
    del sys.modules["t5_bias"]
    measured = ["length", "saved", "--windows", "8", "--validation-file", "text.txt", "--device", "cpu", "--output"]
    assert "folder='saved' needs code" in refused("card", "saved")
    assert "checkpoint='saved' needs code" in refused(
        "convert", "saved", "--position-encoding", "rope", "--output", "c"
    )
    said = refused(*measured, "out")
    assert "checkpoint='saved' needs code that is in the checkpoint" in said
    assert "--import FILE" in said
    assert "--trust-remote-code" in said
    assert cli.main([*measured, "trusted", "--trust-remote-code"]) == 0
    assert cli.main(["--import", "saved/t5_bias.py", *measured, "imported"]) == 0
    # Other code with the same weights is another measurement.
    registered.clear()
    registered.update(known)
    sys.modules.pop("t5_bias")
    shutil.copytree("saved", "changed")
    changed = (
        (tmp_path / "changed" / "t5_bias.py")
        .read_text()
        .replace("return heads[:, bucket]", "return 9 * heads[:, bucket]")
    )
    (tmp_path / "changed" / "t5_bias.py").write_text(changed)
    again = ["length", "changed", *measured[2:]]
    assert cli.main(["--import", "changed/t5_bias.py", *again, "changed_imported"]) == 0
    cells = [
        read_json(next((tmp_path / name).glob("length*.json")))["checkpoints"][0]["cells"]
        for name in ("imported", "changed_imported")
    ]
    assert cells[0] != cells[1]
    with pytest.raises(ValueError, match=r"'saved' has another t5_bias\.py than the one that was imported as 't5'"):
        whatwhere.WhatWhereLlamaForCausalLM.from_pretrained("saved")
    found = [read_json(next((tmp_path / name).glob("length*.json"))) for name in ("trusted", "imported")]
    assert found[0]["checkpoints"][0]["cells"] == found[1]["checkpoints"][0]["cells"]


def test_vllm_imports_files(tmp_path, monkeypatch, registered):
    names = []
    registry = types.SimpleNamespace(register_model=lambda name, path: names.append(name))
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    (tmp_path / "other").mkdir()
    paths = [write(tmp_path, EXAMPLE, "t5_bias.py"), write(tmp_path / "other", HEAD + CLASS)]
    monkeypatch.setenv("WHATWHERE_IMPORT", os.pathsep.join(paths))
    vllm_plugin.register()
    assert {"t5", "own"} <= set(registered)
    assert "WhatWhereLlamaForCausalLM" in names


def test_a_command(tmp_path, monkeypatch, capsys, registered):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, EXAMPLE, "t5_bias.py")
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 2000)
    changes = {
        "model.position_encoding": "t5",
        "model.hidden_size": 32,
        "model.intermediate_size": 32,
        "model.num_hidden_layers": 1,
        "model.num_attention_heads": 2,
        "data.sequence_length": 32,
        "training.steps": 2,
        "training.warmup_steps": 1,
    }
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    write(tmp_path, HEAD + CLASS)
    cli.main(
        [
            "--import",
            "own_bias.py",
            "--import",
            "t5_bias.py",
            "train",
            "demo_rope",
            "--train-file",
            "text.txt",
            "--output",
            "runs/t5",
            *options,
        ]
    )
    code = (tmp_path / "runs" / "t5" / "modeling_whatwhere_llama.py").read_text()
    assert "from .t5_bias import T5Bias\n" in code
    # What is recorded and suggested can be run.
    program = "whatwhere --import own_bias.py --import t5_bias.py"
    assert f"Next: {program} " in capsys.readouterr().out
    assert read_json(tmp_path / "runs" / "t5" / "results.json")["command"].startswith(f"{program} train")
    assert "`t5`" in (tmp_path / "runs" / "t5" / "README.md").read_text()


def test_beside_baselines_over_seeds(tmp_path, monkeypatch, capsys, registered):
    """In one command, which trains what is left."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, EXAMPLE, "t5_bias.py")
    write_texts(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(training__steps=2, evaluation__every=2).resolved()))
    command = ["--import", "t5_bias.py", "train", "tiny.yaml", "--data-dir", ".", "--output", "runs"]
    command += ["--encodings", "t5", "rope", "--seeds", "0", "1"]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 0)
        with pytest.raises(SystemExit):
            cli.main(command)
    said = capsys.readouterr().err
    assert f"Continue with: whatwhere {' '.join(command)}" in said
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    for name in ("t5-seed0", "t5-seed1", "rope-seed0", "rope-seed1"):
        assert (tmp_path / "runs" / name / "model.safetensors").is_file()
    assert "| t5-seed0, mean of 2 seeds" in said
    assert "| rope-seed0, mean of 2 seeds" in said
    assert (tmp_path / "runs" / "comparison" / "curves.png").is_file()
    assert "Next: whatwhere --import t5_bias.py length runs/t5-seed0" in said
    assert cli.main(["compare", "runs"]) == 0
    assert "| rope-seed0, mean of 2 seeds" in capsys.readouterr().out
    before = (tmp_path / "runs" / "t5-seed1" / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main(command) == 0
    assert (tmp_path / "runs" / "t5-seed1" / "metrics.jsonl").stat().st_mtime_ns == before


def test_mistakes_in_several_runs_are_found_first(tmp_path, monkeypatch, refuses):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe().resolved()))
    train = ("tiny.yaml", "--data-dir", ".", "--output", "runs")
    refuses(
        "train",
        [
            (*train, "--encodings", "rope", "roep", "Did you mean 'rope'?"),
            (*train, "--encodings", "rope", "rope", "one is given twice"),
            (*train, "--seeds", "0", "--resume", "it continues runs that are not finished"),
            (*train, "--seeds", "0", "--set", "seed=1", "--set seed=... has no effect with --seeds"),
            (*train, "--seed", "3", "Did you mean '--seeds'?"),
            ("--import", "a.py", "--import FILE goes before the command"),
        ],
    )
    assert not (tmp_path / "runs").exists()


def test_the_command_needs_a_command():
    with pytest.raises(SystemExit, match="--import FILE is followed by a command"):
        cli.main(["--import", "t5_bias.py"])


@pytest.mark.slow
def test_the_contract(tmp_path):
    path = write(tmp_path, EXAMPLE, "t5_bias.py")
    contract = pathlib.Path(__file__).with_name("test_contract.py")
    chosen = ["-p", "no:cacheprovider", "-m", "not slow", "-k", "t5", "--position-encoding", path]
    said = python("-m", "pytest", "-q", *chosen, contract)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 30


CLASS = """
class Own(ALiBi):
    name = "own"
    paper = "none"
    summary = "ALiBi"
"""
HEAD = "from whatwhere.position_alibi import ALiBi\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"import pandas\n{HEAD}{CLASS}", r"own_bias.py, line 1: it imports 'pandas', and is saved with models"),
        (f"{HEAD}from . import helper\n{CLASS}", r"own_bias.py, line 2: it imports '\.'"),
        (f"{HEAD}import whatwhere\n{CLASS}", r"own_bias.py, line 2: it imports 'whatwhere'"),
        (
            f"{HEAD}from whatwhere.scripts.errors import Refused\n{CLASS}",
            r"line 2: whatwhere has no module 'whatwhere.scripts.errors' for models",
        ),
        (
            f"{HEAD}from whatwhere.position_base import torch\n{CLASS}",
            r"line 2: 'whatwhere.position_base' defines no 'torch' for models",
        ),
        (
            f"{HEAD}from whatwhere.vllm_plugin import register\n{CLASS}",
            r"line 2: 'whatwhere.vllm_plugin' defines no 'register' for models",
        ),
        (f"{HEAD}from whatwhere.position_base import *\n{CLASS}", r"line 2: .* defines no '\*' for models"),
        (HEAD, "defines no subclass of PositionEncoding"),
        (HEAD + CLASS.replace('"own"', '"alibi"'), r"Own.name='alibi' is not valid: it is the name of ALiBi"),
        (HEAD + CLASS.replace('"own"', '"a+b"'), r"Own.name='a\+b' is not valid: it must be an identifier"),
    ],
)
def test_files_that_are_refused(code, message, tmp_path, monkeypatch, registered):
    monkeypatch.setitem(sys.modules, "pandas", pytest)
    with pytest.raises((ValueError, ImportError), match=message):
        whatwhere.import_position_encodings(write(tmp_path, code))


def test_what_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="there is no such file of Python"):
        whatwhere.import_position_encodings(str(tmp_path / "none.py"))


@pytest.mark.parametrize("name", ["my-bias.py", "has.dot.py", "random.py"])
def test_names_of_files_that_are_refused(name, tmp_path, registered):
    import random

    with pytest.raises(ValueError, match=r"identifier|another module"):
        whatwhere.import_position_encodings(write(tmp_path, HEAD + CLASS, name))
    assert sys.modules["random"] is random


def test_classes_and_files_of_one_name(tmp_path, registered):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    whatwhere.import_position_encodings(write(tmp_path / "one", HEAD + CLASS, "first.py"))
    second = HEAD + CLASS.replace('"own"', '"second"')
    with pytest.raises(ValueError, match="the encoding 'own' has a class of this name"):
        whatwhere.import_position_encodings(write(tmp_path, second, "second.py"))
    with pytest.raises(ValueError, match="is the name of another module"):
        whatwhere.import_position_encodings(write(tmp_path / "other", second.replace("Own", "Other"), "first.py"))


def test_a_bias_that_a_kernel_would_replace(tmp_path, registered):
    code = f"{HEAD}{CLASS}\n    def bias(self, *arguments):\n        return 0\n"
    with pytest.raises(ValueError, match=r"Own.bias is not valid: block_bias of ALiBi would be used instead"):
        whatwhere.import_position_encodings(write(tmp_path, code))


def test_an_import_over_two_lines(tmp_path, registered):
    code = "from \\\n    whatwhere.position_alibi import ALiBi\n" + CLASS
    with pytest.raises(ValueError, match="on one line"):
        whatwhere.import_position_encodings(write(tmp_path, code))


def test_a_file_with_the_name_of_one_of_ours(tmp_path, registered):
    path = write(tmp_path, HEAD + CLASS, "position_base.py")
    with pytest.raises(ValueError, match=r"its file 'position_base.py' has the name of a file of whatwhere"):
        whatwhere.import_position_encodings(path)


def test_classes_that_are_refused(registered):
    with pytest.raises(ValueError, match="it must be a subclass of PositionEncoding"):
        whatwhere.register_position_encoding(int)
    with pytest.raises(ValueError, match=r"Nameless.name is not valid: it must be a string"):
        whatwhere.register_position_encoding(type("Nameless", (ALiBi,), {"name": None}))
    scripted = type("Scripted", (ALiBi,), {"name": "scripted", "__module__": "__main__"})
    with pytest.raises(ValueError, match="it must be defined in a file of its own"):
        whatwhere.register_position_encoding(scripted)


def test_a_file_is_imported_again(tmp_path, registered):
    path = write(tmp_path, HEAD + CLASS)
    whatwhere.import_position_encodings(path)
    (cls,) = whatwhere.import_position_encodings(path)
    assert registered["own"] is cls
    ids = tokens(1, 8)
    model = tiny_model("llama", "own")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    assert (loaded(ids).logits == model(ids).logits).all()


@pytest.mark.parametrize("module", ["position_alibi", "modeling_whatwhere_llama", "modeling_whatwhere_gpt2"])
def test_a_file_that_was_saved_is_imported(module, tmp_path, registered):
    """From a folder of two files for either family, or from one of many files."""
    (tmp_path / "author").mkdir()
    (cls,) = whatwhere.import_position_encodings(write(tmp_path / "author", HEAD + CLASS))
    saved = write(tmp_path, (HEAD + CLASS).replace("whatwhere.position_alibi", f".{module}"))
    assert whatwhere.import_position_encodings(saved) == [cls]
    del registered["own"], sys.modules["own_bias"]
    (again,) = whatwhere.import_position_encodings(saved)
    assert again is not cls
    assert again.__mro__[1] is ALiBi
    tiny_model("gpt2", "own").save_pretrained(tmp_path / "model")
    code = (tmp_path / "model" / "own_bias.py").read_text(encoding="utf-8")
    assert code == (HEAD + CLASS).replace("whatwhere.position_alibi", ".modeling_whatwhere_gpt2")


def test_an_unknown_name_says_how_to_register():
    with pytest.raises(ValueError, match="register_position_encoding"):
        tiny_model("llama", "unknown")

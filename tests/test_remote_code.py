"""A saved folder loads without the package, without Triton, from a folder and from a Hub-shaped cache."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import whatwhere
from tiny import FAMILIES, tiny_model, tokens

ROOT = pathlib.Path(__file__).parent.parent
# Runs in a process in which the package and Triton can not be imported.
SCRIPT = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("whatwhere", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

place, ids_file, out, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
ids = torch.load(ids_file)
with torch.no_grad():
    logits = model(ids).logits
generated = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
torch.save({"logits": logits, "generated": generated}, out)
model.save_pretrained(again)
config = AutoConfig.from_pretrained(place, trust_remote_code=True)
base = AutoModel.from_pretrained(place, trust_remote_code=True)
classifier = AutoModelForSequenceClassification.from_pretrained(place, trust_remote_code=True)
for auto in (AutoModelForTokenClassification, AutoModelForQuestionAnswering):
    head = auto.from_pretrained(place, trust_remote_code=True)
    assert type(head).__name__.endswith(auto.__name__.removeprefix("AutoModel")), type(head)
    assert torch.equal(head.get_input_embeddings().weight, model.get_input_embeddings().weight)
other = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, position_encoding="none")
assert other.config.position_encoding == "none"
try:
    AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, position_encoding="pop")
except ValueError as error:
    assert "Did you mean 'pope'?" in str(error), error
else:
    raise AssertionError("a wrong name was accepted")
try:
    AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, attn_implementation="triton")
except ValueError as error:
    assert "needs Triton" in str(error) or "does not serve position_encoding" in str(error), error
else:
    raise AssertionError("a kernel was accepted without Triton")
assert "whatwhere" not in sys.modules
print(json.dumps([type(base).__name__, type(classifier).__name__, model.config._attn_implementation]))
"""


def clean_process(place, folder, environment=None):
    torch.save(tokens(2, 12), folder / "ids.pt")
    names = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), **(environment or {})}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            str(place),
            str(folder / "ids.pt"),
            str(folder / "out.pt"),
            str(folder / "again"),
        ],
        env={**os.environ, **names},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt"), json.loads(done.stdout.splitlines()[-1])


def check(model, found):
    ids = tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(found["logits"], model(ids).logits)
    generated = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(found["generated"], generated)


@pytest.mark.parametrize(("family", "encoding"), [("llama", "cope+rope"), ("gpt2", "absolute"), ("llama", "pope")])
def test_folder_in_a_clean_process_and_saved_again(family, encoding, tmp_path):
    model = tiny_model(family, encoding)
    model.save_pretrained(tmp_path / "saved")
    found, (base, classifier, implementation) = clean_process(tmp_path / "saved", tmp_path)
    check(model, found)
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    assert (base, classifier) == (f"{prefix}Model", f"{prefix}ForSequenceClassification")
    assert implementation == model.config._attn_implementation
    assert (tmp_path / "saved" / "kernel_pope.py").exists()
    before, after = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix in (".py", ".safetensors")}
        for name in ("saved", "again")
    )
    assert after == before
    check(model, clean_process(tmp_path / "again", tmp_path)[0])


LORA = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# The tokenizer is stock: nothing is asked, and no code of the folder runs.
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
assert tokenizer("a b").input_ids == [1, 2], tokenizer("a b")
assert not any(name.startswith("transformers_modules") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "peft" not in sys.modules
from peft import LoraConfig, get_peft_model

adapted = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
print(sorted(adapted.peft_config["default"].target_modules))
assert "whatwhere" not in sys.modules
"""


@pytest.mark.parametrize(("family", "targets"), [("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])])
def test_lora_targets_and_the_tokenizer_in_a_clean_process(family, targets, tmp_path):
    pytest.importorskip("peft")
    tiny_model(family, "cope").save_pretrained(tmp_path / "saved")
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "saved")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.partition("import torch")[0] + LORA, str(tmp_path / "saved")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == str(targets)
    assert "custom code" not in done.stdout


def test_hub_shaped_cache_in_a_clean_process(tmp_path):
    model = tiny_model("llama", "cope")
    revision = "0" * 40
    repository = tmp_path / "home" / "hub" / "models--me--x"
    model.save_pretrained(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    found, _ = clean_process("me/x", tmp_path, {"HF_HOME": str(tmp_path / "home")})
    check(model, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_files_are_the_repository_s(family, tmp_path):
    tiny_model(family, "rope").save_pretrained(tmp_path)
    saved = {path.name: path.read_bytes() for path in tmp_path.glob("*.py")}
    other = "gpt2" if family == "llama" else "llama"
    expected = {path.name: path.read_bytes() for path in (ROOT / "modeling").glob("*.py")}
    for name in ("__init__.py", f"modeling_whatwhere_{other}.py", f"configuration_whatwhere_{other}.py"):
        del expected[name]
    for name in (f"configuration_whatwhere_{family}.py", "configuration_common.py", "configuration_rope.py"):
        expected[name] = (ROOT / "configuration" / name).read_bytes()
    assert saved == expected


def test_two_copies_in_one_process(tmp_path, monkeypatch):
    # The package and a checkpoint's code side by side: neither overwrites the other's attention or operators.
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tiny_model("llama", "cope")
    model.save_pretrained(tmp_path / "saved")
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    copy = get_class_from_dynamic_module("modeling_whatwhere_llama.WhatWhereLlamaForCausalLM", str(tmp_path / "saved"))
    assert copy is not type(model)
    loaded = copy.from_pretrained(tmp_path / "saved")
    ids = tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        assert torch.equal(loaded(ids, attention_mask=mask).logits, expected)
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)


def test_corrupt_checkpoints_are_refused(tmp_path):
    model = tiny_model("llama", "pope")
    for name, damage in (
        ("truncated", lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")),
        ("no-weights", lambda folder: (folder / "model.safetensors").unlink()),
        ("bad-json", lambda folder: (folder / "config.json").write_text("{")),
    ):
        folder = tmp_path / name
        model.save_pretrained(folder)
        damage(folder)
        with pytest.raises(Exception, match=r"(?i)header|no file named|valid JSON"):
            type(model).from_pretrained(folder)
    folder = tmp_path / "misspelt"
    model.save_pretrained(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"position_encoding"', '"positon_encoding"'))
    with pytest.raises(ValueError, match="Did you mean 'position_encoding'"):
        type(model).from_pretrained(folder)


def test_only_safetensors_and_small_text(tmp_path):
    tiny_model("gpt2", "cope").save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".py", ".json", ".safetensors", ".md"}


def test_shipped_files_import_siblings_in_the_one_form_that_travels():
    for path in (ROOT / "modeling").glob("*.py"):
        for line in re.findall(r"^\s*(?:from|import) \..*$", path.read_text(), flags=re.MULTILINE):
            assert re.fullmatch(r"\s*from \.\w+ import .*", line), (path.name, line)
    assert whatwhere.__file__ == str(ROOT / "modeling" / "__init__.py") or not (ROOT / "modeling").exists()


def test_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(NotADirectoryError, match="is a file; it must be a folder"):
        tiny_model("llama", "rope").save_pretrained(tmp_path / "file")

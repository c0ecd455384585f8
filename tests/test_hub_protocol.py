"""Pushing to a Hub and loading from it over its protocol: other processes, with a server (`hub_server`) in this one."""

import concurrent.futures
import multiprocessing
import os
import pathlib
import re
import tempfile

import peft
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from transformers import Trainer, TrainingArguments

import whatwhere_cli as cli
from hub_server import Hub
from processes import python
from tiny import tiny_model
from whatwhere import WhatWhereLlamaForCausalLM
from whatwhere.model_card import weights_fingerprint
from whatwhere.scripts.cards.folder import write_card
from whatwhere.scripts.commands import push as command
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.writing import write_json

CONFIGURATION = {"configuration_whatwhere_llama.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


def environment(hub, home, token=None):
    """What the Hub's libraries read when they are imported."""
    names = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # With `hf_xet` installed the client never asks the server how files are stored.
    names |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return names | ({"HF_TOKEN": token} if token else {})


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub
        # Every request was one that the server knows.
        assert hub.unknown == []


@pytest.fixture(scope="module")
def author(hub, tmp_path_factory):
    """Calls a function of this module in a process that has the package and a token, and returns its result."""
    names = environment(hub, tmp_path_factory.mktemp("author"), token="hf_me")
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        processes = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
        processes.submit(os.getpid).result(timeout=120)
    with processes:
        yield lambda function, *args, **kwargs: processes.submit(function, *args, **kwargs).result(timeout=120)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What a saved folder has, by name: the same is to be pushed. `test_remote_code` says what that is."""
    folder = tmp_path_factory.mktemp("saved")
    pope().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def name(request):
    """A repository of this test."""
    return "me/" + re.sub(r"\W+", "-", request.node.name).strip("-")


def pope():
    torch.manual_seed(0)
    return tiny_model("llama", "pope", num_hidden_layers=1, num_key_value_heads=4, vocab_size=258)


RESULTS = {
    "metrics": {"bits_per_byte": {"value": 2.34567}},
    "data": {"source": "stdlib", "dataset": None, "split": "test"},
    "recipe": {"name": "tiny"},
    "command": "whatwhere train tiny --output /data/mine/runs/tiny",
    "date": "2026-11-22T00:00:00+00:00",
    "versions": {"torch": "2.13.0"},
}

# Called in the author's process.


def push(name, further=0.0, **options):
    """Pushes the model; `further` changes its weights."""
    model = pope()
    with torch.no_grad():
        model.lm_head.weight.add_(further)
    model.push_to_hub(name, **options)


def push_tokenizer(name, model_max_length=None):
    tokenizer = build_tokenizer("bytes")
    if model_max_length is not None:
        tokenizer.model_max_length = model_max_length
    tokenizer.push_to_hub(name)


def push_config(name):
    pope().config.push_to_hub(name)


def push_card(name, text):
    HfApi().create_repo(name)
    HfApi().upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=name)


def push_by_saving(name):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "private.txt").write_text("not for the Hub", encoding="utf-8")
        pope().save_pretrained(folder, push_to_hub=True, repo_id=name)


def push_by_trainer(name, **card):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, push_to_hub=True, hub_model_id=name, use_cpu=True, report_to="none", disable_tqdm=True
        )
        Trainer(pope(), arguments).push_to_hub(**card)


def push_measured(name, further):
    """Pushes a model with a card of results; with weights changed after the measurement by `further`."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "measured"
        pope().save_pretrained(folder)
        results = {**RESULTS, "weights_sha256": weights_fingerprint(folder)}
        write_json(folder / "results.json", results)
        write_card(folder)
        model = WhatWhereLlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.lm_head.weight.add_(further)
        model.push_to_hub(name)
        model.push_to_hub(name)


def push_run(name, *options, edit=None, further=0.0, shard="5GB"):
    """Pushes the folder of a run by the command; returns its status or the error. `further` changes the weights."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "run"
        model = pope()
        with torch.no_grad():
            model.lm_head.weight.add_(further)
        model.save_pretrained(folder, max_shard_size=shard)
        build_tokenizer("bytes").save_pretrained(folder)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}", encoding="utf-8")
        for left in (
            "training_args.bin",
            "notes.txt",
            "trainer_state.json",
            "data.jsonl",
            "dump.safetensors",
            ".secret.json",
            "checkpoints/step-1/model.safetensors",
        ):
            (folder / left).parent.mkdir(parents=True, exist_ok=True)
            (folder / left).write_bytes(b"not for the Hub")
        write_json(folder / "results.json", {**RESULTS, "weights_sha256": weights_fingerprint(folder)})
        if edit:
            card = folder / "README.md"
            card.write_text(card.read_text(encoding="utf-8") + edit, encoding="utf-8")
        try:
            return cli.main(["push", str(folder), name, *options])
        except SystemExit as error:
            return str(error)


def push_adapter(name):
    """Pushes a LoRA adapter of a model in a folder; returns the error."""
    with tempfile.TemporaryDirectory() as place:
        pope().save_pretrained(f"{place}/base")
        base = WhatWhereLlamaForCausalLM.from_pretrained(f"{place}/base")
        peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(f"{place}/adapter")
        try:
            return cli.main(["push", f"{place}/adapter", name])
        except SystemExit as error:
            return str(error)


def tag(name, revision):
    HfApi().create_tag(name, tag=revision)


# Tests of what is pushed.


def card_of(repository):
    return ModelCard(repository.files["README.md"].decode("utf-8"))


def test_what_is_saved_is_pushed(hub, author, name, saved):
    author(push, name, tags=["mine"])
    _, commit = hub.repositories[name].commits
    assert sorted(commit.written) == sorted(saved)
    # The card has the name of the repository.
    assert [one for one in saved if commit.files[one].content != saved[one]] == ["README.md"]
    assert [one for one, file in commit.files.items() if file.lfs] == ["model.safetensors"]
    card = card_of(hub.repositories[name])
    # Nobody has said which.
    assert card.data.license is None
    assert {"whatwhere", "pope", "mine"} <= set(card.data.tags)
    assert f'name = "{name}"' in card.text
    assert card.data.eval_results is None
    assert "automatically generated" not in card.text


def test_tokenizer_before_or_after(hub, author, name, saved):
    author(push_tokenizer, name)
    repository = hub.repositories[name]
    # Transformers has put its generic card there.
    assert "automatically generated" in card_of(repository).text
    author(push, name)
    card = repository.files["README.md"]
    assert "pope" in card_of(repository).data.tags
    author(push_tokenizer, name, model_max_length=32)
    assert repository.commits[-1].written == ["tokenizer_config.json"]
    assert set(repository.files) == {*saved, *TOKENIZER, ".gitattributes"}
    assert repository.files["README.md"] == card


def test_the_configuration_alone(hub, author, name):
    author(push_config, name)
    assert set(hub.repositories[name].commits[-1].written) == CONFIGURATION | {"README.md", "config.json"}


def test_a_card_on_the_hub_is_kept(hub, author, name):
    author(push_card, name, "---\nlicense: mit\n---\nwritten by hand\n")
    author(push, name)
    assert hub.repositories[name].files["README.md"].endswith(b"written by hand\n")


def test_a_branch(hub, author, name, saved):
    author(push, name, revision="longer")
    repository = hub.repositories[name]
    assert set(repository.at("longer").files) == {*saved, ".gitattributes"}
    assert set(repository.files) == {".gitattributes"}


def test_the_card_of_the_trainer_is_completed(hub, author, name, saved):
    author(push_by_trainer, name)
    repository = hub.repositories[name]
    # The Trainer writes its card after it has saved the model: the tags are what it asks the model for.
    written = card_of(repository)
    assert "generated automatically according to the information the Trainer had" in written.text
    assert {"whatwhere", "pope", "generated_from_trainer"} <= set(written.data.tags)
    # `training_args.bin` is pickled; it is the Trainer that saves and uploads it.
    assert {*saved, "training_args.bin"} <= set(repository.files)
    author(push, name)
    assert not [one for one in repository.commits[-1].written if one.endswith((".bin", ".pt", ".pth", ".pkl"))]
    card = card_of(repository)
    assert card.text.strip() == written.text.strip()
    about = (card.data.license, card.data.library_name, card.data.pipeline_tag)
    assert about == (None, "transformers", "text-generation")
    assert set(written.data.tags) <= set(card.data.tags)
    # An existing licence is kept.
    author(push_by_trainer, name, license="mit")
    author(push, name)
    assert card_of(repository).data.license == "mit"


@pytest.mark.parametrize("further", [0.0, 1.0], ids=["measured", "trained_further"])
def test_measured_results_travel_with_their_weights(hub, author, name, further):
    author(push_measured, name, further)
    repository = hub.repositories[name]
    card = card_of(repository)
    assert ("2.3457" in card.text) == (further == 0)
    assert bool(card.data.eval_results) == (further == 0)
    assert "results.json" not in repository.files
    # The second push had nothing to change.
    assert len(repository.commits) == 2
    # A generated card on the Hub is written again with other weights.
    author(push, name, further=2.0)
    assert "2.3457" not in card_of(repository).text


def test_save_pretrained_that_pushes(hub, author, name, saved):
    author(push_by_saving, name)
    repository = hub.repositories[name]
    assert set(repository.files) == {*saved, ".gitattributes"}
    assert "pope" in card_of(repository).data.tags


# A process without the package. Its arguments: a shared and a private repository, the commit of the first push, and
# a file for what it finds.
READER = """
import json, pathlib, sys
sys.modules["whatwhere"] = None
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

shared, private, first, out = sys.argv[1:]


def logits(name, **options):
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, **options)
    with torch.no_grad():
        return model(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits


def refusal(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (OSError, HfHubHTTPError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


found = {"before": logits(shared), "tokens": AutoTokenizer.from_pretrained(shared)("ab").input_ids}
found["untrusted"] = refusal(AutoModelForCausalLM.from_pretrained, shared, trust_remote_code=False)
# Somebody changes the code, and pushes it from there.
folder = pathlib.Path(out).parent / "changed"
snapshot_download(shared, local_dir=folder)
code = folder / "modeling_whatwhere_llama.py"
text = code.read_text()
head = "logits = self.lm_head(hidden_states[:, kept])"
assert text.count(head) == 1
code.write_text(text.replace(head, head + " * 2"))
changed = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
found["not the owner"] = refusal(changed.push_to_hub, shared, token="hf_other")
found["no token"] = refusal(changed.push_to_hub, shared, token=False)
changed.push_to_hub(shared, token="hf_me")
found["after"] = logits(shared)
for pinned in (first, "v1"):
    found[f"revision {pinned}"] = logits(shared, revision=pinned)
    found[f"code {pinned}"] = logits(shared, code_revision=pinned)
found["configuration"] = AutoConfig.from_pretrained(shared, revision="v1", trust_remote_code=True).position_encoding
found["snapshot"] = sorted(path.name for path in pathlib.Path(snapshot_download(shared, revision="v1")).iterdir())
found["no such tag"] = refusal(logits, shared, revision="v2")
for token in (False, "hf_other"):
    found[f"private {token}"] = refusal(logits, private, token=token)
found["private"] = logits(private, token="hf_me")
about = HfApi().model_info(shared)
found["info"] = [about.private, about.card_data.license, about.card_data.pipeline_tag, about.sha]
torch.save(found, out)
"""


def test_another_process_loads_by_name_and_revision(hub, author, saved, tmp_path):
    shared, private = "me/shared", "me/secret"
    author(push, shared)
    author(push_tokenizer, shared)
    first = hub.repositories[shared].commits[-1].oid
    author(tag, shared, "v1")
    author(push, private, private=True)
    assert hub.repositories[private].private
    out = tmp_path / "found.pt"
    python("-c", READER, shared, private, first, out, env=environment(hub, tmp_path / "home"), cwd=tmp_path)
    found = torch.load(out)
    with torch.no_grad():
        expected = pope()(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits
    for name in ("before", f"revision {first}", "revision v1", f"code {first}", "code v1", "private"):
        assert torch.equal(found[name], expected), name
    # The changed code.
    assert torch.equal(found["after"], 2 * expected)
    assert found["tokens"] == build_tokenizer("bytes")("ab").input_ids
    assert found["configuration"] == "pope"
    assert set(found["snapshot"]) == {*saved, *TOKENIZER, ".gitattributes"}
    assert "trust_remote_code=True" in found["untrusted"]
    assert "403" in found["not the owner"]
    assert "401" in found["no token"]
    assert "v2" in found["no such tag"]
    for token in (False, "hf_other"):
        assert private in found[f"private {token}"]
    *_, last = hub.repositories[shared].commits
    assert found["info"] == [False, None, "text-generation", last.oid]
    assert last.written == ["modeling_whatwhere_llama.py"]
    # Another host stores the weights: it is sent no token.
    assert not [path for method, path, token in hub.requests if method == "GET" and "/storage/" in path and token]


def test_the_command_pushes_a_run(hub, author, name):
    assert author(push_run, name, "--licence", "apache-2.0") == 0
    files = hub.repositories[name].files
    assert {"model.safetensors", "config.json", "modeling_whatwhere_llama.py", "results.json", *TOKENIZER} <= set(files)
    assert not {path for path, content in files.items() if b"not for the Hub" in content}
    assert "additional_chat_templates/tool.jinja" in files
    assert not {path for path, content in files.items() if b"/data/mine" in content}
    card = files["README.md"].decode()
    assert "license: apache-2.0" in card
    assert f'name = "{name}"' in card
    assert "2.3457" in card
    # Once more, with an edited card: the short one, which was saved with the weights.
    author(push_run, name, edit="Trained in the rain.\n")
    assert "Trained in the rain." in hub.repositories[name].files["README.md"].decode()


def test_a_later_push_replaces_the_weights(hub, author, name):
    author(push_run, name)
    before = hub.repositories[name].files["model.safetensors"]
    author(push_run, name, further=1.0, shard="20KB")
    files = hub.repositories[name].files
    assert before
    assert "model.safetensors" not in files
    assert "model.safetensors.index.json" in files
    assert any(path.startswith("model-00001-of-") for path in files)


def test_an_adapter_of_a_folder_is_refused(author, name):
    error = author(push_adapter, name)
    assert "is an adapter of a model in the folder" in error
    assert "--lora --merge" in error


def test_the_command_makes_a_private_repository(hub, author, name):
    author(push_run, name, "--private")
    assert hub.repositories[name].private


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("me", (), "repo='me' is not valid: it must be like 'you/your-model'"),
        ("me/a b", (), "repo='me/a b' is not valid"),
        ("me/a", ("--licence", "Apache 2"), "licence='Apache 2' is not valid"),
        ("other/a", (), "The Hub refused repo='other/a' (status 403)"),
    ],
)
def test_the_command_says_what_is_wrong(author, name, options, message):
    assert message in author(push_run, name, *options)


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_the_folder_is_checked_before_the_network(monkeypatch, saved, tmp_path, name):
    for path, content in saved.items():
        (tmp_path / path).write_bytes(content)
    message = "no weights" if name == "model.safetensors" else "is not a valid model card"
    (tmp_path / name).unlink()
    if name == "README.md":
        (tmp_path / name).write_bytes(b"\xff")
    monkeypatch.setattr(HfApi, "whoami", lambda *_: pytest.fail("the network was used"))
    with pytest.raises(ValueError, match=message):
        command.push(tmp_path, "me/a")


@pytest.mark.parametrize(
    ("names", "message"),
    [({"HF_TOKEN": None}, "Nobody is logged in"), ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "The Hub cannot be reached")],
)
def test_the_command_without_login_or_network(hub, saved, tmp_path, names, message):
    for path, content in saved.items():
        (tmp_path / path).write_bytes(content)
    given = {**environment(hub, tmp_path / "home", token="hf_me"), **names}
    code = "import whatwhere_cli as cli\ntry: cli.main(['push', '.', 'me/a'])\nexcept SystemExit as error: print(error)"
    assert message in python("-c", code, env=given, cwd=tmp_path)

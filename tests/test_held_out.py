"""The text that `whatwhere length` measures: what runs held out, the user's own, and text of training."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import transformers

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')

import whatwhere_cli as cli
from whatwhere.scripts.commands import finetune
from whatwhere.scripts.data.source import load_text
from whatwhere.scripts.data.tokenize import build_tokenizer, token_unit, tokenize_documents, train_bpe
from whatwhere.scripts.evaluation import checkpoints, text
from whatwhere.scripts.evaluation.text import Part
from whatwhere.scripts.training import loop
from whatwhere.scripts.training.recipe import parse_recipe

VALIDATION = {"train_file": ["mytext/a.txt"], "validation_file": ["held_out.jsonl"], "text_field": "body"}


def recipe(name, **data):
    model = {"family": "llama", "hidden_size": 16, "intermediate_size": 16}
    return parse_recipe(
        {
            "name": name,
            "data": {"source": "local", "sequence_length": 8, **data},
            "model": {**model, "num_hidden_layers": 1, "num_attention_heads": 2},
            "training": {"steps": 1, "batch_size": 2, "learning_rate": 0.01},
            "evaluation": {"blocks": 4, "final_blocks": 4},
        }
    )


RECIPES = {
    "own": {"train_file": ["mytext/*.txt"]},
    "bpe": {"train_file": ["mytext/*.txt"], "tokenizer": "bpe", "vocab_size": 270},
    "file": {"train_file": ["train.jsonl"], "validation_file": ["held_out.jsonl"], "text_field": "body"},
    "stream": {**VALIDATION, "train_file": ["train.jsonl"], "streaming": True},
    "mixture": {
        "source": "mixture",
        "mixture": [
            {"source": "local", "train_file": ["mytext/a.txt"], "weight": 3.0},
            {"source": "local", "train_file": ["mytext/b.txt"], "weight": 1.0},
        ],
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with texts, and runs in `runs`, trained from there on paths relative to it."""
    place = tmp_path_factory.mktemp("place")
    (place / "mytext").mkdir()
    for name in "ab":
        (place / "mytext" / f"{name}.txt").write_text("".join(f"{name}: line {i} of some text\n" for i in range(60)))
    for name in ("train", "held_out"):
        rows = [{"body": f"{name}, document {i}, which is not long"} for i in range(40)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, data in RECIPES.items():
            loop.train(recipe(name, **data), f"runs/{name}", arguments=[])
        sizes = ["--steps", "1", "--batch-size", "2", "--sequence-length", "8", "--evaluation-blocks", "4"]
        own = ["--train-file", "train.jsonl", "--text-field", "body"]
        finetune.main(["runs/own", "--output", "runs/tuned", *own, *sizes])
    return place


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of it in another place, from which a command is run in yet another folder."""
    shutil.copytree(made, tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "moved"


@pytest.fixture
def measure(place, tmp_path, capsys):
    """Runs `length` on runs; returns its results file, and what it printed on both streams."""

    def run(*names, options=(), output="out"):
        fixed = ["--windows", "8", "--device", "cpu", "--output", str(tmp_path / output)]
        capsys.readouterr()
        cli.main(["length", *(str(place / "runs" / name) for name in names), *fixed, *map(str, options)])
        return json.loads(next((tmp_path / output).glob("length*.json")).read_text()), *capsys.readouterr()

    return run


def sha256(tokenizer, documents):
    ids = [token for document in tokenize_documents(tokenizer, documents) for token in document]
    return hashlib.sha256(np.array(ids, dtype=np.int32).tobytes()).hexdigest()


# --- what is measured without options


def test_what_the_run_held_out(measure, place, tmp_path):
    content, printed, said = measure("own", options=["--windows", "4"])
    rows = load_text("local", train_file=[str(place / "mytext/*.txt")])["validation"]
    (entry,) = content["checkpoints"]
    # The ends of both files.
    ends = [(place / "mytext" / f"{name}.txt").read_text() for name in "ab"]
    ends = [end[-sum(len(row["text"]) for row in rows if row["document"] == i) :] for i, end in enumerate(ends)]
    assert entry["tokens"] == 64
    whole, _, _ = measure("own", options=["--windows", "1", "--tokens", "10000"], output="whole")
    assert whole["checkpoints"][0]["tokens_sha256"] == sha256(build_tokenizer("bytes"), ends)
    assert [content["data"][key] for key in ("files", "split", "held_out_part")] == [
        ["mytext/*.txt"],
        "validation",
        True,
    ]
    title = "a held-out part of mytext/*.txt, validation split"
    assert f"± standard error on {title}: 2 documents, joined, 64 tokens, by sequence length (tokens)" in printed
    assert "warning" not in said
    figure = (tmp_path / "out" / "length.svg").read_text()
    assert f"<!-- {title}: 2 documents," in figure
    assert "<!-- perplexity per byte (bars: one standard error) -->" in figure
    assert "<!-- loss (nats per byte) -->" in figure


@pytest.mark.parametrize(
    ("name", "documents", "title"),
    [
        ("file", 40, "held_out.jsonl, validation split"),
        # As many as fill the blocks of an evaluation.
        ("stream", 1, "held_out.jsonl, validation split"),
        ("mixture", 2, "a held-out part of mytext/a.txt (75%), a held-out part of mytext/b.txt (25%), validation"),
        ("tuned", 2, "a held-out part of train.jsonl, validation split"),
    ],
)
def test_other_runs(measure, name, documents, title):
    content, printed, said = measure(name)
    assert content["data"]["documents"] == documents
    assert f"per byte ± standard error on {title}" in printed
    assert f" split: {documents} document" in printed
    assert "warning" not in said


def test_one_text_with_two_tokenizers(measure, capsys):
    _, printed, _ = measure("own", "bpe")
    title = "± standard error on a held-out part of mytext/*.txt, validation split"
    first, second = printed.split("Other tokens")
    assert f"Perplexity per byte {title}" in first
    assert f"Perplexity per token {title}" in second


def test_cards_and_compare_name_the_text(place, capsys, tmp_path, measure):
    measure("own", output=str(place / "runs" / "own"))
    cli.main(["card", str(place / "runs" / "own")])
    card = (place / "runs" / "own" / "README.md").read_text()
    title = "a held-out part of mytext/\\*.txt, validation split"
    assert f"Perplexity per byte ± standard error on {title}: 2 documents" in card
    assert f"Held-out loss on {title}" in card
    assert "| perplexity per byte |" in card
    assert re.search(
        r"trained on mytext/\\\*\.txt\. Held-out result: [\d.]+ bits per byte, perplexity [\d.]+ per byte", card
    )
    capsys.readouterr()
    cli.main(["compare", str(place / "runs" / "own"), str(place / "runs" / "bpe"), "--output", str(tmp_path / "both")])
    lines = capsys.readouterr().out.splitlines()
    assert f"evaluated on: {title}".replace("\\", "") in lines
    rows = {name: "".join(line for line in lines if line.startswith(f"| {name} ")) for name in ("own", "bpe")}
    assert ["per byte" in rows["own"], "per token" in rows["bpe"], "per byte" in rows["bpe"]] == [True, True, False]
    figure = (tmp_path / "both" / "curves.svg").read_text()
    assert "<!-- trained on mytext/*.txt; validation: a held-out part of" in figure


# --- what is refused


def damage(place, how):
    file, results = place / "mytext" / "a.txt", place / "runs" / "own" / "results.json"
    content = json.loads(results.read_text())
    if how == "changed":
        file.write_text(file.read_text() + "one more line\n")
    elif how == "gone":
        shutil.rmtree(place / "mytext")
    elif how == "earlier version":
        results.write_text(json.dumps({key: value for key, value in content.items() if key != "held_out"}))
    elif how == "trained on":
        results.write_text(json.dumps({**content, "weights_sha256": "0" * 64}))
    elif how == "toy task":
        results.write_text(json.dumps({**content, "data": {"source": "task", "task": "flip_flop", "split": "test"}}))
    elif how == "no run":
        results.unlink()


@pytest.mark.parametrize(
    ("names", "how", "message"),
    [
        (
            ["own"],
            "changed",
            r"what it held out \(a held-out part .* it has changed since training, or is another version. Give",
        ),
        (["own"], "gone", r"cannot be measured again: train_file=.*: there is no such file"),
        (
            ["own"],
            "earlier version",
            r"own' does not say which text was held out .*: its results.json is of an ear",
        ),
        (["own"], "trained on", r"its results.json is of other weights"),
        (["own"], "no run", r"has no results.json of a run. Give the text: --validation-file FILE, or --data NAME"),
        (["own"], "toy task", r"trained on a toy task"),
        (["own", "stock"], None, r"stock' does not say which text was held out .* has no results.json of a run"),
        (["own", "file"], None, r"held out different texts \(.*mytext/\*.txt, .*held_out.jsonl, .* one table compares"),
    ],
)
def test_a_text_that_is_not_known_is_asked_for(place, refused, tmp_path, names, how, message):
    damage(place, how)
    if "stock" in names:
        config = transformers.GPT2Config(vocab_size=258, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        transformers.GPT2LMHeadModel(config).save_pretrained(place / "runs" / "stock")
        build_tokenizer("bytes").save_pretrained(place / "runs" / "stock")
    names = [place / "runs" / name for name in names]
    found = refused("length", *names, "--windows", "8", "--device", "cpu", "--output", tmp_path / "out")
    assert re.search(message, found), found
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit(place, refuses):
    table = (
        ("--validation-file", "x.txt", "--data", "pg19", "--data has no effect with --validation-file"),
        ("--text-field", "body", "--text-field has no effect with neither --data hub nor files"),
        ("--dataset-config", "en", "--data", "pg19", "--dataset-config has no effect with --data pg19"),
        ("--data", "local", "for own files, give --validation-file"),
        ("--data-dir", ".", "--data-dir has no effect: a held-out part of mytext/*.txt, validation split is"),
    )
    refuses("length", [(place / "runs" / "own", *row) for row in table], "--device", "cpu")


# --- text of training


def test_text_of_training_is_warned_of(measure, place):
    """By its name, by another, by its contents, and that of the checkpoint that was fine-tuned."""
    copy = place / "copy.txt"
    shutil.copyfile(place / "mytext" / "b.txt", copy)
    (place / "new.txt").write_text("this is new text, of which there is enough for windows")
    for name, file, words in (
        ("own", place / "mytext" / "../mytext/a.txt", f"was trained on '{place / 'mytext' / '../mytext/a.txt'}'"),
        ("own", copy, f"was trained on '{copy}': its results on this text are not those on new text"),
        ("tuned", copy, f"was trained on '{copy}' (in '{place / 'runs' / 'own'}', from which it was fine-tuned)"),
        ("own", place / "new.txt", None),
    ):
        content, printed, said = measure(name, options=["--validation-file", file], output=f"out{len(str(words))}")
        assert (words in said) if words else ("warning" not in said)
        assert content["checkpoints"][0].get("trained_on") == (True if words else None)
        assert f"± standard error on {file.name}, validation split: 1 document, " in printed
    (place / "mytext").rename(place / "moved")
    content, _, said = measure("own", options=["--validation-file", copy], output="moved")
    assert re.search("warning: it is not known if .*own' was trained on this text", said)
    assert "trained_on" not in content["checkpoints"][0]


def test_analysis_warns_of_text_of_training(place, tmp_path, capsys):
    for file, expected in (("mytext/a.txt", True), ("held_out.jsonl", False)):
        options = ["--validation-file", place / file, "--text-field", "body", "--output", tmp_path / "analysis"]
        options = options[:2] + options[4:] if expected else options
        cli.main(["analysis", "frequencies", *map(str, (place / "runs" / "own", *options)), "--device", "cpu"])
        assert ("own' was trained on '" in capsys.readouterr().err) == expected


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (("corpus", "pg19", "train[:10]"), ("corpus", "pg19", "train"), "pg19:train"),
        (("corpus", "pg19", "train[:10]"), ("corpus", "pg19", "train[9:12]"), "pg19:train[9:12]"),
        (("corpus", "pg19", "train[:10]"), ("corpus", "pg19", "train[10:]"), None),
        (("corpus", "pg19", "test"), ("corpus", "pg19", "train"), None),
        # Two forms of one text.
        (("corpus", "wikitext103", "train"), ("corpus", "wikitext103_v1", "train"), "wikitext103_v1:train"),
        (("hub", "me/x None", "train[5:]"), ("hub", "me/x None", "train"), "me/x:train"),
        (("hub", "me/x en", "train"), ("hub", "me/x fr", "train"), None),
        (("hub", "me/x None", "train"), ("corpus", "pg19", "train"), None),
    ],
)
def test_what_two_splits_have_in_common(one, other, shared):
    assert text._shared(Part(*one), Part(*other)) == shared


def test_a_corpus_of_training_is_warned_of(place, monkeypatch):
    file = place / "runs" / "own" / "results.json"
    content = json.loads(file.read_text())
    splits = {"train": "pg19:train[:100]", "validation": "pg19:validation"}
    content["data"] = {"source": "corpus", "splits": splits, "split": "validation", "place": "the Hub"}
    file.write_text(json.dumps(content))
    for name, warned in (("pg19:train[50:]", True), ("pg19:train[100:]", False), ("pg19", False)):
        arguments = [str(file.parent), "--data", name]
        measured = text.given_text(text_options(arguments)).parts
        assert [is_known for _, is_known in text.warnings(str(file.parent), measured, None)] == [True] * warned


def text_options(arguments):
    from whatwhere.scripts.evaluation import length

    return length.parser().parse_args(arguments)


# --- units, and fingerprints


def test_units_of_tokenizers():
    assert token_unit(build_tokenizer("bytes")) == "byte"
    assert token_unit(train_bpe(270, ["some text, some text"])) == "token"
    assert token_unit(build_tokenizer("jsb")) == "token"
    tokenizer = build_tokenizer("bytes")
    tokenizer.add_tokens(["import"])
    assert token_unit(tokenizer) == "token"


def test_weights_are_read_once(measure, place, monkeypatch):
    """However many windows and variants there are; and again when they have changed."""
    read, fingerprint = [], checkpoints.weights_fingerprint
    monkeypatch.setattr(checkpoints, "weights_fingerprint", lambda folder: read.append(folder) or fingerprint(folder))
    run = place / "runs" / "own"
    options = ["--windows", "4,8,16", "--variants", "yarn"]
    content, _, _ = measure("own", options=options, output=str(run))
    assert [len(entry["cells"]) for entry in content["checkpoints"]] == [3, 3]
    assert content["weights_sha256"] == fingerprint(run)
    assert len(read) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(run)
    model.lm_head.weight.data.add_(1)
    model.save_pretrained(run)
    assert checkpoints.weights_of(str(run)) == fingerprint(run) != content["weights_sha256"]

"""Length extrapolation: losses against loops over tokens, names of windows, variants, the growing file, the command."""

import gzip
import importlib.metadata
import json
import math
import re
import shutil

import pytest
import torch
import transformers
from tokenizers import normalizers

import whatwhere_cli as cli
from tiny import LargestTensor, tiny_model
from whatwhere.scripts import progress
from whatwhere.scripts.data.tokenize import build_tokenizer, train_bpe
from whatwhere.scripts.evaluation import kept, length_report, variants, windows
from whatwhere.scripts.evaluation import length as script
from whatwhere.scripts.evaluation.checkpoints import Loading, check_vocabulary, longest_length, trained_length_of
from whatwhere.scripts.evaluation.data_description import measured_text
from whatwhere.scripts.evaluation.results import read_results
from whatwhere.scripts.evaluation.schema import Cell, Measured
from whatwhere.scripts.processes import Processes

SIZES = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TRAINED = 16


def small(encoding, **fields):
    """A model trained, so it says, at 16 tokens."""
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": TRAINED}
    return tiny_model("gpt2", encoding, **{**sizes, **fields})


def granite():
    """A model that divides the logits, so that they are not head x hidden state."""
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.GraniteConfig(**SIZES, intermediate_size=32, logits_scaling=8.0, **special)
    return transformers.GraniteForCausalLM(config).eval()


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 258, (n,), generator=generator, dtype=torch.int32) for n in (66, 20, 100, 34)]


@torch.no_grad()
def by_hand(model, texts, length):
    """The loss of every token of every window, (windows, length) for each text: one forward pass a window."""
    found = []
    for ids in texts:
        rows = []
        while (len(rows) + 1) * length < len(ids):
            some = ids[len(rows) * length :][: length + 1].long()
            logits = model(input_ids=some[None, :-1]).logits[0].double()
            rows.append(-logits.log_softmax(-1)[torch.arange(length), some[1:]])
        found.append(torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64))
    return found


# --- what is computed


@pytest.mark.parametrize("make", [lambda: small("rope"), granite], ids=["plain head", "scaled logits"])
def test_equals_a_loop_over_windows(make, texts):
    model, sizes = make(), [torch.arange(len(ids)) % 5 for ids in texts]
    cell, by_position = windows.measure_windows(model, texts, sizes, 32, trained_length=16, batch_tokens=64)
    losses = by_hand(model, texts, 32)
    assert [len(rows) for rows in losses] == [2, 0, 3, 1]
    whole = torch.cat(losses)
    assert cell.loss == pytest.approx(whole.mean().item(), rel=1e-6)
    assert cell.perplexity == pytest.approx(math.exp(whole.mean()), rel=1e-6)
    size = sum(some[1:][: len(rows) * 32].sum().item() for some, rows in zip(sizes, losses))
    assert cell.bytes == size
    assert cell.bits_per_byte == pytest.approx(whole.sum().item() / math.log(2) / size, rel=1e-6)
    assert (cell.windows, cell.tokens, cell.multiple) == (6, 192, 2.0)
    assert (cell.documents, cell.short_documents, cell.dropped_tokens) == (3, 1, 65 + 19 + 99 + 33 - 192)
    assert by_position["edges"] == [0, 16, 23, 32]
    expected = [whole[:, start:stop].mean().item() for start, stop in ((0, 16), (16, 23), (23, 32))]
    assert by_position["loss"] == pytest.approx(expected, rel=1e-6)
    assert by_position["tokens"] == [96, 42, 54]


def test_standard_error_is_over_documents_or_over_the_windows_of_one(texts):
    model = small("rope")
    equal = [texts[0][:33], texts[2][:33], texts[2][33:66]]
    cell, _ = windows.measure_windows(model, equal, None, 16, trained_length=16)
    # Documents of the same size: the ratio is a plain mean.
    means = torch.stack([rows.mean() for rows in by_hand(model, equal, 16)])
    assert cell.clusters == "documents"
    assert cell.standard_error == pytest.approx((means.std() / math.sqrt(3)).item(), rel=1e-6)
    assert cell.bits_per_byte is cell.bytes is None
    cell, _ = windows.measure_windows(model, texts[2:3], None, 16, trained_length=16)
    means = by_hand(model, texts[2:3], 16)[0].mean(1)
    assert cell.clusters == "windows"
    assert cell.standard_error == pytest.approx((means.std() / math.sqrt(6)).item(), rel=1e-6)
    cell, _ = windows.measure_windows(model, texts[2:3], None, 99, trained_length=16)
    assert cell.standard_error is None


class InTurn(Processes):
    """Processes that run one after the other: the last has the sums of all."""

    given = []

    def summed(self, values):
        self.given.append(values)
        return torch.stack(self.given).sum(0)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_shares_of_processes_add_up(texts, count, monkeypatch):
    """6 windows in 5 batches, and one window; the other processes have nothing to do."""
    model, sizes = small("rope"), [torch.arange(len(ids)) % 5 for ids in texts]
    for length, windows_ in ((32, 6), (80, 1)):
        given = {"trained_length": 16, "batch_tokens": 64}
        cell, by_position = windows.measure_windows(model, texts, sizes, length, **given)
        assert cell.windows == windows_
        monkeypatch.setattr(InTurn, "given", [])
        for rank in range(count):
            found = windows.measure_windows(model, texts, sizes, length, **given, processes=InTurn(count, rank=rank))
        assert len(InTurn.given) == count, "one sum for each cell"
        # Sums by position are added in another order.
        assert found[0] == cell
        assert found[1] == {**by_position, "loss": pytest.approx(by_position["loss"], rel=1e-12)}


def test_logits_are_computed_in_pieces(texts):
    model = small("rope")
    rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    inputs, targets = texts[2][None, :-1].long(), texts[2][None, 1:].long()
    with torch.no_grad():
        pieces = windows.token_losses(model, inputs, targets, plain_head=True, chunk=40)
        assert rows == [40, 40, 19]
        whole = windows.token_losses(model, inputs, targets, plain_head=False)
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("encoding", ["rope", "pope", "cope", "relative"])
def test_memory_is_linear_in_the_length(encoding):
    length = 4096
    fields = {"position_encoding_parameters": {"beyond": "last"}} if encoding == "relative" else {}
    with LargestTensor() as largest:
        text = torch.zeros(length + 1, dtype=torch.int32)
        windows.measure_windows(small(encoding, **fields), [text], None, length, trained_length=16)
    # The logits of 1,024 tokens, or a block of attention: both are the same for any longer window.
    assert largest.largest <= length**2 // 8


@pytest.mark.parametrize(("encoding", "limit"), [("absolute", TRAINED), ("rope", None), ("pope", None)])
def test_longest_length(encoding, limit):
    assert longest_length(small(encoding)) == limit
    stock = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=8, n_embd=16, n_layer=1, n_head=2))
    assert longest_length(stock) == 8


def test_trained_length_comes_from_the_run_before_the_configuration(tmp_path):
    config = small("rope").config
    assert trained_length_of(str(tmp_path), config) == TRAINED
    origin = {"command": "whatwhere train x", "date": "2031-02-03", "versions": {}}
    (tmp_path / "results.json").write_text(json.dumps({"length": 4, "metrics": {}, "data": {}, **origin}))
    assert trained_length_of(str(tmp_path), config) == 4
    with pytest.raises(ValueError, match="--trained-length"):
        trained_length_of("me/x", transformers.BloomConfig())


def test_names_of_windows():
    assert script.parse_windows("4x,16, 1x", 8) == [8, 16, 32]
    assert script.parse_windows("1.5x", 8) == [12]
    for text in ("", "1,two", "0,1", "-1", "nan", "infx", "1.3x", "2.5"):
        with pytest.raises(ValueError, match="windows="):
            script.parse_windows(text, 8)


def test_the_same_tokens_in_all_windows():
    assert windows.common_tokens(16 * 2560, 10**6, [256, 512, 1024, 2048, 2560]) == 40960
    assert windows.common_tokens(1, 10**6, [8, 12]) == 24
    assert windows.common_tokens(25, 10**6, [8, 12]) == 48
    # As much as there is.
    assert windows.common_tokens(192, 100, [8, 12]) == 96
    assert windows.common_tokens(192, 20, [8, 12]) == 20


def test_errors_of_both_metrics_have_one_unit():
    cell = {"loss": 2.0, "standard_error": 0.1, "perplexity": 7.5, "bits_per_byte": 3.0, "reached": True}
    assert length_report.error(cell, "perplexity") == pytest.approx(0.75)
    assert length_report.error(cell, "bits_per_byte") == pytest.approx(0.15)
    assert length_report.error({**cell, "standard_error": None}, "perplexity") is None


# --- variants


def changed(variant, model, length):
    return variants.changes(variant, model.config, trained_length=TRAINED, length=length)


@pytest.mark.parametrize(("variant", "kind"), [("yarn", "yarn"), ("interpolation", "linear")])
@pytest.mark.parametrize("encoding", ["rope", "cope+rope"])
def test_scaled_rope(variant, kind, encoding):
    model = small(encoding)
    rope = changed(variant, model, 64)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 4.0, 10000.0)
    assert rope.get("original_max_position_embeddings") == (TRAINED if variant == "yarn" else None)
    # Never below 1: shorter windows are left alone.
    assert changed(variant, model, 8)["rope_parameters"]["factor"] == 1.0


def test_relative_positions_beyond_the_table():
    parameters = changed("relative-capped", small("relative"), 64)["position_encoding_parameters"]
    assert parameters == {"num_positions": TRAINED, "beyond": "last"}
    both = small("cope+relative")
    parameters = changed("relative-none", both, 64)["position_encoding_parameters"]
    assert parameters["relative"] == {"num_positions": TRAINED, "beyond": "none"}
    assert parameters["cope"] == both.config.position_encoding_parameters["cope"]
    plan = small(["rope", "relative"], num_hidden_layers=2)
    parameters = changed("relative-capped", plan, 64)["position_encoding_parameters"]
    assert parameters == {
        **plan.config.position_encoding_parameters,
        "relative": {"num_positions": 16, "beyond": "last"},
    }
    assert changed("yarn", plan, 64)["rope_parameters"]["factor"] == 4.0


def test_a_plan_by_layer_is_printed_as_names():
    entry = {"name": "tiny", "variant": None, "position_encoding": ["rope", "cope"], "trained_length": 16, "cells": []}
    assert "| rope, cope |" in length_report.table([entry])


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("variant", "encoding", "fields"),
    [
        ("yarn", "pope", {}),
        ("yarn", "rope", LINEAR),
        ("relative-capped", "rope", {}),
        ("relative-capped", "relative", {"position_encoding_parameters": {"beyond": "last"}}),
        ("relative-none", "relative", {"position_encoding_parameters": {"num_positions": 99}}),
    ],
)
def test_variants_that_do_not_apply(variant, encoding, fields):
    assert changed(variant, small(encoding, **fields), 64) is None


# --- the command


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Checkpoints, and a data folder with three books, two short articles and a text of code."""
    root = tmp_path_factory.mktemp("windows")
    for encoding in ("rope", "pope", "relative", "absolute"):
        small(encoding).save_pretrained(root / encoding)
        build_tokenizer("bytes").save_pretrained(root / encoding)
    books = root / "data" / "pg19"
    (books / "test").mkdir(parents=True)
    for index, size in enumerate((70, 140, 200)):
        (books / "test" / f"{index}.txt").write_text("".join(chr(97 + i * i % 23) for i in range(size)))
    (books / "train").mkdir()
    with gzip.open(books / "train" / "train-00.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "it was a dark and stormy night; " * 20}) + "\n")
    (root / "data" / "wikitext").mkdir()
    article = " \n = Title = \n \n words of the article \n"
    (root / "data" / "wikitext" / "wiki.test.raw").write_text(article + article.replace("Title", "Other"))
    (root / "code").mkdir()
    (root / "code" / "a.txt").write_text("def f(x):\n    return x + 1\n" * 40, encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def run(root, tmp_path):
    def run(names, *arguments, data="pg19", files=None):
        text = ["--validation-file", str(root / files)] if files else ["--data", data, "--data-dir", str(root / "data")]
        fixed = [*text, "--device", "cpu", "--output", str(tmp_path)]
        cli.main(["length", *(str(root / name) for name in names), *fixed, *arguments])
        (path,) = tmp_path.glob("length*.json")
        return json.loads(path.read_text(encoding="utf-8"))

    return run


def test_multiples_of_the_trained_length(root, run, tmp_path, capsys):
    arguments = ["--windows", "4x,1x,2x", "--tokens", "200", "--metric", "bits_per_byte"]
    content = run(["rope", "absolute"], *arguments, files="code")
    rope, absolute = content["checkpoints"]
    assert [(cell["length"], cell["multiple"], cell["tokens"]) for cell in rope["cells"]] == [
        (16, 1, 256),
        (32, 2, 256),
        (64, 4, 256),
    ]
    assert rope["tokens_sha256"] == absolute["tokens_sha256"]
    assert [cell["reached"] for cell in absolute["cells"]] == [True, False, False]
    printed = capsys.readouterr().out
    assert printed.count("not supported") == 2
    assert f"{rope['cells'][2]['bits_per_byte']:.3f} ±" in printed
    assert content["command"].startswith("whatwhere length ")
    assert content["versions"]["torch"] == importlib.metadata.version("torch")
    figures = {ending: (tmp_path / f"length_local_code.{ending}").read_bytes() for ending in ("png", "svg")}
    assert figures["png"].startswith(b"\x89PNG")
    # The same numbers draw the same bytes.
    title = measured_text(content["data"], content["checkpoints"])
    length_report.draw(content["checkpoints"], tmp_path / "again", title=title, metric="bits_per_byte")
    assert {ending: (tmp_path / f"again.{ending}").read_bytes() for ending in ("png", "svg")} == figures


def test_one_checkpoint_keeps_its_numbers_beside_its_weights(root):
    data = ["--validation-file", str(root / "code"), "--device", "cpu"]
    script.main([str(root / "pope"), *data, "--windows", "1x", "--tokens", "16"])
    assert read_results(root / "pope")["length_local_code"]["checkpoints"][0]["name"] == "pope"


def test_variants(root, run, capsys):
    names = "yarn,interpolation,relative-capped,relative-none"
    content = run(["rope", "relative"], "--windows", "64,16", "--variants", names)
    assert capsys.readouterr().err.count("does not apply") == 4
    data = content["data"]
    assert (data["corpus"], data["place"], data["joined"], data["documents"]) == ("pg19", "local files", False, 3)
    found = {(one["name"], one["variant"]): one for one in content["checkpoints"]}
    books = [torch.tensor([*file.read_bytes(), 256]) for file in sorted((root / "data/pg19/test").glob("*.txt"))]
    for (name, variant), entry in found.items():
        for cell in entry["cells"]:
            length = cell["length"]
            assert cell["reached"] == (length <= TRAINED or name == "rope" or variant is not None)
            if not cell["reached"]:
                assert "16" in cell["reason"]
                continue
            fields = {}
            if variant in ("yarn", "interpolation"):
                fields = {"rope_type": variant.replace("interpolation", "linear"), "rope_theta": 10000.0}
                fields["factor"] = length / TRAINED
                if variant == "yarn":
                    fields["original_max_position_embeddings"] = TRAINED
                fields = {"rope_parameters": fields}
            elif variant:
                beyond = {"relative-capped": "last", "relative-none": "none"}[variant]
                fields = {"position_encoding_parameters": {"num_positions": TRAINED, "beyond": beyond}}
            model = transformers.AutoModelForCausalLM.from_pretrained(root / name, **fields).eval()
            # The books end with the end-of-text token.
            assert cell["loss"] == pytest.approx(torch.cat(by_hand(model, books, length)).mean().item(), rel=1e-5)
        reached = [cell["length"] for cell in entry["cells"] if cell["reached"]]
        assert [one["length"] for one in entry["by_position"]] == reached
    # At the trained length a variant changes nothing, beyond it does.
    losses = {key: [cell["loss"] for cell in entry["cells"]] for key, entry in found.items()}
    for name, variant in found:
        if variant is not None:
            assert losses[name, variant][0] == losses[name, None][0]
            assert losses[name, variant][1] != losses[name, None][1]


def test_some_of_the_text(run, capsys):
    content = run(["rope"], "--windows", "16,32,999", "--documents", "2", "--tokens", "48")
    assert content["data"]["documents"] == 2
    (entry,) = content["checkpoints"]
    assert entry["tokens"] == 96
    assert [(cell["windows"], cell["dropped_tokens"]) for cell in entry["cells"]] == [(6, 0), (2, 32)]
    assert "999" in capsys.readouterr().err, "windows that no text fills are skipped"


def test_articles_are_joined(root, run, tmp_path):
    content = run(["rope"], "--windows", "16", data="wikitext103")
    (cell,) = content["checkpoints"][0]["cells"]
    assert (content["data"]["joined"], content["data"]["documents"]) == (True, 2)
    assert (cell["documents"], cell["clusters"]) == (1, "windows")
    # Between the articles and after them an end-of-text token; the first token is only context; what comes before the
    # first title is no article.
    size = len((root / "data" / "wikitext" / "wiki.test.raw").read_bytes()) - 2 + 2 - 1
    assert content["checkpoints"][0]["tokens"] == size
    (tmp_path / "length_wikitext103.json").unlink()
    apart = run(["rope"], "--windows", "16", "--no-join", data="wikitext103")
    assert apart["checkpoints"][0]["cells"][0]["documents"] == 2
    assert apart["checkpoints"][0]["tokens"] == size - 1


def test_no_more_books_are_read_than_asked_for(run, monkeypatch):
    from datasets import IterableDataset

    from whatwhere.scripts.data.corpora import CORPORA

    read = []

    def books():
        for index in range(1000):
            read.append(index)
            yield {"text": "once upon a time " * 9}

    monkeypatch.setattr(
        type(CORPORA["pg19"]), "read_local", lambda *_, **__: IterableDataset.from_generator(books), raising=True
    )
    content = run(["rope"], "--windows", "16,32", "--documents", "3")
    assert content["data"]["documents"] == 3
    assert len(read) <= 4


def test_the_same_command_goes_on(run, monkeypatch, capsys):
    lengths = []
    measure = windows.measure_windows

    def counted(model, parts, sizes, length, **options):
        if len(lengths) == 2:
            raise KeyboardInterrupt
        lengths.append(length)
        return measure(model, parts, sizes, length, **options)

    with monkeypatch.context() as patch:
        patch.setattr(script, "measure_windows", counted)
        with pytest.raises(SystemExit) as stop:
            run(["rope", "pope"], "--windows", "16,32")
        assert stop.value.code == 130
    assert lengths == [16, 16], "short windows of all models come first"
    monkeypatch.setattr(
        script, "measure_windows", lambda *args, **options: lengths.append(args[3]) or measure(*args, **options)
    )
    del lengths[:]
    first = run(["rope", "pope"], "--windows", "16,32")
    assert lengths == [32, 32], "the longer ones were missing"
    assert "2 of 4 measurements were made before" in capsys.readouterr().err
    more = run(["rope"], "--windows", "64,32")
    assert lengths == [32, 32, 64]
    assert "1 of 2 measurements were made before" in capsys.readouterr().err
    assert [cell["length"] for cell in more["checkpoints"][0]["cells"]] == [16, 32, 64]
    assert more["checkpoints"][1] == first["checkpoints"][1]
    # Every run that added to it is named: the one that was stopped, its second part, this one.
    assert ["16,32" in run["command"] for run in (*more["earlier"], more)] == [True, True, False]
    # What was measured with another precision is measured again.
    run(["pope"], "--windows", "16", "--dtype", "bfloat16")
    assert lengths[3:] == [16]


def test_another_folder_takes_what_was_measured(run, tmp_path, monkeypatch, capsys):
    first = run(["rope", "pope"], "--windows", "16,32")
    monkeypatch.setattr(script, "measure_windows", None)
    (tmp_path / "length_pg19.json").unlink()
    write, written = script.write_json, []
    monkeypatch.setattr(script, "write_json", lambda *given: written.append(given[0].name) or write(*given))
    again = run(["pope", "rope"], "--windows", "16,32")
    assert written == ["length_pg19.json"], "once for all"
    assert "4 of 4 measurements were made before" in capsys.readouterr().err
    assert again["checkpoints"] == first["checkpoints"][::-1]
    # Other settings are measured: other weights, windows, types, code.
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run(["rope"], "--windows", "64")
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run(["rope"], "--windows", "16", "--dtype", "bfloat16")
    monkeypatch.setattr(kept, "_code", lambda: "other code")
    (tmp_path / "length_pg19.json").unlink()
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run(["rope"], "--windows", "16")


def edited(folder, **fields):
    """Changes fields of the config.json in a folder."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **fields}))


def test_another_configuration_is_measured_again(root, run, tmp_path):
    """Neither the file of results nor what is kept beside tokenised text is of this model."""
    shutil.copytree(root / "rope", root / "edited")
    losses = []
    for epsilon in (1e-5, 0.5):
        edited(root / "edited", layer_norm_epsilon=epsilon)
        (entry,) = run(["edited"], "--windows", "16")["checkpoints"]
        losses.append(entry["cells"][0]["loss"])
    assert losses[0] != losses[1]
    (tmp_path / "length_pg19.json").unlink()
    edited(root / "edited", layer_norm_epsilon=1e-5, _name_or_path="x", dtype="bfloat16", transformers_version="9")
    (entry,) = run(["edited"], "--windows", "16")["checkpoints"]
    assert entry["cells"][0]["loss"] == losses[0]


def test_edited_code_is_measured_again(root, run):
    folder = root / "own_code"
    stock = transformers.GPT2Config(vocab_size=258, n_positions=TRAINED, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(stock).save_pretrained(folder)
    build_tokenizer("bytes").save_pretrained(folder)
    edited(folder, auto_map={"AutoModelForCausalLM": "own.Own"})
    losses = []
    for factor in (1, 2):
        (folder / "own.py").write_text(
            "import transformers\n\n\n"
            "class Own(transformers.GPT2LMHeadModel):\n"
            "    def forward(self, *args, **kwargs):\n"
            "        output = super().forward(*args, **kwargs)\n"
            f"        output.logits = {factor} * output.logits\n"
            "        return output\n"
        )
        (entry,) = run(["own_code"], "--windows", "16", "--trust-remote-code")["checkpoints"]
        losses.append(entry["cells"][0]["loss"])
    assert losses[0] != losses[1]


def test_what_cannot_be_kept_or_read(run, tmp_path, monkeypatch, capsys):
    """Measurements are kept as a convenience: one warning, and files of others are ignored."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("WHATWHERE_CACHE", str(cache))
    first = run(["rope"], "--windows", "16,32")
    for file, content in zip(sorted((cache / "length").iterdir()), ('{"cell": {', "[1]"), strict=True):
        file.write_text(content)
    (tmp_path / "length_pg19.json").unlink()
    again = run(["rope"], "--windows", "16,32")
    assert again["checkpoints"] == first["checkpoints"]
    assert "were made before" not in capsys.readouterr().err
    (tmp_path / "a file").touch()
    monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path / "a file"))
    (tmp_path / "length_pg19.json").unlink()
    assert run(["rope"], "--windows", "16,32")["checkpoints"] == first["checkpoints"]
    assert capsys.readouterr().err.count("warning: measurements are not kept") == 1


def test_progress_in_a_log(run, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "NEXT_LINE", 0.0)
    run(["rope", "pope"], "--windows", "16,32", "--tokens", "96", "--documents", "1")
    lines = [line for line in capsys.readouterr().err.splitlines() if " tokens/s, " in line]
    assert [re.sub(r"[\d,.]+ tokens/s, \d\d:\d\d", "SPEED", line) for line in lines] == [
        "rope at 16: 64 of 256 tokens, SPEED left",
        "pope at 16: 128 of 256 tokens, SPEED left",
        "pope at 32: 192 of 256 tokens, SPEED left",
        "rope at 32: 256 of 256 tokens, SPEED left",
    ]


def test_results_of_other_data_stay(run, tmp_path):
    run(["rope"], "--windows", "16")
    before = (tmp_path / "length_pg19.json").read_bytes()
    with pytest.raises(SystemExit, match="text_tokens: None → 32"):
        run(["rope"], "--windows", "16", "--tokens", "32")
    assert (tmp_path / "length_pg19.json").read_bytes() == before
    (tmp_path / "length_pg19.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"length_pg19\.json: checkpoints is missing"):
        run(["rope"], "--windows", "16")


def test_own_files(root, tmp_path, monkeypatch, refused):
    """Paths are relative to the current folder, as those of `train --validation-file`."""
    monkeypatch.chdir(root)
    fixed = ["length", str(root / "rope"), "--windows", "16", "--output", str(tmp_path)]
    fixed += ["--device", "cpu", "--tokens", "16", "--validation-file"]
    cli.main([*fixed, "code/*.txt", "data/pg19/test/0.txt"])
    content = json.loads((tmp_path / "length_local_files.json").read_text(encoding="utf-8"))
    assert content["data"]["files"] == ["code/*.txt", "data/pg19/test/0.txt"]
    assert content["data"]["documents"] == 2
    (tmp_path / "length_local_files.json").unlink()
    assert "validation_file='no/*.txt' is not valid" in refused(*fixed, "no/*.txt")
    (tmp_path / "empty.txt").touch()
    assert "empty.txt'] is not valid: it has no text" in refused(*fixed, str(tmp_path / "empty.txt"))
    assert "text_field='body' has no effect: all files are" in refused(*fixed, "code", "--text-field", "body")


def test_other_tokenizers_have_their_own_table(root, run, tmp_path, capsys):
    """Perplexities per token are not comparable between tokenizers; bits per byte are, on the same text."""
    texts = [(root / "code" / "a.txt").read_text()]
    small("rope", vocab_size=300).save_pretrained(root / "bpe")
    train_bpe(270, texts).save_pretrained(root / "bpe")
    arguments = ["--windows", "16", "--tokens", "32"]
    content = run(["pope", "bpe"], *arguments, files="code")
    one, two = content["checkpoints"]
    assert one["tokens_sha256"] != two["tokens_sha256"]
    first, second = capsys.readouterr().out.split("Other tokens, so perplexity cannot be compared")
    assert ("| pope" in first, "| bpe" in first) == (True, False)
    assert ("| pope" in second, "| bpe" in second) == (False, True)
    assert b"<!-- pope -->" in (tmp_path / "length_local_code.svg").read_bytes()
    assert b"<!-- bpe -->" in (tmp_path / "length_local_code_2.svg").read_bytes()
    # So many tokens of each tokenizer are other text.
    run(["pope", "bpe"], *arguments, "--metric", "bits_per_byte", files="code")
    counts = [entry["cells"][0]["bytes"] for entry in (one, two)]
    assert f"Other text ({counts[1]} bytes scored; {counts[0]} in the first table), so" in capsys.readouterr().out
    assert (tmp_path / "length_local_code_2.svg").is_file()
    (tmp_path / "length_local_code.json").unlink()
    for name in ("length_local_code_2_notes.svg", "length_local_code_65536.png"):
        (tmp_path / name).touch()
    size = len(texts[0])
    run(
        ["pope", "bpe"],
        "--windows",
        "1",
        "--tokens",
        f"{size}",
        "--metric",
        "bits_per_byte",
        files="code",
    )
    assert "Other text" not in capsys.readouterr().out
    for name in (b"<!-- pope -->", b"<!-- bpe -->"):
        assert name in (tmp_path / "length_local_code.svg").read_bytes()
    # The earlier run's second figure is gone, and nothing else.
    assert {path.name for path in tmp_path.glob("length_local_code_*")} == {
        "length_local_code_2_notes.svg",
        "length_local_code_65536.png",
    }


def test_a_tokenizer_that_changes_the_text(root, run, tmp_path, capsys):
    """The bytes are those of the text itself; bits per byte are in a table of their own, and why is said."""
    (root / "changed").mkdir()
    text = "ﬁne ① café  \uff54ext " * 30
    (root / "changed" / "a.txt").write_text(text)
    tokenizer = train_bpe(300, [text])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    small("rope", vocab_size=300).save_pretrained(root / "nfkc")
    tokenizer.save_pretrained(root / "nfkc")
    arguments = ["--windows", "1", "--tokens", "9999", "--metric", "bits_per_byte"]
    content = run(["pope", "nfkc"], *arguments, files="changed")
    said = capsys.readouterr()
    one, two = content["checkpoints"]
    assert (one["changed_documents"], two["changed_documents"]) == (0, 1)
    # The first token is not predicted.
    assert len(text.encode()) - two["cells"][0]["bytes"] in range(1, 9)
    assert "nfkc: the tokenizer changes the text of 1 of 1 documents" in said.err
    assert "Other text, because a tokenizer changes it, so bits per byte cannot be compared" in said.out


def test_entries_are_those_of_their_weights(tmp_path):
    data = {"corpus": "pg19", "split": "validation[:3]"}
    origin = {"command": "whatwhere length x", "date": "2031-02-03", "versions": {}}
    results = script.LengthResults(tmp_path, data, origin=origin)
    assert results.path.name == "length_pg19_validation.json"
    identity = {"name": "a", "variant": None, "weights": "1", "trained_length": 16, "tokens_sha256": "0"}
    cell = Measured(parameters=1, cell=Cell(length=16, multiple=1.0, reached=True), by_position=None)
    results.add([(results.entry(identity, {"checkpoint": "x/a"}), cell)])
    again = script.LengthResults(tmp_path, data, origin=origin)
    # The same weights by another path; another checkpoint of that name; other weights in the same place.
    assert again.entry(identity, {"checkpoint": "y/a"})["cells"]
    with pytest.raises(ValueError, match="checkpoint='y/a'"):
        again.entry({**identity, "weights": "2"}, {"checkpoint": "y/a"})
    assert not again.entry({**identity, "weights": "2"}, {"checkpoint": "x/a"})["cells"]
    assert len(again.checkpoints) == 1
    # Weights without a fingerprint may have changed.
    unknown = {**identity, "name": "b", "weights": None}
    again.add([(again.entry(unknown, {}), cell)])
    assert not again.entry(unknown, {})["cells"]


def test_mistakes(root, refuses, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, size in (("broken", 257), ("smaller", 200)):
        small("rope", vocab_size=size).save_pretrained(root / name)
        build_tokenizer("bytes").save_pretrained(root / name)
    (root / "broken" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    output = ["--output", tmp_path, "--device", "cpu"]
    data = ["--data", "pg19", "--data-dir", root / "data"]
    own = (
        ("--windows", "16,y", "windows='16,y'"),
        ("--windows", "998,999", "windows=998"),
        ("--dataset", "x", "--dataset"),
        ("--variants", "", "variants=''"),
        ("--variants", "yarm", "Did you mean 'yarn'"),
        ("--variants", "relative-capped", "variants='relative-capped'"),
        ("--documents", "0", "--documents"),
        ("--trained-length", "0", "--trained-length"),
        ("--batch-tokens", "-5", "--batch-tokens"),
        ("--data", "stdlib", "--data-dir"),
        ("--data", "pg20", "data='pg20'"),
        ("--data", "pg19:tset", "Did you mean 'test'"),
    )
    refuses("length", [(root / "rope", *data, "--windows", "16", *row) for row in own], *output)
    checkpoints = (
        ("code", "config.json"),
        ("nowhere", "nowhere"),
        ("broken", "broken"),
        ("rope/config.json", "config.json' is not valid: it is a file"),
        ("adapter", "a full model with --lora --merge)."),
        ("smaller", "its tokenizer has 257 tokens, the model has 200"),
    )
    refuses("length", [(root / name, words) for name, words in checkpoints], *data, "--windows", "16", *output)
    assert not list(tmp_path.iterdir())


def test_added_tokens():
    """A model need not have the token for padding, which no text has, but it needs one for an added word."""
    tokenizer, config = build_tokenizer("bytes"), small("rope", vocab_size=257).config
    check_vocabulary("x", tokenizer, config)
    tokenizer.add_tokens(["import"])
    with pytest.raises(ValueError, match=r"checkpoint='x' .* its tokenizer has 259 tokens, the model has 257 "):
        check_vocabulary("x", tokenizer, config)


@pytest.mark.parametrize(
    ("environment", "device", "message"),
    [
        ({}, "cpu", "WORLD_SIZE=2 is not valid without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "1"}, "cuda:1", "device='cuda:1' is not valid with 2 processes. Allowed: 'cpu', 'cuda'"),
        ({"LOCAL_RANK": "1"}, "cuda", "LOCAL_RANK=1: this machine has 1 GPUs, and each process needs its own"),
    ],
)
def test_processes_that_do_not_fit(environment, device, message, root, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    fixed = {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"} if environment else {}
    for name, value in {"WORLD_SIZE": "2", **fixed, **environment}.items():
        monkeypatch.setenv(name, value)
    for command in ("length", "zero-shot", "task"):
        output = [] if command == "task" else ["--output", tmp_path / "out"]
        assert message in refused(command, root / "rope", "--device", device, *output)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_equal_one(root, run, two_processes, tmp_path):
    """Books fill 6, 2 and 1 windows, each a batch, and shares are uneven; some cells need no model."""
    arguments = ["--windows", "64,128,192", "--batch-tokens", "64", "--data", "pg19", "--data-dir", root / "data"]
    printed = two_processes("length", root / "rope", root / "absolute", *arguments, "--output", tmp_path / "two")
    assert printed.count("± standard error") == 1
    content = json.loads((tmp_path / "two/length_pg19.json").read_text(encoding="utf-8"))
    expected = run(["rope", "absolute"], *map(str, arguments[:4]))
    assert content["data"] == expected["data"]
    assert [cell["windows"] for cell in expected["checkpoints"][0]["cells"]] == [6, 2, 1]
    for entry, other in zip(content["checkpoints"], expected["checkpoints"], strict=True):
        for kind in ("cells", "by_position"):
            for found, wanted in zip(entry.pop(kind), other.pop(kind), strict=True):
                for name, value in wanted.items():
                    numbers = isinstance(value, float) or (name == "loss" and isinstance(value, list))
                    assert found[name] == (pytest.approx(value, rel=1e-6) if numbers else value), name
        assert entry == other
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "length_pg19.json",
        "length_pg19.png",
        "length_pg19.svg",
    ]
    # Nothing is left to measure: no process waits for another.
    again = two_processes("length", root / "rope", root / "absolute", *arguments, "--output", tmp_path / "two")
    assert again == printed


def test_names_of_folders_that_end_alike(root, tmp_path):
    (tmp_path / "rope").symlink_to(root / "rope")
    paths = [str(root / "rope"), str(tmp_path / "rope")]
    found = script.curves_of(paths, [], Loading())
    assert [curve.name for curve in found] == paths


def test_real_books(root, data_dir, tmp_path):
    fixed = ["--data", "pg19", "--data-dir", str(data_dir), "--output", str(tmp_path), "--device", "cpu"]
    script.main([str(root / "pope"), *fixed, "--windows", "64", "--documents", "2", "--tokens", "256"])
    (entry,) = json.loads((tmp_path / "length_pg19.json").read_text(encoding="utf-8"))["checkpoints"]
    assert (entry["tokens"], entry["cells"][0]["windows"]) == (512, 8)

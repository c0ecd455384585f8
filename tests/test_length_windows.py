"""The papers' windows: perplexity against independent loops, by position, variants, results that grow, fine-tuning."""

import gzip
import json
import math

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tiny import tiny_model
from whatwhere.scripts import length as script
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import curves, variants, windows

SIZES = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TRAINED = 16


def small(encoding, **fields):
    """A model trained, so it says, at 16 tokens."""
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": TRAINED}
    return tiny_model("gpt2", encoding, **{**sizes, **fields})


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


def test_equals_a_loop_over_windows(texts):
    model = small("rope")
    byte_counts = torch.arange(258) % 5
    cell, by_position = windows.measure_windows(model, texts, byte_counts, 32, trained_length=16, batch_tokens=64)
    losses = by_hand(model, texts, 32)
    assert [len(rows) for rows in losses] == [2, 0, 3, 1]
    whole = torch.cat(losses)
    assert cell.loss == pytest.approx(whole.mean().item(), rel=1e-6)
    assert cell.perplexity == pytest.approx(math.exp(whole.mean()), rel=1e-6)
    targets = [ids[1:][: len(rows) * 32].long() for ids, rows in zip(texts, losses)]
    size = sum(byte_counts[some].sum().item() for some in targets)
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


def test_no_document_is_long_enough(texts):
    with pytest.raises(ValueError, match="windows=128 is not valid: the longest of 4 documents has 99 tokens"):
        windows.measure_windows(small("rope"), texts, None, 128, trained_length=16)


def test_edges_of_positions():
    edges = windows.position_edges(1024)
    assert edges[:6] == [0, 16, 23, 32, 45, 64]
    assert edges[-3:] == [512, 724, 1024]
    assert set(windows.position_edges(256)) < set(edges)
    assert windows.position_edges(7) == [0, 7]
    assert windows.position_edges(10240)[-2:] == [8192, 10240]


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                # A broadcast tensor takes the room of what it is made of.
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("encoding", ["rope", "pope", "cope", "relative"])
def test_memory_is_linear_in_the_length(encoding):
    length = 4096
    fields = {"position_encoding_parameters": {"beyond": "last"}} if encoding == "relative" else {}
    model = small(encoding, **fields)
    assert windows.quadratic_memory(model, length) is None
    with Largest() as largest:
        windows.measure_windows(model, [torch.zeros(length + 1, dtype=torch.int32)], None, length, trained_length=16)
    # The logits of 1,024 tokens, or a block of attention: both are the same for any longer window.
    assert largest.elements <= length**2 // 8


def test_what_holds_all_pairs_is_said():
    length = 512
    model = small("rope", implementation="eager")
    with Largest() as largest:
        windows.measure_windows(model, [torch.zeros(length + 1, dtype=torch.int32)], None, length, trained_length=16)
    assert largest.elements >= 2 * length**2
    assert "'eager' holds all attention weights of a layer, 2 heads: 32.00 GiB at 65536" in windows.quadratic_memory(
        model, 65536
    )
    assert "holds the bias of all 2 heads" in windows.quadratic_memory(small("alibi", implementation="sdpa"), length)
    mistral = transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, intermediate_size=16, sliding_window=64)
    )
    assert windows.quadratic_memory(mistral, 64) is None
    assert "sliding window of 64: 4.00 GiB" in windows.quadratic_memory(mistral, 65536)


def test_a_tokenizer_without_an_end_of_text():
    tokenizer = build_tokenizer("bytes")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="it has no end-of-text token"):
        curves.tokenise(tokenizer, ["text"], documents=None, document_tokens=None, joined=True)
    with pytest.raises(ValueError, match="it holds no document"):
        curves.tokenise(build_tokenizer("bytes"), [], documents=None, document_tokens=None, joined=True)


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


@pytest.mark.parametrize(
    ("variant", "encoding", "fields", "reason"),
    [
        ("yarn", "pope", {}, "it has no rotary positions"),
        (
            "yarn",
            "rope",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "scaled already .*'linear'",
        ),
        ("relative-capped", "rope", {}, "it has no relative positions"),
        ("relative-capped", "relative", {"position_encoding_parameters": {"beyond": "last"}}, "it is so already"),
        (
            "relative-none",
            "relative",
            {"position_encoding_parameters": {"num_positions": 99}},
            "99 positions and .* 16",
        ),
    ],
)
def test_variants_without_a_meaning(variant, encoding, fields, reason):
    with pytest.raises(variants.DoesNotApply, match=reason):
        changed(variant, small(encoding, **fields), 64)


def test_unknown_variant():
    with pytest.raises(ValueError, match=r"variants='yarm' is not valid\. Did you mean 'yarn'"):
        changed("yarm", small("rope"), 64)


# --- the command line


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keeps the copies that `datasets` makes out of the user's cache."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Checkpoints, and a data folder with three books, a training split and two short articles."""
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
    return root


@pytest.fixture
def run(root, tmp_path):
    def run(names, *arguments, data="pg19"):
        fixed = ["--data", data, "--data-dir", str(root / "data"), "--device", "cpu", "--output", str(tmp_path)]
        script.main([*(str(root / name) for name in names), *fixed, *arguments])
        (path,) = tmp_path.glob("length_*.json")
        return json.loads(path.read_text(encoding="utf-8"))

    return run


def test_command_line(root, run, tmp_path, capsys):
    content = run(
        ["rope", "relative", "absolute"],
        *("--windows", "64,16,32", "--variants", "yarn,interpolation,relative-capped,relative-none"),
    )
    captured = capsys.readouterr()
    assert captured.err.count("absolute: no ") == 4
    assert "rope: no relative-capped, because it has no relative positions." in captured.err
    assert content["data"]["corpus"] == "pg19"
    assert (content["data"]["place"], content["data"]["joined"], content["data"]["documents"]) == ("local", False, 3)
    assert content["command"].startswith("python -m whatwhere.scripts.length ")
    found = {(one["name"], one["variant"]): one for one in content["checkpoints"]}
    assert list(found) == [
        ("rope", None),
        ("rope", "yarn"),
        ("rope", "interpolation"),
        ("relative", None),
        ("relative", "relative-capped"),
        ("relative", "relative-none"),
        ("absolute", None),
    ]
    # The books end with the end-of-text token.
    text = [*(root / "data" / "pg19" / "test" / "1.txt").read_bytes(), 256]
    books = [torch.tensor([*file.read_bytes(), 256]) for file in sorted((root / "data/pg19/test").glob("*.txt"))]
    assert books[1].tolist() == text
    for (name, variant), entry in found.items():
        assert [cell["length"] for cell in entry["cells"]] == [16, 32, 64]
        for cell in entry["cells"]:
            length = cell["length"]
            assert cell["reached"] == (length <= TRAINED or name == "rope" or variant is not None)
            if not cell["reached"]:
                assert "reaches 16 tokens" in cell["reason"]
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
            loss = torch.cat(by_hand(model, books, length)).mean().item()
            assert cell["loss"] == pytest.approx(loss, rel=1e-5)
        assert [one["length"] for one in entry["by_position"]] == [
            cell["length"] for cell in entry["cells"] if cell["reached"]
        ]
    # At the trained length a variant changes nothing, beyond it does.
    losses = {key: [cell["loss"] for cell in entry["cells"]] for key, entry in found.items()}
    for name, variant in found:
        if variant is not None:
            assert losses[name, variant][0] == losses[name, None][0]
            assert losses[name, variant][2] != losses[name, None][2]
    assert losses["relative", "relative-capped"][2] != losses["relative", "relative-none"][2]
    assert "| rope, yarn" in captured.out
    assert captured.out.count("cannot reach") == 4
    assert f"{found['rope', None]['cells'][2]['perplexity']:,.2f} ±" in captured.out
    assert (tmp_path / "length_pg19.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "length_pg19.svg").read_bytes()


def test_some_of_the_text(run):
    content = run(["rope"], "--windows", "16,32", "--documents", "2", "--document-tokens", "48")
    assert content["data"]["documents"] == 2
    (entry,) = content["checkpoints"]
    assert entry["tokens"] == 96
    assert [(cell["windows"], cell["dropped_tokens"]) for cell in entry["cells"]] == [(6, 0), (2, 32)]


def test_windows_that_the_text_cannot_fill_are_skipped(run, capsys):
    content = run(["rope"], "--windows", "16,999", "--document-tokens", "48")
    assert [cell["length"] for cell in content["checkpoints"][0]["cells"]] == [16]
    said = "windows of 999 tokens are skipped, because the longest of 3 texts has 48 tokens to score"
    assert said in capsys.readouterr().err


def test_articles_are_joined(root, run, tmp_path):
    content = run(["rope"], "--windows", "16", data="wikitext103")
    (cell,) = content["checkpoints"][0]["cells"]
    assert content["data"]["joined"]
    assert (cell["documents"], cell["clusters"]) == (1, "windows")
    assert content["data"]["documents"] == 2
    # Between the articles and after them an end-of-text token; the first token is only context.
    articles = (root / "data" / "wikitext" / "wiki.test.raw").read_bytes()
    # What comes before the first title is no article.
    size = len(articles) - 2 + 2 - 1
    assert content["checkpoints"][0]["tokens"] == size
    assert cell["windows"] == size // 16
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

    def read_local(self, root, split, *, streaming):
        assert streaming
        return IterableDataset.from_generator(books)

    monkeypatch.setattr(type(CORPORA["pg19"]), "read_local", read_local)
    content = run(["rope"], "--windows", "16,32", "--documents", "3")
    assert content["data"]["documents"] == 3
    assert len(read) <= 4


def test_the_same_command_goes_on(run, root, monkeypatch, tmp_path):
    lengths = []
    measure = windows.measure_windows

    def counted(model, parts, byte_counts, length, **options):
        if len(lengths) == 2:
            raise KeyboardInterrupt
        lengths.append(length)
        return measure(model, parts, byte_counts, length, **options)

    with monkeypatch.context() as patch:
        patch.setattr(windows, "measure_windows", counted)
        with pytest.raises(SystemExit) as stop:
            run(["rope", "pope"], "--windows", "16,32")
        assert stop.value.code == 130
    assert lengths == [16, 32]
    monkeypatch.setattr(
        windows, "measure_windows", lambda *args, **options: lengths.append(args[3]) or measure(*args, **options)
    )
    del lengths[:]
    first = run(["rope", "pope"], "--windows", "16,32")
    assert lengths == [16, 32], "only pope's were missing"
    more = run(["rope"], "--windows", "64,32")
    assert lengths == [16, 32, 64]
    assert [cell["length"] for cell in more["checkpoints"][0]["cells"]] == [16, 32, 64]
    assert more["checkpoints"][1] == first["checkpoints"][1]
    # Every run that added to it is named: the one that was stopped, its second part, this one.
    assert ["16,32" in run["command"] for run in (*more["earlier"], more)] == [True, True, False]
    # What was measured with another precision is measured again.
    run(["pope"], "--windows", "16", "--dtype", "bfloat16")
    assert lengths[3:] == [16]
    with pytest.raises(SystemExit):
        run(["rope"], "--windows", "16", "--documents", "1")


def test_results_of_other_data_stay(run, tmp_path, capsys):
    run(["rope"], "--windows", "16")
    before = (tmp_path / "length_pg19.json").read_bytes()
    with pytest.raises(SystemExit):
        run(["rope"], "--windows", "16", "--document-tokens", "32")
    assert "document_tokens: None → 32" in capsys.readouterr().err
    assert (tmp_path / "length_pg19.json").read_bytes() == before
    (tmp_path / "length_pg19.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(["rope"], "--windows", "16")
    assert "is no results file of this command" in capsys.readouterr().err


def test_other_weights_are_measured_again(root, tmp_path):
    data = {"corpus": "pg19", "split": "validation[:3]"}
    results = curves.WindowResults(tmp_path, data, origin={})
    assert results.path.name == "length_pg19_validation.json"
    entry = results.entry({"name": "a", "variant": None, "weights": "1"}, {})
    results.add(entry, windows.WindowCell(length=16, multiple=1.0, reached=True), None)
    again = curves.WindowResults(tmp_path, data, origin={})
    assert again.entry({"name": "a", "variant": None, "weights": "1"}, {})["cells"]
    assert not again.entry({"name": "a", "variant": None, "weights": "2"}, {})["cells"]
    assert len(again.checkpoints) == 1
    # Weights that nothing tells apart may have changed.
    unknown = again.entry({"name": "b", "variant": None, "weights": None}, {})
    again.add(unknown, windows.WindowCell(length=16, multiple=1.0, reached=True), None)
    assert not again.entry({"name": "b", "variant": None, "weights": None}, {})["cells"]


# --- fine-tuning


def test_finetune(root, run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft", reason='needs pip install "whatwhere[train]"')
    from whatwhere.scripts.training import finetune

    short = ["--finetune-length", "32", "--finetune-steps", "2", "--finetune-batch-size", "4"]
    arguments = ["--windows", "16,32", "--finetune", *short, "--finetune-micro-batch-size", "2"]
    content = run(["rope", "pope", "absolute"], *arguments)
    assert "absolute: no fine-tuning at 32 tokens, because its position encoding reaches 16" in capsys.readouterr().err
    found = {(one["name"], one["variant"]): one for one in content["checkpoints"]}
    assert list(found)[3:] == [("rope", "fine-tuned at 32 with YaRN"), ("pope", "fine-tuned at 32")]
    for name in ("rope", "pope"):
        trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned" / name).eval()
        before = transformers.AutoModelForCausalLM.from_pretrained(root / name)
        weights = "transformer.h.0.mlp.c_fc.weight"
        assert not torch.equal(trained.state_dict()[weights], before.state_dict()[weights])
        assert trained.config.position_encoding_parameters == before.config.position_encoding_parameters
        entry = next(one for (key, variant), one in found.items() if key == name and variant)
        assert entry["trained_length"] == 32
        books = [torch.tensor([*file.read_bytes(), 256]) for file in sorted((root / "data/pg19/test").glob("*.txt"))]
        assert entry["cells"][1]["loss"] == pytest.approx(
            torch.cat(by_hand(trained, books, 32)).mean().item(), rel=1e-5
        )
        recipe = json.loads((tmp_path / "finetuned" / name / "finetune.json").read_text())
        assert (recipe["data"], recipe["schedule"], recipe["learning_rate"]) == ("pg19", "constant", 6e-5)
        assert (recipe["batch_size"], recipe["accumulation"], recipe["weight_decay"]) == (2, 2, 0.0)
        rope = recipe["rope_parameters"]
        assert (rope and rope["rope_type"], rope and rope["factor"]) == (
            ("yarn", 2.0) if name == "rope" else (None, None)
        )

    # What is there is taken; what another recipe made is not.
    def never(*arguments):
        raise AssertionError("it is trained already")

    monkeypatch.setattr(finetune, "finetune", never)
    assert run(["rope", "pope", "absolute"], *arguments)["checkpoints"] == content["checkpoints"]
    with pytest.raises(SystemExit):
        run(["rope"], *arguments, "--finetune-learning-rate", "1e-3")
    assert "learning_rate: 6e-05 → 0.001" in capsys.readouterr().err


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--windows", "16,x"], "windows='16,x' is not valid: a comma-separated list of positive integers"),
        (["--windows", "0"], "windows='0' is not valid"),
        (["--windows", "16", "--lengths", "1"], "--windows and --lengths are two protocols"),
        (["--windows", "16", "--tokens", "16"], "--tokens has no effect without --lengths"),
        (["--lengths", "1", "--variants", "yarn"], "--variants has no effect without --windows"),
        (["--lengths", "1", "--no-join"], "--join has no effect without --windows"),
        (["--lengths", "1", "--finetune"], "--finetune has no effect without --windows"),
        (["--windows", "16", "--finetune-steps", "3"], "--finetune-steps has no effect without --finetune"),
        (["--windows", "16", "--dataset", "x"], "--dataset has no effect with --data pg19"),
        (["--windows", "16", "--data", "stdlib"], "--data-dir has no effect with --data stdlib"),
        (["--windows", "16", "--variants", ""], "variants='' is not valid"),
        (["--windows", "16", "--documents", "0"], "documents=0 is not valid: it must be at least 1"),
        (["--windows", "16", "--variants", "yarm"], "variants='yarm' is not valid. Did you mean 'yarn'"),
        (["--windows", "16", "--variants", "relative-capped"], "it serves no checkpoint (rope: no relative-capped"),
        (["--windows", "998,999"], "windows=998 is not valid: the longest of 3 documents has 200 tokens to score"),
        (["--windows", "16", "--data", "pg20"], "data='pg20' is not valid"),
        (["--windows", "16", "--data", "pg19:tset"], "Did you mean 'test'"),
        (["--windows", "16", "--finetune", "--finetune-batch-size", "9"], "it must divide finetune-batch-size=9"),
        (["--windows", "16", "--finetune", "--finetune-length", "0"], "finetune-length=0 is not valid"),
    ],
)
def test_bad_input_is_one_clear_line(run, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run(["rope"], *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_names_of_folders_that_end_alike(root, tmp_path):
    (tmp_path / "rope").symlink_to(root / "rope")
    paths = [str(root / "rope"), str(tmp_path / "rope")]
    found = curves.curves_of(paths, [], trained_length=None, trust_remote_code=False, report=print)
    assert [curve.name for curve in found] == paths
    with pytest.raises(ValueError, match="is given twice"):
        curves.curves_of(paths[:1] * 2, [], trained_length=None, trust_remote_code=False, report=print)


def test_another_checkpoint_of_the_same_name_takes_no_place(tmp_path):
    """Its numbers would replace those of the first one."""
    data = {"corpus": "pg19", "split": "test"}
    results = curves.WindowResults(tmp_path, data, origin={})
    first = {"name": "model", "variant": None, "weights": "1"}
    results.entry(first, {"checkpoint": "a/model"})
    with pytest.raises(
        ValueError, match=r"checkpoint='b/model' is not valid.*results of 'a/model', which is called 'mo"
    ):
        results.entry({**first, "weights": "2"}, {"checkpoint": "b/model"})
    # The same weights by another path, and other weights in the same place.
    assert results.entry(first, {"checkpoint": "c/model"})["checkpoint"] == "a/model"
    assert results.entry({**first, "weights": "2"}, {"checkpoint": "a/model"})["weights"] == "2"


def test_real_books(root, data_dir, tmp_path):
    fixed = ["--data", "pg19", "--data-dir", str(data_dir), "--output", str(tmp_path), "--device", "cpu"]
    script.main([str(root / "pope"), *fixed, "--windows", "64", "--documents", "2", "--document-tokens", "256"])
    (entry,) = json.loads((tmp_path / "length_pg19.json").read_text(encoding="utf-8"))["checkpoints"]
    assert (entry["tokens"], entry["cells"][0]["windows"]) == (512, 8)

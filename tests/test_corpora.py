"""Corpora by name: where they are looked for, what is read, and what is refused."""

import dataclasses
import re
import tracemalloc

import pytest

pytest.importorskip("datasets", reason='needs pip install "whatwhere[train]"')

import datasets

from whatwhere.scripts.data.corpora import CORPORA, Corpus, load_corpus, parse_choice, wikitext_articles
from whatwhere.scripts.data.rows import on_disk
from whatwhere.scripts.data.source import SPLITS, load_text


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    for name, count in (("train-00", 3), ("train-01", 2), ("valid", 1)):
        lines = [f'{{"id": "{i}", "text": "{name} {i}"}}\n' for i in range(count)]
        path = tmp_path / "wikinews_en" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines))
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """A corpus in both places, plain files."""
    found = Corpus(
        title="Small",
        licence="none",
        local={"train": ("wikinews_en/train-*.jsonl",), "validation": ("wikinews_en/valid.jsonl",)},
        hub={"train": ("me/small", "all", "train[2:]"), "test": ("me/small", "all", "train[:2]")},
        text_field="body",
    )
    monkeypatch.setitem(CORPORA, "small", found)
    return found


def test_names_and_places():
    for name, found in CORPORA.items():
        assert parse_choice(f"{name}:train[:3]") == (name, "train", "[:3]")
        assert found.title
        assert found.licence
        assert found.local or found.hub
        assert set(found.local) | set(found.hub) <= set(SPLITS)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("pg19", "corpus='pg19' is not valid: it must be like 'pg19:test'"),
        (3, "corpus=3 is not valid"),
        ("pg19:test[1]", "not valid: it must be like"),
        ("pg19:test[5:2]", "slice='[5:2]' is not valid"),
        ("pg18:test", "corpus='pg18' is not valid. Did you mean 'pg19'"),
        ("pg19:tests", "split='tests' is not valid. Did you mean 'test'"),
    ],
)
def test_bad_choices(choice, message):
    with pytest.raises(ValueError, match=message.replace("[", "\\[")):
        parse_choice(choice)


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_local_files(folder, small, streaming):
    rows = load_corpus("small", "train", data_dir=folder, streaming=streaming)
    assert [row["text"] for row in rows] == ["train-00 0", "train-00 1", "train-00 2", "train-01 0", "train-01 1"]
    for chosen, expected in (
        ("[:1]", ["train-00 0"]),
        ("[3:]", ["train-01 0", "train-01 1"]),
        ("[1:2]", ["train-00 1"]),
    ):
        rows = load_corpus("small", f"train{chosen}", data_dir=folder, streaming=streaming)
        assert [row["text"] for row in rows] == expected


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("small:train[9:]", "corpus 'small:train[9:]'"),
        ("wikitext103:test", "corpus 'wikitext103:test'"),
        ("pg19:test", "splits['test']=('pg19/test/*.txt',)"),
    ],
)
def test_corpora_without_text_are_named(folder, small, choice, message, streaming):
    for file in ("wikitext/wiki.test.raw", "pg19/test/1.txt"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
    splits = {"train": choice, "validation": "small:validation"}
    with pytest.raises(ValueError, match=re.escape(f"{message} is not valid: it has no text, and so no tokens.")):
        load_text("corpus", data_dir=folder, splits=splits, streaming=streaming)


def test_variable_names_the_folder(folder, small, monkeypatch):
    monkeypatch.setenv("WHATWHERE_DATA_DIR", str(folder))
    assert load_corpus("small", "validation")["text"] == ["valid 0"]


def test_places_that_lack_a_split(folder, small):
    with pytest.raises(
        ValueError, match=r"split='test' of corpus 'small' is not in the data folder .*It is on the Hub"
    ):
        load_corpus("small", "test", data_dir=folder)
    with pytest.raises(ValueError, match=r"split='validation' .* not in the Hub.*'train', 'test'.*local files"):
        load_corpus("small", "validation")
    with pytest.raises(
        ValueError, match=r"split='test' of corpus 'wikinews_en' is not in the Hub. Allowed there: none"
    ):
        load_corpus("wikinews_en", "test")
    with pytest.raises(ValueError, match="must be an existing folder"):
        load_corpus("small", "train", data_dir=folder / "nothing")
    with pytest.raises(ValueError, match="matches no file"):
        load_corpus("jsb_chorales", "train", data_dir=folder)


class Counted:
    """Stands in for the Hub: ten documents, and how many of them were read."""

    def __init__(self, monkeypatch, column="body"):
        self.column, self.read, self.calls = column, 0, []
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def rows(self):
        for i in range(10):
            self.read += 1
            yield {self.column: str(i)}

    def load(self, dataset, config, split, streaming, **files):
        self.calls.append((dataset, config, split, streaming, files))
        features = datasets.Features({self.column: datasets.Value("string")})
        if streaming:
            return datasets.IterableDataset.from_generator(self.rows, features=features)
        return datasets.Dataset.from_list(list(self.rows()))


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_hub(small, monkeypatch, streaming):
    hub = Counted(monkeypatch)
    rows = load_corpus("small", "train", streaming=streaming)
    assert [row["text"] for row in rows] == [str(i) for i in range(2, 10)]
    assert hub.calls == [("me/small", "all", "train", streaming, {})]
    # of a slice, the slice
    rows = load_corpus("small", "train[1:3]", streaming=streaming)
    assert [row["text"] for row in rows] == ["3", "4"]
    rows = load_corpus("small", "train[6:]", streaming=streaming)
    assert [row["text"] for row in rows] == ["8", "9"]


def test_a_slice_of_the_hub_reads_no_more_than_itself(small, monkeypatch):
    hub = Counted(monkeypatch)
    rows = load_corpus("small", "test")
    assert isinstance(rows, datasets.Dataset)
    assert rows["text"] == ["0", "1"]
    assert hub.read <= 3
    hub.read = 0
    # the corpus' own slice has no end, that of the caller has one
    assert load_corpus("small", "train[:2]")["text"] == ["2", "3"]
    assert hub.read <= 5
    assert all(streaming for *_, streaming, files in hub.calls)


def test_without_a_network_local_files_are_named(small, monkeypatch):
    def no_network(*_, **__):
        raise ConnectionError("Couldn't reach 'me/small' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(ConnectionError, match=r"corpus 'small' .* Couldn't reach 'me/small' .*give --data-dir"):
        load_corpus("small", "train")


def test_openwebtext_is_read_as_parquet(monkeypatch):
    """The Hub's repository has a script, which `datasets` does not support, so its files are named instead."""
    hub = Counted(monkeypatch, "text")
    assert len(load_corpus("openwebtext", "validation")) == 10
    (call,) = hub.calls
    assert call[:4] == ("parquet", None, "train", True)
    assert call[4]["data_files"].startswith("hf://datasets/Skylion007/openwebtext@")


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_splits_of_parquet_files(monkeypatch, tmp_path, streaming):
    """The same reading, of real files; only the address is replaced."""
    datasets.Dataset.from_dict({"text": [str(i) for i in range(6)]}).to_parquet(str(tmp_path / "train-0.parquet"))
    found = CORPORA["openwebtext"]
    hub = {"train": "train[4:]", "validation": "train[:4]"}
    hub = {split: (str(tmp_path / "train-*.parquet"), None, theirs) for split, theirs in hub.items()}
    monkeypatch.setitem(CORPORA, "openwebtext", dataclasses.replace(found, hub=hub))
    assert [row["text"] for row in load_corpus("openwebtext", "train", streaming=streaming)] == ["4", "5"]
    assert [row["text"] for row in load_corpus("openwebtext", "validation", streaming=streaming)] == list("0123")


def test_splits_of_a_recipe(folder, small):
    loaded = load_text("corpus", data_dir=folder, splits={"train": "small:train[:2]", "validation": "small:validation"})
    assert {split: rows["text"] for split, rows in loaded.items()} == {
        "train": ["train-00 0", "train-00 1"],
        "validation": ["valid 0"],
    }
    with pytest.raises(ValueError, match=r"splits\['train'\]='small:test' is not valid: split='test'"):
        load_text("corpus", data_dir=folder, splits={"train": "small:test", "validation": "small:validation"})


def test_tables_hold_more_than_2_gib():
    """The human genome and MAESTRO in seven keys do not fit into a column of Arrow's `string`."""
    rows = on_disk(iter(["a", "\u00e9"]))
    assert rows.features["text"].dtype == "large_string"
    assert rows["text"] == ["a", "\u00e9"] == [row["text"] for row in rows.to_iterable_dataset()]
    assert list(on_disk(iter([]))) == []


def test_wikitext_is_cut_before_titles(tmp_path):
    file = tmp_path / "wiki.test.raw"
    text = " \n = One = \n \n A b . \n \n = = Part = = \n \n c = d \n \n = Two = \n \n e \n = no title = \n"
    file.write_text(text)
    assert list(wikitext_articles(file, "test")) == [
        " = One = \n \n A b . \n \n = = Part = = \n \n c = d \n \n",
        " = Two = \n \n e \n = no title = \n",
    ]


def test_wikitext_is_read_by_lines(tmp_path):
    """A file of 8 MB in articles of 8 KB."""
    file = tmp_path / "wiki.test.raw"
    file.write_text(" \n = One = \n \n A b c . \n" + 1000 * (" \n = Two = \n \n" + 1000 * " A b c .\n"))
    tracemalloc.start()
    assert sum(1 for _ in wikitext_articles(file, "test")) == 1001
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_real_corpora(data_dir):
    rows = load_corpus("wikitext103", "test", data_dir=data_dir)
    assert len(rows) == 60
    assert rows[0]["text"].startswith(" = Robert Boulter = \n")
    assert len(list(load_corpus("pg19", "test[:2]", data_dir=data_dir, streaming=True))) == 2
    assert len(load_corpus("wikinews_en", "validation", data_dir=data_dir)) == 192

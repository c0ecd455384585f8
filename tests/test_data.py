"""Corpora, tokenizers and packing."""

import glob
import gzip
import itertools
import json
import os
import random
import re

import numpy
import pytest
import torch

pytest.importorskip("datasets", reason='needs pip install "whatwhere[train]"')

import datasets
import pyarrow as pa
from pyarrow import parquet

from processes import python
from whatwhere.scripts.data import source
from whatwhere.scripts.data import tokenize as tokens
from whatwhere.scripts.data.files import find_all
from whatwhere.scripts.data.pack import (
    IGNORED,
    Packer,
    ShuffledBatches,
    add_labels,
)
from whatwhere.scripts.data.prepared import TextBlocks, prepare
from whatwhere.scripts.data.source import TextSource, find_files
from whatwhere.scripts.data.tokenize import (
    build_tokenizer,
    check_bytes,
    measure_documents,
    tokenize_documents,
    train_bpe,
)

TEXTS = ["def f(x):\n    return x\n", "Zoë's naïve café, 数学 🤖\r\n\ttabs", "a" * 50, " leading and trailing  "]


@pytest.fixture(scope="session")
def stdlib():
    return source.load_text()


@pytest.fixture(scope="session", params=["bytes", "bpe"])
def tokenizer(request):
    if request.param == "bytes":
        return build_tokenizer("bytes")
    return train_bpe(300, TEXTS)


# --- the embedded corpus


def test_stdlib_splits_are_disjoint_and_hold_the_library(stdlib):
    paths = {split: set(stdlib[split]["path"]) for split in source.SPLITS}
    assert all(paths.values())
    together = set().union(*paths.values())
    assert len(together) == sum(map(len, paths.values()))
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= together
    folders = {folder for path in together for folder in path.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    texts = [text for split in source.SPLITS for text in stdlib[split]["text"]]
    assert len(set(texts)) > 0.98 * len(texts), "many equal files: train leaks into test"


def test_stdlib_split_depends_on_the_path_alone():
    # Written down once: a change would move files between train and test under existing checkpoints.
    pinned = {"argparse.py": "train", "ast.py": "test", "json/decoder.py": "validation", "enum.py": "train"}
    pinned |= {"inspect.py": "test", "typing.py": "train", "os.py": "validation", "heapq.py": "train"}
    assert {name: source.stdlib_split(name) for name in pinned} == pinned
    shares = [source.stdlib_split(f"module_{i}.py") for i in range(4000)]
    assert 0.88 < shares.count("train") / 4000 < 0.92
    assert 0.04 < shares.count("test") / 4000 < 0.06


def test_stdlib_order_is_by_path(stdlib):
    # not by what the file system or a set happens to give
    for split in source.SPLITS:
        assert stdlib[split]["path"] == sorted(stdlib[split]["path"])


# --- local files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "1.txt").write_bytes(b"one\r\ntwo\r\n")
    with gzip.open(tmp_path / "books" / "2.txt.gz", "wt", encoding="utf-8") as file:
        file.write("three\n\nfour é")
    rows = [{"id": str(i), "body": f"document {i}\nline"} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "valid.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "train-00.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    return tmp_path


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_local_jsonl(folder, streaming):
    splits = {"train": "train-*.jsonl.gz", "validation": ["valid.jsonl"]}
    loaded = source.load_text("local", data_dir=folder, splits=splits, text_field="body", streaming=streaming)
    assert set(loaded) == {"train", "validation"}
    for split in loaded.values():
        assert [row["text"] for row in split] == [f"document {i}\nline" for i in range(3)]


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_local_text_is_one_document_a_file(folder, streaming, monkeypatch):
    monkeypatch.setenv("WHATWHERE_DATA_DIR", str(folder))
    splits = {"train": "books/*.txt*", "validation": "books/1.txt", "test": "books/2.txt.gz"}
    loaded = source.load_text("local", splits=splits, streaming=streaming)
    assert documents_of(loaded["train"]) == ["one\ntwo\n", "three\n\nfour é"]
    assert documents_of(loaded["test"]) == ["three\n\nfour é"]


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_line_ends_and_byte_order_mark_of_text_files(tmp_path, name, streaming):
    """The mark is removed at the start, not inside; every line end becomes a newline."""
    content = "\ufeffone\r\ntwo\rthree \ufeff\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    splits = {"train": name, "validation": name}
    loaded = source.load_text("local", data_dir=tmp_path, splits=splits, streaming=streaming)
    assert documents_of(loaded["train"]) == ["one\ntwo\nthree \ufeff\n"]


def test_text_of_jsonl_is_taken_as_it_is(tmp_path):
    row = {"text": "one\r\ntwo\rthree \ufeff\n"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\n")
    splits = {"train": "a.jsonl", "validation": "mark.jsonl"}
    loaded = source.load_text("local", data_dir=tmp_path, splits=splits)
    assert loaded["train"]["text"][:] == loaded["validation"]["text"][:] == [row["text"]]


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", bytes(1000), r"a\.txt' cannot be read as UTF-8 text: it contains NUL characters"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt' cannot be read as UTF-8 text"),
        ("a.txt", b"caf\xe9", r"a\.txt' cannot be read as UTF-8 text"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz' cannot be read as UTF-8 text"),
        (
            "a.txt.gz",
            gzip.compress(os.urandom(4000).hex().encode())[:2000],
            r"a\.txt\.gz' cannot be read as UTF-8 text",
        ),
        ("a.jsonl", bytes(1000), r"a\.jsonl' (is not valid: it has no text|cannot be read)"),
        ("a.jsonl", b'{"text": "caf\xe9"}', r"a\.jsonl' cannot be read: line 1: 'utf-8' codec can't decode"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz' cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(os.urandom(4000).hex().encode())[:2000],
            r"a\.jsonl\.gz' cannot be read: Compressed",
        ),
        ("a.jsonl", b'["text"]\n["text"]', r"a\.jsonl' cannot be read: line 2 is not valid JSON: Extra data"),
    ],
    ids=[
        "nul",
        "utf-16",
        "latin-1",
        "no gzip",
        "cut gzip",
        "nul jsonl",
        "latin-1 jsonl",
        "no gzip jsonl",
        "cut jsonl",
        "lists",
    ],
)
def test_files_that_are_no_text(tmp_path, name, content, message, streaming):
    (tmp_path / name).write_bytes(content)
    splits = {"train": name, "validation": name}
    with pytest.raises(ValueError, match=message):
        list(source.load_text("local", data_dir=tmp_path, splits=splits, streaming=streaming)["train"])


@pytest.mark.parametrize("pattern", ["../secret.txt", "books/../../secret.txt", "..", "/etc/passwd"])
def test_patterns_stay_inside_the_data_folder(folder, pattern):
    (folder.parent / "secret.txt").write_text("secret")
    with pytest.raises(ValueError, match=r"relative to the data folder and without '\.\.'"):
        source.load_text("local", data_dir=folder, splits={"train": pattern, "validation": "valid.jsonl"})


TEXTLESS = {
    "empty.txt": b"",
    "empty.jsonl": b"",
    "lines.jsonl": b"\n\n",
    "blank.jsonl": b'{"text": ""}\n' * 30,
    "rows.parquet": None,
}


@pytest.fixture
def textless(tmp_path, monkeypatch):
    """A folder with files without text, and `good.txt`."""
    monkeypatch.chdir(tmp_path)
    for name, content in TEXTLESS.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    none = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": []}, features=none).to_parquet("rows.parquet")
    (tmp_path / "good.txt").write_text("some text. " * 400)
    return tmp_path


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize("name", TEXTLESS)
def test_files_without_text_are_named(textless, name, streaming):
    with pytest.raises(ValueError, match=f"^train_file='{name}' is not valid: it has no text, and so no tokens"):
        source.load_text("local", train_file=name, validation_file="good.txt", streaming=streaming)
    with pytest.raises(ValueError, match=f"^validation_file='{name}' is not valid: it has no text"):
        source.load_text("local", train_file="good.txt", validation_file=name, streaming=streaming)


def test_some_documents_without_text(textless):
    """Empty ones do not count, for the rule and for the parts; null is refused."""
    lines = [json.dumps({"text": text}) + "\n" for text in ["", "some text " * 50, "", "more text " * 50]]
    (textless / "some.jsonl").write_text("".join(lines))
    loaded = source.load_text("local", train_file="some.jsonl")
    assert [len(loaded[split].unique("document")) for split in ("train", "validation")] == [2, 2]
    (textless / "most.jsonl").write_text("".join(lines[:1] * 300 + lines[1:2]))
    loaded = source.load_text("local", train_file="most.jsonl")
    assert documents_of(loaded["train"])[0] + documents_of(loaded["validation"])[0] == "some text " * 50
    (textless / "nulls.jsonl").write_text(lines[1] * 9 + '{"text": null}\n{"other": 1}\n')
    with pytest.raises(ValueError, match=r"^train_file='nulls.jsonl' is not valid: line 10 of .* has text=None;"):
        source.load_text("local", train_file="nulls.jsonl")


FOUND = {
    "t/a.txt": "a",
    "t/sub/b.txt": "b",
    "t/.hidden.txt": "1",
    "t/._a.txt": "2",
    "t/.git/c.txt": "3",
    "t/sub/.ipynb_checkpoints/b.txt": "4",
    "t/__pycache__/d.txt": "5",
    "elsewhere/e.txt": "e",
    "f.txt": "f",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder `t` with hidden files and links: to a file and a folder elsewhere, to itself, and to nothing."""
    for name, content in FOUND.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content * 99)
    for link, target in {"t/f.txt": "f.txt", "t/link": "elsewhere", "t/sub/loop": "t", "t/dead.txt": "none"}.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["t"], ["t/a.txt", "t/f.txt", "t/sub/b.txt"]),
        (["./t/"], ["t/a.txt", "t/f.txt", "t/sub/b.txt"]),
        (["t/**/*.txt"], ["t/a.txt", "t/f.txt", "t/sub/b.txt"]),
        (["t/**"], ["t/a.txt", "t/f.txt", "t/sub/b.txt"]),
        (["t/*"], ["t/a.txt", "t/f.txt"]),
        (["t/sub/../*.txt"], ["t/a.txt", "t/f.txt"]),
        (["t/link"], ["t/link/e.txt"]),
        (["t/link/*.txt"], ["t/link/e.txt"]),
        (["t/.git"], ["t/.git/c.txt"]),
        (["t/.*.txt"], ["t/._a.txt", "t/.hidden.txt"]),
        (["t/.git/*"], ["t/.git/c.txt"]),
        (["t/__pycache__"], ["t/__pycache__/d.txt"]),
        (["t/.hidden.txt"], ["t/.hidden.txt"]),
        (["t/a.txt", "./t/a.txt", "{root}/t/a.txt", "t/sub/../a.txt", "t/?.txt"], ["t/a.txt", "t/f.txt"]),
        (["f.txt", "t"], ["f.txt", "t/a.txt", "t/sub/b.txt"]),
        (["elsewhere", "t/link"], ["elsewhere/e.txt"]),
    ],
)
def test_which_files_a_folder_and_a_pattern_have(tree, entries, expected):
    """The rule of `datasets`: without hidden files and linked folders, unless they are named. Each file counts once."""
    entries = [entry.format(root=tree) for entry in entries]
    found = find_all("train_file", entries)
    assert [os.path.normpath(file) for file in found] == expected
    # The same in a data folder.
    inside = find_all("splits", [entry for entry in entries if not os.path.isabs(entry)], tree)
    assert [os.path.relpath(file, tree) for file in inside] == expected
    if len(entries) == 1 and glob.has_magic(entries[0]) and ".." not in entries[0]:
        theirs = datasets.load_dataset("text", data_files=entries[0], sample_by="document", split="train")
        assert sorted(theirs["text"]) == sorted((tree / file).read_text() for file in expected)


def test_names_with_brackets_and_files_that_are_not_data(tree, monkeypatch):
    (tree / "t[1]").mkdir()
    for name in ("x[a].txt", "README.md", "config.json"):
        (tree / "t[1]" / name).write_text("text")
    assert find_all("train_file", ["t[1]"]) == find_all("train_file", ["t[1]/x[a].txt"]) == ["t[1]/x[a].txt"]
    monkeypatch.chdir(tree / "t[1]")
    assert find_all("train_file", ["*.txt"]) == find_all("train_file", ["."]) == ["x[a].txt"]
    for entry, reason in (
        ("**.txt", "Invalid pattern: .*entire path component"),
        ("*::*", "no file"),
        ("*x", "no file"),
    ):
        with pytest.raises(ValueError, match=rf"^train_file='{re.escape(entry)}' is not valid: .*{reason}"):
            find_all("train_file", [entry])


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_held_out_files_are_not_trained_on(tree, streaming, capsys):
    (tree / "v.txt").write_bytes((tree / "t/sub/b.txt").read_bytes())
    (tree / "t/notes.md").write_text("left out")
    loaded = source.load_text("local", train_file="t", validation_file=["v.txt"], streaming=streaming)
    assert documents_of(loaded["train"]) == ["a" * 99, "f" * 99]
    assert documents_of(loaded["validation"]) == ["b" * 99]
    said = capsys.readouterr().err
    assert "train_file='t': 1 of 3 files are held out, and not trained on\n" in said
    assert streaming or re.search(
        r"^t: 1 files with other endings than .* are left out \(notes.md\)$", said, flags=re.M
    )
    splits = {"train": "t/*.txt", "validation": "t/sub/*", "test": "f.txt"}
    loaded = source.load_text("local", data_dir=tree, splits=splits, streaming=streaming)
    assert documents_of(loaded["train"]) == ["a" * 99]


BROKEN = {
    "null": ('{"text": null}', "a document has text=None; it must be a string"),
    "number": ('{"text": 5}', "a document has text=5; it must be a string"),
    "string": ('"abc"', "line 3 of '1.jsonl' is \"abc\"; it must be an object"),
    "list": ('["abc"]', "line 3 of '1.jsonl' is [\"abc\"]; it must be an object"),
    "missing": ('{"other": "x"}', "has no text_field='text', but 'other'"),
    "nul": ('{"text": "a\\u0000b"}', "a document contains NUL characters"),
    "surrogate": ('{"text": "a\\ud800b"}', "surrogates not allowed"),
    "twice": ('{"text": "a", "id": 1, "text": "b"}', "line 3 of '1.jsonl' has the key 'text' more than once"),
    "cut": ('{"text": "abc', "cannot be read: line 3 is not valid JSON: Unterminated string starting, character 10"),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_lines_are_named_once(textless, kind, streaming, capfd):
    """By the number of the line, also in a later file, and without a second message of `datasets`."""
    line, reason = BROKEN[kind]
    (textless / "0.jsonl").write_text('{"text": "first", "id": 1}\n')
    (textless / "1.jsonl").write_text('{"text": "second"}\n\n' + line + '\n{"text": "third"}\n')
    (textless / "good.jsonl").write_text('{"text": "held out"}\n')
    loaded = {"train_file": "[01].jsonl", "validation_file": "good.jsonl", "streaming": streaming}
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        list(source.load_text("local", **loaded)["train"])
    assert len(re.findall(r"line 3|'1\.jsonl'", str(raised.value))) == 2
    assert ("train_file='[01].jsonl' is not valid: " in str(raised.value)) != streaming
    assert "rror" not in capfd.readouterr().err


CODES = pa.array(["c"]).dictionary_encode()
PARQUET = {
    "null": ([{"text": ["a", None]}], "row 2 of '0.parquet': a document has text=None"),
    "all null": ([{"text": ["a"]}, {"text": pa.nulls(2)}], "row 1 of '1.parquet': a document has text=None"),
    "numbers": ([{"text": ["a"]}, {"text": [5]}], "row 1 of '1.parquet': a document has text=5"),
    "bytes": ([{"text": ["a"]}, {"text": [b"x"]}], "row 1 of '1.parquet': a document has text=b'x'"),
    "no text": ([{"text": ["a"]}, {"body": ["x"], "id": [1]}], "row 1 of '1.parquet' has no .*, but 'body', 'id'"),
    "nul": ([{"text": ["a", "b\0"]}], "row 2 of '0.parquet': a document contains NUL characters"),
    "schemas": ([{"text": ["a"]}, {"id": [1], "text": ["b"]}, {"text": ["c"], "id": ["x"]}], None),
    "types": ([{"text": ["a"]}, {"text": pa.array(["b"], pa.large_string())}, {"text": CODES}], None),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize("kind", PARQUET)
def test_parquet_files(tmp_path, monkeypatch, kind, streaming):
    """Other columns than the text may differ; what is no text is named by file and row."""
    monkeypatch.chdir(tmp_path)
    tables, message = PARQUET[kind]
    for number, columns in enumerate(tables):
        parquet.write_table(pa.table(columns), f"{number}.parquet")
    parquet.write_table(pa.table({"text": ["held out"]}), "held_out.parquet")
    read = lambda: source.load_text(  # noqa: E731
        "local", train_file="[0-9].parquet", validation_file="held_out.parquet", streaming=streaming
    )
    if message is None:
        assert documents_of(read()["train"]) == ["a", "b", "c"]
        return
    with pytest.raises(ValueError, match=message):
        list(read()["train"])


def test_a_key_twice_in_an_entry_of_an_array(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Only the row's own keys count.
    (tmp_path / "a.json").write_text('[{"text": "a", "about": {"x": 1, "x": 2}},\n {"text": "b", "text": "c"}]')
    with pytest.raises(ValueError, match=r"entry 2 of 'a\.json' has the key 'text' more than once"):
        source.load_text("local", train_file="a.json")


@pytest.mark.parametrize("name", ["A.TXT", "A.JSONL", "A.Jsonl.GZ", "A.PARQUET", "A.Raw"])
@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_endings_in_upper_case(tmp_path, monkeypatch, name, streaming):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.txt").write_text("held out")
    (tmp_path / "texts").mkdir()
    file = tmp_path / "texts" / name
    if name.endswith("PARQUET"):
        parquet.write_table(pa.table({"text": ["abc"]}), file)
    else:
        content = b'{"text": "abc"}\n' if "JSON" in name.upper() else b"abc"
        file.write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    for entry in (f"texts/{name}", "texts"):
        loaded = source.load_text("local", train_file=entry, validation_file="v.txt", streaming=streaming)
        assert documents_of(loaded["train"]) == ["abc"]


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize(
    "content",
    ['[{"text": "2020-01-01"},\n {"text": "b"}]', '["2020-01-01", "b"]', '{"text": "2020-01-01"}\n{"text": "b"}'],
    ids=["objects", "strings", "lines"],
)
def test_forms_of_json(tmp_path, monkeypatch, content, streaming):
    """Text that looks like a date stays text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "v.json").write_text(json.dumps({"text": "held out"}, indent=1))
    loaded = source.load_text("local", train_file="a.json", validation_file="v.json", streaming=streaming)
    assert documents_of(loaded["train"]) == ["2020-01-01", "b"]
    assert documents_of(loaded["validation"]) == ["held out"]


def test_a_file_that_vanishes_is_named(textless, monkeypatch):
    found = find_files(TextSource(train_file="good.txt"), None)
    (textless / "good.txt").unlink()
    monkeypatch.setattr(source, "find_files", lambda *_: found)
    with pytest.raises(OSError, match=r"No such file.*good\.txt"):
        source.load_text("local", train_file="good.txt")


# --- own text


def documents_of(rows):
    """Returns the documents of rows; rows can be pieces of documents."""
    documents = {}
    for number, row in enumerate(rows):
        key = row.get("document", number)
        documents[key] = documents.get(key, "") + row["text"]
    return list(documents.values())


def test_own_text_of_one_file(tmp_path, monkeypatch, capsys):
    """The end of a single document is held out: nothing is lost, nothing is in both parts."""
    text = "".join(f"line {i}, café\n" for i in range(4000))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    loaded = source.load_text("local", train_file="a.txt")
    (train,), (validation,) = documents_of(loaded["train"]), documents_of(loaded["validation"])
    assert train + validation == text
    assert validation[0].isspace()
    assert 0.03 < len(validation) / len(text) < 0.07
    assert "without a validation file: the last 5% of the document is held out" in capsys.readouterr().err
    given = source.load_text("local", train_file=["a.txt"], validation_file="a.txt")
    assert documents_of(given["train"]) == documents_of(given["validation"]) == [text]
    assert capsys.readouterr().err.startswith("train_file=['a.txt']: WARNING: all of it is held out as well")
    blocks = [block["input_ids"] for block in Packer(build_tokenizer("bytes"), 8, "concat")(loaded["train"])]
    assert bytes(torch.from_numpy(numpy.concatenate(blocks)).tolist()) == train.encode()[: 8 * len(blocks)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("line of words\r\n" * 1500, id="crlf"),
        pytest.param("\u6587\u5b57 \u3068 " * 5000, id="cjk"),
        pytest.param("a word and more \n" * 120_000, id="2MB"),
        pytest.param("short text " * 30, id="short"),
    ],
)
def test_held_out_part_of_own_text(tmp_path, monkeypatch, text):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    monkeypatch.chdir(tmp_path)
    loaded = source.load_text("local", train_file="a.txt")
    train, validation = ("".join(loaded[split]["text"][:]) for split in ("train", "validation"))
    assert train + validation == text.replace("\r\n", "\n")
    assert 0.025 < len(validation) / len(train + validation) < 0.08


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("count", [3, 60])
def test_own_text_of_many_documents(tmp_path, kind, count, capsys):
    import datasets

    texts = [f"document {i} " + "word " * 100 for i in range(count)]
    rows = datasets.Dataset.from_dict({"body": texts})
    field = "text" if kind == "txt" else "body"
    if kind == "txt":
        for i, text in enumerate(texts):
            (tmp_path / f"{i:02d}.txt").write_text(text)
        (tmp_path / "LICENSE").write_text("of another kind")
    elif kind == "jsonl":
        rows.to_json(tmp_path / "a.jsonl")
    else:
        rows.to_parquet(tmp_path / "a.parquet")
    loaded = source.load_text("local", train_file=str(tmp_path), text_field=field)
    train, validation = documents_of(loaded["train"]), documents_of(loaded["validation"])
    note = capsys.readouterr().err
    if count == 3:
        assert [one + end for one, end in zip(train, validation)] == texts
        assert all(len(end) < 40 for end in validation)
        assert "the last 5% of each of the 3 documents" in note
    else:
        assert sorted(train + validation) == sorted(texts)
        assert len(validation) == 3
        assert "3 of 60 documents, drawn at random" in note
        again = source.load_text("local", train_file=str(tmp_path), text_field=field)
        assert documents_of(again["validation"]) == validation


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("count", [3, 19, 60])
def test_empty_documents_of_own_text_do_not_count(tmp_path, kind, count, capsys):
    texts = [f"document {i} " + "word " * 100 for i in range(count)]
    for i, text in enumerate(["", *texts, ""] if kind == "txt" else []):
        (tmp_path / f"{i:02d}.txt").write_text(text)
    if kind == "jsonl":
        lines = [json.dumps({"text": text}) + "\n" for text in ["", *texts, ""]]
        (tmp_path / "a.jsonl").write_text("".join(lines))
    loaded = source.load_text("local", train_file=str(tmp_path))
    train, validation = documents_of(loaded["train"]), documents_of(loaded["validation"])
    if count < 20:
        assert [one + end for one, end in zip(train, validation)] == texts
        assert all(validation)
    else:
        assert sorted(train + validation) == sorted(texts)
        assert "3 of 60 documents" in capsys.readouterr().err


def test_own_text_by_pattern_and_refusals(folder, monkeypatch):
    monkeypatch.chdir(folder)
    books = {"validation_file": "valid.jsonl", "text_field": "body"}
    loaded = source.load_text("local", train_file="books/*", validation_file="books/1.txt", streaming=True)
    assert [row["text"] for row in loaded["train"]] == ["three\n\nfour é"]
    (folder / "empty").mkdir()
    (folder / "table.csv").write_text("a,b")
    (folder / "blank.jsonl").write_text('{"text": ""}\n' * 3)
    (folder / "blank.txt").touch()
    (folder / "short.txt").write_text("a")
    for options, message in (
        ({"train_file": "nothing.txt"}, "train_file='nothing.txt' is not valid: there is no such file"),
        ({"train_file": ["valid.jsonl", "no*"], **books}, r"train_file='no\*' is not valid"),
        ({"train_file": "valid.jsonl", "validation_file": "nix"}, "validation_file='nix'"),
        ({"train_file": "empty"}, "the folder has no .txt"),
        ({"train_file": "table.csv"}, "'table.csv' has an unknown ending"),
        ({"train_file": "."}, "train_file='.' is not valid: it has files of several formats, such as .*`mixture`"),
        ({"validation_file": "valid.jsonl"}, "validation_file='valid.jsonl'"),
        ({"train_file": "valid.jsonl", "splits": {"train": "a"}}, "splits={'train': 'a'}"),
        ({"train_file": "valid.jsonl", "streaming": True}, "streaming=True"),
        ({"train_file": ["books/1.txt", 3]}, r"train_file(\[1\])?="),
        (
            {"train_file": "valid.jsonl"},
            "train_file='valid.jsonl' is not valid: line 1 of 'valid.jsonl' has no text_field='text', but 'id', 'body'",
        ),
        ({"train_file": "books/1.txt", **books, "validation_file": "books/1.txt"}, "text_field='body' has no effect"),
        ({"train_file": "blank.jsonl"}, "train_file='blank.jsonl' is not valid: it has no text"),
        ({"train_file": "books/1.txt", "validation_file": "blank.txt"}, "validation_file='blank.txt' .* no text"),
        ({"train_file": "short.txt"}, "train_file='short.txt' is too short to hold out a part"),
        ({}, "splits=None"),
    ):
        with pytest.raises(ValueError, match=message):
            source.load_text("local", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "stlib"}, "source='stlib'"),
        ({"source": "local", "data_dir": "none", "splits": {"train": "a", "validation": "b"}}, "data_dir=.none"),
        (
            {"source": "local", "splits": {"train": "nothing*", "validation": "valid.jsonl"}},
            "'nothing\\*' is not valid",
        ),
        ({"source": "local", "splits": {"train": "valid.jsonl"}}, "must have 'train' and 'validation'"),
        ({"source": "local", "splits": {"train": "valid.jsonl", "validation": "valid.jsonl", "dev": "x"}}, "'dev'"),
        (
            {"source": "local", "splits": {"train": ["valid.jsonl", "books/1.txt"], "validation": "valid.jsonl"}},
            "several formats",
        ),
        ({"source": "local", "splits": {"train": "valid.jsonl", "validation": "valid.jsonl"}}, "text_field='text'"),
        ({"source": "local", "splits": {"train": "table.csv", "validation": "valid.jsonl"}}, "table.csv"),
        (
            {"source": "local", "splits": {"train": 5, "validation": "valid.jsonl"}},
            "must be a file, a folder or a pattern",
        ),
        ({"source": "local", "splits": {"train": "/etc/*.txt", "validation": "valid.jsonl"}}, "without '..'"),
        ({"source": "local", "splits": {"train": "cut.jsonl", "validation": "valid.jsonl"}}, "cannot be read"),
        ({"source": "local", "splits": {"train": "empty.jsonl", "validation": "valid.jsonl"}}, "it has no text"),
        ({"source": "hub"}, "needs the id of a dataset"),
        ({"source": "hub", "dataset": "a/b", "train_file": "a.txt"}, "train_file='a.txt'"),
        ({"source": "stdlib", "dataset": "me/x"}, "dataset='me/x'"),
        ({"source": "stdlib", "streaming": True}, "streaming=True"),
        ({"source": "corpus"}, "splits=None"),
        ({"source": "corpus", "splits": {"train": "pg18:train"}}, "splits=.*pg18.*'pg19'"),
        ({"source": "corpus", "splits": {"train": "pg19:train"}, "dataset": "a/b"}, "dataset='a/b'"),
    ],
)
def test_bad_sources(folder, options, message):
    for name, content in {"table.csv": "a,b\n", "cut.jsonl": '{"text": "a"}\n{"text"', "empty.jsonl": ""}.items():
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        source.load_text(**{"data_dir": folder, **options})


def test_local_needs_a_folder(monkeypatch):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    with pytest.raises(ValueError, match="WHATWHERE_DATA_DIR"):
        source.load_text("local", splits={"train": "a", "validation": "b"})


@pytest.mark.skipif(
    "WHATWHERE_DATA_DIR" not in os.environ, reason="set WHATWHERE_DATA_DIR to a folder with the public data"
)
def test_public_data():
    splits = {
        "train": "wikipedia_en/train-*.jsonl.gz",
        "validation": "wikipedia_en/valid.jsonl.gz",
        "test": "pg19/test/*.txt",
    }
    loaded = source.load_text("local", splits=splits, streaming=True)
    assert "\r" not in next(iter(loaded["test"]))["text"]
    assert len(list(loaded["validation"])) == 63
    assert len(next(iter(loaded["train"]))["text"]) > 100


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "field", "trainer"),
    [
        ({"messages": MESSAGES}, "text", "SFTTrainer"),
        ({"messages": MESSAGES}, "messages", "SFTTrainer"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "text", "SFTTrainer"),
        ({"prompt": "a", "completion": "b"}, "text", "SFTTrainer"),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, "text", "DPOTrainer"),
    ],
)
def test_conversations_are_no_text(row, field, trainer, tmp_path):
    """The message shows how to train on them, in files and in data sets."""
    rows, split = datasets.Dataset.from_list([row] * 2), {"train": "train", "validation": "train"}
    rows.to_json(tmp_path / "chat.jsonl")
    (tmp_path / "set").mkdir()
    rows.to_parquet(tmp_path / "set/chat.parquet")
    files = {"json": tmp_path / "chat.jsonl", "parquet": tmp_path / "set/chat.parquet"}
    calls = {
        repr(str(tmp_path / "set")): ("hub", {"dataset": str(tmp_path / "set"), "splits": split}),
        **{f"{kind!r}, data_files={str(file)!r}": ("local", {"train_file": str(file)}) for kind, file in files.items()},
    }
    for arguments, (name, options) in calls.items():
        with pytest.raises(ValueError, match=r"These rows are conversations: .* \(docs/chat.md\):\n.*\n.*\n") as error:
            source.load_text(name, **options, text_field=field)
        assert f"trl.{trainer}(model, train_dataset=datasets.load_dataset({arguments})['train'])" in str(error.value)
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"has no text_field='text', but 'prompt'\.$"):
        source.load_text("local", train_file=str(tmp_path / "other.jsonl"))


def test_hub_slices(monkeypatch):
    """What a slice of a Hub split selects, streamed or not; only the network call is replaced."""
    import datasets

    rows = datasets.Dataset.from_dict({"content": [str(i) for i in range(10)]})
    calls = []

    def load_dataset(dataset, config, split, streaming):
        calls.append((dataset, config, split, streaming))
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda dataset, config: ["train"])
    splits = {"train": "train[4:]", "validation": "train[:2]", "test": "train[2:4]"}
    for streaming in (False, True):
        loaded = source.load_text("hub", dataset="me/text", splits=splits, text_field="content", streaming=streaming)
        assert [row["text"] for row in loaded["train"]] == ["4", "5", "6", "7", "8", "9"]
        assert [row["text"] for row in loaded["validation"]] == ["0", "1"]
        assert [row["text"] for row in loaded["test"]] == ["2", "3"]
    # What has an end is streamed, so that no more than it is downloaded.
    assert calls[:3] == [("me/text", None, "train", streaming) for streaming in (False, True, True)]
    with pytest.raises(ValueError, match="has the splits 'train'"):
        source.load_text("hub", dataset="me/text", text_field="content")


# --- tokenizers


def random_text(seed: int, length: int = 2000) -> str:
    generator = random.Random(seed)
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(generator.randint(*generator.choice(ranges))) for _ in range(length))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n",
        "<|endoftext|>",
        "a <|padding|>b<|endoftext|>",
        "don't , stop !",
        "e\u0301 vs é",
        random_text(0),
        random_text(1),
    ],
    ids=["empty", "space", "newlines", "special", "specials", "spacing", "combining", "random0", "random1"],
)
def test_round_trip(tokenizer, text):
    (ids,) = tokenize_documents(tokenizer, [text])
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.decode(ids[:-1]) == text
    # every way of asking for it
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def random_prose(generator: random.Random) -> str:
    """Words, numbers, CJK, punctuation, every kind of white space, and long runs with none."""
    kinds = [
        lambda: "".join(generator.choice("abcdeéß") for _ in range(generator.randint(1, 12))),
        lambda: str(generator.randint(0, 99999)),
        lambda: generator.choice([" ", "  ", "\n", "\r\n", "\t", "   \n ", "\u3000", "\xa0", " \u0301"]),
        lambda: "".join(chr(generator.randint(0x4E00, 0x4E40)) for _ in range(generator.randint(1, 200))),
        lambda: generator.choice("!?,.。、'\"-_") * generator.randint(1, 5),
        lambda: generator.choice(["'s", "don't", "I'LL", "<|endoftext|>"]),
        lambda: generator.choice("x ") * generator.randint(1, 300),
        lambda: random_text(generator.randint(0, 10**9), 1),
    ]
    parts = (generator.choice(kinds)() + generator.choice(["", " "]) for _ in range(generator.randint(0, 60)))
    return "".join(parts)


def bpe_of_kind(kind: str, texts: list[str]):
    """A BPE that separates words as the tokenizers of some models do."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    joined = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    if kind in ("llama3", "qwen"):
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), joined])
    elif kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    elif kind == "prefix space":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        backend.pre_tokenizer = (
            joined if kind == "merges across words" else pre_tokenizers.ByteLevel(add_prefix_space=False)
        )
    if kind == "qwen":
        backend.normalizer = normalizers.NFC()
    if kind == "strip":
        backend.normalizer = normalizers.Strip()
    options = {"vocab_size": 500, "special_tokens": ["<e>"], "show_progress": False}
    backend.train_from_iterator(texts, trainers.BpeTrainer(**options))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")


CUT = ("bytes", "bpe", "llama3", "qwen", "metaspace", "prefix space")


@pytest.mark.parametrize("kind", [*CUT, "merges across words", "strip"])
def test_pieces_are_tokenised_as_the_whole(kind, monkeypatch):
    """The tokens of a document do not depend on its pieces; tokenizers for which they would are given the whole."""
    monkeypatch.setattr(tokens, "PIECE", 64)
    monkeypatch.setattr(tokens, "_BATCH", 256)
    monkeypatch.setattr(tokens, "_CONTEXT", 16)
    generator = random.Random(0)
    texts = [random_prose(generator) for _ in range(120)] + ["word " * 100]
    if kind in ("bytes", "bpe"):
        tokenizer = build_tokenizer("bytes") if kind == "bytes" else train_bpe(500, texts)
    else:
        tokenizer = bpe_of_kind(kind, texts)
    end, longer = [tokenizer.eos_token_id], 0
    for text in texts:
        whole = tokenizer([text], add_special_tokens=False, split_special_tokens=True)["input_ids"][0] + end
        pieces = list(tokens.tokenize_pieces(tokenizer, [{"text": text}]))
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
        assert numpy.concatenate([ids for ids, _ in pieces]).tolist() == whole
        longer += len(pieces) > 1
        # as it is read from a file in pieces, with another document after it
        starts = sorted(generator.sample(range(len(text) + 1), min(5, len(text) + 1)))
        rows = [text[start:stop] for start, stop in zip([0, *starts], [*starts, len(text)])]
        rows = [*({"text": row, "document": 0} for row in rows), {"text": "a b", "document": 1}]
        ids = numpy.concatenate([ids for ids, _ in tokens.tokenize_pieces(tokenizer, rows)]).tolist()
        assert ids == whole + next(iter(tokenize_documents(tokenizer, ["a b"])))
    assert (longer > 50) == (kind in CUT)


def test_byte_tokens_are_the_bytes():
    tokenizer = build_tokenizer("bytes")
    text = "".join(map(chr, range(256))) + "数"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert len(tokenizer) == 258
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} == {256}
    assert tokenizer.pad_token_id == 257
    # any sequence of bytes decodes, even one that is no text
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.slow
def test_tokenizers_load_in_a_clean_process(tmp_path):
    tokenizers = {
        "bytes": build_tokenizer("bytes"),
        "bpe": train_bpe(300, TEXTS),
    }
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(tmp_path / name)
    text = random_text(2, 200)
    code = (
        "import sys, json; from transformers import AutoTokenizer; assert 'whatwhere' not in sys.modules\n"
        "text = json.loads(sys.argv[1])\n"
        "for name in sys.argv[2:]:\n"
        "    t = AutoTokenizer.from_pretrained(name); ids = t(text)['input_ids']; assert t.decode(ids) == text\n"
        "    print(json.dumps([ids, t.eos_token_id, t.pad_token_id, t.bos_token_id]))"
    )
    output = python("-c", code, json.dumps(text), *tokenizers, cwd=tmp_path)
    for tokenizer, line in zip(tokenizers.values(), output.splitlines()[-2:]):
        special = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id]
        assert json.loads(line) == [tokenizer(text)["input_ids"], *special]


def test_bpe_is_deterministic(stdlib):
    texts = stdlib["test"]["text"][:6]
    first, second = (train_bpe(400, given) for given in (texts, iter(texts)))
    assert len(first) == 400
    assert first.get_vocab() == second.get_vocab()
    assert len(next(iter(tokenize_documents(first, texts[:1])))) < len(texts[0].encode())


def test_a_tokenizer_that_does_not_exist():
    with pytest.raises(ValueError, match="no/such/folder"):
        build_tokenizer("./no/such/folder")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"tokenizer='{tmp_path}' is not valid"):
        build_tokenizer(str(tmp_path))


def measured(tokenizer, texts):
    """Returns of each document its ids, the bytes of each token, and whether it is changed; checks ends and ids."""
    found = list(measure_documents(tokenizer, texts))
    assert [ids.tolist() for ids, _, _ in found] == list(tokenize_documents(tokenizer, texts))
    return found


def test_the_bytes_of_each_token(tokenizer):
    for (ids, sizes, changed), text in zip(measured(tokenizer, TEXTS), TEXTS, strict=True):
        assert sizes.sum() == len(text.encode())
        assert (sizes[-1], changed) == (0, False)
        if len(tokenizer) == 258:
            assert sizes[:-1].tolist() == [1] * len(ids[:-1])
        # A token has the bytes of its piece of text, up to the parts of characters.
        pieces = [tokenizer.decode(ids[: number + 1]) for number in range(len(ids) - 1)]
        whole = [number for number, piece in enumerate(pieces) if "\ufffd" not in piece]
        assert [sizes[: number + 1].sum() for number in whole] == [len(pieces[number].encode()) for number in whole]


CHANGED = ["ﬁne ①  café   ﬀ \uff21  word\n\n\ttabs  ", "e\u0301 x", "數 x <new> y 🤖 "]
KEPT = ["plain words", "don't stop", " one space", "naive cafe", ""]
CHANGING = ("NFKC", "NFKC, byte-level", "unknown", "unknown, one by one", "NFKC and collapsed spaces", "added", "strip")


def tokenizer_that_changes_text(kind):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level = kind in ("NFKC, byte-level", "added", "strip")
    unigram = kind in ("unknown", "NFKC and collapsed spaces")
    backend = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token=None if byte_level else "<unk>"))
    normalizer = {"NFKC": "NFKC", "NFKC, byte-level": "NFKC", "strip": "Strip"}.get(kind)
    if normalizer:
        backend.normalizer = getattr(normalizers, normalizer)()
    if kind == "NFKC and collapsed spaces":
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    special, alphabet = ["<unk>", "<e>"], pre_tokenizers.ByteLevel.alphabet()
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    form = {"vocab_size": 300, "special_tokens": special, "show_progress": False}
    trainer = (
        trainers.UnigramTrainer(**form, unk_token="<unk>")
        if unigram
        else trainers.BpeTrainer(**form, initial_alphabet=alphabet if byte_level else [])
    )
    backend.train_from_iterator([*KEPT, "abcdefghijklmnopqrstuvwxyz'1\n\tAfi"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="<unk>")
    if kind == "added":
        tokenizer.add_tokens([AddedToken("<new>", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.mark.parametrize("kind", CHANGING)
def test_bytes_are_those_of_the_text_itself(kind, monkeypatch):
    """Whatever the tokenizer makes of it, and in pieces too; what is changed is known."""
    tokenizer = tokenizer_that_changes_text(kind)
    found = measured(tokenizer, CHANGED)
    assert all(sizes.min() >= 0 for _, sizes, _ in found)
    expected = {"NFKC, byte-level": [True, True, False], "strip": [True, False, True], "added": [False, False, True]}
    assert [changed for _, _, changed in found] == expected.get(kind, [True] * 3)
    texts = [*CHANGED, *KEPT, "   ", "  ", "\n"]
    assert [sizes.sum() for _, sizes, _ in measured(tokenizer, texts)] == [len(text.encode()) for text in texts]
    assert [changed for _, _, changed in measured(tokenizer, KEPT)] == [False] * len(KEPT)
    monkeypatch.setattr(tokens, "PIECE", 64)
    monkeypatch.setattr(tokens, "_BATCH", 256)
    monkeypatch.setattr(tokens, "_CONTEXT", 16)
    texts = [text * 20 for text in CHANGED]
    assert [sizes.sum() for _, sizes, _ in measured(tokenizer, texts)] == [len(text.encode()) for text in texts]


def test_bytes_of_sentencepiece_and_refusal_of_others():
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5, **{f"<0x{b:02X}>": 6 + b for b in range(256)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    # Without the space that SentencePiece puts before a document.
    (ids, sizes, changed), (_, others, _) = measured(tokenizer, ["ab aé", "b"])
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", "b", "▁a", "<0xC3>", "<0xA9>", "</s>"]
    assert (sizes.tolist(), changed) == ([1, 1, 2, 1, 1, 0], False)
    assert others.sum() == 1

    words = Tokenizer(models.WordLevel({"a": 0, "[EOS]": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="bits per byte cannot be computed"):
        check_bytes(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[EOS]"))


def test_pair_of_gpt2_files(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = build_tokenizer(str(tmp_path))
    assert list(tokenize_documents(tokenizer, ["aab"])) == [[0, 2, 3]]
    assert [sizes.tolist() for _, sizes, _ in measured(tokenizer, ["aab"])] == [[1, 2, 0]]


# --- packing


def test_concat_joins_documents_by_end_of_text():
    tokenizer = build_tokenizer("bytes")
    blocks = list(Packer(tokenizer, 4, "concat")([{"text": "abc"}, {"text": ""}, {"text": "defgh"}]))
    end = tokenizer.eos_token_id
    # abc$ $def gh$: the last three tokens do not fill a block
    assert [block["input_ids"].tolist() for block in blocks] == [[97, 98, 99, end], [end, 100, 101, 102]]
    assert all(block.keys() == {"input_ids"} for block in blocks)


WORDS = [{"text": " ".join(str(60 + i) for i in range(length))} for length in (3, 12, 1, 10, 9, 0)]


def separate_blocks(rows):
    tokenizer = build_tokenizer("jsb")
    text = prepare(datasets.Dataset.from_list(rows), tokenizer)
    return TextBlocks(text, 9, "separate", pad_token_id=tokenizer.pad_token_id)


def test_separate_documents_are_padded():
    tokenizer, blocks = build_tokenizer("jsb"), separate_blocks(WORDS)
    # 12 is 9 and 3, 10 is 9 and 1; of a single token nothing can be predicted
    assert [len(blocks.block(index)["input_ids"]) for index in range(len(blocks))] == [3, 9, 3, 9, 9]
    batch = blocks[[0, 2]]
    first = tokenizer("60 61 62")["input_ids"], tokenizer("69 70 71")["input_ids"]
    # to a multiple of 8
    assert batch["input_ids"].tolist() == [[*ids, *[tokenizer.pad_token_id] * 5] for ids in first]
    assert batch["labels"].tolist() == [[*ids, *[IGNORED] * 5] for ids in first]
    assert add_labels(batch) is batch
    # but not beyond the sequence length
    assert blocks[[0, 1]]["input_ids"].shape == (2, 9)
    assert blocks[[1]]["labels"].tolist() == [tokenizer(WORDS[1]["text"])["input_ids"][:9]]
    shuffled = ShuffledBatches(blocks, 5, seed=1)
    assert sorted((shuffled(0)["labels"] != IGNORED).sum(1).tolist()) == [3, 3, 9, 9, 9]
    with pytest.raises(ValueError, match="sequence_length=9 is not valid"):
        separate_blocks(WORDS[2:3])


def test_end_of_text_belongs_to_a_separate_document():
    blocks = Packer(build_tokenizer("bytes"), 9, "separate")([{"text": "ab"}, {"text": "c"}])
    assert [block["input_ids"].tolist() for block in blocks] == [[97, 98, 256], [99, 256]]


def packed_documents(texts, length):
    blocks = list(Packer(build_tokenizer("bytes"), length, "documents")({"text": text} for text in texts))
    return {name: torch.from_numpy(numpy.stack([block[name] for block in blocks])).long() for name in blocks[0]}


def test_documents_restart_positions_and_lose_their_first_label():
    tokenizer = build_tokenizer("bytes")
    blocks = packed_documents(["ab", "cdefghi"], 5)
    assert blocks["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    labels = add_labels(blocks)["labels"]
    assert labels.tolist()[0] == [IGNORED, 98, tokenizer.eos_token_id, IGNORED, 100]
    assert labels.tolist()[1][1:] == [*b"fghi"]


def test_packing_loses_nothing_before_the_last_block(tokenizer):
    rows = [{"text": text} for text in TEXTS * 3]
    stream = torch.tensor(list(itertools.chain(*tokenize_documents(tokenizer, [row["text"] for row in rows]))))
    for length in (3, 16, 63):
        blocks = [block["input_ids"] for block in Packer(tokenizer, length, "concat")(rows)]
        assert len(blocks) == len(stream) // length
        assert torch.equal(
            torch.cat([torch.from_numpy(block) for block in blocks]).long(), stream[: len(blocks) * length]
        )


def numbered_blocks(count: int):
    import datasets

    return datasets.Dataset.from_dict({"input_ids": [[i, i] for i in range(count)]}).with_format("torch")


def test_shuffling_visits_everything_once_an_epoch():
    batches = ShuffledBatches(numbered_blocks(10), batch_size=4, seed=3)
    seen = [index for step in range(5) for index in batches(step)["input_ids"][:, 0].tolist()]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:], "both epochs have the same order"
    assert seen[:10] != list(range(10))
    # a function of the step alone: any step first, again, and in a new object
    again = ShuffledBatches(numbered_blocks(10), batch_size=4, seed=3)
    assert again(2)["input_ids"].tolist() == batches(2)["input_ids"].tolist()
    assert again(0)["input_ids"][:, 0].tolist() == seen[:4]
    other = ShuffledBatches(numbered_blocks(10), batch_size=10, seed=4)
    assert other(0)["input_ids"][:, 0].tolist() != seen[:10]


def test_documents_without_a_text():
    with pytest.raises(ValueError, match="a document has text=None; it must be a string"):
        source.text_of({"text": None, "id": 3})
    with pytest.raises(ValueError, match=r"a document has text=\['aaa.{35}\.\.\.; it must be a string"):
        source.text_of({"text": ["a" * 1000]})

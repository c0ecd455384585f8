"""Tokenised text on disk."""

import json
import multiprocessing
import os
import pickle

import datasets
import numpy as np
import pytest
import torch
import yaml
from tokenizers import normalizers

from whatwhere.scripts.commands import prepare as command
from whatwhere.scripts.data import prepared
from whatwhere.scripts.data.pack import Packer, ShuffledBatches
from whatwhere.scripts.data.prepared import PreparedText, TextBlocks, prepare, prepared_folder
from whatwhere.scripts.data.rows import on_disk, texts_of
from whatwhere.scripts.data.tokenize import build_tokenizer, train_bpe
from whatwhere.scripts.training.recipe import RECIPES

TEXTS = [f"{'word ' * (number % 7)}{number}" for number in range(300)] + ["", "x"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path / "prepared"))


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict({"text": TEXTS})


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("bytes")


def in_memory(rows, tokenizer, length, pack):
    return list(Packer(tokenizer, length, pack)(rows))


@pytest.mark.parametrize("pack", ["concat", "documents", "separate"])
def test_blocks_are_those_of_the_text(rows, tokenizer, pack):
    blocks = TextBlocks(prepare(rows, tokenizer), 16, pack, pad_token_id=tokenizer.pad_token_id)
    expected = in_memory(rows, tokenizer, 16, pack)
    assert len(blocks) == len(expected)
    for index, block in enumerate(expected):
        found = {name: rows[0] for name, rows in blocks[[index]].items()}
        tokens = found["input_ids"] if pack != "separate" else found["input_ids"][found["labels"] >= 0]
        assert torch.equal(tokens, torch.from_numpy(block["input_ids"]).long())
        if pack == "documents":
            assert torch.equal(found["position_ids"], torch.from_numpy(block["position_ids"]).long())
    # Several at once, in any order.
    both = blocks[[7, 3]]
    assert both["input_ids"].shape[0] == 2
    assert torch.equal(both["input_ids"][1, :9], blocks[[3]]["input_ids"][0, :9])
    assert len(TextBlocks(blocks.text, 16, pack, pad_token_id=0, limit=5)) == 5


@pytest.mark.parametrize("pack", ["concat", "documents", "separate"])
def test_measured_text(pack):
    """Held-out text has the bytes of each token, before the tokenizer changed it, in all forms of blocks."""
    texts = [f"{'ﬁne ' * (number % 5)}{number}" for number in range(80)]
    rows, tokenizer = datasets.Dataset.from_dict({"text": texts}), train_bpe(300, texts)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    plain, text = prepare(rows, tokenizer), prepare(rows, tokenizer, measure=True)
    assert (text.sha256, text.is_measured, plain.is_measured) == (plain.sha256, True, False)
    assert (text.changed, plain.changed, text.documents) == (64, 0, 80)
    assert text.read(0, text.tokens, "bytes").sum() == sum(len(text.encode()) for text in texts)
    blocks = TextBlocks(text, 8, pack, pad_token_id=tokenizer.pad_token_id)
    batch, without = blocks[range(len(blocks))], TextBlocks(plain, 8, pack, pad_token_id=0)[[0]]
    assert "bytes" not in without
    sizes = batch["bytes"][batch["labels"] >= 0 if pack == "separate" else slice(None)]
    scored = text.tokens // 8 * 8 if pack != "separate" else text.tokens
    if pack == "separate":
        # A remainder of one token, which is the end of text or a word, is not in a block.
        assert 0 <= sum(len(text.encode()) for text in texts) - sizes.sum() < 80
    else:
        assert sizes.flatten().tolist() == text.read(0, scored, "bytes").tolist()


def test_pieces_of_documents(tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["one two", " three", "four", " five"], "document": [0, 0, 1, 1]})
    text = prepare(rows, tokenizer)
    assert bytes(text.read(0, 13).tolist()) == b"one two three"
    assert (text.documents, text.tokens) == (2, 13 + 1 + 9 + 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_any_number_of_processes_writes_the_same(rows, tokenizer, processes, monkeypatch, tmp_path):
    folders = []
    for count in (1, processes):
        monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path / str(len(folders))))
        folders.append(prepare(rows, tokenizer, processes=count).folder)
    names = sorted(file.name for file in folders[0].glob("*.bin"))
    assert len(names) == 2 * 76
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.parametrize(("processes", "parallelism"), [(1, "false"), (None, None)])
def test_one_process_is_one_thread(rows, tokenizer, processes, parallelism, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    heard, right = [], prepared._write_shard
    monkeypatch.setattr(
        prepared, "_write_shard", lambda shard: heard.append(os.environ.get("TOKENIZERS_PARALLELISM")) or right(shard)
    )
    monkeypatch.setattr(prepared.os, "sched_getaffinity", lambda process: {0}, raising=False)
    prepare(rows, tokenizer, processes=processes)
    assert set(heard) == {parallelism}
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_nothing_is_done_twice(rows, tokenizer, monkeypatch):
    first = prepare(rows, tokenizer)
    monkeypatch.setattr(prepared, "tokenize_pieces", None)
    again = prepare(datasets.Dataset.from_dict({"text": TEXTS}), tokenizer)
    assert (again.folder, again.sha256) == (first.folder, first.sha256)
    # Other text, or another tokenizer, is another folder.
    assert prepared_folder(rows.select(range(9)), tokenizer) != first.folder
    assert prepared_folder(rows, build_tokenizer("remi")) != first.folder


def test_interrupted_work_goes_on(rows, tokenizer, monkeypatch):
    right, calls = prepared._write_shard, []

    def failing(shard):
        calls.append(shard)
        if len(calls) == 10:
            raise OSError(28, "No space left on device")
        return right(shard)

    monkeypatch.setattr(prepared, "_write_shard", failing)
    with pytest.raises(OSError, match="No space left"):
        prepare(rows, tokenizer, processes=1)
    assert not list(prepared_folder(rows, tokenizer).glob("*.partial"))
    assert prepare(rows, tokenizer, processes=1).documents == len(TEXTS)
    assert calls == [*range(10), *range(9, 76)]


def _prepare_in(barrier, results, rows, tokenizer):
    calls, right = [], prepared._write_shard
    prepared._write_shard = lambda shard: calls.append(shard) or right(shard)
    barrier.wait()
    prepare(rows, tokenizer, processes=1)
    results.put(len(calls))


def test_processes_wait_for_the_one_that_works(rows, tokenizer):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=_prepare_in, args=(barrier, results, rows, tokenizer)) for _ in range(2)]
    for process in both:
        process.start()
    assert sorted(results.get(timeout=60) for _ in both) == [0, 76]
    for process in both:
        process.join()


def test_damage_is_found_and_named(rows, tokenizer):
    text = prepare(rows, tokenizer)
    file = text.folder / "tokens-00003.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"tokens-00003\.bin.*is damaged"):
        prepare(rows, tokenizer)
    file.write_bytes(b"\0\0" + content[2:])
    with pytest.raises(ValueError, match=r"tokens-00003\.bin.*SHA-256"):
        prepare(rows, tokenizer)
    # Changed and with the old time of writing.
    written = json.loads((text.folder / "shard-00003.json").read_text())["files"]["tokens"]["written_ns"]
    os.utime(file, ns=(written, written))
    PreparedText(text.folder)
    with pytest.raises(ValueError, match="SHA-256"):
        PreparedText(text.folder, verify=True)
    file.unlink()
    with pytest.raises(ValueError, match=r"tokens-00003\.bin.*No such file"):
        prepare(rows, tokenizer)
    # A copy has other times of writing, and is right.
    file.write_bytes(content)
    assert PreparedText(text.folder).sha256 == text.sha256


def test_damaged_records_and_an_unusable_folder(rows, tokenizer, monkeypatch, tmp_path):
    record = prepare(rows, tokenizer).folder / "shard-00003.json"
    record.write_text("{")
    with pytest.raises(ValueError, match=r"shard-00003\.json.*Remove its folder"):
        prepare(rows, tokenizer)
    record.unlink()
    with pytest.raises(ValueError, match=r"shard-00003\.json.*No such file"):
        prepare(rows, tokenizer)
    (tmp_path / "file").touch()
    monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"WHATWHERE_CACHE='.*file' is not valid"):
        prepare(rows, tokenizer)


def test_many_entries_take_more_bytes(rows, tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 1 << 17)
    text = prepare(rows, tokenizer)
    assert np.memmap(text.folder / "tokens-00000.bin", dtype=np.int32, mode="r")[0] == ord(TEXTS[0][0])


def test_pickled_as_a_folder(rows, tokenizer):
    blocks = TextBlocks(prepare(rows, tokenizer), 16)
    content = pickle.dumps(blocks)
    assert len(content) < 1000
    assert torch.equal(pickle.loads(content)[[5]]["input_ids"], blocks[[5]]["input_ids"])


def test_too_short(tokenizer):
    text = prepare(datasets.Dataset.from_dict({"text": ["abc"]}), tokenizer)
    with pytest.raises(ValueError, match=r"sequence_length=100 .* the train split has \d+ tokens"):
        TextBlocks(text, 100, name="the train split")


def test_texts_that_cannot_be_tokenised_are_named(tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["abc", None]})
    with pytest.raises(
        ValueError, match=r"^the train split of mixture\[1\] cannot be tokenised: a document has text=None"
    ):
        prepare(rows, tokenizer, name="the train split of mixture[1]")


def test_command(tmp_path, capfd, monkeypatch):
    file = tmp_path / "own.txt"
    file.write_text("some text. " * 400)
    arguments = ["demo_rope", "--train-file", str(file), "--set", "data.sequence_length=16"]
    command.main(arguments)
    first, said = capfd.readouterr()
    assert "train: " in first
    assert "tokenised the train split" in said
    command.main([*arguments, "--processes", "2"])
    second, said = capfd.readouterr()
    assert "tokenised" not in said
    assert first.partition(", verified")[0] == second.partition(", verified")[0]
    options = f"--set data.sequence_length=16 --train-file {file}"
    assert second.endswith(f"\nNext: whatwhere train demo_rope {options}\n")
    for wrong, field in ((["--processes", "0"], "--processes=0"), (["--set", "data.streaming=true"], "streaming")):
        with pytest.raises(ValueError, match=field):
            command.main([*arguments, *wrong])


def test_workers_read_the_same_batches(rows, tokenizer):
    """In order, each process its share, and without a draw from the training's random numbers."""
    batches = ShuffledBatches(TextBlocks(prepare(rows, tokenizer), 16, "documents"), 4, seed=1)
    state = torch.get_rng_state()
    expected = [batches(step) for step in range(5, 9)]
    for workers in (0, 2):
        shares = []
        for rank in range(2):
            shares.append(list(batches.loader((rank, 2), range(5, 9), workers=workers)))
        for whole, *parts in zip(expected, *shares):
            for name, tensor in whole.items():
                assert torch.equal(tensor, torch.cat([part[name] for part in parts]))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mixture_is_prepared_by_parts(tmp_path, capfd):
    """Each text by itself: a run with one of them alone finds it done."""
    texts = []
    for number in range(2):
        file = tmp_path / f"{number}.txt"
        file.write_text(f"some text {number}. " * 400)
        texts.append({"train_file": str(file), "weight": 1 + number})
    recipe = tmp_path / "mixed.yaml"
    values = yaml.safe_load((RECIPES / "demo_rope.yaml").read_text())
    values["data"] |= {"source": "mixture", "mixture": texts, "sequence_length": 16}
    recipe.write_text(yaml.safe_dump(values))
    command.main([str(recipe)])
    said, heard = capfd.readouterr()
    found = [line.partition(":")[0] for line in said.splitlines()]
    assert found == ["train", "train", "validation", "validation", "Next"]
    assert "tokenised the train split of mixture[1]" in heard
    own = ["--train-file", texts[1]["train_file"], "--set", "data.sequence_length=16"]
    command.main(["demo_rope", *own])
    said, heard = capfd.readouterr()
    assert "tokenised" not in heard
    # A mixture is left out for text of one's own.
    command.main([str(recipe), *own])


def test_rows_are_mapped_anew(rows, tokenizer, tmp_path, monkeypatch):
    """What a process has read of a file does not stay in its memory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    stored = on_disk(TEXTS)
    assert list(texts_of(stored)) == TEXTS
    assert stored._fingerprint == on_disk(iter(TEXTS))._fingerprint != on_disk(TEXTS[:-1])._fingerprint
    assert len(list(tmp_path.glob("whatwhere/*"))) == 2
    assert prepare(stored, tokenizer).sha256 == prepare(rows, tokenizer).sha256

"""Streams, read by parts, and mixtures."""

import itertools
import json
import re

import datasets
import numpy as np
import pytest
import torch

from whatwhere.scripts.data.files import read_found
from whatwhere.scripts.data.pack import IGNORED, MixedBatches
from whatwhere.scripts.data.prepared import MixedBlocks, TextBlocks, prepare
from whatwhere.scripts.data.rows import choose
from whatwhere.scripts.data.stream import StreamedBatches
from whatwhere.scripts.data.tokenize import build_tokenizer

TEXTS = [f"<{number:03d}>" + "x" * (number % 17) for number in range(120)]
WAYS = ("files", "a slice", "own files", "lines", "memory")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("bytes")


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Returns new streams of the same documents."""
    folder = tmp_path_factory.mktemp("stream")
    for number in range(4):
        datasets.Dataset.from_dict({"text": TEXTS[number * 30 :][:30]}).to_parquet(str(folder / f"{number}.parquet"))
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def stream(way):
        if way == "memory":
            return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
        if way in ("own files", "lines"):
            files = [str(file) for file in sorted(folder.glob("*.jsonl" if way == "lines" else "*.parquet"))]
            return read_found(files, way, text_field="text", streaming=True)
        rows = datasets.load_dataset("parquet", data_files=str(folder / "*.parquet"), split="train", streaming=True)
        return choose(rows, "[20:]") if way == "a slice" else rows

    return stream


def batches_of(rows, tokenizer, **changes):
    options = {"sequence_length": 8, "pack": "concat", "batch_size": 4, "seed": 1, "shuffle_buffer": 11, **changes}
    return StreamedBatches(rows if isinstance(rows, list) else [rows], tokenizer, **options)


def first(batches, count, share=(0, 1), workers=0):
    return list(itertools.islice(batches.loader(share, workers=workers), count))


def numbers(batches, tokenizer):
    text = tokenizer.decode(torch.cat([batch["input_ids"].flatten() for batch in batches]))
    return [int(number) for number in re.findall(r"<(\d\d\d)>", text)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(rows, other[name]) for name, rows in one.items())


@pytest.mark.parametrize("pack", ["concat", "documents", "separate"])
@pytest.mark.parametrize("way", WAYS)
def test_resumed_from_any_step_it_is_the_same(streams, tokenizer, way, pack):
    """Inside a window, in later windows, and in the second epoch (70 steps of 32 tokens; an epoch has 1,600)."""
    whole = batches_of(streams(way), tokenizer, pack=pack)
    states, batches = [], []
    for batch in itertools.islice(whole.loader(), 70):
        batches.append(batch)
        # Checkpoints are written while training continues.
        states.append(whole.state_dict())
    states = [json.dumps(state) for state in states]
    for step in (1, 2, 9, 40, 66):
        resumed = batches_of(streams(way), tokenizer, pack=pack)
        resumed.load_state_dict([json.loads(states[step - 1])], (0, 1))
        assert_equal(first(resumed, 70 - step), batches[step:])
    assert len(states[-1]) < 2000


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_are_resumed(streams, tokenizer, workers):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    batches = first(batches_of(streams("files"), tokenizer), 15, workers=workers)
    for step in (1, 6):
        begun = batches_of(streams("files"), tokenizer)
        assert_equal(first(begun, step, workers=workers), batches[:step])
        resumed = batches_of(streams("files"), tokenizer)
        resumed.load_state_dict([json.loads(json.dumps(begun.state_dict()))], (0, 1))
        assert_equal(first(resumed, 15 - step, workers=workers), batches[step:])
    assert torch.equal(torch.get_rng_state(), state)
    if workers == 1:
        assert_equal(first(batches_of(streams("files"), tokenizer), 15), batches)
    else:
        with pytest.raises(ValueError, match=r"workers=1 is not valid: .* read by 2"):
            resumed.loader(workers=1)


@pytest.mark.parametrize("way", WAYS)
def test_processes_and_workers_share_the_documents(streams, tokenizer, way):
    """In an epoch each document is in one part; a few at the end are in the remainder of their part."""
    parts = []
    for rank in range(2):
        # 24 steps of 4 x 8 tokens from 2 workers in turns: almost an epoch.
        batches = first(batches_of(streams(way), tokenizer, batch_size=8), 24, (rank, 2), workers=2)
        parts += [numbers(batches[worker::2], tokenizer) for worker in range(2)]
    documents = set().union(*parts)
    assert sum(len(set(part)) for part in parts) == len(documents), "a document is in two parts"
    wanted = set(range(20 if way == "a slice" else 0, 120))
    assert documents <= wanted, "a document that is held out is in a part"
    assert len(documents) > 0.85 * len(wanted)


@pytest.mark.parametrize("way", ["files", "own files"])
def test_order(streams, tokenizer, way):
    plain = numbers(first(batches_of(streams(way), tokenizer, shuffle_buffer=1), 80), tokenizer)
    assert plain[:110] == list(range(110))
    shuffled = numbers(first(batches_of(streams(way), tokenizer), 100), tokenizer)
    other = numbers(first(batches_of(streams(way), tokenizer, seed=2), 100), tokenizer)
    assert shuffled[:110] != plain[:110] != other[:110] != shuffled[:110]
    # Files, and documents in windows of 11.
    assert len({number // 30 for number in shuffled[:11]}) == 1
    # The second epoch has another order.
    assert shuffled[110:130] != shuffled[:20]


def test_batches_of_separate_documents(streams, tokenizer):
    """With everything in one window: the blocks of the text, in another order."""
    stream = batches_of(
        streams("files"), tokenizer, sequence_length=24, pack="separate", batch_size=120, shuffle_buffer=999
    )
    (batch,) = first(stream, 1)
    text = prepare(datasets.Dataset.from_dict({"text": TEXTS}), tokenizer)
    expected = TextBlocks(text, 24, "separate", pad_token_id=tokenizer.pad_token_id)[range(120)]
    for name in ("input_ids", "labels"):
        assert sorted(batch[name].tolist()) == sorted(expected[name].tolist())


def test_refusals(streams, tokenizer):
    batches = batches_of(streams("files"), tokenizer)
    first(batches, 2)
    with pytest.raises(ValueError, match=r"read by 1 processes, .* continued by 2.*whatwhere prepare"):
        batches.load_state_dict([batches.state_dict()], (1, 2))
    for workers in (0, 1):
        with pytest.raises(ValueError, match=r"^sequence_length=5000 is not valid"):
            first(batches_of(streams("files"), tokenizer, sequence_length=5000), 1, workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_of_the_hub_that_cannot_be_read(tmp_path, tokenizer, workers):
    """Files of several schemas, as `datasets` streams them: one sentence, not its classes of errors."""
    for number, columns in enumerate(({"text": ["abc"] * 9}, {"text": ["abc"] * 9, "id": [1] * 9})):
        datasets.Dataset.from_dict(columns).to_parquet(str(tmp_path / f"{number}.parquet"))
    rows = datasets.load_dataset("parquet", data_files=f"{tmp_path}/*", split="train", streaming=True)
    with pytest.raises(ValueError, match=r"^the text cannot be read: Couldn't cast .*") as raised:
        first(batches_of(rows, tokenizer, shuffle_buffer=1), 30, workers=workers)
    assert type(raised.value) is ValueError
    assert "\n" not in str(raised.value)


# --- mixtures


def sources(batch):
    return (batch["input_ids"] == ord("b")).any(1).int().tolist()


@pytest.fixture
def letters(tokenizer, tmp_path, monkeypatch):
    """Blocks of 60 documents `a...` and of 30 documents `b...`, all different."""
    monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path))
    rows = [
        datasets.Dataset.from_dict({"text": [f"{letter * 4}{n:03d}" for n in range(count)]})
        for letter, count in (("a", 60), ("b", 30))
    ]
    return [TextBlocks(prepare(one, tokenizer), 8, "documents") for one in rows], rows


def test_a_mixture_has_the_weights(letters, monkeypatch):
    parts, _ = letters
    monkeypatch.setattr(MixedBatches, "PAGE", 400)
    make = lambda: MixedBatches(MixedBlocks(parts), 20, 3, [0.9, 0.1])  # noqa: E731
    batches = make()
    seen = [batches(step) for step in range(60)]
    drawn = [sum(sources(batch)) for batch in seen]
    # Exactly, of the blocks of a page: 20 batches.
    assert [sum(drawn[start : start + 20]) for start in (0, 20, 40)] == [40] * 3
    assert len(set(drawn)) > 2
    # The blocks of a text: each once before any is seen again.
    a = [tuple(row.tolist()) for batch in seen for row in batch["input_ids"] if ord("b") not in row]
    assert len(set(a[:60])) == len(set(a[60:120])) == 60
    assert a[:60] != a[60:120]
    # A function of the step alone, and of any number of processes.
    again = make()
    for step in (47, 3):
        for name, rows in seen[step].items():
            assert torch.equal(torch.cat([again(step, (rank, 4))[name] for rank in range(4)]), rows)
    assert MixedBatches(MixedBlocks(parts), 20, 4, [0.9, 0.1])(0)["input_ids"].tolist() != seen[0]["input_ids"].tolist()
    assert not seen[0]["position_ids"][:, 0].any()


def test_blocks_of_several_texts(letters):
    parts, _ = letters
    both = MixedBlocks(parts)
    assert len(both) == 90
    for index, (part, within) in {0: (0, 0), 59: (0, 59), 60: (1, 0), 89: (1, 29)}.items():
        assert torch.equal(both[[index]]["input_ids"], parts[part][[within]]["input_ids"])
    assert both.sha256 not in (parts[0].sha256, parts[1].sha256, MixedBlocks(parts[::-1]).sha256)


def test_a_stream_of_a_mixture_is_named(letters, tokenizer):
    rows = [datasets.Dataset.from_dict({"text": texts}) for texts in (["a" * 99] * 9, ["b" * 99, None])]
    for workers in (0, 1):
        batches = batches_of([one.to_iterable_dataset() for one in rows], tokenizer, weights=[1, 1], shuffle_buffer=2)
        with pytest.raises(ValueError, match=r"^mixture\[1\]: a document has text=None"):
            first(batches, 9, workers=workers)


def test_a_mixture_of_streams(letters, tokenizer):
    _, rows = letters

    def make():
        return batches_of([one.to_iterable_dataset() for one in rows], tokenizer, weights=[3, 1], batch_size=10)

    batches = make()
    seen = first(batches, 50)
    assert np.mean([sources(batch) for batch in seen]) == pytest.approx(0.25, abs=0.06)
    half = make()
    first(half, 20)
    resumed = make()
    resumed.load_state_dict([json.loads(json.dumps(half.state_dict()))], (0, 1))
    assert_equal(first(resumed, 30), seen[20:])
    assert all((batch["labels"] != IGNORED).all() for batch in seen)

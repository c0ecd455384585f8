"""Music: chorales and piano performances as words."""

import csv
import json

import pytest
import torch

pytest.importorskip("datasets", reason='needs pip install "whatwhere[train]"')

from transformers import AutoTokenizer

from whatwhere.scripts.data import music
from whatwhere.scripts.data.corpora import CORPORA, load_corpus
from whatwhere.scripts.data.pack import Packer
from whatwhere.scripts.data.tokenize import build_tokenizer, check_bytes, tokenize_documents
from whatwhere.scripts.extras import explain

CHORALES = {
    "train": [[[74, 70, 65, 58], [74, 70, 65, -1]], [[108, 70, 65, 21]]],
    "valid": [[[60, 60, 60, 60]]],
    "test": [[[61, 60, 59, 58]]],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jsb_chorales").mkdir()
    (tmp_path / "jsb_chorales" / "Jsb16thSeparated.json").write_text(json.dumps(CHORALES))
    return tmp_path


# --- chorales


@pytest.mark.parametrize("streaming", [False, True], ids=["copied", "streamed"])
def test_chorales_go_through_the_voices_of_each_step(folder, streaming):
    rows = load_corpus("jsb_chorales", "train", data_dir=folder, streaming=streaming)
    assert [row["text"] for row in rows] == ["74 70 65 58 74 70 65 -1", "108 70 65 21"]
    rows = load_corpus("jsb_chorales", "validation[:1]", data_dir=folder, streaming=streaming)
    assert [row["text"] for row in rows] == ["60 60 60 60"]


def test_chorales_by_address(folder, monkeypatch):
    """Without a data folder the file is downloaded; only the download is replaced."""
    asked = []

    def download(self, address):
        asked.append(address)
        return str(folder / "jsb_chorales" / "Jsb16thSeparated.json")

    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    monkeypatch.setattr("datasets.DownloadManager.download_and_extract", download)
    assert load_corpus("jsb_chorales", "test")["text"] == ["61 60 59 58"]
    assert asked == [CORPORA["jsb_chorales"].hub["test"][0]]


def test_chorale_words():
    tokenizer = build_tokenizer("jsb")
    # 88 keys, silence, padding: the paper's number
    assert len(tokenizer) == 90
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, None, "<pad>")
    text = "-1 21 108 60"
    assert list(tokenize_documents(tokenizer, [text])) == [[1, 2, 89, 41]]
    assert tokenizer.decode([1, 2, 89, 41]) == text
    with pytest.raises(ValueError, match=r"the word '109'.*89 words"):
        list(tokenize_documents(tokenizer, ["60 109"]))
    with pytest.raises(ValueError, match="the word '<pad>'"):
        list(tokenize_documents(tokenizer, ["60 <pad>"]))
    with pytest.raises(ValueError, match="bits per byte"):
        check_bytes(tokenizer)


def test_word_tokenizer_loads_again(tmp_path):
    build_tokenizer("jsb").save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded("74 -1 65")["input_ids"]) == "74 -1 65"
    assert loaded(["74 -1", "65"], padding=True)["input_ids"] == [[55, 1], [0, 46]]


@pytest.mark.parametrize(
    ("chorales", "message"),
    [([], "not a JSON object .* for 'train'"), ({"test": []}, "not a JSON object .* for 'train'.*KeyError")],
)
def test_bad_chorales(tmp_path, chorales, message):
    file = tmp_path / "chorales.json"
    file.write_text(json.dumps(chorales))
    with pytest.raises(ValueError, match=message):
        list(music.read_chorales(file, "train"))


def test_real_chorales(data_dir):
    tokenizer = build_tokenizer("jsb")
    for split, count, steps in (("train", 229, 55_228), ("validation", 76, 18_408), ("test", 77, 18_900)):
        rows = load_corpus("jsb_chorales", split, data_dir=data_dir)
        blocks = list(Packer(tokenizer, 2048, "separate")(rows))
        assert len(rows) == count
        # All tokens are in the blocks; only long chorales have more than one.
        assert sum(len(block["input_ids"]) for block in blocks) == 4 * steps
        assert len(blocks) == count + sum(len(text.split()) > 2048 for text in rows["text"])


# --- performances


@pytest.fixture
def performances(tmp_path):
    """A small MAESTRO: three works in the layout of the official archive, and what their notes are."""
    pytest.importorskip("miditok", reason='needs pip install "whatwhere[music]"')
    from symusic import ControlChange, Note, Score, Tempo, Track

    root = tmp_path / "maestro-v3.0.0"
    (root / "2004").mkdir(parents=True)
    rows = []
    for number, pitch in enumerate((60, 21, 108)):
        score = Score(480)
        track = Track(program=0)
        # time, duration (ticks; 480 a beat), pitch, velocity
        for beat, value in enumerate((pitch, 64)):
            track.notes.append(Note(beat * 480, 240, value, 63))
        # the sustain pedal, down for a beat
        track.controls.append(ControlChange(0, 64, 127))
        track.controls.append(ControlChange(480, 64, 0))
        score.tracks.append(track)
        score.tempos.append(Tempo(0, qpm=120))
        name = f"2004/{number}.midi"
        score.dump_midi(root / name)
        rows.append({"canonical_composer": "B", "canonical_title": f"work {number}", "midi_filename": name})
    with (root / "maestro-v3.0.0.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


def pitches(text):
    return [int(word.removeprefix("Pitch_")) for word in text.split() if word.startswith("Pitch_")]


def test_performances(performances, monkeypatch):
    monkeypatch.setattr(music, "performance_split", lambda composer, title: "test" if title == "work 0" else "train")
    (row,) = load_corpus("maestro", "test", data_dir=performances)
    words = row["text"].split()
    assert [word for word in words if word.startswith(("Pitch", "Duration"))] == [
        *("Pitch_60", "Duration_0.4.8"),
        *("Pitch_64", "Duration_0.4.8"),
    ]
    # on the first and the second beat of a bar, the pedal too
    assert [word for word in words if word.startswith(("Bar", "Position"))] == ["Bar_None", "Position_0", "Position_8"]
    assert [word for word in words if word.startswith("Pedal")] == ["Pedal_0", "PedalOff_0"]
    assert [pitches(text) for text in load_corpus("maestro", "train", data_dir=performances)["text"]] == [
        [21, 64],
        [108, 64],
    ]


def test_transposed_performances(performances, monkeypatch):
    monkeypatch.setattr(music, "performance_split", lambda composer, title: "train")
    texts = load_corpus("maestro_transposed", "train", data_dir=performances)["text"]
    # A note beyond the piano's keys is dropped.
    expected = [[first, 64] for first in (60, 21, 108)]
    moved = [[pitch + by for pitch in notes] for notes in expected for by in range(-3, 4)]
    assert [pitches(text) for text in texts] == [[pitch for pitch in notes if 21 <= pitch <= 108] for notes in moved]
    # Only training is augmented.
    with pytest.raises(ValueError, match=r"split='test' of corpus 'maestro_transposed'.*Allowed there: 'train'"):
        load_corpus("maestro_transposed", "test", data_dir=performances)


def test_performance_words(performances):
    tokenizer = build_tokenizer("remi")
    # the paper's number
    assert len(tokenizer) == 328
    special = (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.mask_token)
    assert special == ("PAD_None", "BOS_None", "EOS_None", "MASK_None")
    text = load_corpus("maestro_transposed", "train", data_dir=performances)["text"][0]
    (ids,) = tokenize_documents(tokenizer, [text])
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.decode(ids[1:-1]) == text
    # the same numbers as miditok's own
    vocabulary = music.remi_tokenizer().vocab
    assert ids[1:-1] == [vocabulary[word] for word in text.split()]


def test_archive_is_downloaded(performances, monkeypatch):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    monkeypatch.setattr("datasets.DownloadManager.download_and_extract", lambda self, address: str(performances))
    monkeypatch.setattr(music, "performance_split", lambda composer, title: "test")
    assert len(load_corpus("maestro", "test")) == 3
    assert len(load_corpus("maestro", "test[1:]")) == 2


def test_bad_performances(performances, tmp_path):
    from symusic import Note, Score, Track

    with pytest.raises(ValueError, match=r"'maestro-v3\.0\.0/maestro-v3\.0\.0\.csv' matches no file"):
        load_corpus("maestro", "train", data_dir=tmp_path / "maestro-v3.0.0")
    root = tmp_path / "maestro-v3.0.0"
    score = Score(480)
    for program in (0, 1):
        score.tracks.append(Track(program=program))
        score.tracks[-1].notes.append(Note(0, 240, 60, 64))
    score.dump_midi(root / "2004" / "0.midi")
    splits, table = ("train", "validation", "test"), root / "maestro-v3.0.0.csv"
    with pytest.raises(ValueError, match=r"'2004/0\.midi' has 2 tracks"):
        [list(music.read_performances(table, split)) for split in splits]
    (root / "2004" / "0.midi").write_bytes(b"no MIDI")
    with pytest.raises(ValueError, match=r"'2004/0\.midi' cannot be read"):
        [list(music.read_performances(table, split)) for split in splits]


def test_performance_split_is_by_work():
    # Written down once: a change would move works between train and test under existing checkpoints.
    split = music.performance_split
    assert [split("Bach", f"Fugue {i}") for i in range(4)] == ["train", "train", "train", "train"]
    shares = [split("Bach", f"work {i}") for i in range(4000)]
    assert 0.88 < shares.count("train") / 4000 < 0.92
    assert 0.04 < shares.count("test") / 4000 < 0.06


def test_remi_needs_miditok(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "miditok", None)
    with pytest.raises(ImportError) as error:
        build_tokenizer("remi")
    assert "whatwhere[music]" in explain(error.value)
    assert torch.equal(torch.tensor(build_tokenizer("jsb")("60")["input_ids"]), torch.tensor([41]))

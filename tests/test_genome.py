"""Genomes: FASTA files, pieces, splits and 6-mers."""

import gzip
import random

import pytest

pytest.importorskip("datasets", reason='needs pip install "whatwhere[train]"')

from transformers import AutoTokenizer

from whatwhere.scripts.data import genome
from whatwhere.scripts.data.corpora import load_corpus
from whatwhere.scripts.data.pack import Packer
from whatwhere.scripts.data.source import SPLITS
from whatwhere.scripts.data.tokenize import build_tokenizer, tokenize_documents


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("6mer")


def by_hand(text):
    """6-mers from the left; single letters where fewer than six are left before an N or the end."""
    words = []
    while text:
        size = 6 if len(text) >= 6 and "N" not in text[:6] else 1
        words.append(text[:size])
        text = text[size:]
    return words


@pytest.mark.parametrize(
    "text", ["", "A", "ACGTA", "ACGTAC", "ACGTACG", "NACGTAC", "ACGNTACGTACGT", "NNNNNN", "ACGTACGTACGTNACGTACGTT"]
)
def test_words(tokenizer, text):
    words = by_hand(text)
    assert tokenizer.tokenize(text) == words
    (ids,) = tokenize_documents(tokenizer, [text])
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids) == text


def test_vocabulary(tokenizer, tmp_path):
    assert len(tokenizer) == 4107
    assert tokenizer.convert_ids_to_tokens(range(8)) == [*genome.SPECIAL_TOKENS, "AAAAAA", "AAAAAT"]
    assert tokenizer.convert_ids_to_tokens(range(4101, 4107)) == ["GGGGGG", *"ATCGN"]
    assert tokenizer.pad_token == "<pad>"
    assert tokenizer.eos_token is None
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("acgtac")) == [0]
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("ACGTACNA")["input_ids"] == tokenizer("ACGTACNA")["input_ids"]
    assert loaded.decode(loaded("ACGTACNA")["input_ids"]) == "ACGTACNA"


def write(file, sequences):
    with gzip.open(file, "wt") if file.suffix == ".gz" else file.open("w") as text:
        for header, sequence in sequences:
            text.write(f">{header}\n")
            for start in range(0, len(sequence), 70):
                text.write(sequence[start : start + 70] + "\n")
    return file


@pytest.mark.parametrize("name", ["a.fa", "a.fa.gz"])
def test_fasta(tmp_path, name):
    file = write(tmp_path / name, [("one, of two", "acgtn" * 40 + "RYK*-"), ("two", "TTTT"), ("empty", "")])
    assert list(genome.read_fasta(file)) == [
        ("one, of two", "ACGTN" * 40 + "NNNNN"),
        ("two", "TTTT"),
        ("empty", ""),
    ]


def test_fasta_cut_short(tmp_path):
    whole = gzip.compress(b">one\n" + bytes(random.Random(0).choices(b"ACGT", k=50_000)))
    (tmp_path / "a.fa.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"file 'a.fa.gz' cannot be read: .*end"):
        list(genome.read_fasta(tmp_path / "a.fa.gz"))


@pytest.mark.parametrize("text", ["ACGT\n", ""])
def test_no_fasta(tmp_path, text):
    (tmp_path / "a.fa").write_text(text)
    with pytest.raises(ValueError, match=r"'a\.fa' is not a FASTA file: it does not begin with '>'"):
        list(genome.read_fasta(tmp_path / "a.fa"))


def test_pieces(monkeypatch):
    monkeypatch.setattr(genome, "PIECE", 4)
    # neither what is N throughout nor the rest
    assert list(genome.pieces("ACGTNNNNNNNATT")) == ["ACGT", "NNNA"]


@pytest.mark.parametrize("style", ["UCSC", "NCBI"])
def test_splits_by_chromosome(tmp_path, monkeypatch, style):
    monkeypatch.setattr(genome, "PIECE", 2)
    names = [*map(str, range(1, 23)), "X", "Y"]
    if style == "UCSC":
        headers = [f"chr{name}" for name in names] + ["chrM", "chr1_KI270706v1_random", "chrUn_KI270302v1"]
    else:
        rest = "GRCh38.p14 Primary Assembly"
        headers = [f"NC_0000{i}.9 Homo sapiens chromosome {name}, {rest}" for i, name in enumerate(names)]
        headers += [f"NT_187361.1 Homo sapiens chromosome 1 unlocalized genomic scaffold, {rest}"]
    # Each its own pair of letters, as far as they go.
    pairs = [a + b for a in "ACGT" for b in "ACGT"] * 2
    (tmp_path / "genome").mkdir()
    file = write(tmp_path / "genome" / "hg38.fa.gz", list(zip(headers, pairs)))
    found = {
        split: list(load_corpus("genome", split, data_dir=tmp_path)["text"])
        for split in ("train", "validation", "test")
    }
    assert found == {"train": [*pairs[:20], *pairs[22:24]], "validation": [pairs[20]], "test": [pairs[21]]}
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    monkeypatch.setattr("datasets.DownloadManager.download_and_extract", lambda self, address: str(file))
    assert load_corpus("genome", "test")["text"] == found["test"]
    write(file, [("chr21", "AC"), ("chr1", "AC")])
    with pytest.raises(ValueError, match="has no chromosomes 22 for split 'test'"):
        load_corpus("genome", "test", data_dir=tmp_path)


def test_splits_by_position(tmp_path, monkeypatch):
    monkeypatch.setattr(genome, "PIECE", 2)
    letters = "".join("ACGT"[i % 4] + "ACGT"[i // 4 % 4] for i in range(40)) + "A"
    file = write(tmp_path / "a.fa", [("chr2", letters)])
    found = {split: "".join(genome.read_sequence(file, split)) for split in SPLITS}
    assert [len(text) for text in found.values()] == [72, 4, 4]
    assert "".join(found.values()) == letters[:80]


def test_real_genome(data_dir, tokenizer):
    rows = {
        split: load_corpus("genome_chr2", split, data_dir=data_dir)["text"] for split in ("train", "validation", "test")
    }
    # 388 complete pieces; the first contains only N
    assert {split: len(texts) for split, texts in rows.items()} == {"train": 348, "validation": 19, "test": 20}
    assert all(len(text) == 6000 for texts in rows.values() for text in texts)
    packer = Packer(tokenizer, 1000, "separate")
    blocks = [block["input_ids"] for block in packer({"text": text} for text in rows["test"])]
    assert [len(block) for block in blocks] == [1000] * 20
    assert "".join(tokenizer.batch_decode(blocks)) == "".join(rows["test"])

"""The corpora of the papers and of our own runs, by name: from local files where a data folder is given, else the Hub.

    load_corpus("pg19", "test", data_dir="data")     # local files, in the layout below
    load_corpus("pg19", "test")                      # from the Hub, unless WHATWHERE_DATA_DIR is set

`data.source: corpus` in a recipe takes its splits from them: `splits: {train: "wikipedia_en:train[:1000]", ...}`, the
split of a corpus and, in brackets, which of its documents. Every corpus gives rows with a document in `text`, whatever
it is made of: music and genomes are written as words of their own tokenizers.

A corpus says where its files lie under the data folder (`local`), and which split of which data set it is on the Hub.
Some exist in one place only; asking for the other is an error that says so.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from whatwhere.position_base import suggest

from .corpus import DATA_DIR_VARIABLE, SPLITS, choose, collect, in_memory, read_files, read_hub
from .genome import read_genome, read_sequence
from .music import MAESTRO_TABLE, read_chorales, read_performances

_CHOICE = re.compile(r"^(?P<corpus>\w+):(?P<split>\w+)(?P<slice>\[\d*:\d*\])?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the splits of a corpus are.

    Attributes:
        title: what it is, for cards and tables.
        licence: of the data.
        local: our split to the glob patterns of its files under the data folder; splits may be missing.
        hub: our split to (data set, its configuration, its split); splits may be missing. A data set may be the
            address of a file instead.
        text_field: the column of the Hub's data set that holds a document.
    """

    title: str
    licence: str
    local: Mapping[str, tuple[str, ...]]
    hub: Mapping[str, tuple[str, str | None, str]]
    text_field: str = "text"

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns the rows of a split that `local` has; overridden where files do not hold one document a row."""
        return read_files(root, split, self.local[split], streaming=streaming)

    def read_hub(self, split: str, *, streaming: bool) -> Any:
        """Returns the rows of a split that `hub` has; overridden where the Hub's rows are not documents."""
        dataset, config, theirs = self.hub[split]
        return read_hub(dataset, config, theirs, text_field=self.text_field, streaming=streaming)


class WikiText(Corpus):
    """WikiText, whose local files hold all articles in one text: cut before each title, as the Hub's rows are."""

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns an article a row."""
        rows = read_files(root, split, self.local[split], streaming=False)
        articles = [{"text": article} for row in rows for article in wikitext_articles(row["text"])]
        found = datasets.Dataset.from_list(articles)
        return found.to_iterable_dataset() if streaming else found


def wikitext_articles(text: str) -> Iterator[str]:
    """Yields the articles of a WikiText file, each from its title (` = Title = `, between empty lines) on."""
    starts = [match.start() for match in re.finditer(r"^ = [^=\n](?:.*[^=\n])? = $", text, re.MULTILINE)]
    starts = [start for start in starts if re.search(r"(^|\n) ?\n\Z", text[max(0, start - 3) : start]) or start < 3]
    for start, stop in zip(starts, [*starts[1:], len(text)]):
        yield text[start:stop]


class Chorales(Corpus):
    """Bach's chorales, all splits in one JSON file; `hub` names its address, which is on GitHub."""

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns a chorale a row."""
        file = one_file(root, split, self.local[split])
        return _rows(read_chorales(file, _THEIR_SPLITS[split]), streaming)

    def read_hub(self, split: str, *, streaming: bool) -> Any:
        """Returns a chorale a row."""
        address, _, theirs = self.hub[split]
        return _rows(read_chorales(datasets.DownloadManager().download(address), theirs), streaming)


class Performances(Corpus):
    """MAESTRO's MIDI files, in a folder as the official archive has it; `hub` names the archive's address."""

    transpose: bool = False

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns a performance a row."""
        table = one_file(root, split, self.local[split])
        return _rows(read_performances(table.parent, split, transpose=self.transpose), streaming)

    def read_hub(self, split: str, *, streaming: bool) -> Any:
        """Returns a performance a row."""
        folder = Path(datasets.DownloadManager().download_and_extract(self.hub[split][0]))
        return self.read_local(folder, split, streaming=streaming)


class TransposedPerformances(Performances):
    """The same in all transpositions."""

    transpose = True


class Genome(Corpus):
    """The human genome, all chromosomes in one FASTA file; `hub` names its address."""

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns a piece a row."""
        return _rows(read_genome(one_file(root, split, self.local[split]), split), streaming)

    def read_hub(self, split: str, *, streaming: bool) -> Any:
        """Returns a piece a row."""
        # Extracted, for a download has no name that would tell that it is gzipped.
        file = Path(datasets.DownloadManager().download_and_extract(self.hub[split][0]))
        return _rows(read_genome(file, split), streaming)


class GenomeSequence(Corpus):
    """One sequence, its splits one after the other."""

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns a piece a row."""
        return _rows(read_sequence(one_file(root, split, self.local[split]), split), streaming)


class Parquet(Corpus):
    """A data set of the Hub whose parquet files are named by an address, because its repository holds a script."""

    def read_hub(self, split: str, *, streaming: bool) -> Any:
        """Returns a document a row."""
        files, _, theirs = self.hub[split]
        return read_hub("parquet", None, theirs, text_field=self.text_field, streaming=streaming, data_files=files)


def one_file(root: Path, split: str, patterns: tuple[str, ...]) -> Path:
    """Returns the first file under `root` that matches one of the patterns; raises ValueError if there is none."""
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            return file
    raise ValueError(f"splits[{split!r}]={' or '.join(patterns)!r} matches no file in {str(root)!r}.")


def _rows(texts: Iterable[str], streaming: bool) -> Any:
    rows = in_memory(texts)
    return rows.to_iterable_dataset() if streaming else rows


_WIKITEXT = "EleutherAI/wikitext_document_level"

# A commit of a pull request by the data set's author: all of it as parquet. The main branch has the script, which
# `datasets` does not run any more.
_OPENWEBTEXT = (
    "hf://datasets/Skylion007/openwebtext@7577b918bd30b25df0b88bb718dc8a6c80cb619b/data/train-*-of-00080.parquet"
)
_MAESTRO = ("maestro-v3.0.0/" + MAESTRO_TABLE,)
_MAESTRO_ADDRESS = (
    "https://storage.googleapis.com/magentadata/datasets/maestro/v3.0.0/maestro-v3.0.0-midi.zip",
    None,
    "all",
)
# The file that `InstaDeepAI/human_reference_genome` reads.
_GENOME_ADDRESS = (
    "https://ftp.ncbi.nlm.nih.gov/genomes/all/GCF/000/001/405/GCF_000001405.40_GRCh38.p14/"
    "GCF_000001405.40_GRCh38.p14_genomic.fna.gz",
    None,
    "all",
)
_CHORALES = "jsb_chorales/Jsb16thSeparated.json"
_CHORALES_ADDRESS = (
    "https://raw.githubusercontent.com/czhuang/JSB-Chorales-dataset/9a7f733ddb4ed91f48da64ac7f0f621c34aadd4d/"
    "Jsb16thSeparated.json"
)
_THEIR_SPLITS = {"train": "train", "validation": "valid", "test": "test"}

CORPORA: dict[str, Corpus] = {
    "wikitext103": WikiText(
        title="WikiText-103 (raw)",
        licence="CC BY-SA 3.0, GFDL",
        local={"test": ("wikitext/wiki.test.raw",)},
        hub={split: (_WIKITEXT, "wikitext-103-raw-v1", split) for split in SPLITS},
        text_field="page",
    ),
    "wikitext103_v1": WikiText(
        title="WikiText-103 (word level, with <unk>)",
        licence="CC BY-SA 3.0, GFDL",
        local={
            "validation": ("wikitext/wikitext-103-v1.valid.txt",),
            "test": ("wikitext/wikitext-103-v1.test.txt",),
        },
        hub={split: (_WIKITEXT, "wikitext-103-v1", split) for split in SPLITS},
        text_field="page",
    ),
    "wikipedia_en": Corpus(
        title="English Wikipedia (local: an extract of 2018; Hub: the dump of November 2023)",
        licence="CC BY-SA 3.0, GFDL",
        local={"train": ("wikipedia_en/train-*.jsonl.gz",), "validation": ("wikipedia_en/valid.jsonl.gz",)},
        hub={
            "train": ("wikimedia/wikipedia", "20231101.en", "train[1000:]"),
            "validation": ("wikimedia/wikipedia", "20231101.en", "train[:1000]"),
        },
    ),
    "wikinews_en": Corpus(
        title="English Wikinews",
        licence="CC BY 2.5",
        local={"train": ("wikinews_en/train-*.jsonl.gz",), "validation": ("wikinews_en/valid.jsonl.gz",)},
        hub={},
    ),
    "pg19": Corpus(
        title="PG-19 (books of Project Gutenberg from before 1919)",
        licence="Apache-2.0; the books are in the public domain in the USA",
        local={"train": ("pg19/train/train-*.jsonl.gz",), "test": ("pg19/test/*.txt",)},
        hub={
            "train": ("emozilla/pg19", None, "train"),
            "validation": ("emozilla/pg19", None, "validation"),
            "test": ("emozilla/pg19-test", None, "test"),
        },
    ),
    "jsb_chorales": Chorales(
        title="JSB Chorales (four voices, 16th notes, split of Boulanger-Lewandowski et al. 2012)",
        licence="none stated; the music is in the public domain",
        local=dict.fromkeys(SPLITS, (_CHORALES,)),
        hub={split: (_CHORALES_ADDRESS, None, theirs) for split, theirs in _THEIR_SPLITS.items()},
    ),
    "maestro": Performances(
        title="MAESTRO v3.0.0 (MIDI, REMI words, our split of 90/5/5 by work)",
        licence="CC BY-NC-SA 4.0",
        local=dict.fromkeys(SPLITS, _MAESTRO),
        hub=dict.fromkeys(SPLITS, _MAESTRO_ADDRESS),
    ),
    "maestro_transposed": TransposedPerformances(
        title="MAESTRO v3.0.0 (MIDI, REMI words), each performance moved by -3 to +3 semitones",
        licence="CC BY-NC-SA 4.0",
        local={"train": _MAESTRO},
        hub={"train": _MAESTRO_ADDRESS},
    ),
    "genome": Genome(
        title="Human reference genome GRCh38 (pieces of 6,000 nucleotides)",
        licence="no restrictions",
        local=dict.fromkeys(SPLITS, ("genome/hg38.fa.gz", "genome/GCF_000001405.40_GRCh38.p14_genomic.fna.gz")),
        hub=dict.fromkeys(SPLITS, _GENOME_ADDRESS),
    ),
    "genome_chr2": GenomeSequence(
        title="Human reference genome GRCh38, the first 2,333,275 bases of chromosome 2",
        licence="no restrictions",
        local=dict.fromkeys(SPLITS, ("genome/hg38_chr2_1-2333275.fa.gz",)),
        hub={},
    ),
    "openwebtext": Parquet(
        title="OpenWebText (validation: the first 4,007 documents, 0.05 %)",
        licence="CC0-1.0 (of the collection)",
        local={},
        hub={
            "train": (_OPENWEBTEXT, None, "train[4007:]"),
            "validation": (_OPENWEBTEXT, None, "train[:4007]"),
        },
    ),
}


def parse_choice(choice: str) -> tuple[str, str, str]:
    """Returns corpus, split and slice (`[1:2]` or nothing) of a text such as `pg19:test[:10]`.

    Raises:
        ValueError: the text is not of that form, or there is no such corpus or split.
    """
    match = _CHOICE.match(choice) if isinstance(choice, str) else None
    if match is None:
        raise ValueError(
            f"corpus={choice!r} is not valid: it must be like 'pg19:test' or 'pg19:train[:100]'. Corpora: "
            f"{', '.join(sorted(CORPORA))}."
        )
    if match["corpus"] not in CORPORA:
        raise ValueError(f"corpus={match['corpus']!r} is not valid. {suggest(match['corpus'], CORPORA)}")
    start, _, stop = (match["slice"] or "").strip("[]").partition(":")
    if start and stop and int(start) >= int(stop):
        raise ValueError(f"slice={match['slice']!r} is not valid: it holds no document.")
    if match["split"] not in SPLITS:
        raise ValueError(f"split={match['split']!r} is not valid. {suggest(match['split'], SPLITS)}")
    return match["corpus"], match["split"], match["slice"] or ""


def load_corpus(
    name: str, split: str, *, data_dir: str | os.PathLike[str] | None = None, streaming: bool = False
) -> Any:
    """Loads a split of a corpus.

    Args:
        name: a key of `CORPORA`.
        split: `train`, `validation` or `test`, with the documents wanted in brackets if not all: `test[:10]`.
        data_dir: a folder of local files; by default the environment variable WHATWHERE_DATA_DIR. Without either, the
            corpus comes from the Hub.
        streaming: read lazily instead of downloading or copying first.

    Returns:
        a `datasets.Dataset` (`IterableDataset` when streaming) with a document in `text`.

    Raises:
        ValueError: there is no such corpus or split, or not where it is looked for.
        ConnectionError: the Hub does not answer.
    """
    name, split, chosen = parse_choice(f"{name}:{split}")
    corpus = CORPORA[name]
    data_dir = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    here, there = (corpus.local, corpus.hub) if data_dir else (corpus.hub, corpus.local)
    if split not in here:
        place = f"the data folder {str(data_dir)!r}" if data_dir else "the Hub"
        hint = ""
        if split in there:
            hint = (
                f" The Hub has it: leave out --data-dir and {DATA_DIR_VARIABLE}."
                if data_dir
                else f" Local files can hold it: give --data-dir, or set {DATA_DIR_VARIABLE}."
            )
        allowed = f"Allowed there: {', '.join(map(repr, here))}." if here else "It has no split there."
        raise ValueError(f"split={split!r} of corpus {name!r} is not known in {place}. {allowed}{hint}")
    if data_dir:
        root = Path(data_dir).expanduser()
        if not root.is_dir():
            raise ValueError(f"data_dir={str(data_dir)!r} is not valid: it must be an existing folder.")
        return choose(corpus.read_local(root, split, streaming=streaming), chosen)
    # Only what is asked for is downloaded.
    lazily = not streaming and bool(chosen) and not chosen.endswith(":]")
    try:
        rows = choose(corpus.read_hub(split, streaming=streaming or lazily), chosen)
        return collect(rows) if lazily else rows
    except ConnectionError as error:
        local = f" Local files can hold it: give --data-dir, or set {DATA_DIR_VARIABLE}." if split in there else ""
        raise ConnectionError(f"corpus {name!r} comes from the Hub, which did not answer: {error}.{local}") from error

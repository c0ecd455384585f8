"""Named corpora of the papers and of our own runs, from local files if a data folder is given, else from the Hub.

All corpora have rows with a document in `text`; music and genomes are written as words for their tokenizers. Some are
available in one place only.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import yaml

from whatwhere.position_base import suggest

from .files import find_all, read_found
from .folder import DATA_DIR_VARIABLE, data_folder
from .genome import read_genome, read_sequence
from .music import read_chorales, read_performances
from .rows import SPLITS, check_text, choose, on_disk, read_hub

_CHOICE = re.compile(r"^(?P<corpus>\w+):(?P<split>\w+)(?P<slice>\[\d*:\d*\])?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The places of a corpus's splits; see `corpora.yaml` for the fields."""

    title: str
    licence: str
    local: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    hub: Mapping[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
    text_field: str = "text"
    reader: str = "documents"

    def read_local(self, root: Path, split: str, *, streaming: bool) -> Any:
        """Returns the rows of a split in `local`."""
        if self.reader not in READERS:
            option, patterns = f"splits[{split!r}]", self.local[split]
            found = find_all(option, patterns, root)
            return read_found(found, f"{option}={patterns!r}", text_field="text", streaming=streaming)
        return on_disk(READERS[self.reader](one_file(root, split, self.local[split]), split))

    def read_hub(self, split: str, chosen: str, *, streaming: bool) -> Any:
        """Returns the rows of a slice of a split in `hub`."""
        place, *rest = self.hub[split]
        assert place is not None, "every split has a place"
        if not rest:
            # Extracted, because the name of a download has no file ending.
            found = Path(datasets.DownloadManager().download_and_extract(place))
            if found.is_dir():
                return choose(self.read_local(found, split, streaming=streaming), chosen)
            return choose(on_disk(READERS[self.reader](found, split)), chosen)
        config, theirs = rest
        dataset, files = ("parquet", place) if self.reader == "parquet" else (place, None)
        form: dict[str, Any] = {"text_field": self.text_field, "streaming": streaming, "data_files": files}
        return read_hub(dataset, config, str(theirs), chosen, **form)


_TITLE = re.compile(r" = [^=\n](?:.*[^=\n])? = \n?")


def wikitext_articles(file: Path, split: str) -> Iterator[str]:
    """Yields the articles of a WikiText file, each starting with its title (` = Title = `, after an empty line)."""
    article: list[str] | None = None
    # A file may begin with its first title.
    before = ""
    with file.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if before in ("", "\n", " \n") and _TITLE.fullmatch(line):
                if article is not None:
                    yield "".join(article)
                article = []
            if article is not None:
                article.append(line)
            before = line
    if article is not None:
        yield "".join(article)


# Readers of files with other formats than one document per row: functions of the file and the split.
READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "wikitext": wikitext_articles,
    "chorales": lambda file, split: read_chorales(file, "valid" if split == "validation" else split),
    "performances": read_performances,
    "transposed_performances": lambda file, split: read_performances(file, split, transpose=True),
    "genome": read_genome,
    "sequence": read_sequence,
}


def one_file(root: Path, split: str, patterns: tuple[str, ...]) -> Path:
    """Returns the first file under `root` that matches one of the patterns; raises ValueError if there is none."""
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            return file
    raise ValueError(f"splits[{split!r}]={' or '.join(patterns)!r} matches no file in {str(root)!r}.")


def _load(entry: dict[str, Any]) -> Corpus:
    places = {
        kind: {
            split: tuple(split if part == "{split}" else part for part in parts)
            for splits, parts in entry.get(kind, {}).items()
            for split in splits.split(", ")
        }
        for kind in ("local", "hub")
    }
    return Corpus(**{**entry, **places})


_FILE = Path(__file__).parent / "corpora.yaml"
CORPORA: dict[str, Corpus] = {
    name: _load(entry) for name, entry in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}


def parse_choice(choice: str) -> tuple[str, str, str]:
    """Returns corpus, split and slice (`[1:2]` or empty) of a text such as `pg19:test[:10]`."""
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
        raise ValueError(f"slice={match['slice']!r} is not valid: it is empty.")
    if match["split"] not in SPLITS:
        raise ValueError(f"split={match['split']!r} is not valid. {suggest(match['split'], SPLITS)}")
    return match["corpus"], match["split"], match["slice"] or ""


def load_corpus(
    name: str, split: str, *, data_dir: str | os.PathLike[str] | None = None, streaming: bool = False
) -> Any:
    """Returns a table or stream of a split (`test`, or `test[:10]`) of a corpus, with documents in `text`.

    It is read from a folder of local files (by default WHATWHERE_DATA_DIR), or without one from the Hub.
    """
    name, split, chosen = parse_choice(f"{name}:{split}")
    corpus = CORPORA[name]
    root = data_folder(data_dir)
    here, there = (corpus.local, corpus.hub) if root else (corpus.hub, corpus.local)
    if split not in here:
        place = f"the data folder {str(root)!r}" if root else "the Hub"
        other = "on the Hub: leave out --data-dir and" if root else "in local files: give --data-dir or"
        hint = f" It is {other} {DATA_DIR_VARIABLE}." if split in there else ""
        allowed = ", ".join(map(repr, here)) or "none"
        raise ValueError(f"split={split!r} of corpus {name!r} is not in {place}. Allowed there: {allowed}.{hint}")
    try:
        if root:
            rows = choose(corpus.read_local(root, split, streaming=streaming), chosen)
        else:
            rows = corpus.read_hub(split, chosen, streaming=streaming)
        check_text(rows, f"corpus {f'{name}:{split}{chosen}'!r}")
    except ConnectionError as error:
        local = f" For local files, give --data-dir, or set {DATA_DIR_VARIABLE}." if split in there else ""
        raise ConnectionError(f"corpus {name!r} is read from the Hub, which did not answer: {error}.{local}") from error
    return rows.to_iterable_dataset() if streaming and isinstance(rows, datasets.Dataset) else rows

"""Genomes as documents of 6-mers, as the Nucleotide Transformer (Dalla-Torre et al. 2024) prepares them.

A FASTA file becomes upper case, with N for every letter but A, C, G and T, and is cut into pieces of 6,000 nucleotides,
which are 1,000 tokens. The vocabulary has 4,107 words: six special tokens, the 4,096 words of six nucleotides, and the
single letters, of which what holds an N, or is left at the end, is made.

Of the human genome, chromosome 21 is for validation, 22 for testing, the others (X and Y too) for training: the split
of the data set `InstaDeepAI/human_reference_genome`. What differs from it: pieces do not overlap (there, each is 200
nucleotides longer, and training starts at a random one of them); pieces that are N throughout are left out; there is no
<cls> token before a piece.
"""

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path

PIECE = 6000
SPECIAL_TOKENS = ["<unk>", "<pad>", "<mask>", "<cls>", "<eos>", "<bos>"]
GENOME_WORDS = [*SPECIAL_TOKENS, *map("".join, product("ATCG", repeat=6)), *"ATCGN"]
# What a tokenizer cuts a text by: from the left, six letters if none of them is an N, else one.
GENOME_PATTERN = "[ACGT]{6}|[ACGTN]"

_CHROMOSOMES = {
    "train": [*map(str, range(1, 21)), "X", "Y"],
    "validation": ["21"],
    "test": ["22"],
}
# Where in a single sequence a split lies.
_SHARES = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}
# `>chr21` (UCSC) and `>NC_000021.9 Homo sapiens chromosome 21, GRCh38.p14 Primary Assembly` (NCBI); no other sequences,
# such as unplaced ones, match.
_NAME = re.compile(r"^(?:chr(\w{1,2})|NC_\S+ Homo sapiens chromosome (\w+), \S+ Primary Assembly)$")
_LETTERS = dict.fromkeys(range(128), "N") | {ord(c): c.upper() for c in "ACGTacgt"}


def read_genome(file: str | os.PathLike[str], split: str) -> Iterator[str]:
    """Yields the pieces of a split of the human genome.

    Args:
        file: a FASTA file of all chromosomes, of UCSC or NCBI; gzipped if its name ends with `.gz`.
        split: `train`, `validation` or `test`.

    Raises:
        ValueError: the file is no FASTA file, or lacks a chromosome of the split.
    """
    missing = list(_CHROMOSOMES[split])
    for header, sequence in read_fasta(file, lambda header: _chromosome(header) in _CHROMOSOMES[split]):
        missing.remove(str(_chromosome(header)))
        yield from pieces(sequence)
    if missing:
        raise ValueError(f"file {Path(file).name!r} lacks the chromosomes {', '.join(missing)} of split {split!r}.")


def read_sequence(file: str | os.PathLike[str], split: str) -> Iterator[str]:
    """Yields the pieces of a split of a FASTA file's first sequence: its first 90 % are for training, the next 5 % for
    validation, the last 5 % for testing, in whole pieces.

    Raises:
        ValueError: the file is no FASTA file.
    """
    _, sequence = next(read_fasta(file))
    count = len(sequence) // PIECE
    start, stop = (int(share * count) * PIECE for share in _SHARES[split])
    yield from pieces(sequence[start:stop])


def pieces(sequence: str) -> Iterator[str]:
    """Yields the whole pieces of a sequence that are not N throughout."""
    for start in range(0, len(sequence) - PIECE + 1, PIECE):
        piece = sequence[start : start + PIECE]
        if piece.strip("N"):
            yield piece


def read_fasta(
    file: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda header: True
) -> Iterator[tuple[str, str]]:
    """Yields (header, sequence) of a FASTA file, the sequence in letters A, C, G, T and N.

    Args:
        file: its path; gzipped if the name ends with `.gz`.
        wanted: says of a header, without `>`, whether its sequence is yielded.

    Raises:
        ValueError: the file does not begin with a header.
    """
    path = Path(file)
    header: str | None = None
    lines: list[str] = []
    with gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii") as text:
        for line in _whole(text, path):
            line = line.strip()
            if line.startswith(">"):
                if header is not None and wanted(header):
                    yield header, "".join(lines).translate(_LETTERS)
                header, lines = line[1:], []
            elif header is None:
                raise ValueError(f"file {path.name!r} is no FASTA file: it begins with {line[:20]!r}, not with '>'.")
            elif wanted(header):
                lines.append(line)
    if header is None:
        raise ValueError(f"file {path.name!r} is no FASTA file: it is empty.")
    if wanted(header):
        yield header, "".join(lines).translate(_LETTERS)


def _whole(lines: Iterable[str], path: Path) -> Iterator[str]:
    try:
        yield from lines
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"file {path.name!r} cannot be read: {error}") from error


def _chromosome(header: str) -> str | None:
    match = _NAME.match(header)
    return (match[1] or match[2]) if match else None

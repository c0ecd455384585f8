"""Genomes as documents of 6-mers, as the Nucleotide Transformer (Dalla-Torre et al. 2024) prepares them.

A FASTA file is converted to upper case, letters other than A, C, G and T become N, and the sequence is cut into pieces
of 6,000 nucleotides (1,000 tokens). The vocabulary has 4,107 words: six special tokens, the 4,096 words of six
nucleotides, and the single letters A, C, G, T and N, for six letters with an N and for the remainder of a piece.

The split of the human genome is that of `InstaDeepAI/human_reference_genome`: chromosome 21 for validation, 22 for
testing, all others including X and Y for training. Differences: pieces do not overlap (there, each is 200 nucleotides
longer, and training starts at a random offset), pieces that only contain N are left out, and pieces have no <cls>
token.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

PIECE = 6000
SPECIAL_TOKENS = ["<unk>", "<pad>", "<mask>", "<cls>", "<eos>", "<bos>"]
GENOME_WORDS = [*SPECIAL_TOKENS, *map("".join, product("ATCG", repeat=6)), *"ATCGN"]
# The pattern of tokens, from the left: six letters without N, else a single letter.
GENOME_PATTERN = "[ACGT]{6}|[ACGTN]"

_CHROMOSOMES = {
    "train": [*map(str, range(1, 21)), "X", "Y"],
    "validation": ["21"],
    "test": ["22"],
}
# The range of each split in a single sequence, as shares of its length.
_SHARES = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}
# Matches `>chr21` (UCSC) and `>NC_000021.9 Homo sapiens chromosome 21, GRCh38.p14 Primary Assembly` (NCBI), but no
# other sequences, such as unplaced ones.
_NAME = re.compile(r"^(?:chr(\w{1,2})|NC_\S+ Homo sapiens chromosome (\w+), \S+ Primary Assembly)$")
_LETTERS = dict.fromkeys(range(128), "N") | {ord(c): c.upper() for c in "ACGTacgt"}


def read_genome(file: str | os.PathLike[str], split: str) -> Iterator[str]:
    """Yields the pieces of a split of the human genome, from a FASTA file of all chromosomes, of UCSC or NCBI."""
    missing = list(_CHROMOSOMES[split])
    for header, sequence in read_fasta(file):
        match = _NAME.match(header)
        if match and (match[1] or match[2]) in missing:
            missing.remove(match[1] or match[2])
            yield from pieces(sequence)
    if missing:
        raise ValueError(f"file {Path(file).name!r} has no chromosomes {', '.join(missing)} for split {split!r}.")


def read_sequence(file: str | os.PathLike[str], split: str) -> Iterator[str]:
    """Yields the pieces of a split of a FASTA file's first sequence: in order, 90 % train, 5 % validation, 5 % test."""
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


def read_fasta(file: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Yields (header without `>`, sequence of A, C, G, T and N) of a FASTA file, gzipped if it ends with `.gz`."""
    path = Path(file)
    header: str | None = None
    lines: list[str] = []
    try:
        with gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii") as text:
            for line in map(str.strip, text):
                if line.startswith(">"):
                    if header is not None:
                        yield header, "".join(lines).translate(_LETTERS)
                    header, lines = line[1:], []
                elif header is None:
                    break
                else:
                    lines.append(line)
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"file {path.name!r} cannot be read: {error}") from error
    if header is None:
        raise ValueError(f"file {path.name!r} is not a FASTA file: it does not begin with '>'.")
    yield header, "".join(lines).translate(_LETTERS)

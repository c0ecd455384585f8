"""Music as documents of words: Bach's chorales, and the piano performances of MAESTRO.

Chorales (PoPE paper, Appendix B.1) have four voices in steps of a 16th note. A document lists the MIDI pitches step by
step, from soprano to bass: `74 70 65 58 74 70 65 58 ...`, with `-1` for silence. Held and repeated notes are written
alike. The vocabulary has 90 words, as in the paper: the 88 keys of a piano, silence, and padding.

MAESTRO v3.0.0 (the same appendix) has MIDI files, which `miditok` converts to REMI words (Huang and Yang 2020):
`Bar_None TimeSig_4/4 Position_0 Tempo_121.29 Pitch_60 Velocity_63 Duration_1.0.8 ...`. With 88 pitches, 32 velocities,
tempos, time signatures, the sustain pedal, PAD, BOS, EOS and MASK, the vocabulary has 328 words, as in the paper. The
paper does not state the settings, and other settings give 328 words, too. Each performance begins with BOS and ends
with EOS.

The paper does not state its split of MAESTRO. Ours has 90 % of the works for training, 5 % for validation and 5 % for
testing, by a hash of composer and title, so that no work is in two splits (the official split is 75/11/14). As
augmentation, each training performance is transposed by -3 to +3 semitones; an epoch has all seven versions once,
whereas the paper samples them uniformly.
"""

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# MIDI pitches of the lowest and highest piano key.
_LOWEST, _HIGHEST = 21, 108

SILENCE = -1
TRANSPOSITIONS = range(-3, 4)

CHORALE_WORDS = ["<pad>", str(SILENCE), *map(str, range(_LOWEST, _HIGHEST + 1))]


def read_chorales(file: str | os.PathLike[str], split: str) -> Iterator[str]:
    """Yields the chorales of a split as documents of words.

    The file has for `train`, `valid` and `test` a list of chorales, each a list of steps of four pitches.
    """
    split = "valid" if split == "validation" else split
    try:
        chorales = json.loads(Path(file).read_text(encoding="utf-8"))[split]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"file {Path(file).name!r} is not a JSON object with a list of chorales for {split!r}: {error!r}"
        ) from error
    for chorale in chorales:
        yield " ".join(str(int(pitch)) for pitches in chorale for pitch in pitches)


def remi_tokenizer() -> Any:
    """Returns the `miditok.REMI` tokenizer of performances."""
    from miditok import REMI, TokenizerConfig

    return REMI(
        TokenizerConfig(
            # Both ends are included.
            pitch_range=(_LOWEST, _HIGHEST),
            num_velocities=32,
            special_tokens=["PAD", "BOS", "EOS", "MASK"],
            use_tempos=True,
            use_time_signatures=True,
            use_sustain_pedals=True,
            use_pitchdrum_tokens=False,
        )
    )


def remi_words() -> list[str]:
    """Returns the words of performances, ordered by their ids."""
    vocabulary = remi_tokenizer().vocab
    return sorted(vocabulary, key=vocabulary.get)


def read_performances(table: Path, split: str, *, transpose: bool = False) -> Iterator[str]:
    """Yields the performances of our split of MAESTRO as documents of words.

    The table is in the folder of the files. With `transpose`, each performance is yielded in all seven transpositions,
    without the notes that are then outside the piano's range.
    """
    tokenizer = remi_tokenizer()
    from symusic import Score

    with table.open(encoding="utf-8", newline="") as file:
        works = list(csv.DictReader(file))
    for work in works:
        if performance_split(work["canonical_composer"], work["canonical_title"]) != split:
            continue
        name = work["midi_filename"]
        try:
            score: Any = Score(table.parent / name)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"performance {name!r} cannot be read: {error}") from error
        for semitones in TRANSPOSITIONS if transpose else (0,):
            tracks = tokenizer(score.shift_pitch(semitones))
            if len(tracks) != 1:
                raise ValueError(f"performance {name!r} has {len(tracks)} tracks with notes: it must have 1.")
            yield " ".join(tracks[0].tokens)


def performance_split(composer: str, title: str) -> str:
    """Returns the split of a work."""
    percent = int.from_bytes(hashlib.sha256(f"{composer}\n{title}".encode()).digest()[:8], "big") % 100
    return "train" if percent < 90 else "validation" if percent < 95 else "test"

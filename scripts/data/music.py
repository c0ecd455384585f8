"""Music as documents of words: Bach's chorales.

Chorales (PoPE paper, Appendix B.1): four voices in steps of a 16th note. A document goes through them step by step, and
in each step through the voices from soprano to bass: `74 70 65 58 74 70 65 58 ...`, MIDI pitches, `-1` for silence.
Held and repeated notes are not told apart. The vocabulary has 90 words, as in the paper: the 88 keys of a piano,
silence, and padding.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

# MIDI pitches of a piano's lowest and highest key.
_LOWEST, _HIGHEST = 21, 108
_VOICES = 4

SILENCE = -1
CHORALE_WORDS = ["<pad>", str(SILENCE), *map(str, range(_LOWEST, _HIGHEST + 1))]


def read_chorales(file: str | os.PathLike[str], split: str) -> Iterator[str]:
    """Yields the chorales of a split as documents of words.

    Args:
        file: `Jsb16thSeparated.json`: a split to its chorales, a chorale being steps of four pitches.
        split: `train`, `valid` or `test`, as in the file.

    Raises:
        ValueError: the file is not of that form, or a pitch is no key of a piano.
    """
    try:
        chorales = json.loads(Path(file).read_text(encoding="utf-8"))[split]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"file {Path(file).name!r} is no JSON mapping of splits with {split!r} to chorales: {error!r}"
        ) from error
    for number, chorale in enumerate(chorales):
        for step, pitches in enumerate(chorale):
            if len(pitches) != _VOICES or not all(
                pitch == SILENCE or pitch in range(_LOWEST, _HIGHEST + 1) for pitch in pitches
            ):
                raise ValueError(
                    f"chorale {number} of {split!r} has {pitches!r} at step {step}: it must be {_VOICES} pitches from "
                    f"{_LOWEST} to {_HIGHEST}, or {SILENCE} for silence."
                )
        yield " ".join(str(int(pitch)) for pitches in chorale for pitch in pitches)

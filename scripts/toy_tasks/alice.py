"""Counting a word in the last sentence (CoPE paper, Sections 3.2 and A, Tables 1 and 6): a probe for any model.

A prompt consists of sentences and a question, as in the paper:

    Alice was beginning to get very tired of sitting by her sister on the bank, ... "without pictures or conversations?"

    So she was considering in her own mind ...

    Now, tell me how many times word "Alice" is mentioned in the last sentence.

A model that does not separate the last sentence from those before it counts the word in all of them. The probe needs
no training: `whatwhere task --task alice CHECKPOINT` compares the likelihoods of the answers 0 to 5.
"""

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from ..checks import Count
from .common import SampleConfig

LARGEST_ANSWER = 5
# From the first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865); the first two are the paper's.
SENTENCES = tuple((Path(__file__).parent / "alice.txt").read_text(encoding="utf-8").splitlines())
PAPER_WORDS = ("Alice", "book")
# Places of a word: in the last sentence, in one before it, in both, or in neither.
PLACES = ("last", "earlier", "both", "none")


class Question(NamedTuple):
    """Sentences, a word, its place (one of `PLACES`), and its count in the last sentence."""

    sentences: tuple[str, ...]
    word: str
    place: str
    number: int


def _counts(sentence: str) -> collections.Counter[str]:
    """Returns the count of each word in a sentence, without words that are, or can be mistaken for, parts of others."""
    words = collections.Counter(re.findall(r"[A-Za-z]+", sentence))
    parts = {
        part for compound in re.findall(r"[A-Za-z]+(?:[-'][A-Za-z]+)+", sentence) for part in re.split("[-']", compound)
    }
    cases = collections.Counter(word.lower() for word in words)
    return collections.Counter(
        {word: count for word, count in words.items() if word not in parts and cases[word.lower()] == 1}
    )


class AliceConfig(SampleConfig):
    """Questions about a word in the last sentence, in one before it, in both or in neither, equally often.

    Attributes:
        as_in_paper: alternate the two questions of the paper; `sentences` must be 2.
    """

    test_samples: Count = 200
    sentences: Annotated[int, Field(ge=2, le=len(SENTENCES) - 1)] = 2
    as_in_paper: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.as_in_paper and self.sentences != 2:
            yield "sentences", "with as_in_paper it must be 2"

    def test_sets(self) -> dict[str, dict[str, Any]]:
        return {
            "paper": {"as_in_paper": True, "test_samples": len(PAPER_WORDS)},
            **{f"sentences_{count}": {"sentences": count} for count in (2, 3, 5)},
        }

    def draw(self, random: np.random.Generator) -> Question:
        place = PLACES[int(random.integers(len(PLACES)))]
        while True:
            order = random.permutation(len(SENTENCES)).tolist()
            chosen = tuple(SENTENCES[index] for index in order[: self.sentences])
            last, earlier = _counts(chosen[-1]), sum((_counts(text) for text in chosen[:-1]), collections.Counter())
            others = sum((_counts(SENTENCES[index]) for index in order[self.sentences :]), collections.Counter())
            candidates = {
                "last": set(last) - set(earlier),
                "earlier": set(earlier) - set(last),
                "both": set(last) & set(earlier),
                "none": set(others) - set(last) - set(earlier),
            }[place]
            text = " ".join(chosen).lower()
            fitting = sorted(
                word
                for word in candidates
                # Other forms of the word, or words that contain it, would make the count ambiguous.
                if len(re.findall(rf"\b{word.lower()}\b", text)) == last[word] + earlier[word]
                and last[word] <= LARGEST_ANSWER
            )
            if fitting:
                word = fitting[int(random.integers(len(fitting)))]
                return Question(chosen, word, place, last[word])

    def sample(self, split: str, index: int) -> Question:
        if not self.as_in_paper:
            return super().sample(split, index)
        return Question(SENTENCES[:2], PAPER_WORDS[index % len(PAPER_WORDS)], "earlier", 0)

    def row(self, sample: Question) -> dict[str, Any]:
        """Returns `prompt`, `answer` (a number), `word` and `place` (one of `PLACES`)."""
        question = f'Now, tell me how many times word "{sample.word}" is mentioned in the last sentence.'
        return {
            "prompt": "\n\n".join([*sample.sentences, question]),
            "answer": str(sample.number),
            "word": sample.word,
            "place": sample.place,
        }

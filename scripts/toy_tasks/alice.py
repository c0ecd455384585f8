"""How often a word is in the last sentence (CoPE paper, Sections 3.2 and A, Tables 1 and 6): a probe for any model.

A prompt is some sentences and a question, as in the paper:

    Alice was beginning to get very tired of sitting by her sister on the bank, ... "without pictures or conversations?"

    So she was considering in her own mind ...

    Now, tell me how many times word "Alice" is mentioned in the last sentence.

A model that cannot tell the last sentence from the ones before it counts the words of both. Nothing is trained on
this: `whatwhere task --task alice CHECKPOINT` compares the likelihoods of the answers 0 to 5
in any causal language model.
"""

import collections
import dataclasses
import re
from typing import Annotated, Any, NamedTuple

import datasets
import numpy as np
from pydantic import Field

from ..checks import Count
from .common import SampleConfig, TaskBuilder

LARGEST_ANSWER = 5
# From the first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865); the first two are the paper's.
SENTENCES = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations "
    'in it, "and what is the use of a book," thought Alice "without pictures or conversations?"',
    "So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and "
    "stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking "
    "the daisies, when suddenly a White Rabbit with pink eyes ran close by her.",
    "In another moment down went Alice after it, never once considering how in the world she was to get out again.",
    "The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly "
    "that Alice had not a moment to think about stopping herself before she found herself falling down a very "
    "deep well.",
    "Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look "
    "about her and to wonder what was going to happen next.",
    "First, she tried to look down and make out what she was coming to, but it was too dark to see anything; "
    "then she looked at the sides of the well, and noticed that they were filled with cupboards and "
    "book-shelves; here and there she saw maps and pictures hung upon pegs.",
    "She took down a jar from one of the shelves as she passed; it was labelled ORANGE MARMALADE, but to her "
    "great disappointment it was empty: she did not like to drop the jar for fear of killing somebody "
    "underneath, so managed to put it into one of the cupboards as she fell past it.",
    "Alice was not a bit hurt, and she jumped up on to her feet in a moment: she looked up, but it was all dark "
    "overhead; before her was another long passage, and the White Rabbit was still in sight, hurrying down it.",
    "There were doors all round the hall, but they were all locked; and when Alice had been all the way down one "
    "side and up the other, trying every door, she walked sadly down the middle, wondering how she was ever to "
    "get out again.",
)
PAPER_WORDS = ("Alice", "book")
# Where a word is: in the last sentence, in one before it, in both, or in neither.
PLACES = ("last", "earlier", "both", "none")


class Question(NamedTuple):
    """Some sentences, a word, where it is (one of `PLACES`), and how often it is in the last sentence."""

    sentences: tuple[str, ...]
    word: str
    place: str
    number: int


def _counts(sentence: str) -> collections.Counter[str]:
    """Returns how often each word is in a sentence, without words that are, or may be taken for, parts of others."""
    words = collections.Counter(re.findall(r"[A-Za-z]+", sentence))
    parts = {
        part for compound in re.findall(r"[A-Za-z]+(?:[-'][A-Za-z]+)+", sentence) for part in re.split("[-']", compound)
    }
    cases = collections.Counter(word.lower() for word in words)
    return collections.Counter(
        {word: count for word, count in words.items() if word not in parts and cases[word.lower()] == 1}
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class AliceConfig(SampleConfig):
    """Questions about a word of the last sentence, of one before it, of both or of none, equally often.

    Args:
        sentences: the number of sentences, all different.
        as_in_paper: the two questions of the paper in turn, for which `sentences` must be 2.
    """

    test_samples: Count = 200
    sentences: Annotated[int, Field(ge=2, le=len(SENTENCES) - 1)] = 2
    as_in_paper: bool = False

    def validate(self) -> None:
        if self.as_in_paper and self.sentences != 2:
            raise ValueError(f"sentences={self.sentences!r} is not valid with as_in_paper=True: it must be 2.")

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
                # In another form, or as a part of another word, it would be a matter of opinion.
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
        """Returns `prompt`, `answer` (a number), and the `word` with the `place` where it is (one of `PLACES`)."""
        question = f'Now, tell me how many times word "{sample.word}" is mentioned in the last sentence.'
        return {
            "prompt": "\n\n".join([*sample.sentences, question]),
            "answer": str(sample.number),
            "word": sample.word,
            "place": sample.place,
        }

    def features(self) -> dict[str, Any]:
        return dict.fromkeys(("prompt", "answer", "word", "place"), datasets.Value("string"))


class Alice(TaskBuilder):
    """The two questions of the paper, and drawn ones about 2, 3 and 5 sentences."""

    BUILDER_CONFIG_CLASS = AliceConfig
    BUILDER_CONFIGS = [
        AliceConfig(name=name, version=TaskBuilder.VERSION, **changes)
        for name, changes in AliceConfig().test_sets().items()
    ]
    DEFAULT_CONFIG_NAME = "sentences_2"


def solve(text: str, config: AliceConfig) -> str:
    """Returns the answer to a prompt."""
    *_, sentence, question = text.split("\n\n")
    word = question.split('"')[1]
    letters = "".join(character if character.isalpha() else " " for character in sentence)
    return str(letters.split().count(word))

"""Solvers of the toy tasks: functions of the text up to an answer and the configuration; they return the answer."""

import itertools
import re


def alice(text, config):
    """Returns the answer to a prompt."""
    *_, sentence, question = text.split("\n\n")
    word = question.split('"')[1]
    letters = "".join(character if character.isalpha() else " " for character in sentence)
    return str(letters.split().count(word))


def counting(text, config):
    """Returns the symbol that follows `text`, which ends in `print` and a variable."""
    values = {}
    words = text.split()
    for word, following in itertools.pairwise(words):
        if following == "=":
            values[word] = 0
        elif following == "++;":
            values[word] += 1
    return str(values[words[-1]])


def flip_flop(text, config):
    """Returns the symbol that follows `text`, which ends in `r`."""
    return re.findall("w([01])", text)[-1]


def indirect_indexing(text, config):
    """Returns the symbol that follows `text`, which ends in the delimiter after the shift."""
    letters, source, shift = re.fullmatch(r"(\w+), (\w), ([+-]\d+), ", text).groups()
    return letters[letters.index(source) + int(shift)]


def selective_copy(text, config):
    """Returns the symbol that follows `text`, a complete sequence with a part of its copy."""
    return text.replace("_", "")[-config.non_blanks]

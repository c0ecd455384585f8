"""Stands in for a module that the source distribution of Transformers does not hold: no generation tests.

What they ask for is in our own contract tests (cached decoding, static caches, beams, sampling, assisted decoding).
"""


class GenerationTesterMixin:
    pass

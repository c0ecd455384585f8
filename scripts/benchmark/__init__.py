"""The benchmark: `python -m whatwhere.scripts.benchmark` (its manual is the docstring of `__main__`)."""

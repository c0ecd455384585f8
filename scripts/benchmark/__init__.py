"""The benchmark: `whatwhere benchmark` (its manual is the docstring of `__main__`)."""

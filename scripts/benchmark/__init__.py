"""The benchmark, `whatwhere benchmark`; see the docstring of `__main__`."""

if __name__ != "whatwhere.configuration":
    raise ImportError(f"import this package as `whatwhere.configuration` (after `pip install -e .`), not as `{__name__}`")

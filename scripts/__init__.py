if __name__ != "whatwhere.scripts":
    raise ImportError(f"import this as `whatwhere.scripts` (after `pip install -e .`), not as `{__name__}`")

"""Position encodings that separate *what* from *where*, for Hugging Face Transformers."""

if __name__ != "whatwhere":
    raise ImportError(f"import this package as `whatwhere` (after `pip install -e .`), not as `{__name__}`")

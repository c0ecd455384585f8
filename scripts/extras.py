"""Error messages for modules that only an optional extra installs."""

# The extra of pyproject.toml that installs each module.
EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "filelock", "jinja2", "numpy", "peft", "pyarrow", "pydantic"), "train"),
    **dict.fromkeys(("fsspec", "gguf", "tokenizers", "tqdm", "yaml"), "train"),
    **dict.fromkeys(("lm_eval", "evaluate", "matplotlib", "nltk", "PIL", "wonderwords"), "eval"),
    **dict.fromkeys(("miditok", "symusic"), "music"),
    "triton": "kernels",
    "liger_kernel": "liger",
    "fla": "fla",
}


def explain(error: Exception) -> str:
    """Returns an error's message; for a missing module of an extra, how to install it."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module in EXTRAS:
        return f'`{module}` is not installed: pip install "whatwhere[{EXTRAS[module]}]"'
    return str(error)

"""The papers' tables, trained and measured here: `python -m whatwhere.scripts.reproduce` (manual: `__main__`)."""

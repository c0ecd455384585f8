"""The benchmark, `whatwhere benchmark`; see `command.py`."""

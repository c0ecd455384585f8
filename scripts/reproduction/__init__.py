"""The papers' tables, trained and measured here: `whatwhere reproduce`."""

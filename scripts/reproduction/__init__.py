"""Reproduction of the papers' tables: `whatwhere reproduce`."""

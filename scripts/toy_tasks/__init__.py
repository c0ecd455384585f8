"""Toy tasks for comparing position encodings: data sets, tokenizers and test sets (`docs/reproduction.md`)."""

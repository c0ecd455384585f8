"""Toy tasks that tell position encodings apart: data set builders, solvers and tokenizers."""

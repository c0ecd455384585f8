"""Measurements of trained checkpoints. Nothing here trains a model."""

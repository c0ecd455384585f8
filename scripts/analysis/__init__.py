"""Looks into trained models: which frequencies they use, their learned phases, and what they count."""

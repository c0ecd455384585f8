"""Model cards, written from results files."""

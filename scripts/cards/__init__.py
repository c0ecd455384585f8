"""Model cards: written from results files, by a template."""

"""Model cards, written from results files with a template."""

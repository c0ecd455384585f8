"""Task files for lm-eval's `--include_path`, and the data that they read."""

"""Length extrapolation: perplexity and bits per byte at several lengths, on the same held-out text.

    whatwhere length demo/rope demo/pope demo/cope
    whatwhere length runs/mine openai-community/gpt2 --validation-file new.txt
    whatwhere length runs/rope runs/pope --data pg19 --variants yarn --windows 512,1024,2048 --documents 4

By default, the text is what the runs held out from training, read again from where it was. Other checkpoints need
--validation-file or --data. Text that a checkpoint was trained on gives a warning.

--output gets length.json (length_CORPUS.json for a named corpus, length_CORPUS_SPLIT.json for another split than test,
length_local_FILE.json for own files), and the figure as PNG and SVG. Each number is written when it is measured.
Running the command again continues an interrupted measurement, measures new lengths, checkpoints and variants, and
repeats what was measured with other weights or settings. Measurements are also kept beside tokenised text
(WHATWHERE_CACHE): another --output takes those with the same model, text, settings and versions from there.
"""

import argparse
import pathlib

from .options import add_loading, add_own_text, at_least_one, command_parser

DEFAULT_WINDOWS = "1x,2x,4x,8x,10x"
# The default of --windows for books (PoPE, Figure 2).
BOOK_WINDOWS = ",".join(map(str, (*range(1024, 10241, 1024), 65536)))
# Corpora with long documents, which are cut into windows one by one; documents of other corpora are joined.
SEPARATE_DOCUMENTS = ("pg19",)
# Those that `length_report.py` and `variants.py` of `evaluation/` have.
METRICS = ("perplexity", "bits_per_byte")
VARIANTS = ("interpolation", "yarn", "relative-capped", "relative-none")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = command_parser("length", "CHECKPOINT [CHECKPOINT ...] [OPTIONS]", __doc__)
    result.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder or a Hub id")
    result.add_argument(
        "--windows",
        metavar="N,...",
        help=f"lengths in tokens, or multiples of the trained length (default {DEFAULT_WINDOWS}; pg19: the paper's)",
    )
    result.add_argument("--trained-length", type=at_least_one, metavar="N", help="default: read from the checkpoint")
    result.add_argument("--variants", metavar="NAME,...", help=f"also with changes: {', '.join(VARIANTS)}")
    result.add_argument("--metric", default="perplexity", choices=METRICS, help="of table and figure")
    result.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="DIR",
        help="for results and figure (default: the folder of a single checkpoint, else length/)",
    )
    result.add_argument("--tasks", choices=("ruler",), help="RULER's generated tasks instead of perplexity")
    result.add_argument("--samples", type=at_least_one, metavar="N", help="with --tasks: samples of each (default 100)")
    text = result.add_argument_group("text")
    add_own_text(text, "default: what the runs held out")
    text.add_argument("--data", help="a named text: pg19, pg19:validation and so on, stdlib, hub, hub:SPLIT")
    text.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    text.add_argument("--dataset", metavar="ID", help="data set of --data hub")
    text.add_argument("--dataset-config", metavar="NAME", help="its configuration")
    text.add_argument("--documents", type=at_least_one, metavar="N", help="only the first N documents (default all)")
    text.add_argument(
        "--tokens",
        type=at_least_one,
        metavar="N",
        help="tokens of each text (default all; for text that is not a named corpus 16 times the longest of --windows)",
    )
    text.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help=f"join all documents before cutting sequences (default, except for {', '.join(SEPARATE_DOCUMENTS)})",
    )
    text.add_argument(
        "--bos-windows",
        action="store_true",
        help="begin every window with the tokenizer's BOS token (default: as the text is cut)",
    )
    add_loading(result)
    result.add_argument(
        "--batch-tokens", type=at_least_one, default=4096, metavar="N", help="tokens per batch (default 4096)"
    )
    return result

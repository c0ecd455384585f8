"""Looks into trained checkpoints, and draws what it finds as PNG, SVG and an interactive page.

    whatwhere analysis frequencies runs/rope runs/pope
    whatwhere analysis deltas runs/pope
    whatwhere analysis maps runs/cope --text article.txt --tokens 256

A checkpoint is a folder or a Hub id. On a laptop each takes seconds for a model of 100 million parameters; a GPU is
used if there is one.

| command | what it shows | files |
|---|---|---|
| `frequencies` | mean norms of queries and keys per frequency and layer (PoPE, Figures 3 to 6) | `frequencies.*` |
| `deltas` | the learned phase shifts of a PoPE model | `deltas.*` |
| `maps` | what a CoPE model counts on a text: gates, positions, attention by position alone (CoPE, Figures 4 and 6) | \
`maps.html`, `maps.json`, `maps.safetensors`, `gates.*`, `positions.*`, `position_attention.*`, `attention.*` |

Figures are PNG and SVG; the JSON beside them has the numbers, the command, the date and the versions.

`frequencies` takes rope, pope and sums with rope, and stock models that rotate as Llama does. It reads the first ten of
Shakespeare's sonnets (the paper: "10 different Shakespeare sonnets", it does not say which) or `--texts`, a file whose
texts are separated by blank lines.

`maps` takes cope, sums with it, cope_alibi, cope_mlp and token_gated_cope. It reads the first `--tokens` tokens of
`--text`, a file, or `--prompt`; without them, held-out text of the corpus that the checkpoint's `results.json` names,
or else a short article in English. `maps.html` opens without a server, at the head whose gates differ most between
tokens (the largest standard deviation of each token's mean gate): hover a token to see which tokens it counts. With one
layer and one head (`--layers 2 --heads 3`) the figures have the tokens on their axes.
`maps.safetensors` holds every map, float32 (layers, heads, tokens, tokens).
"""

import argparse
import pathlib
from typing import Any

from safetensors.torch import save

from ..evaluation.checkpoints import load_tokenizer
from ..evaluation.results import check_writable, provenance, write_json
from ..extras import explain
from . import common, deltas, frequencies, maps, page

COMMAND = "analysis"


def parse_indices(text: str) -> list[int]:
    """Returns the numbers of a list such as `0,3,8-11`; an `argparse` type."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: allowed are lists such as 0,3,8-11.")
        found.extend(range(int(first), int(last or first) + 1))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it names nothing.")
    return found


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=f"whatwhere {COMMAND}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    usages = []
    for name, help_ in (
        ("frequencies", "norms of queries and keys per frequency and layer"),
        ("deltas", "the learned phase shifts of PoPE"),
        ("maps", "gates, positions and attention of CoPE on a text"),
    ):
        one = commands.add_parser(name, help=help_, description=help_)
        one.add_argument(
            "checkpoint", nargs="+" if name == "frequencies" else 1, metavar="CHECKPOINT", help="a folder or a Hub id"
        )
        if name == "frequencies":
            one.add_argument(
                "--texts",
                type=pathlib.Path,
                default=common.SONNETS,
                metavar="FILE",
                help="texts, separated by blank lines; default: ten sonnets of Shakespeare",
            )
        if name == "maps":
            text = one.add_mutually_exclusive_group()
            text.add_argument(
                "--text",
                type=pathlib.Path,
                metavar="FILE",
                help="the text to read; default: held-out text of the model's corpus, or else a short article",
            )
            text.add_argument("--prompt", metavar="TEXT", help="the text itself")
            one.add_argument(
                "--tokens", type=int, default=128, metavar="N", help="at most so many (default %(default)s)"
            )
            one.add_argument("--layers", type=parse_indices, metavar="LIST", help="such as 0,3,8-11; default: all")
            one.add_argument("--heads", type=parse_indices, metavar="LIST", help="such as 0,3,8-11; default: all")
        one.add_argument(
            "--output",
            type=pathlib.Path,
            default=pathlib.Path("analysis"),
            metavar="DIR",
            help="folder for the files (default %(default)s)",
        )
        one.add_argument("--device", help="default: the GPU if there is one")
        one.add_argument("--trust-remote-code", action="store_true", help="run the code in the checkpoint's folder")
        usages.append(one.format_usage())
    result.epilog = "".join(usages)
    return result


def run_frequencies(options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """Writes `frequencies.json`, `.png` and `.svg`; returns what to print."""
    texts = common.read_texts(options.texts)
    entries = []
    for checkpoint in options.checkpoint:
        model = common.load_model(checkpoint, device=options.device, trust_remote_code=options.trust_remote_code)
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
        usage = frequencies.measure(model, tokenizer, texts)
        entries.append({**common.describe(checkpoint, model.config), **usage.as_dict()})
    content = {"texts": common.describe_texts(options.texts, texts), "checkpoints": entries, **origin}
    write_json(options.output / "frequencies.json", content)
    frequencies.draw(entries, options.output / "frequencies")
    return frequencies.table(entries)


def run_deltas(options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """Writes `deltas.json`, `.png` and `.svg`; returns what to print."""
    (checkpoint,) = options.checkpoint
    model = common.load_model(checkpoint, device="cpu", trust_remote_code=options.trust_remote_code)
    entry = {**common.describe(checkpoint, model.config), **deltas.read(model)}
    write_json(options.output / "deltas.json", {**entry, **origin})
    deltas.draw(entry, options.output / "deltas")
    return (
        f"delta: mean {entry['mean']:.4f}, from {entry['smallest']:.4f} to {entry['largest']:.4f} radians; "
        f"{entry['at_bounds']:.1%} at a bound"
    )


def run_maps(options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """Writes `maps.html`, `maps.json`, `maps.safetensors` and a figure of each kind; returns what to print."""
    if options.tokens < 2:
        raise ValueError(f"tokens={options.tokens!r} is not valid: it must be at least 2.")
    (checkpoint,) = options.checkpoint
    if options.prompt is not None:
        text, source = options.prompt, "the command"
    elif options.text is not None:
        text, source = common.read_text(options.text), options.text.name
    else:
        # More than enough: few tokens are longer than a dozen characters.
        text, source = common.held_out_text(checkpoint, characters=16 * options.tokens)
    model = common.load_model(
        checkpoint,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        attn_implementation="eager",
    )
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
    ids = common.encode(tokenizer, text, model.device)[:, : options.tokens]
    found = maps.measure(model, tokenizer, ids, layers=options.layers, heads=options.heads)
    about = common.describe(checkpoint, model.config)
    # The page first: it may be refused.
    content = page.page(found, name=about["name"], text=source)
    summary = found.summary()
    write_json(
        options.output / "maps.json",
        {
            **about,
            "text": source,
            "tokens": found.tokens,
            "token_ids": ids[0].tolist(),
            "boundaries": found.boundaries,
            "layers": found.layers,
            "heads": found.heads,
            "last_position": found.last,
            "summary": summary,
            **origin,
        },
    )
    (options.output / "maps.html").write_text(content, encoding="utf-8")
    tensors = save({kind: getattr(found, kind).contiguous() for kind in maps.KINDS})
    (options.output / "maps.safetensors").write_bytes(tensors)
    for kind in maps.KINDS:
        maps.draw(found, kind, options.output / kind, name=about["name"])
    first = found.most_selective()
    return (
        f"{maps.table(summary)}\nText: {source}.\n"
        f"The page opens at layer {first['layer']}, head {first['head']}, whose gates differ most between tokens."
    )


FIGURES = ", ".join(f"{kind}.png and .svg" for kind in maps.KINDS)
FILES = {
    "frequencies": "frequencies.json, .png and .svg",
    "deltas": "deltas.json, .png and .svg",
    "maps": f"maps.html, maps.json, maps.safetensors; {FIGURES}",
}
COMMANDS = {"frequencies": run_frequencies, "deltas": run_deltas, "maps": run_maps}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    one = parser()
    options = one.parse_args(arguments)
    try:
        check_writable(options.output)
        printed = COMMANDS[options.command](options, provenance(COMMAND, arguments))
    except (ValueError, OSError, ImportError) as error:
        one.exit(2, f"error: {explain(error)}\n")
    print(printed)
    print(f"In {options.output}: {FILES[options.command]}")


if __name__ == "__main__":
    main()

"""`whatwhere analysis`: its help is in `cli/analysis.py`."""

import argparse
import pathlib
from typing import Any

from safetensors.torch import save_file

from whatwhere_cli.analysis import parser

from ..analysis import deltas, frequencies, maps, page, texts
from ..data.sonnets import SONNETS, sonnets
from ..evaluation.checkpoints import Loading, choose_device
from ..evaluation.results import provenance
from ..writing import check_writable, write_json, writing


def describe(checkpoint: str, config: Any) -> dict[str, Any]:
    """Returns the entry of a checkpoint for a results file."""
    return {
        "name": pathlib.PurePath(checkpoint).name,
        "model_type": config.model_type,
        "position_encoding": getattr(config, "position_encoding", None),
    }


def run_frequencies(options: argparse.Namespace, loading: Loading, origin: dict[str, Any]) -> str:
    """Writes `frequencies.json`, `.png` and `.svg`; returns the summary to print."""
    # PoPE's Figures 3 to 6 are means over ten of Shakespeare's sonnets that it does not name.
    documents, source = texts.own_documents(options) or (sonnets(), SONNETS.name)
    entries = []
    for checkpoint in options.checkpoint:
        model = loading.model(checkpoint, loading.config(checkpoint))
        found = frequencies.measure(model, loading.tokenizer(checkpoint, model.config), documents)
        entries.append({**describe(checkpoint, model.config), **found})
    content = {"texts": {"source": source, "count": len(documents)}, "checkpoints": entries, **origin}
    write_json(options.output / "frequencies.json", content)
    text = f"{source}, {len(documents)} document" + "s" * (len(documents) > 1)
    frequencies.draw(entries, options.output / "frequencies", text=text)
    return f"{frequencies.table(entries)}\nText: {text}."


def run_deltas(options: argparse.Namespace, loading: Loading, origin: dict[str, Any]) -> str:
    """Writes `deltas.json`, `.png` and `.svg`; returns the summary to print."""
    checkpoint = options.checkpoint[0]
    model = loading.model(checkpoint, loading.config(checkpoint))
    entry = {**describe(checkpoint, model.config), **deltas.read(model)}
    write_json(options.output / "deltas.json", {**entry, **origin})
    deltas.draw(entry, options.output / "deltas")
    return (
        f"delta: mean {entry['mean']:.4f}, from {entry['smallest']:.4f} to {entry['largest']:.4f} radians; "
        f"{entry['at_bounds']:.1%} at a bound"
    )


def run_maps(options: argparse.Namespace, loading: Loading, origin: dict[str, Any]) -> str:
    """Writes `maps.html`, `maps.json`, `maps.safetensors` and a figure of each kind; returns the summary to print."""
    if options.tokens < 2:
        raise ValueError(f"tokens={options.tokens!r} is not valid: it must be at least 2.")
    checkpoint = options.checkpoint[0]
    article = [texts.PROSE.read_text(encoding="utf-8")], texts.PROSE.name
    (text, *_), source = texts.own_documents(options) or article
    model = loading.model(checkpoint, loading.config(checkpoint))
    tokenizer = loading.tokenizer(checkpoint, model.config)
    ids = texts.encode(tokenizer, text, model.device)[:, : options.tokens]
    tokens = texts.token_texts(tokenizer, text)[: options.tokens]
    found = maps.measure(model, ids, tokens, layers=options.layers, heads=options.heads)
    about = describe(checkpoint, model.config)
    # First, since it can raise ValueError.
    content = page.page(found, name=about["name"], text=source)
    summary = found.summary()
    fields = {key: getattr(found, key) for key in ("tokens", "boundaries", "layers", "heads")}
    fields |= {"token_ids": ids[0].tolist(), "last_position": found.last, "summary": summary}
    write_json(options.output / "maps.json", {**about, "text": source, **fields, **origin})
    (options.output / "maps.html").write_text(content, encoding="utf-8")
    with writing(tensors := options.output / "maps.safetensors"):
        save_file({kind: getattr(found, kind) for kind in maps.KINDS}, tensors)
    for kind in maps.KINDS:
        maps.draw(found, kind, options.output / kind, name=about["name"], text=f"{source}, {len(tokens)} tokens")
    first = found.most_selective()
    return (
        f"{maps.table(summary)}\nText: {source}.\n"
        f"The page opens at layer {first['layer']}, head {first['head']}, the most selective head "
        "(the largest standard deviation of its gates)."
    )


RUNS = {"frequencies": run_frequencies, "deltas": run_deltas, "maps": run_maps}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    check_writable(options.output)
    loading = Loading(
        device=choose_device(options.device),
        attn_implementation="eager" if options.command == "maps" else None,
        trust_remote_code=options.trust_remote_code,
    )
    print(RUNS[options.command](options, loading, provenance("analysis", arguments)))
    print(f"Files: {options.output}")

"""A self-contained HTML page with the maps of a text; it needs no server and no network."""

import base64
import hashlib
import html
import json
import pathlib
import re
from typing import Any

import numpy as np
import torch

from .maps import KINDS, TITLES, Maps

TEMPLATE = pathlib.Path(__file__).with_name("page.html")

# Values are 16-bit integers, in units of 1/65535 of the largest value of a kind.
STEPS = 65535

# Larger pages are slow to open.
LARGEST_MIB = 24


def page(maps: Maps, *, name: str, text: str) -> str:
    """Returns the page, as HTML, with the lower triangle of every map, row by row.

    Raises:
        ValueError: the page would be larger than `LARGEST_MIB`.
    """
    layers, heads, length, _ = maps.gates.shape
    size = len(KINDS) * layers * heads * length * (length + 1) // 2 * 2 * 4 / 3 / 2**20
    if size > LARGEST_MIB:
        raise ValueError(
            f"a page of {length} tokens, {layers} layers and {heads} heads has {size:.0f} MiB; allowed: {LARGEST_MIB}. "
            "Choose fewer with --tokens, --layers or --heads."
        )
    rows, columns = torch.tril_indices(length, length)
    scales, pieces = [], []
    for kind in KINDS:
        values = getattr(maps, kind)[:, :, rows, columns]
        top = max(values.max().item(), 1e-6)
        scales.append(top)
        pieces.append((values.double() / top * STEPS).round().to(torch.int32).numpy().astype("<u2"))
    first = maps.most_selective()
    data: dict[str, Any] = {
        "name": name,
        "text": text,
        "first": [maps.layers.index(first["layer"]), maps.heads.index(first["head"])],
        "deviation": first["gate_deviation"],
        "encoding": maps.encoding,
        "tokens": maps.tokens,
        "boundaries": maps.boundaries,
        "layers": maps.layers,
        "heads": maps.heads,
        "last": maps.last,
        "fromStart": maps.from_start,
        "kinds": [{"key": kind, "title": TITLES[kind], "scale": scale} for kind, scale in zip(KINDS, scales)],
        "steps": STEPS,
        "values": base64.b64encode(np.stack(pieces).tobytes()).decode("ascii"),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    code = template.partition('<script id="code">')[2].partition("</script>")[0]
    # The content security policy allows this script only, and no network access.
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii")
    # Inside <script>, only `<` can end the data or begin a comment.
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    filled = {"hash": digest, "title": html.escape(f"{name}: what it counts"), "data": encoded}
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: filled[mark[1]], template)

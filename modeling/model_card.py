"""Model cards (README.md): their form, and the short one that saving and pushing writes.

`whatwhere card` writes the full one, of the same form, with results. A generated card ends in a comment with a digest
of its text, the fingerprint of its weights, and digests of its metadata. A generated card without edits of its text is
replaced when other weights are saved to the folder, and copied with its weights. Metadata that a user adds or changes
stay, such as a licence, tags or languages, except results. Cards with edited text are kept.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import logging

from .position_plan import parse

logger = logging.get_logger(__name__)

# Lines of the template that Transformers and PEFT save as a card.
_MISSING = "[More Information Needed]"
_TEMPLATE = re.compile(
    rf"#{{2,}} .*|# Model Card for Model ID|<!--.*-->|(- \*\*[^*]+:\*\* )?{re.escape(_MISSING)}( <!--.*-->)?|"
    r"Users \(both direct and downstream\) should be made aware .*|Use the code below to get started with the model\.|"
    r"Carbon emissions can be estimated using .*|\*\*(BibTeX|APA):\*\*|- PEFT \S+|"
    r"This is the model card of a 🤗 transformers model that has been pushed on the Hub\..*"
)
# Texts in the cards of Transformers' Trainer and of TRL.
_TRAINERS = (
    "This model card has been generated automatically according to the information the Trainer had access to.",
    "It has been trained using [TRL](https://github.com/huggingface/trl).",
)
_MARK = "\n<!-- whatwhere card: text={} weights={} metadata={} -->\n"
_MARKED = re.compile(_MARK.format(r"(?P<text>\w+)", r"(?P<weights>\w+)", r"(?P<metadata>\S*)") + r"\Z")
# The Hub's pipeline tag of each head.
PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}

# In the card of a model without results.
NO_RESULTS = "No results are recorded for these weights."
# The sections of a card after its first screen, in this order. One without content is left out.
SECTIONS = ("Model", "Training", "Evaluation", "Limitations", "Licence", "Citation")
_ARXIV = re.compile(r"\d{4}\.\d{5}")
LICENCE_KEYS = ("license", "license_name", "license_link")
# The metadata that a model made from another one keeps, in `config.origin`.
ORIGIN_KEYS = ("base_model", "language", *LICENCE_KEYS)
# Title and authors of papers, by what is in brackets in the `paper` of position encodings.
PAPERS = {
    "2203.16634": (
        "Transformer Language Models without Positional Encodings Still Learn Positional Information",
        "Adi Haviv and Ori Ram and Ofir Press and Peter Izsak and Omer Levy",
    ),
    "GPT-2": (
        "Language Models are Unsupervised Multitask Learners",
        "Alec Radford and Jeffrey Wu and Rewon Child and David Luan and Dario Amodei and Ilya Sutskever",
    ),
    "1706.03762": (
        "Attention Is All You Need",
        "Ashish Vaswani and Noam Shazeer and Niki Parmar and Jakob Uszkoreit and Llion Jones and Aidan N. Gomez and "
        "Łukasz Kaiser and Illia Polosukhin",
    ),
    "1803.02155": (
        "Self-Attention with Relative Position Representations",
        "Peter Shaw and Jakob Uszkoreit and Ashish Vaswani",
    ),
    "2108.12409": (
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        "Ofir Press and Noah A. Smith and Mike Lewis",
    ),
    "2104.09864": (
        "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        "Jianlin Su and Yu Lu and Shengfeng Pan and Ahmed Murtadha and Bo Wen and Yunfeng Liu",
    ),
    "2405.18719": (
        "Contextual Position Encoding: Learning to Count What's Important",
        "Olga Golovneva and Tianlu Wang and Jason Weston and Sainbayar Sukhbaatar",
    ),
    "2509.10534": (
        'Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings',
        "Anand Gopalakrishnan and Róbert Csordás and Jürgen Schmidhuber and Michael C. Mozer",
    ),
    "2503.02130": (
        "Forgetting Transformer: Softmax Attention with a Forget Gate",
        "Zhixuan Lin and Evgenii Nikishin and Xu Owen He and Aaron Courville",
    ),
    "2410.17980": (
        "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study",
        "Shawn Tan and Songlin Yang and Aaron Courville and Rameswar Panda and Yikang Shen",
    ),
}


def weights_fingerprint(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of a folder's weights and position encoding: a change of the latter may leave all weights."""
    config = json.loads(file.read_bytes()) if (file := folder / "config.json").is_file() else {}
    encoding = {key: config[key] for key in config if key.startswith(("position_encoding", "rope"))}
    digest = hashlib.sha256(json.dumps(encoding, sort_keys=True).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def encoding_text(position_encoding: str | list[str]) -> str:
    """Returns `config.position_encoding` for readers: a name, or the names of a plan by layer, such as `rope, cope`."""
    return position_encoding if isinstance(position_encoding, str) else ", ".join(position_encoding)


def card_tags(config: Any) -> list[str]:
    """Returns the tags of a model's card."""
    return ["whatwhere", str(config.model_type), "position-encoding", *config.encoding_names]


def card_head(config: Any) -> tuple[str, str | None]:
    """Returns the Auto class that loads a model, and the Hub's pipeline tag."""
    head = next(filter((config.architectures or ["ForCausalLM"])[0].endswith, PIPELINES), "")
    return f"AutoModel{head}", PIPELINES.get(head)


def sign(data: ModelCardData, text: str, weights: str, given: Mapping[str, Any]) -> ModelCard:
    """Returns a card with the comment that marks it as generated.

    `weights` is their fingerprint, and `given` are metadata of a user, see `with_given`, which later cards keep.
    """
    ours = [one for one in _entries(data.to_dict()) if one not in [*_entries(given)]]
    text = with_given(data, text.rstrip() + "\n", given)
    mark = _MARK.format(_digest(text), weights, ",".join(_digest(f"{key}: {one}")[:8] for key, one in ours))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}{mark}")


def _entries(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the metadata of a card without its results, each item of a list separately; of licences all at once."""
    for key, value in metadata.items():
        if key != "model-index":
            yield from ((key, one) for one in (value if isinstance(value, list) and key != "license" else [value]))


def origin_of(source: str | pathlib.Path, origin: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the `origin` of what is made from a folder or a Hub id, whose configuration states `origin`."""
    found = dict(origin or {})
    if not pathlib.Path(source).is_dir():
        return {"base_model": str(source), **found}
    try:
        card, _ = read_card(source)
    except ValueError:
        # `complete_card` warns.
        card = None
    stated = {
        key: value for key, value in (card.data.to_dict() if card else {}).items() if key in ORIGIN_KEYS and value
    }
    if stated.get("license") == "unknown":
        del stated["license"]
    if "license" in stated:
        found = {key: value for key, value in found.items() if key not in LICENCE_KEYS}
    return {**found, **stated} or None


def known_origin(config: Any) -> dict[str, Any]:
    """Returns `config.origin` for a card; what is none of its metadata, in a file of somebody else, is left out."""
    origin = config.origin or {}
    return {key: origin[key] for key in ORIGIN_KEYS if isinstance(origin.get(key), (str, list))}


def base_links(names: Any) -> str:
    """Returns the value of `base_model` in a card's metadata for readers, with links to the Hub."""
    names = [names] if isinstance(names, str) else names
    return ", ".join(f"[`{name}`](https://huggingface.co/{name})" for name in names)


def given_metadata(card: ModelCard | None, mark: re.Match[str] | None) -> dict[str, Any]:
    """Returns the metadata that a user has given to a generated card or a template, by key; of lists, the new items."""
    stated, given = card.data.to_dict() if card is not None else {}, dict[str, Any]()
    ours = mark["metadata"] if mark else ""
    # Templates have the other three.
    not_given = ("license: unknown", *(() if mark else ("library_name: ", "base_model: ", "tags: base_model:")))
    for key, one in _entries(stated):
        if not f"{key}: {one}".startswith(not_given) and _digest(f"{key}: {one}")[:8] not in ours.split(","):
            given[key] = one if stated[key] == one else [*given.get(key, []), one]
    return given


def with_given(data: ModelCardData, text: str, given: Mapping[str, Any]) -> str:
    """Sets a user's metadata in those of a card, in lists at their ends; returns its text with a given licence."""
    if "license" in given:
        given = {**dict.fromkeys(LICENCE_KEYS), **given}
        stated = licence_text(given["license_name"] or given["license"])
        text = re.sub(r"(?<=\n## Licence\n\n)[^\n]*", lambda _: f"Weights: {stated}.", text)
    for key, value in given.items():
        mine = [one for _, one in _entries({key: data.get(key) or []})]
        is_list = isinstance(value, list) and key != "license"
        data[key] = mine + [one for one in value if one not in mine] if is_list else value
    return text


def licence_text(licence: Any) -> str:
    """Returns a licence, or a list of them, for readers."""
    return plain(", ".join(map(str, licence)) if isinstance(licence, list) else str(licence))


def with_name(text: str, name: str) -> str:
    """Returns the text of a card whose code loads the model `name`."""
    line = r'(?<=```python\n)(from [^\n]*\n\nname = )"(?:[^"\\\n]|\\.)*"'
    return re.sub(line, lambda found: found[1] + json.dumps(name, ensure_ascii=False), text, count=1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def read_card(folder: str | pathlib.Path | None) -> tuple[ModelCard | None, re.Match[str] | None]:
    """Returns the card in a folder, and its comment if its text is a generated one; ValueError if it is not valid."""
    if folder is None or not (path := pathlib.Path(folder) / "README.md").is_file():
        return None, None
    try:
        card = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    # Those of YAML are no ValueError.
    except Exception as error:
        raise ValueError(f"{str(path)!r} is not a valid model card: {' '.join(str(error).split())}.") from error
    mark = _MARKED.search(card.text)
    return card, mark if mark and mark["text"] == _digest(card.text[: mark.start()]) else None


def plain(text: str) -> str:
    """Returns text on one line with Markdown characters and tags such as `<unk>` escaped."""
    return re.sub(r"[\\`*\[\]<|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def is_template(card: ModelCard) -> bool:
    """Returns whether a card is a template of Transformers or PEFT that nobody has filled in."""
    lines = filter(None, map(str.strip, card.text.splitlines()))
    return _MISSING in card.text and all(map(_TEMPLATE.fullmatch, lines))


def is_of_trainer(card: ModelCard) -> bool:
    """Returns whether a card was generated by Transformers' Trainer or by TRL."""
    return any(text in card.text for text in _TRAINERS)


def card_data(config: Any, **more: Any) -> ModelCardData:
    """Returns the metadata of a card: what the configuration says, and `more`."""
    about = {"library_name": "transformers", "pipeline_tag": card_head(config)[1], **known_origin(config)}
    return ModelCardData(**{**about, "tags": card_tags(config), **more})


def complete_data(card: ModelCard, config: Any) -> None:
    """Adds the metadata to a card that it lacks."""
    for key, value in card_data(config).to_dict().items():
        mine = card.data.get(key)
        card.data[key] = list(dict.fromkeys([*(mine or []), *value])) if key == "tags" else mine or value


def model_table(config: Any) -> str:
    """Returns a Markdown table with the size of a model, its position encoding and the encoding's parameters."""
    rows = [
        ("layers", f"{config.num_hidden_layers:,}"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("attention heads", f"{config.num_attention_heads:,}"),
        ("vocabulary", f"{config.vocab_size:,} tokens"),
        ("configured length", f"{config.max_position_embeddings:,} tokens"),
        ("`position_encoding`", f"`{encoding_text(config.position_encoding)}`"),
    ]
    given = dict(config.position_encoding_parameters or {})
    given["rope_parameters"] = getattr(config, "rope_parameters", None) or {}
    for key, value in given.items():
        inside = {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
        for name, one in inside.items():
            if one is not None:
                text = f"[{one[0]!r}, ... ({len(one)} in all)]" if isinstance(one, list) and len(one) > 8 else repr(one)
                rows.append((f"`{name}`", f"`{text}`"))
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def paper_link(source: str) -> str:
    """Returns the title of a paper in `PAPERS`, if it is there, with a link if `source` is an arXiv id."""
    link = f"[arXiv:{source}](https://arxiv.org/abs/{source})" if _ARXIV.fullmatch(source) else source
    return ", ".join([*PAPERS.get(source, ("",))[:1], link]).removeprefix(", ")


def citation(config: Any, *, has_code: bool = True) -> Iterator[str]:
    """Yields the papers of a configuration's position encodings, with links, and their BibTeX entries.

    `has_code` is whether the folder has the code of the encodings, for links.
    """
    papers: dict[str, list[str]] = {}
    for name, (cls, _) in parse(config).items():
        file = cls.code[0] if cls.code else f"{cls.__module__.rpartition('.')[2]}.py"
        shown = f"`{name}`" + f" ([code]({file}))" * has_code
        papers.setdefault(cls.paper.partition("),")[0].removesuffix(")"), []).append(shown)
    entries, lines = [], []
    for paper, names in papers.items():
        about, _, source = paper.partition(" (")
        title, authors = PAPERS.get(source, ("", ""))
        lines.append(f"- {' and '.join(names)}: {about}" + f", {paper_link(source)}" * bool(source))
        if title:
            fields = {"title": title, "author": authors, "year": about.split()[-1]}
            fields |= {"eprint": source, "archivePrefix": "arXiv"} if _ARXIV.fullmatch(source) else {}
            inside = "".join(f"  {key} = {{{value}}},\n" for key, value in fields.items())
            entries.append(f"@misc{{{about.split()[0].lower()}{fields['year']},\n{inside}}}")
    if lines:
        yield "\n".join(lines)
    if entries:
        yield "```bibtex\n" + "\n\n".join(entries) + "\n```"


def loading_code(config: Any, name: str, *, comment: str = "", has_tokenizer: bool = False) -> str:
    """Returns the lines of Python that load a model, and its tokenizer."""
    auto, _ = card_head(config)
    lines = [f"from transformers import {auto}" + ", AutoTokenizer" * has_tokenizer, ""]
    lines.append(f"name = {json.dumps(name, ensure_ascii=False)}" + f"  # {comment}" * bool(comment))
    lines.append(f"model = {auto}.from_pretrained(name, trust_remote_code=True)")
    if has_tokenizer:
        lines.append("tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)")
    return "\n".join(lines)


def card_text(
    config: Any,
    name: str,
    *,
    kind: str = "",
    summary: str = f", made with `whatwhere`. {NO_RESULTS}",
    results: Sequence[str] = (),
    code: str = "",
    notes: Sequence[str] = (),
    sections: Mapping[str, Sequence[str]] | None = None,
    has_code: bool = True,
) -> str:
    """Returns the text of a card, in Markdown.

    Args:
        kind: what the model is, by default by its family. `summary` ends the first sentence, after the encoding.
        results: blocks before the code that loads the model, and `notes` those after it.
        code: by default the lines that load it.
        sections: more sections, by their names in `SECTIONS`, as lists of blocks.
        has_code: see `citation`.
    """
    kind = kind or f"A {'GPT-2' if 'gpt2' in config.model_type else 'Llama'}-style model with"
    first = f"{kind} the position encoding `{encoding_text(config.position_encoding)}`{summary}"
    blocks = [f"\n# {plain(name)}", first, *results, f"```python\n{code or loading_code(config, name)}\n```", *notes]
    content: dict[str, Sequence[str]] = {"Model": [model_table(config)], **(sections or {})}
    origin = known_origin(config)
    if "base_model" in origin:
        content.setdefault("Training", [f"The weights were made from {base_links(origin['base_model'])}."])
    licence = origin.get("license_name") or origin.get("license")
    stated = f"Weights: {licence_text(licence)}." if licence else "The licence of the weights is not stated."
    content.setdefault("Licence", [stated])
    content["Citation"] = [*citation(config, has_code=has_code)]
    for heading in SECTIONS:
        if content.get(heading):
            blocks += [f"## {heading}", *content[heading]]
    return "\n\n".join(blocks)


def complete_card(
    folder: str | pathlib.Path, config: Any, *, source: str | pathlib.Path | None = None, name: str | None = None
) -> None:
    """Writes README.md into a folder of newly saved weights, unless it has a user's card or an edited card.

    A card of the Trainer or TRL keeps its text, and missing metadata are added: licence, library, pipeline and tags. A
    generated card of the same weights in `source`, the folder that the model was loaded from, is copied without its
    figures. If a card cannot be read, it is kept, and there is a warning. `name` is the Hub id, by default the folder's
    name.
    """
    folder = pathlib.Path(folder)
    name, weights = name or folder.resolve().name, weights_fingerprint(folder)
    try:
        (old, mark), (known, known_mark) = read_card(folder), read_card(source)
    except ValueError as error:
        logger.warning(f"No model card is written: {error}")
        return
    if old is not None and mark is None and not is_template(old):
        if is_of_trainer(old):
            complete_data(old, config)
            old.save(folder / "README.md")
        return
    if mark and mark["weights"] == weights:
        return
    data: Any = card_data(config)
    text = card_text(config, name)
    given = given_metadata(old, mark)
    if known is not None and known_mark and known_mark["weights"] == weights:
        data, text = known.data, re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", known.text[: known_mark.start()])
        text, given = with_name(text, name), {**given_metadata(known, known_mark), **given}
    sign(data, text, weights, given).save(folder / "README.md")

"""The model card (README.md) of a checkpoint, written from its configuration and from measured results.

No number is typed by hand: each comes from the configuration or from a results file beside the weights, and the same
files give the same bytes. Results belong to weights: a results file that states the fingerprint of other weights
(`weights_sha256`) is left out, so that a model that was trained further does not carry old numbers. For the same reason
a card ends in a comment with a digest of its text, the fingerprint of its weights and the number of its own tags: a
card that nobody has edited is written again when other weights are saved beside it, and one that somebody has edited is
theirs.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .position_registry import max_length

# Patterns of names; what is in them: `whatwhere.scripts.evaluation.results`.
RESULT_FILES = ("results.json", "curves.json", "length.json", "length_*.json", "lm_eval.json")
LIBRARY = "whatwhere"


class Corpus(NamedTuple):
    """What a card says of a corpus that `whatwhere.scripts.data.corpora` knows by name.

    Attributes:
        title: what it is.
        licence: of the data.
        dataset: the id of its training split on the Hub; None if the Hub does not have it.
        prompt: how a document may begin, for the snippet.
        is_text: whether its documents are read by people; the others are words of a tokenizer of their own.
    """

    title: str
    licence: str
    dataset: str | None
    prompt: str
    is_text: bool = True


# What data are called that are no corpus known by name.
SOURCES = {"stdlib": "source code of Python's standard library", "local": "local files"}
# Cards are written where `whatwhere.scripts` is not installed, too: a test compares this with the list there.
CORPORA = {
    "wikitext103": Corpus(
        "WikiText-103 (raw)", "CC BY-SA 3.0, GFDL", "EleutherAI/wikitext_document_level", " = History ="
    ),
    "wikitext103_v1": Corpus(
        "WikiText-103 (word level, with <unk>)",
        "CC BY-SA 3.0, GFDL",
        "EleutherAI/wikitext_document_level",
        " = History =",
    ),
    "wikipedia_en": Corpus(
        "English Wikipedia (local: an extract of 2018; Hub: the dump of November 2023)",
        "CC BY-SA 3.0, GFDL",
        "wikimedia/wikipedia",
        "The history of",
    ),
    "wikinews_en": Corpus("English Wikinews", "CC BY 2.5", None, "The government of"),
    "pg19": Corpus(
        "PG-19 (books of Project Gutenberg from before 1919)",
        "Apache-2.0; the books are in the public domain in the USA",
        "emozilla/pg19",
        "It was a dark and",
    ),
    "jsb_chorales": Corpus(
        "JSB Chorales (four voices, 16th notes, split of Boulanger-Lewandowski et al. 2012)",
        "none stated; the music is in the public domain",
        None,
        "74 70 65 58",
        is_text=False,
    ),
    "maestro": Corpus(
        "MAESTRO v3.0.0 (MIDI, REMI words, our split of 90/5/5 by work)",
        "CC BY-NC-SA 4.0",
        None,
        "Bar_None Position_0",
        is_text=False,
    ),
    "maestro_transposed": Corpus(
        "MAESTRO v3.0.0 (MIDI, REMI words), each performance moved by -3 to +3 semitones",
        "CC BY-NC-SA 4.0",
        None,
        "Bar_None Position_0",
        is_text=False,
    ),
    "genome": Corpus(
        "Human reference genome GRCh38 (pieces of 6,000 nucleotides)",
        "no restrictions",
        None,
        "TTAGGGTTAGGGTTAGGG",
        is_text=False,
    ),
    "genome_chr2": Corpus(
        "Human reference genome GRCh38, the first 2,333,275 bases of chromosome 2",
        "no restrictions",
        None,
        "TTAGGGTTAGGGTTAGGG",
        is_text=False,
    ),
    "openwebtext": Corpus(
        "OpenWebText (validation: the first 4,007 documents, 0.05 %)",
        "CC0-1.0 (of the collection)",
        "Skylion007/openwebtext",
        "In the past year",
    ),
}

# How a card begins that Transformers writes when a model is pushed to a repository that has none.
_GENERIC = "This is the model card of a 🤗 transformers model that has been pushed on the Hub."
# The pipeline of each head, by the end of its class's name, which ends the name of the Auto class too.
_HEADS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
# What the Trainer writes into its cards.
_TRAINER = (
    "<!-- This model card has been generated automatically according to the information the Trainer had access to."
)
_MARK = "\n<!-- whatwhere.model_card text={text} weights={weights} tags={tags} -->\n"
_MARK_PATTERN = re.compile(
    _MARK.format(text=r"(?P<text>\w+)", weights=r"(?P<weights>\w+)", tags=r"(?P<tags>\d+)") + r"\Z"
)


def weights_fingerprint(folder: str | pathlib.Path) -> str:
    """Returns the SHA-256 of the folder's safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def result_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of the results files in a folder, in the order of a card."""
    return [path for pattern in RESULT_FILES for path in sorted(pathlib.Path(folder).glob(pattern)) if path.is_file()]


def read_results(folder: str | pathlib.Path, *, weights: str | None = None) -> dict[str, Any] | None:
    """Returns the contents of the results files in a folder, by file name without its ending, or None if there is none.

    Args:
        folder: the folder of a checkpoint.
        weights: take only files that state this fingerprint; by default those that state the fingerprint of the
            weights in the folder, or none.

    Raises:
        ValueError: a file is not a JSON object.
    """
    folder = pathlib.Path(folder)
    found: dict[str, Any] = {}
    for path in result_files(folder):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} in {str(folder)!r} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} in {str(folder)!r} must hold a JSON object.")
        checkpoints = content.get("checkpoints", [])
        # A file in which checkpoints were measured may state the weights of each.
        alone = checkpoints[0].get("weights") if len(checkpoints) == 1 else None
        stated = content.get("weights_sha256", alone)
        if (weights is None and stated is None) or (
            stated is not None and stated == (weights or weights_fingerprint(folder))
        ):
            found[path.stem] = content
    return found or None


class Weights(NamedTuple):
    """Where the weights are that a card is about, if they are not beside it.

    Attributes:
        place: a Hub id, or the folder that `command` makes.
        command: which makes them; None if they are published.
        about: how long it took, and what it needs, in sentences.
    """

    place: str
    command: str | None = None
    about: str = ""


def model_card(
    config: Any,
    *,
    results: dict[str, Any] | None = None,
    name: str | None = None,
    weights: str | None = None,
    has_tokenizer: bool = False,
    figures: Mapping[str, str] | None = None,
    remarks: Mapping[str, str] | None = None,
    elsewhere: Weights | None = None,
) -> ModelCard:
    """Builds the card of a model.

    Args:
        config: the model's configuration.
        results: from `read_results`; None for a model about which nothing was measured.
        name: the Hub id or the name of the folder.
        weights: the fingerprint of the weights that the results are about.
        has_tokenizer: whether a tokenizer is saved with the model: the snippet uses it.
        figures: the file names of the figures, by the name of the results that they show.
        remarks: what else is to be said of some results, in Markdown, by their name.
        elsewhere: where the weights are; None for beside the card.
    """
    name = name or "model"
    results = results or {}
    figures, remarks = figures or {}, remarks or {}
    architecture = (getattr(config, "architectures", None) or [""])[0]
    head, tag = next((pair for pair in _HEADS.items() if architecture.endswith(pair[0])), ("", None))
    if not architecture:
        head, tag = "ForCausalLM", "text-generation"
    training = results.get("results", {})
    evaluations = _eval_results(results)
    metadata = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag=tag,
        base_model=training.get("base_model"),
        datasets=_datasets(training.get("data", {})) or None,
        metrics=sorted({result.metric_type for result in evaluations}) or None,
        tags=card_tags(config),
        model_name=name if evaluations else None,
        eval_results=evaluations or None,
    )
    auto = f"AutoModel{head}"
    sections = [
        f"# {_plain(name)}",
        _description(config, training, elsewhere),
        _use_section(auto, name, has_tokenizer, training.get("data", {}), elsewhere),
        _encoding_section(config),
        _training_section(results, figures),
        _results_section(results, figures, remarks),
        _limits_section(config, results),
        _licence_section(training),
    ]
    text = "\n" + "\n\n".join(filter(None, sections)) + "\n"
    mark = _MARK.format(text=_digest(text), weights=weights or "none", tags=len(metadata.tags or []))
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n{text}{mark}")


def card_tags(config: Any) -> list[str]:
    """Returns the tags of a model's card."""
    names = config.position_encoding if isinstance(config.position_encoding, list) else [config.position_encoding]
    parts = dict.fromkeys(part for name in names for part in str(name).split("+"))
    return [LIBRARY, str(config.model_type), "position-encoding", *parts]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def folder_card(folder: str | pathlib.Path, config: Any, *, results: dict[str, Any] | None, name: str) -> ModelCard:
    """Builds the card of the checkpoint in a folder; see `model_card`."""
    folder = pathlib.Path(folder)
    return model_card(
        config,
        results=results,
        name=name,
        weights=weights_fingerprint(folder) if results else None,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        figures=figures_of(folder, results or {}),
    )


def figures_of(folder: pathlib.Path, results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the file names of the figures in a folder that show one of the results, by the name of the result."""
    return {key: f"{key}.png" for key in results if (folder / f"{key}.png").is_file()}


def complete_card(
    folder: str | pathlib.Path, config: Any, *, source: str | pathlib.Path | None = None, name: str | None = None
) -> None:
    """Writes README.md into a folder of freshly saved weights, unless it holds a card that somebody wrote or edited.

    A card that Transformers generated is replaced (its tags are kept), and so is one of ours that nobody has edited,
    unless it is about the weights in the folder and there are no results here to write a better one. A card of the
    Trainer keeps its text and gets the metadata that it lacks: licence, library, pipeline and tags.

    Args:
        folder: where the model was saved.
        config: the model's configuration.
        source: the folder that the model was loaded from, if any. Its results files, and those in `folder`, are used if
            they state the fingerprint of the weights now in `folder`.
        name: the Hub id; None for the folder's name.
    """
    folder = pathlib.Path(folder)
    path = folder / "README.md"
    results = None
    for place in dict.fromkeys(pathlib.Path(place) for place in (folder, source) if place):
        if results is None and result_files(place):
            results = read_results(place, weights=weights_fingerprint(folder))
    tags: list[str] = []
    if path.is_file():
        old = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
        mark = _MARK_PATTERN.search(old.text)
        ours = mark is not None and mark["text"] == _digest(old.text[: mark.start()])
        if not ours and _TRAINER in old.text:
            _complete_metadata(old, folder_card(folder, config, results=None, name=name or folder.resolve().name))
            old.save(path)
            return
        if not ours and _GENERIC not in old.text:
            return
        if mark and ours and not results and mark["weights"] == weights_fingerprint(folder):
            return
        # Those that somebody added: ours come first.
        tags = old.data.get("tags", [])[int(mark["tags"]) if mark else 0 :]
    card = folder_card(folder, config, results=results, name=name or folder.resolve().name)
    card.data["tags"] = list(dict.fromkeys([*card.data["tags"], *tags]))
    card.save(path)


def _complete_metadata(card: ModelCard, ours: ModelCard) -> None:
    """Gives a card the metadata of ours that it lacks."""
    for key in ("license", "library_name", "pipeline_tag"):
        if not card.data.get(key):
            card.data[key] = ours.data.get(key)
    card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), *ours.data["tags"]]))


def _value(number: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{number:.6g}")


def _eval_results(results: dict[str, Any]) -> list[EvalResult]:
    found = []
    training = results.get("results", {})
    if training.get("metrics"):
        data = training["data"]
        for metric, score in _metrics(training):
            found.append(_language_modelling(data, metric, score["value"], "final evaluation"))
        for name, scores in _test_sets(training).items():
            for metric in ("token_error", "sequence_error"):
                where = f"test set {name.replace('_', ' ')}"
                found.append(_language_modelling(data, metric, scores[metric], where))
    for key, length in _lengths(results).items():
        metric = "bits_per_byte" if key == "length" else "perplexity"
        some = length["data"].get("document_limit") or length["data"].get("document_tokens")
        for entry in _own(length):
            about = f", {entry['variant']}" if entry.get("variant") else ""
            # Without it, figures of several parts of a corpus would have one name.
            about += f" ({_documents(length['data'])})" if some else ""
            for cell in entry["cells"]:
                if cell["reached"]:
                    where = f"at {cell['length']} tokens{about}"
                    found.append(_language_modelling(length["data"], metric, cell[metric], where))
    for task, scores in results.get("lm_eval", {}).get("tasks", {}).items():
        for metric, score in scores["metrics"].items():
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=task,
                    dataset_name=task,
                    dataset_split=scores["split"],
                    dataset_args={
                        key: scores[key]
                        for key in ("shots", "samples", "version", "limit")
                        if scores.get(key) is not None
                    },
                    metric_type="accuracy" if metric in ("acc", "acc_norm") else metric,
                    metric_name=metric,
                    metric_value=_value(score["value"]),
                )
            )
    return found


def _language_modelling(data: dict[str, Any], metric: str, value: float, where: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=data.get("dataset") or data.get("task") or _corpus_of(data, data["split"]) or data["source"],
        dataset_name=_data_name(data),
        dataset_split=data["split"],
        metric_type=metric,
        metric_name=f"{metric.replace('_', ' ')}, {where}",
        metric_value=_value(value),
    )


def _metrics(training: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the metrics of a `results.json` that are one number each."""
    return [(name, score) for name, score in training.get("metrics", {}).items() if name != "test_sets"]


def _test_sets(training: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a toy task's scores in a `results.json`, by test set."""
    return training.get("metrics", {}).get("test_sets", {})


def _corpus_of(data: dict[str, Any], split: str) -> str | None:
    """Returns the name of the corpus that a split was taken from; None if the data are no named corpora."""
    if data.get("corpus"):
        return str(data["corpus"])
    if data.get("source") == "corpus":
        return str(data["splits"][split]).partition(":")[0]
    return str(data["source"]) if data.get("source") in CORPORA else None


def _corpora(data: dict[str, Any]) -> dict[str, str]:
    """Returns the splits of named corpora, such as `pg19:test[:2]`, by what they were used for."""
    return dict(data.get("splits") or {}) if data.get("source") == "corpus" else {}


def _is_text(data: dict[str, Any]) -> bool:
    """Returns whether a model was trained on what people read, and not on symbols, music or genomes."""
    if data.get("source") == "task":
        return False
    corpus = CORPORA.get(_corpus_of(data, "train") or "")
    return corpus is None or corpus.is_text


def _datasets(data: dict[str, Any]) -> list[str]:
    """Returns the ids of the training data on the Hub; none if they came from elsewhere."""
    if name := _corpus_of(data, "train"):
        corpus = CORPORA.get(name)
        return [corpus.dataset] if corpus and corpus.dataset and data.get("place") == "the Hub" else []
    return [data["dataset"]] if data.get("dataset") else []


def _data_name(data: dict[str, Any], split: str | None = None) -> str:
    """Returns what the data of a split are called; by default of that on which was measured."""
    if data.get("dataset"):
        return str(data["dataset"])
    if data.get("task"):
        return f"toy task {data['task'].replace('_', ' ')}"
    if corpus := _corpus_of(data, split or data["split"]):
        return CORPORA[corpus].title if corpus in CORPORA else SOURCES.get(corpus, corpus)
    return SOURCES.get(data["source"], str(data["source"]))


def _lengths(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the results that are about length extrapolation, by name."""
    return {key: value for key, value in results.items() if key == "length" or key.startswith("length_")}


def _own(length: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns those of the checkpoints measured together that are of the weights that the file states."""
    checkpoints = length.get("checkpoints", [])
    weights = length.get("weights_sha256")
    if weights is None:
        return checkpoints if len(checkpoints) == 1 else []
    return [entry for entry in checkpoints if entry.get("weights", weights) == weights]


def _plain(text: str) -> str:
    """Returns text on one line in which Markdown sees no tag, such as `<unk>`, and no mark-up of its own."""
    return re.sub(r"[\\`*\[\]<|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _command(origin: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in origin.get("versions", {}).items())
    when = " on ".join(filter(None, [origin.get("date", ""), versions]))
    # A file that grew has the commands of the runs before, too.
    commands = dict.fromkeys(one["command"] for one in (*origin.get("earlier", []), origin))
    return "```bash\n" + "\n".join(commands) + "\n```" + (f"\n\n{when}." if when else "")


def _description(config: Any, training: dict[str, Any], elsewhere: Weights | None) -> str:
    sizes = {
        "parameters": training.get("parameters"),
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "configured length": config.max_position_embeddings,
    }
    rows = [["", ""], *([key, f"{value:,}"] for key, value in sizes.items() if value)]
    base = training.get("base_model")
    where = "saved with the weights" if elsewhere else "in this repository"
    return (
        f"A causal Transformer of the family `{config.model_type}`, position encoding `{config.position_encoding}`. "
        + (f"Fine-tuned from `{base}`. " if base else "")
        + f"Made with `{LIBRARY}`; the code that it needs is {where}.\n\n"
        + _table(rows)
    )


def _use_section(auto: str, name: str, has_tokenizer: bool, data: dict[str, Any], elsewhere: Weights | None) -> str:
    parts = ["## Use"]
    if elsewhere and elsewhere.command:
        parts += [f"The weights are not published. This command makes them:\n\n```bash\n{elsewhere.command}\n```"]
        parts += [elsewhere.about] if elsewhere.about else []
    path, comment = name, "the id of this repository, or the path of this folder"
    if elsewhere:
        path = elsewhere.place
        comment = "the folder that the command makes" if elsewhere.command else "the id of the weights' repository"
    parts.append(_snippet(auto, path, comment, has_tokenizer, data))
    if not has_tokenizer:
        parts.append("No tokenizer was saved with the model when this card was written.")
    return "\n\n".join(parts)


def _prompt(data: dict[str, Any]) -> str:
    """Returns what the snippet begins with."""
    corpus = CORPORA.get(_corpus_of(data, "train") or "")
    return data["example"]["prompt"] if data.get("example") else corpus.prompt if corpus else "def main("


def _snippet(auto: str, path: str, comment: str, has_tokenizer: bool, data: dict[str, Any]) -> str:
    lines = [f"from transformers import {auto}" + (", AutoTokenizer" if has_tokenizer else "")]
    lines += ["", f"name = {json.dumps(path, ensure_ascii=False)}  # {comment}"]
    lines.append(f"model = {auto}.from_pretrained(name, trust_remote_code=True)")
    if has_tokenizer:
        # It has no code of its own: without this, Transformers asks whether to run that of the model's configuration.
        lines.append("tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)")
        example = data.get("example")
        lines.append(f'inputs = tokenizer({json.dumps(_prompt(data))}, return_tensors="pt")')
        if example and auto == "AutoModelForCausalLM":
            lines.append(f"output = model.generate(**inputs, max_new_tokens={example['tokens']}, do_sample=False)")
            lines.append('print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))')
            lines.append(f"# the right answer: {example['answer']}")
        elif auto == "AutoModelForCausalLM":
            lines.append("output = model.generate(**inputs, max_new_tokens=40)")
            lines.append("print(tokenizer.decode(output[0]))")
        else:
            lines.append("print(model(**inputs)[0].shape)")
    return "```python\n" + "\n".join(lines) + "\n```"


def _encoding_section(config: Any) -> str:
    text = f"## Position encoding\n\n`position_encoding={config.position_encoding!r}`"
    rows = [["parameter", "value"]]
    for key, value in (config.position_encoding_parameters or {}).items():
        pairs = value.items() if isinstance(value, dict) else [(None, value)]
        rows += [[f"`{key}`" if inner is None else f"`{key}.{inner}`", f"`{item!r}`"] for inner, item in pairs]
    rope = getattr(config, "rope_parameters", None)
    rows += [[f"`rope_parameters.{key}`", f"`{value!r}`"] for key, value in (rope or {}).items()]
    return text + ("\n\n" + _table(rows) if len(rows) > 1 else ", which has no parameters.")


def _training_section(results: dict[str, Any], figures: Mapping[str, str]) -> str:
    training = results.get("results", {})
    recipe = training.get("recipe")
    if not recipe:
        return "## Training\n\nNo training run is recorded for these weights."
    data = training.get("data", {})
    facts = {
        "data": _plain(_data_name(data, "train")) if data.get("source") else None,
        "optimiser steps": training.get("steps"),
        "tokens seen": training.get("tokens_trained"),
        "samples seen": training.get("samples_trained"),
        "weights kept from step, of the lowest validation loss": training.get("kept", {}).get("step"),
        "seed": training.get("seed"),
        "seconds": training.get("seconds"),
        "device": training.get("device"),
        "commit": training.get("commit"),
    }
    rows = [["", ""]]
    for key, value in facts.items():
        if value is not None:
            text = (
                f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if isinstance(value, float) else str(value)
            )
            rows.append([key, text])
    parts = ["## Training"]
    if len(rows) > 1:
        parts.append(_table(rows))
    if corpora := _corpora(data):
        rows = [["split", "taken from", "which is", "licence"]]
        for split, choice in corpora.items():
            corpus = CORPORA.get(choice.partition(":")[0])
            rows.append([split, f"`{choice}`", *((_plain(corpus.title), corpus.licence) if corpus else ("", ""))])
        parts += [f"The data, from {data['place']} (in brackets: which documents):", _table(rows)]
    if curves := results.get("curves"):
        parts += [text] if (text := _curves_text(curves)) else []
        parts += [f"![loss against optimiser steps]({figures['curves']})"] if "curves" in figures else []
    parts += ["The recipe, with every default filled in:", f"```json\n{json.dumps(recipe, indent=2)}\n```"]
    return "\n\n".join(parts)


def _curves_text(curves: dict[str, Any]) -> str:
    """Says how training went, from `curves.json`."""
    training, validation = curves["training"], curves["validation"]
    parts = []
    if training:
        lines = training[-1]["lines"]
        which = f"mean of the last {lines} recorded" if lines > 1 else "the last recorded"
        parts.append(f"Training loss (nats per predicted token), {which}: {training[-1]['loss']:.4f}.")
    if validation:
        last, best = validation[-1], min(validation, key=lambda row: row["loss"])
        text = f"Validation loss after step {last['step']:,}: {last['loss']:.4f}"
        text += f", perplexity {last['perplexity']:.4f}" if "perplexity" in last else ""
        text += f"; lowest after step {best['step']:,}: {best['loss']:.4f}." if best != last else ", the lowest."
        parts.append(text)
    return " ".join(parts)


def _results_section(results: dict[str, Any], figures: Mapping[str, str], remarks: Mapping[str, str]) -> str:
    found = {"results": _training_results(results.get("results", {}))}
    for key, length in _lengths(results).items():
        same = key == "length"
        found[key] = _length_results(length) if same else _window_results(length)
        if found[key] and key in figures:
            found[key].append(f"![{'bits per byte' if same else 'perplexity'} against length]({figures[key]})")
    found["lm_eval"] = _task_results(results.get("lm_eval", {}))
    parts = ["## Results"]
    for key, texts in found.items():
        if texts:
            parts += [*texts, *([remarks[key]] if key in remarks else []), _command(results[key])]
    if len(parts) == 1:
        parts.append("There are no measured results for these weights.")
    return "\n\n".join(parts)


def _training_results(training: dict[str, Any]) -> list[str]:
    parts = []
    if _test_sets(training):
        rows = [["test set", "differs in", "error per answer token", "error per sequence", "answers", "sequences"]]
        changed = training["recipe"]["data"]["test_sets"]
        for name, scores in _test_sets(training).items():
            differs = [f"{key} {value}" for key, value in changed[name].items() if key != "test_samples"]
            errors = [f"{100 * scores[metric]:.2f} %" for metric in ("token_error", "sequence_error")]
            counts = [f"{scores[count]:,}" for count in ("tokens", "sequences")]
            rows.append([name.replace("_", " "), ", ".join(differs), *errors, *counts])
        where = f"Held-out samples of the {_data_name(training['data'])}, each answer predicted from the right tokens"
        parts += [where + " before it:", _table(rows)]
    if _metrics(training):
        data = training["data"]
        rows = [["metric", "value"]]
        for metric, score in _metrics(training):
            error = f" ± {score['standard_error']:.4f}" if score.get("standard_error") is not None else ""
            unit = ", nats per token" if metric == "loss" else ""
            rows.append([metric.replace("_", " ") + unit, f"{score['value']:.4f}{error}"])
        where = f"Held-out loss on {_plain(_data_name(data))}, {data['split']} split"
        where += f", sequences of {training['length']} tokens" if training.get("length") else ""
        where += f", {training['tokens']:,} tokens scored" if training.get("tokens") else ""
        parts += [where + ":", _table(rows)]
    return parts


def _length_results(length: dict[str, Any]) -> list[str]:
    rows = [["tokens", "times trained length", "bits per byte", "standard error", "tokens scored"]]
    for entry in _own(length):
        for cell in entry["cells"]:
            numbers = ["cannot reach", "", ""]
            if cell["reached"]:
                numbers = [f"{cell['bits_per_byte']:.4f}", _error(cell["standard_error"]), f"{cell['tokens']:,}"]
            rows.append([str(cell["length"]), f"{cell['multiple']:g}", *numbers])
    where = f"Length extrapolation on {_data_name(length['data'])}, {length['data']['split']} split"
    return [where + ", the same tokens at every length:", _table(rows)] if len(rows) > 1 else []


def _window_results(length: dict[str, Any]) -> list[str]:
    data = length["data"]
    # Joined, they are one text.
    counted = ["tokens"] if data["joined"] else ["tokens", "documents"]
    rows = [["window", "times trained length", "perplexity", "bits per byte", *counted]]
    variants = any(entry.get("variant") for entry in _own(length))
    clusters = set()
    for entry in _own(length):
        for cell in entry["cells"]:
            numbers = ["cannot reach", "", *("" for _ in counted)]
            if cell["reached"]:
                # That of the file is of the loss.
                error = cell["standard_error"]
                text = f"{cell['perplexity']:,.2f}" + ("" if error is None else f" ± {cell['perplexity'] * error:,.2f}")
                counts = [f"{cell[count]:,}" for count in counted]
                numbers = [text, _error(cell["bits_per_byte"]), *counts]
                clusters |= {cell["clusters"]} if error is not None else set()
            rows.append([f"{cell['length']:,}", f"{cell['multiple']:g}", *numbers])
            if variants:
                rows[-1].insert(0, entry.get("variant") or "as trained")
    if len(rows) == 1:
        return []
    if variants:
        rows[0].insert(0, "at test time")
    text = f"Perplexity on {_plain(_data_name(data))}, {data['split']} split: {_documents(data)}"
    text += "" if data["documents"] == 1 else ", joined to one text" if data["joined"] else ", each by itself"
    text += ", cut into disjoint windows of each length"
    text += f" (± one standard error over {' or '.join(sorted(clusters))})" if clusters else ""
    return [text + ":", _table(rows)]


def _documents(data: dict[str, Any]) -> str:
    """Says how many documents windows were cut from, and how much of each."""
    count, tokens = data["documents"], data.get("document_tokens")
    text = f"{count:,} documents" if count > 1 else "1 document"
    return text + (f", the first {tokens:,} tokens of {'each' if count > 1 else 'it'}" if tokens else "")


def _task_results(lm_eval: dict[str, Any]) -> list[str]:
    rows = [["task", "version", "split", "shots", "samples", "metric", "value", "standard error"]]
    for task, scores in lm_eval.get("tasks", {}).items():
        about = [task, *(str(scores[key]) for key in ("version", "split", "shots", "samples"))]
        for metric, score in scores["metrics"].items():
            rows.append([*about, metric, f"{score['value']:.4f}", _error(score["standard_error"])])
    if len(rows) == 1:
        return []
    parts = ["lm-eval:", _table(rows)]
    limited = [task for task, scores in lm_eval["tasks"].items() if scores.get("limit") is not None]
    if limited:
        parts.append(
            "Of these only the first questions were asked, so that they compare with nothing but the same ones: "
            f"{', '.join(limited)}."
        )
    if cut := lm_eval.get("truncated_requests"):
        parts.append(f"{cut:,} requests were longer than {lm_eval['max_length']:,} tokens and lost their beginning.")
    return parts


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _limits_section(config: Any, results: dict[str, Any]) -> str:
    training = results.get("results", {})
    data = training.get("data", {})
    points = []
    parameters, tokens, samples = (training.get(key) for key in ("parameters", "tokens_trained", "samples_trained"))
    if parameters and (tokens or samples):
        seen = f"{tokens:,} tokens, {tokens / parameters:.2f} for each parameter" if tokens else f"{samples:,} samples"
        points.append(
            f"It has {parameters:,} parameters and saw {seen}. Its figures say how its encoding does at this size and "
            "on this budget, and nothing about larger ones."
        )
    if training.get("seed") is not None:
        points.append(f"This is one run, with seed {training['seed']}: how far another seed would differ is not in it.")
    trained, measured = (_corpus_of(data, split) for split in ("train", data["split"])) if data else (None, None)
    # Forms of one corpus, such as `maestro_transposed` and `maestro`, are named alike.
    if trained and measured and not trained.startswith(measured) and not measured.startswith(trained):
        points.append(
            f"It was trained on `{trained}` and is measured on `{measured}`: the held-out figures are those of another "
            "source of text, and include what differs between the two."
        )
    longest = max_length(config)
    limit = "its encoding sets no limit" if longest is None else f"it can serve no more than {longest:,}"
    points.append(
        f"The configuration states a length of {config.max_position_embeddings:,} tokens, and {limit}. How well it "
        "does beyond the length of training is known only where it was measured above."
    )
    if data.get("source") == "task":
        points.append(
            f"It knows the symbols of one generated task, the {_data_name(data)}, and nothing else: it is no language "
            "model. Other parameters of the task than those above are untested."
        )
    else:
        missing = {"length extrapolation": _lengths(results), "zero-shot tasks": results.get("lm_eval")}
        if not data.get("source") or not _is_text(data):
            del missing["zero-shot tasks"]
        if data.get("source") and (unknown := [what for what, found in missing.items() if not found]):
            points.append(f"Not measured: {', '.join(unknown)}.")
        points.append(
            "It was not tuned to follow instructions or to be safe, and can repeat what its training text holds."
            if _is_text(data)
            else "It writes words of its own tokenizer, was not tuned for any use of them, and can repeat its training "
            "data."
        )
    return "## Limits\n\nNothing is known about the model beyond the results above.\n\n" + "\n".join(
        f"- {point}" for point in points
    )


def _licence_section(training: dict[str, Any]) -> str:
    text = "## Licence\n\nCode, weights and this card: Apache-2.0."
    if base := training.get("base_model"):
        text += f" The licence of `{base}` applies to the weights, too."
    data = training.get("data", {})
    names = [choice.partition(":")[0] for choice in _corpora(data).values()] or [_corpus_of(data, "train") or ""]
    corpora = [CORPORA[name] for name in dict.fromkeys(names) if name in CORPORA]
    if corpora:
        lines = [f"- {_plain(corpus.title)}: {corpus.licence}" for corpus in corpora]
        return text + " The data have licences of their own:\n\n" + "\n".join(lines)
    if data.get("source") == "task":
        return text + " The training data are generated by the code."
    if data.get("source") == "stdlib":
        return text + " The training data, Python's standard library: PSF License."
    if data.get("source"):
        place = f"the page of `{data['dataset']}`" if data.get("dataset") else "their source"
        return text + f" The licence of the training data is not known to this card: see {place}."
    return text

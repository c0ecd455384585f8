"""Tokenizers (bytes, a byte-level BPE trained here, words, or any existing one), and the tokens of documents."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import cached_file

# As in GPT-2, one token ends a document and begins the next, and is the prompt for unconditional generation.
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"

# Tokenizers of documents that are not text (music and genomes, as words of a small vocabulary). Their tokens have no
# bytes, so there are no bits per byte.
WORD_TOKENIZERS = ("jsb", "remi", "6mer")

# Characters in a piece of a long document (at most, for text files), and in a batch of pieces.
PIECE = 1 << 16
_BATCH = 2 * PIECE
# Characters on each side of a cut that are tokenised to check it.
_CONTEXT = 200

# Files that a tokenizer can be read from.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


def build_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """Builds a tokenizer that has a padding token and, except for `jsb` and `6mer`, an end-of-text token.

    Args:
        kind: `bytes` (token b is byte b, plus two special tokens), `jsb` and `remi` (words of chorales and piano
            performances, see `music.py`), `6mer` (words of genomes, see `genome.py`), or the folder or Hub id of an
            existing tokenizer.
    """
    if kind == "bytes":
        return byte_level(_byte_tokenizer())
    if kind == "jsb":
        from .music import CHORALE_WORDS

        return word_tokenizer(CHORALE_WORDS, pad_token="<pad>")
    if kind == "remi":
        from .music import remi_words

        names = {f"{name}_token": f"{name.upper()}_None" for name in ("pad", "bos", "eos", "mask")}
        return word_tokenizer(remi_words(), **names)
    if kind == "6mer":
        from .genome import GENOME_PATTERN, GENOME_WORDS

        # Other letters become <unk>, as in the Nucleotide Transformer.
        names = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "mask", "cls")}
        return word_tokenizer(GENOME_WORDS, GENOME_PATTERN, **names)
    try:
        tokenizer = load_tokenizer(kind)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer={kind!r} is not valid: it must be 'bytes', 'bpe' (in recipes), or a folder or Hub id from "
            f"which a tokenizer loads. ({error})"
        ) from error
    if tokenizer.eos_token is None:
        raise ValueError(f"tokenizer={kind!r} is not valid: it has no end-of-text token (`eos_token`).")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer itself puts before and after a text, such as those of BOS and EOS.

    Raises ValueError if they cannot be told from those of the text.
    """

    def ids(text: str, *, added: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=added, verbose=False)["input_ids"])

    # Fields such as `add_bos_token` do not say what a post-processor adds. A tokenizer of words may not have the "a".
    if ids("", added=True) == ids("", added=False):
        return [], []
    whole, text = ids("a", added=True), ids("a", added=False)
    for start in range(len(whole) - len(text) + 1):
        if text and whole[start : start + len(text)] == text:
            return whole[:start], whole[start + len(text) :]
    raise ValueError(
        f"tokenizer={tokenizer.name_or_path!r} is not valid: its tokens of 'a' are {text} without special tokens, and "
        f"{whole} with them. Allowed: a tokenizer that adds special tokens before or after those of a text."
    )


def around_document(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the ids before and after each document of data: `added_tokens`, and after them the end-of-text token.

    Documents of words, as of music, also begin with the beginning-of-text token, if there is one.
    """
    begin, end = added_tokens(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if _is_of_words(tokenizer) and bos is not None and bos not in begin:
        begin = [bos, *begin]
    if eos is not None and eos not in end:
        end = [*end, eos]
    return begin, end


def begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the documents of data begin with a token such as BOS, see `around_document`."""
    return bool(around_document(tokenizer)[0])


def _is_of_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.pre_tokenizer) is pre_tokenizers.WhitespaceSplit


def text_of(row: Mapping[str, Any]) -> str:
    """Returns the text of a document; raises ValueError if it is not a string."""
    text = row.get("text")
    if not isinstance(text, str):
        shown = repr(text)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise ValueError(f"a document has text={shown}; it must be a string.")
    return text


def cut(parts: Iterable[str], place: Callable[[str], int | None]) -> Iterator[tuple[str, bool]]:
    """Yields the joined parts in other pieces, and whether a piece is the last.

    `place` returns where a piece may end in the text that is read, or None.
    """
    rest = ""
    for part in parts:
        rest += part
        if stop := place(rest):
            yield rest[:stop], False
            rest = rest[stop:]
    yield rest, True


def tokenize_documents(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yields the token ids of each document; see `tokenize_pieces`."""
    ids: list[int] = []
    for piece, last in tokenize_pieces(tokenizer, ({"text": text} for text in texts)):
        ids += piece.tolist()
        if last:
            yield ids
            ids = []


def tokenize_pieces(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields the token ids of documents in pieces, int32 (tokens), and whether a piece is the last of its document.

    A document has the tokens of `around_document` once, whatever its pieces. The text of a special token is encoded as
    text, not as the token.

    The concatenated pieces equal the tokens of the document: it is cut only where that does not change them. Without
    such a place (no white space, a tokenizer without pre-tokenisation), pieces are longer, up to the whole document.

    Args:
        rows: with `text`, a document; or with `text` and `document`, the next piece of the document with that number.
    """
    for ids, last, _, _ in _tokenised(tokenizer, rows, measure=False):
        yield ids, last


def measure_pieces(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[np.ndarray, bool, np.ndarray, bool]]:
    """Yields the pieces of `tokenize_pieces`, the bytes of text of each token, and whether a piece's text is changed.

    The bytes, int32 (tokens), are those of the text itself in UTF-8, whatever the tokenizer makes of it: from the end
    of the token before, so those of a document add up to its text. Tokens around it have none. The text is changed if
    the tokens do not decode to it, but for one space at its start.
    """
    check_bytes(tokenizer)
    return _tokenised(tokenizer, rows, measure=True)


def measure_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Yields for each document its token ids, their bytes of text, and whether it is changed; see `measure_pieces`."""
    ids, sizes, changed = [], [], False
    for piece, last, some, differs in measure_pieces(tokenizer, ({"text": text} for text in texts)):
        ids.append(piece)
        sizes.append(some)
        changed |= differs
        if last:
            yield np.concatenate(ids), np.concatenate(sizes), changed
            ids, sizes, changed = [], [], False


def _tokenised(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]], *, measure: bool
) -> Iterator[tuple[np.ndarray, bool, np.ndarray, bool]]:
    (begin, end), of_words = around_document(tokenizer), _is_of_words(tokenizer)
    first, sizes, differs = True, np.empty(0, dtype=np.int32), False
    # Bytes of pieces without tokens; the next token has them.
    before = 0
    for batch in _batches(_pieces(tokenizer, rows)):
        texts = [text for text, _ in batch]
        if of_words:
            _check_words(tokenizer, texts)
        encoded = _encode(tokenizer, texts, measure)
        for number, (text, last) in enumerate(batch):
            start, ids = begin if first else [], encoded["input_ids"][number]
            tokens = np.array([*start, *ids, *(end if last else [])], dtype=np.int32)
            if measure:
                before = 0 if first else before
                sizes = np.zeros(len(tokens), dtype=np.int32)
                if ids:
                    sizes[len(start) : len(start) + len(ids)] = _bytes_of(text, encoded["offset_mapping"][number])
                else:
                    before += len(text.encode())
                if len(tokens) > len(start):
                    sizes[len(start)] += before
                    before = 0
                decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
                differs = text not in (decoded, f" {decoded}") and decoded != f" {text}"
            yield tokens, last, sizes, differs
            first = last


def _bytes_of(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the bytes of each token: from the end of the token before, and for the last to the end of the text.

    Tokens that end at the same place, such as the bytes of a character, have equal shares.
    """
    ends = np.maximum.accumulate([stop for _, stop in offsets])
    ends[-1] = len(text)
    if not text.isascii():
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
        ends = np.concatenate([[0], widths.cumsum()])[ends]
    places, firsts, counts = np.unique(ends, return_index=True, return_counts=True)
    shared, count = np.repeat(np.diff(places, prepend=0), counts), np.repeat(counts, counts)
    number = np.arange(len(ends)) - np.repeat(firsts, counts)
    return (number + 1) * shared // count - number * shared // count


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH or len(batch) == 64:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], offsets: bool = False) -> Mapping[str, list[Any]]:
    return tokenizer(
        texts,
        return_offsets_mapping=offsets,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def _pieces(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yields the text of rows in pieces (see `tokenize_pieces`), and whether a piece ends a document."""
    cuttable = _may_be_cut(tokenizer)

    def place(text: str) -> int | None:
        return _place_to_cut(tokenizer, text) if cuttable and len(text) >= PIECE + _CONTEXT else None

    def document(row: Mapping[str, Any]) -> Any:
        number = row.get("document")
        return object() if number is None else number

    for _, group in itertools.groupby(rows, document):
        texts = map(text_of, group)
        yield from cut((text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE)), place)


def _may_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer splits text into words before merging, or does not merge."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.pre_tokenizer is None:
        return False
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("word word")]
    return len(words) > 1 or not json.loads(backend.to_str())["model"].get("merges", True)


def _place_to_cut(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Returns the last place between a word or number and white space where the text may be cut, or None."""
    stop = len(text) - _CONTEXT
    places = (
        place
        for place in range(stop - 1, max(0, stop - PIECE), -1)
        if text[place].isspace() and text[place - 1].isalnum()
    )
    for place in itertools.islice(places, 8):
        left, right = text[max(0, place - _CONTEXT) : place], text[place : place + _CONTEXT]
        together, one, other = _encode(tokenizer, [left + right, left, right])["input_ids"]
        # Needs more than white space on the right: a tokenizer that strips it would otherwise pass the check.
        if together == one + other and not right.isspace():
            return place
    return None


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """This process, and those that are forked inside, tokenise in one thread each; `tokenizers` warns otherwise."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def check_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if there are no bits per byte with a tokenizer: its tokens are not pieces of text, as words of
    music are not, or it does not say which piece each of them is."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description = "" if backend is None else repr(backend.decoder) + repr(backend.pre_tokenizer)
    if "ByteLevel" in description or (backend and any(token.startswith("▁") for token in tokenizer.get_vocab())):
        return
    raise ValueError(
        f"bits per byte cannot be computed with {type(tokenizer).__name__} {tokenizer.name_or_path!r}: the bytes of "
        "its tokens are unknown. Allowed: byte-level and SentencePiece-style tokenizers of the library `tokenizers`."
    )


def about_changes(changed: int, documents: int) -> str:
    """Returns a note on bits per byte if a tokenizer changes the text of some documents."""
    return (
        f"the tokenizer changes the text of {changed:,} of {documents:,} documents (by normalisation, or for lack of a "
        "token). Bits per byte are per byte of the text itself, but without what is lost: they are not comparable with "
        "those of other tokenizers"
    )


def token_unit(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what loss and perplexity are per: "byte" if every token of text is a byte, else "token"."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = set(tokenizer.get_vocab()) - special
    is_bytes = "ByteLevel" in repr(getattr(backend, "decoder", None)) and all(len(text) == 1 for text in texts)
    return "byte" if is_bytes else "token"


def wrapped(backend: Tokenizer, **special_tokens: str) -> PreTrainedTokenizerFast:
    """Returns Transformers' tokenizer with a backend, for generation with padding on the left."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **special_tokens
    )


def byte_level(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns the tokenizer `bytes` or `bpe` with a backend."""
    return wrapped(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PADDING)


def word_tokenizer(words: Sequence[str], pattern: str | None = None, **special_tokens: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words between white space, or with `pattern` of the parts of a text that match it."""
    unknown = special_tokens.get("unk_token", "<unk>")
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    if pattern is None:
        # Without a decoder, words are joined by spaces again.
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.decoder = decoders.Fuse()
    return wrapped(backend, **special_tokens)


def _check_words(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> None:
    known = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    for document in documents:
        if unknown := set(document.split()) - known:
            raise ValueError(
                f"a document contains the word {min(unknown)!r}, which is not in the tokenizer's vocabulary of "
                f"{len(known)} words, such as {', '.join(map(repr, sorted(known)[:3]))}."
            )


def gguf_options(gguf_file: str | None) -> dict[str, str]:
    """Returns the keywords of `from_pretrained` that name a GGUF file; none without a file."""
    return {} if gguf_file is None else {"gguf_file": gguf_file}


def load_tokenizer(path: str, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder or Hub id, or that in a GGUF file of it; OSError or ValueError without one."""
    # `AutoTokenizer` cannot infer the class from GPT-2's two files alone.
    folder = Path(path)
    if (folder / "merges.txt").exists() and not any(folder.glob("*config.json")):
        return GPT2Tokenizer.from_pretrained(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **gguf_options(gguf_file))
    except (KeyError, TypeError) as error:
        # JSON with other contents.
        raise ValueError(f"tokenizer.json does not describe a tokenizer: {error!r}.") from error
    # `AutoTokenizer` returns special tokens alone for a GPT-2 checkpoint without tokenizer files.
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise ValueError("There are no tokenizer files.")
    return tokenizer


def why_not_loaded(path: str, error: BaseException) -> str:
    """Returns why a folder or Hub id has no tokenizer; `error` is from `load_tokenizer`."""
    optional = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
    if not any(cached_file(path, name, **optional) for name in _FILES):
        return "it has no tokenizer"
    cause, *_ = str(error).split("\n")
    return f"its tokenizer cannot be read: {cause.rstrip(' .:')}"


def _byte_tokenizer() -> Tokenizer:
    # A byte-level BPE without merges: its 256 tokens are the bytes, in order.
    tokenizer = Tokenizer(
        models.BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END_OF_TEXT, PADDING)])
    return tokenizer


def train_bpe(vocab_size: int, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE trained on texts; 256 bytes and two special tokens are among its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return byte_level(tokenizer)

"""Tokens that a tokenizer itself puts around a text, such as BOS: in the data of all commands, once, and only there."""

import hashlib
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import whatwhere
import whatwhere_cli as cli
from runs import fine_tuning, interrupt, recipe, start, write_texts
from tiny import tiny_model
from whatwhere.scripts.data import prepared
from whatwhere.scripts.data import tokenize as tokens
from whatwhere.scripts.data.pack import Packer
from whatwhere.scripts.data.prepared import prepare, prepared_folder
from whatwhere.scripts.data.sonnets import sonnets
from whatwhere.scripts.data.tokenize import (
    added_tokens,
    build_tokenizer,
    measure_documents,
    tokenize_documents,
    word_tokenizer,
)
from whatwhere.scripts.errors import TrainingError
from whatwhere.scripts.evaluation import windows, zero_shot
from whatwhere.scripts.evaluation.checkpoints import Loading
from whatwhere.scripts.training.loop import train

BOS, EOS, CLS = 256, 257, 258
TEXTS = ["the cow", "", " now, <s>brown</s>\n", "数学"]


def of_bytes(template=None, bos="<s>", eos="</s>", **fields):
    """A tokenizer of bytes, with a post-processor for `template`, or with fields that make one."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"<s>": BOS, "</s>": EOS, "<cls>": CLS}
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    if template is not None:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(names.items()))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<cls>", **fields)


# By name: the tokenizer, and the tokens around a document.
TOKENIZERS = {
    "nothing": (lambda: of_bytes(), [], [EOS]),
    "GPT-2": (lambda: of_bytes(bos="</s>"), [], [EOS]),
    "no EOS": (lambda: of_bytes("<s> $A", eos=None), [BOS], []),
    "post-processor": (lambda: of_bytes("<s> $A"), [BOS], [EOS]),
    "field": (lambda: of_bytes(add_bos_token=True), [BOS], [EOS]),
    "field against post-processor": (lambda: of_bytes("<s> $A", add_bos_token=False), [], [EOS]),
    "both": (lambda: of_bytes("<s> $A </s>"), [BOS], [EOS]),
    "EOS": (lambda: of_bytes("$A </s>"), [], [EOS]),
    "both by fields": (lambda: of_bytes(add_bos_token=True, add_eos_token=True), [BOS], [EOS]),
    "another end": (lambda: of_bytes("<s> $A <cls>"), [BOS], [CLS, EOS]),
    "one token for both": (lambda: of_bytes("</s> $A", bos="</s>"), [EOS], [EOS]),
}


@pytest.fixture(params=TOKENIZERS)
def known(request):
    make, begin, end = TOKENIZERS[request.param]
    return make(), begin, end


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WHATWHERE_CACHE", str(tmp_path_factory.mktemp("cache")))


# --- documents


def test_documents_have_what_the_tokenizer_adds(known, tmp_path):
    tokenizer, begin, end = known
    expected = [begin + list(text.encode()) + end for text in TEXTS]
    assert list(tokenize_documents(tokenizer, TEXTS)) == expected
    before, after = added_tokens(tokenizer)
    assert tokenizer("the cow")["input_ids"] == before + list(b"the cow") + after
    assert (before, end[: len(after)]) == (begin, after)
    # As it is loaded from a checkpoint.
    tokenizer.save_pretrained(tmp_path)
    assert list(tokenize_documents(AutoTokenizer.from_pretrained(tmp_path), TEXTS)) == expected


@pytest.mark.parametrize("name", ["bytes", "bpe", "remi", "jsb"])
def test_our_own_tokenizers_add_nothing(name):
    tokenizer = tokens.train_bpe(300, TEXTS) if name == "bpe" else build_tokenizer(name)
    assert added_tokens(tokenizer) == ([], [])
    assert tokens.begins_with_bos(tokenizer) == (name == "remi")


def test_words_begin_with_one_bos():
    tokenizer = word_tokenizer(["a", "b", "<s>", "<unk>"], bos_token="<s>", unk_token="<unk>")
    assert list(tokenize_documents(tokenizer, ["a b"])) == [[2, 0, 1]]
    tokenizer.add_bos_token = True
    assert tokenizer("a b")["input_ids"] == [2, 0, 1]
    assert list(tokenize_documents(tokenizer, ["a b"])) == [[2, 0, 1]]


@pytest.mark.parametrize("name", ["post-processor", "both", "nothing"])
def test_long_documents_begin_once(name, monkeypatch):
    for field, value in (("PIECE", 64), ("_BATCH", 128), ("_CONTEXT", 16)):
        monkeypatch.setattr(tokens, field, value)
    make, begin, end = TOKENIZERS[name]
    text = "how now brown cow " * 60
    # In pieces of a file, too; a short document follows.
    rows = [{"text": text[start : start + 100], "document": 0} for start in range(0, len(text), 100)]
    rows.append({"text": "cow", "document": 1})
    pieces = list(tokens.tokenize_pieces(make(), rows))
    assert len(pieces) > 10
    expected = begin + list(text.encode()) + end + begin + list(b"cow") + end
    assert np.concatenate([ids for ids, _ in pieces]).tolist() == expected


def test_bos_has_no_bytes(known):
    tokenizer, begin, _ = known
    for (ids, sizes, _), text in zip(measure_documents(tokenizer, TEXTS), TEXTS, strict=True):
        assert len(ids) == len(sizes)
        assert sizes[: len(begin)].sum() == 0
        # Bytes of a text without tokens have no place if no token ends it.
        assert sizes.sum() == len(text.encode())


def test_bytes_of_a_piece_without_tokens(monkeypatch):
    """The first piece of a document has BOS, but no token of text; the next piece has its bytes."""
    tokenizer = of_bytes("<s> $A")
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    monkeypatch.setattr(tokens, "_pieces", lambda *_: iter([("  ", False), ("cow", True), ("", True)]))
    (first, _, sizes, _), (second, _, others, _), *_ = tokens.measure_pieces(tokenizer, [])
    assert (first.tolist(), second.tolist()) == ([BOS], [*b"cow", EOS])
    assert (sizes.tolist(), others.tolist()) == ([0], [3, 1, 1, 0])


@pytest.mark.parametrize("pack", ["concat", "documents", "separate"])
def test_each_packed_document_has_its_own_bos(pack):
    texts = ["one", "two cows", "three"]
    blocks = list(Packer(of_bytes("<s> $A"), 8, pack)({"text": text} for text in texts))
    ids = np.concatenate([block["input_ids"] for block in blocks])
    stream = [token for text in texts for token in (BOS, *text.encode(), EOS)]
    assert ids.tolist() == stream[: len(ids)]
    assert (ids == BOS).sum() == 3
    if pack == "documents":
        positions = np.concatenate([block["position_ids"] for block in blocks])
        assert (positions[ids == BOS] == 0).all()


# --- prepared text, and runs that are resumed


def earlier_folder(rows, tokenizer):
    """The folder in which versions without BOS prepared text."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    content = tokenizer.backend_tokenizer.to_str()
    what = json.dumps([prepared.FORMAT, rows._fingerprint, type(tokenizer).__name__, content, special])
    return prepared.cache_folder() / hashlib.sha256(what.encode()).hexdigest()[:32]


def test_text_prepared_without_bos_is_not_used(known):
    tokenizer, begin, end = known
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    changed = prepared_folder(rows, tokenizer) != earlier_folder(rows, tokenizer)
    assert changed == any(added_tokens(tokenizer))
    text = prepare(rows, tokenizer, processes=1)
    expected = [token for text in TEXTS for token in (*begin, *text.encode(), *end)]
    assert text.read(0, text.tokens).tolist() == expected


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A checkpoint whose tokenizer adds BOS."""
    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    model = tiny_model(
        "llama", "rope", vocab_size=259, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=CLS, hidden_size=16
    )
    model.save_pretrained(folder)
    of_bytes("<s> $A").save_pretrained(folder)
    return str(folder)


def settings_of(kind, stock):
    if kind == "finetune":
        return fine_tuning(stock)
    streaming = {"data__streaming": True, "data__shuffle_buffer": 4, "evaluation__final_blocks": 3}
    return recipe(data__tokenizer=stock, **(streaming if kind == "stream" else {}))


@pytest.mark.parametrize("kind", ["train", "finetune", "stream"])
def test_runs_do_not_change_their_data(kind, stock, data_dir, tmp_path, monkeypatch):
    """A run of an earlier version, which wrote no BOS, is not continued with it."""
    settings = settings_of(kind, stock)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "added_tokens", lambda tokenizer: ([], []))
        patch.setattr(prepared, "added_tokens", lambda tokenizer: ([], []))
        interrupt(settings, tmp_path / "run", 1, data_dir)
    with pytest.raises(TrainingError, match="an earlier version wrote no BOS token"):
        start(settings, tmp_path / "run", resume=True, data_dir=data_dir)


@pytest.mark.parametrize("kind", ["train", "finetune", "stream"])
def test_runs_train_with_bos_and_say_so(kind, stock, data_dir, tmp_path, monkeypatch):
    batches = []
    train_step = whatwhere.scripts.training.loop.TrainingRun.train_step

    def watched(self, batch):
        batches.append(batch["input_ids"])
        return train_step(self, batch)

    monkeypatch.setattr(whatwhere.scripts.training.loop.TrainingRun, "train_step", watched)
    results = start(settings_of(kind, stock), tmp_path / "run", data_dir=data_dir)
    assert results["bos"] is True
    assert json.loads((tmp_path / "run/results.json").read_text())["bos"] is True
    ids = torch.cat(batches)
    ends = (ids == EOS)[:, :-1]
    assert ends.any()
    assert (ids[:, 1:][ends] == BOS).all()
    # The saved tokenizer begins texts as in training.
    assert AutoTokenizer.from_pretrained(tmp_path / "run")("a")["input_ids"] == [BOS, 97]


def test_runs_without_bos_say_nothing(data_dir, tmp_path):
    results = train(recipe(), tmp_path / "run", data_dir=data_dir)
    assert "bos" not in results


def test_prepare_command(stock, data_dir, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(data__tokenizer=stock).resolved()))
    cli.main(["prepare", str(tmp_path / "recipe.yaml"), "--data-dir", str(data_dir), "--processes", "1"])
    rows = [json.loads(line)["text"] for line in (data_dir / "validation.jsonl").read_text().splitlines()]
    printed = capsys.readouterr().out
    (folder,) = re.findall(r"validation: .* in '(.*)', verified", printed)
    text = prepared.PreparedText(Path(folder))
    assert text.read(0, text.tokens).tolist() == [id for row in rows for id in (BOS, *row.encode(), EOS)]


# --- length


def test_length_cuts_the_stream_of_tokens(stock, data_dir, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text((data_dir / "test.jsonl").read_text())
    fixed = ["length", stock, "--validation-file", str(tmp_path / "a.jsonl"), "--windows", "16,32", "--device", "cpu"]
    cli.main([*fixed, "--output", str(tmp_path / "cut")])
    (path,) = (tmp_path / "cut").glob("*.json")
    content = json.loads(path.read_text())
    (entry,) = content["checkpoints"]
    assert entry["bos"] is True
    assert content["data"]["bos_windows"] is None
    texts = [json.loads(line)["text"] for line in (data_dir / "test.jsonl").read_text().splitlines()]
    ids = [token for text in texts for token in (BOS, *text.encode(), EOS)][: entry["tokens"] + 1]
    assert entry["tokens_sha256"] == hashlib.sha256(np.array(ids, dtype=np.int32).tobytes()).hexdigest()
    # With BOS in every window: other results of the same tokens.
    with pytest.raises(SystemExit, match="bos_windows: None → True"):
        cli.main([*fixed, "--output", str(tmp_path / "cut"), "--bos-windows"])
    assert "begins with BOS" not in capsys.readouterr().out
    cli.main([*fixed, "--output", str(tmp_path / "begun"), "--bos-windows"])
    assert "tokens, every window begins with BOS, by sequence length" in capsys.readouterr().out
    begun = json.loads((tmp_path / "begun" / path.name).read_text())
    assert begun["data"] == {**content["data"], "bos_windows": True}
    (other,) = begun["checkpoints"]
    assert other["tokens_sha256"] == entry["tokens_sha256"]
    for cell, same in zip(other["cells"], entry["cells"], strict=True):
        assert (cell["tokens"], cell["bytes"]) == (same["tokens"], same["bytes"])
        assert cell["loss"] != same["loss"]
    with pytest.raises(SystemExit, match="bos_windows: True → None"):
        cli.main([*fixed, "--output", str(tmp_path / "begun")])


def test_windows_that_begin_with_bos():
    model = tiny_model("gpt2", "pope")
    ids = torch.arange(3, 60, dtype=torch.int32)
    cell, _ = windows.measure_windows(model, [ids], None, 8, trained_length=8, begin=1)
    losses = []
    for start_of in range(0, 56, 8):
        inputs, targets = ids[start_of : start_of + 8].long(), ids[start_of + 1 : start_of + 9].long()
        inputs = torch.cat([torch.tensor([1]), inputs[1:]])
        with torch.no_grad():
            logits = model(input_ids=inputs[None]).logits[0].double()
        losses.append(-logits.log_softmax(-1)[torch.arange(8), targets])
    assert cell.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    # The text itself is not changed.
    assert torch.equal(ids, torch.arange(3, 60, dtype=torch.int32))


def test_windows_cannot_begin_with_a_token_that_there_is_not(data_dir, tmp_path, refused):
    model = tiny_model("gpt2", "pope", vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257)
    model.save_pretrained(tmp_path / "model")
    build_tokenizer("bytes").save_pretrained(tmp_path / "model")
    given = ["length", str(tmp_path / "model"), "--validation-file", str(data_dir / "test.jsonl"), "--windows", "16"]
    given += ["--device", "cpu", "--output", str(tmp_path / "out"), "--bos-windows"]
    assert "bos_windows=True is not valid" in (message := refused(*given))
    assert "adds no token before a text" in message
    assert "--bos-windows has no effect with --tasks ruler" in refused(*given[:2], "--tasks", "ruler", "--bos-windows")


# --- other commands


def test_text_of_conversions(stock, tmp_path):
    from whatwhere.scripts.conversion.folder import _tokens

    config = whatwhere.WhatWhereLlamaConfig.from_pretrained(stock)
    for template, count in (("<s> $A", 0), ("<s> $A </s>", 1)):
        of_bytes(template).save_pretrained(tmp_path)
        ids = _tokens(str(tmp_path), None, config, None).flatten()
        expected = [token for text in sonnets() for token in (BOS, *text.encode(), *[EOS] * count)]
        assert ids.tolist() == expected[: len(ids)]
        assert (ids == BOS).sum() > 1


def test_samples_of_cards(stock, monkeypatch):
    from whatwhere.scripts.cards.sample import take_sample

    given = []
    generate = whatwhere.WhatWhereLlamaForCausalLM.generate

    def watched(self, **inputs):
        given.append(inputs["input_ids"][0].tolist())
        return generate(self, **inputs)

    monkeypatch.setattr(whatwhere.WhatWhereLlamaForCausalLM, "generate", watched)
    config = whatwhere.WhatWhereLlamaConfig.from_pretrained(stock)
    take_sample(Path(stock), config, {}, "cow", 2)
    assert given == [[BOS, *b"cow"]]


@pytest.mark.parametrize("name", ["post-processor", "field", "nothing"])
def test_lm_eval_has_one_bos(name, tmp_path):
    """Requests of lm-eval begin as documents do; its rolling ones do so only with `add_bos_token=False`."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = tiny_model("llama", "pope", vocab_size=259, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=CLS)
    model.save_pretrained(tmp_path)
    make, begin, _ = TOKENIZERS[name]
    make().save_pretrained(tmp_path)
    asked = []

    def watch(scorer):
        def answer(requests, *_, **__):
            asked[:] = [(list(context), list(continuation)) for _, context, continuation in requests]
            return [(0.0, True)] * len(requests)

        scorer._loglikelihood_tokens = answer
        return scorer

    loading = Loading()
    stock = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    for scorer in (watch(zero_shot.load_scorer(str(tmp_path), loading, 2)), watch(stock)):
        pairs = [("the", " cow"), ("", "cow")]
        scorer.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True)
        assert asked == [([*begin, *b"the"], list(b" cow")), ([BOS], list(b"cow"))]
        # The tokens of a rolling request follow one BOS of lm-eval's own.
        scorer.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("cow",), 0)], disable_tqdm=True)
        assert asked == [([BOS], [*begin, *b"cow"])]
    once = watch(HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2, add_bos_token=False))
    once.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("cow",), 0)], disable_tqdm=True)
    assert asked == [([BOS], list(b"cow"))]


# Files that call a tokenizer with its defaults, and on what. All documents of data are tokenised by data/tokenize.py.
CALLS = {
    "analysis/texts.py": "the text of figures",
    "cards/content.py": "a prompt, in the code of a card",
    "cards/sample.py": "a prompt",
    "commands/demo.py": "a prompt, in code that is printed",
    "conversion/folder.py": "the text of a conversion",
    "data/music.py": "music, by MidiTok",
    "data/tokenize.py": "documents",
    "evaluation/ruler.py": "a prompt, for its length",
    "evaluation/task.py": "a prompt",
    "training/held_out.py": "the answer of a toy task",
}


def test_all_commands_tokenise_documents_by_one_function():
    root = Path(whatwhere.__file__).parent / "scripts"
    source = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}

    def files(pattern):
        return {name for name, text in source.items() if re.search(pattern, text)}

    assert files(r"(?<![\w.])(?<!def )tokenizer\(|okenizer\.(encode|__call__)\(") == set(CALLS)
    assert files("add_special_tokens=") == {"data/tokenize.py"}
    users = files(r"\b(tokenize|measure)_(pieces|documents)\(")
    assert users == {"data/tokenize.py", "data/pack.py", "data/prepared.py", "evaluation/length.py"}


def test_lm_eval_refuses_an_end_before_the_answer(tmp_path):
    model = tiny_model("llama", "rope", vocab_size=259, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=CLS)
    model.save_pretrained(tmp_path)
    TOKENIZERS["both"][0]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"it ends each text with \['</s>'\], so answers would follow"):
        zero_shot.load_scorer(str(tmp_path), Loading(), 2)

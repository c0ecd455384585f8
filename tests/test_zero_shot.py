"""Zero-shot tasks: local files ask what the Hub's data asks, CBT's scores, the command, lm-eval's own command line."""

import gzip
import importlib.util
import json
import pathlib
import random
import re

import datasets
import peft
import pytest
import torch
import transformers
import yaml

import whatwhere_cli as cli
from engine_matrix import for_engine
from processes import python
from tiny import log_likelihood, slow_but, tiny_model
from whatwhere.model_card import weights_fingerprint
from whatwhere.scripts import progress
from whatwhere.scripts.cards.folder import write_card
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import zero_shot
from whatwhere.scripts.evaluation.checkpoints import Loading
from whatwhere.scripts.evaluation.lm_eval import zero_shot_files as files
from whatwhere.scripts.evaluation.results import lm_eval_tasks, read_results

# A warning of PEFT.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
STOCK = pathlib.Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks"
PARADIGMS = sorted(path.stem for path in (STOCK / "blimp").glob("*.yaml") if path.stem != "_blimp")

# Rows of the Hub's data sets, with the fields that lm-eval reads; made up.
HUB = {
    "lambada": {
        "test": [
            {"text": 'He gave her a key.\n\n"Keep it," he said, and she put the key'},
            {"text": "The tea was cold. She poured out the tea"},
        ]
    },
    "blimp": {
        "train": [
            {"sentence_good": "The dogs bark.", "sentence_bad": "The dogs barks."},
            {"sentence_good": "A cat sleeps.", "sentence_bad": "A cat sleep."},
        ]
    },
    "hellaswag": {
        "validation": [
            {
                "activity_label": "Clean and jerk",
                "ctx_a": "A lady walks to a barbell. She bends down.",
                "ctx_b": "the lady",
                "endings": ["sleeps.", "lifts it [step] up.", "eats  it.", "is a barbell."],
                "label": "1",
            },
            {
                "activity_label": "Home",
                "ctx_a": "[header] How to clean a pan [title] Heat water. [step] Use a big pot.",
                "ctx_b": "",
                "endings": ["Boil it.", "Sing.", "[substeps] Sell it.", "Go."],
                "label": "0",
            },
        ]
    },
    "piqa": {
        "validation": [
            {"goal": "open a jar", "sol1": "turn the lid ", "sol2": "turn the table", "label": 0},
            {"goal": "Dry hair?", "sol1": "use a spoon", "sol2": "use a towel", "label": 1},
        ]
    },
    "arc_easy": {
        "test": [
            {
                "question": "Which is a metal?",
                "choices": {"text": ["iron", "wood", "wool", "air"], "label": ["A", "B", "C", "D"]},
                "answerKey": "A",
            },
            # Some have numbers for letters.
            {
                "question": "What falls?\nChoose.",
                "choices": {"text": ["light", "sound", "rain", "heat"], "label": ["1", "2", "3", "4"]},
                "answerKey": "3",
            },
        ]
    },
}
LAMBADA = ("lambada/lambada_test.jsonl", "test")
COUNTS = {"lambada": 5153, "blimp": 1000, "hellaswag": 10042, "piqa": 1838, "arc_easy": 2376}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def preprocessed(text):
    """HellaSwag's text as the local file has it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def write_local(root):
    """The rows of HUB in the formats of the local files."""
    for names in files.FILES.values():
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "lambada/lambada_test.jsonl").write_text(jsonl(HUB["lambada"]["test"]), encoding="utf-8")
    rows = [{**row, "UID": paradigm} for paradigm in PARADIGMS for row in HUB["blimp"]["train"]]
    (root / "blimp/blimp.jsonl.gz").write_bytes(gzip.compress(jsonl(rows).encode()))
    rows = [
        {
            "ind": place,
            "query": preprocessed(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b']}"),
            "choices": [preprocessed(ending) for ending in row["endings"]],
            "gold": int(row["label"]),
        }
        for place, row in enumerate(HUB["hellaswag"]["validation"])
    ]
    (root / "hellaswag/hellaswag_val.jsonl.gz").write_bytes(gzip.compress(jsonl(rows).encode()))
    rows = HUB["piqa"]["validation"]
    questions = [{key: row[key] for key in ("goal", "sol1", "sol2")} for row in rows]
    (root / "piqa/valid.jsonl").write_text(jsonl(questions))
    (root / "piqa/valid-labels.lst").write_text("".join(f"{row['label']}\n" for row in rows))
    rows = [
        {
            "query": f"Question: {row['question']}",
            "choices": row["choices"]["text"],
            "gold": row["choices"]["label"].index(row["answerKey"]),
        }
        for row in HUB["arc_easy"]["test"]
    ]
    (root / "arc/arc_easy_test.jsonl").write_text(jsonl(rows))
    for word_class, rows in cbt_rows().items():
        write_cbt(root, word_class, rows)


def cbt_rows(count=4):
    """Questions in the form of the Children's Book Test, tokenised as it is, by word class; made up."""
    words = {
        "CN": ["dog", "house", "king", "queen", "tree", "road", "fish", "bell", "coat", "door"],
        "NE": ["Anna", "Tom", "Baker", "Mary", "Rose", "Jack", "Flora", "Hugh", "Nell", "Kate"],
        "P": ["in", "on", "at", "by", "of", "to", "with", "from", "under", "over"],
        "V": ["'s", "had", "saw", "did", "ran", "sang", "ate", "fell", "won", "made"],
    }
    generator = random.Random(0)
    found = {}
    for word_class, options in words.items():
        rows = []
        for _ in range(count):
            names = generator.sample(words["NE"], 3)
            pair = [f"`` I do n't , '' said {names[0]} .", f"The {generator.choice(words['CN'])} was old ."]
            if word_class == "NE":
                question = "`` XXXXX 's dog -LRB- the old one -RRB- , '' he said , `` is n't here . ''"
            else:
                question = f"{names[1]} XXXXX the old {generator.choice(words['CN'])} ; she was 12 ."
            chosen = generator.sample(options, 10)
            rows.append(
                {"sentences": pair * 10, "question": question, "answer": chosen[4], "options": chosen},
            )
        found[word_class] = rows
    return found


def write_cbt(root, word_class, rows):
    lines = []
    for row in rows:
        lines += [f"{place} {sentence} " for place, sentence in enumerate(row["sentences"], start=1)]
        lines += [f"21 {row['question']}\t{row['answer']}\t\t{'|'.join(row['options'])}", ""]
    path = root / f"cbt/cbtest_{word_class}_test_2500ex.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report_in(folder):
    """What lm-eval's own report file says."""
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text(encoding="utf-8"))


def manager(data_dir=None):
    """lm-eval's manager with the few of its folders that we need: reading all of them takes seconds."""
    from lm_eval.tasks import TaskManager

    folders = [str(STOCK / name) for name in ("lambada", "blimp", "hellaswag", "piqa", "arc")]
    metadata = None if data_dir is None else {"data_dir": str(data_dir)}
    return TaskManager(include_path=[*folders, str(zero_shot.TASK_FOLDER)], include_defaults=False, metadata=metadata)


def requests(task):
    """Everything a model is asked, and the right answers."""
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(rank=0, world_size=1)
    asked = [(instance.doc_id, instance.idx, instance.request_type, instance.args) for instance in task.instances]
    return asked, [task.doc_to_target(doc) for doc in task.eval_docs]


@pytest.fixture
def local_data(tmp_path, monkeypatch):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    write_local(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("name", [*HUB, "cbt"])
def test_local_files_ask_what_the_hub_asks(name, local_data, monkeypatch):
    hub_sets = []

    def hub(path, name=None, **_):
        """What the Hub would give: rows with the fields of its data sets."""
        hub_sets.append((path, name))
        if path == "cam-cst/cbt":
            splits = {"test": cbt_rows()[name]}
        else:
            key = {"EleutherAI/lambada_openai": "lambada", "nyu-mll/blimp": "blimp", "Rowan/hellaswag": "hellaswag"}
            splits = HUB[{**key, "baber/piqa": "piqa", "allenai/ai2_arc": "arc_easy"}[path]]
            # Splits for lm-eval's few-shot examples, which are not used here.
            splits = {"train": next(iter(splits.values())), "validation": next(iter(splits.values())), **splits}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    from_hub = manager().load([zero_shot.TASKS[name].hub])["tasks"]
    assert hub_sets
    hub_sets.clear()
    from_files = manager(local_data).load([zero_shot.TASKS[name].local])["tasks"]
    assert not hub_sets, "local tasks do not go to the Hub"
    assert list(from_files) == list(from_hub)
    assert len(from_hub) == {"blimp": 67, "cbt": 4}.get(name, 1)
    for task in from_hub:
        asked, answers = requests(from_hub[task])
        assert (asked, answers) == requests(from_files[task])
        assert len(answers) >= 2


def test_hellaswag_keeps_what_has_no_unfinished_sentence(local_data):
    rows = files.hellaswag(data_dir=str(local_data))["validation"]
    assert rows[0]["query"].endswith("She bends down. The lady")
    assert rows[1]["query"] == "Home: How to clean a pan. Heat water. Use a big pot."


def test_local_definitions_follow_the_stock_ones():
    """Versions and BLiMP's list are copies: they change with lm-eval's."""

    def stock(path):
        return yaml.safe_load(re.sub(r"!function \S+", "null", (STOCK / path).read_text()))

    def ours(name):
        return yaml.safe_load(re.sub(r"!function (\S+)", r"\1", (zero_shot.TASK_FOLDER / f"{name}.yaml").read_text()))

    stock_files = {
        "lambada": "lambada/lambada_openai.yaml",
        "hellaswag": "hellaswag/hellaswag.yaml",
        "piqa": "piqa/piqa.yaml",
        "arc_easy": "arc/arc_easy.yaml",
    }
    for name, path in stock_files.items():
        (task,) = ours(zero_shot.TASKS[name].local)["task"]
        assert task["task"] == stock(path)["task"]
        assert task["metadata"]["version"] == f"{stock(path)['metadata']['version']}+local"
    theirs = next(loaded for path in (STOCK / "blimp").glob("_*.yaml") if "group" in (loaded := stock(path)))
    blimp = ours("whatwhere_local_blimp")
    assert [task["task"] for task in blimp["task"]] == theirs["task"]
    assert blimp["aggregate_metric_list"] == theirs["aggregate_metric_list"]
    assert blimp["metadata"]["version"] == f"{theirs['metadata']['version']}+local"
    for task in blimp["task"]:
        paradigm = task["dataset_kwargs"]["paradigm"]
        assert stock(f"blimp/{task['task'].removeprefix('blimp_')}.yaml")["dataset_name"] == paradigm


@pytest.mark.parametrize("name", slow_but(set(COUNTS) - {"blimp"}, COUNTS))
def test_real_files(name, data_dir):
    tasks = manager(data_dir).load([zero_shot.TASKS[name].local])["tasks"]
    assert len(tasks) == (67 if name == "blimp" else 1)
    for task in tasks.values():
        assert len(task.eval_docs) == COUNTS[name]
        for doc in list(task.eval_docs)[:3]:
            target = task.doc_to_target(doc)
            if task.config.doc_to_choice is not None:
                target = task.doc_to_choice(doc)[target]
            assert target.strip()
    if name == "arc_easy":
        repeats = [len(set(doc["choices"])) < 4 for doc in task.eval_docs]
        assert sum(repeats) == 7, "a known fault of the file"


@pytest.mark.parametrize(
    ("tokenised", "text"),
    [
        ("`` I do n't , '' he said .", '"I don\'t," he said.'),
        ("It 's Tom 's dog ; the boys ' dogs ran .", "It's Tom's dog; the boys' dogs ran."),
        ("`` He said ` come ' , '' she said -LRB- twice -RRB- !", "\"He said 'come',\" she said (twice)!"),
        ("I 'LL go , YOU 'RE late .", "I'LL go, YOU'RE late."),
        ("plain text -- with a dash", "plain text -- with a dash"),
    ],
)
def test_detokenise(tokenised, text):
    assert files.detokenise(tokenised) == text


def test_cbt_question():
    row = {
        "sentences": ["It was late ."] * 20,
        "question": "`` XXXXX 's right , '' he said .",
        "answer": "Tom",
        "options": ["She", "Tom", ""],
    }
    question = files.cbt_question(row)
    assert question["context"] == "It was late. " * 20 + '"'
    assert question["choices"] == ["She's right,\" he said.", "Tom's right,\" he said."]
    assert question["gold"] == 1
    row = {**row, "question": "He XXXXX here .", "answer": "'s", "options": ["is", "'s"]}
    assert files.cbt_question(row)["choices"] == [" is here.", "'s here."]


def test_cbt_requests(local_data):
    """Context and continuation are what `cbt_question` says, nothing between them."""
    tasks = manager(local_data).load(["whatwhere_local_cbt"])["tasks"]
    for word_class, rows in cbt_rows().items():
        asked, answers = requests(tasks[f"whatwhere_cbt_{word_class.lower()}"])
        questions = [files.cbt_question(row) for row in rows]
        expected = [(question["context"], choice) for question in questions for choice in question["choices"]]
        assert [arguments for *_, arguments in asked] == expected
        assert answers == [4] * len(rows), "the place of every answer in `cbt_rows`"


def test_local_files_that_cannot_be_read(tmp_path, monkeypatch, local_data):
    with pytest.raises(ValueError, match=r"no data_dir is given.*WHATWHERE_DATA_DIR.*--metadata"):
        files.rows(*LAMBADA)
    monkeypatch.setenv("WHATWHERE_DATA_DIR", str(local_data))
    assert len(files.rows(*LAMBADA)["test"]) == 2
    with pytest.raises(ValueError, match="must be an existing folder"):
        files.rows(*LAMBADA, data_dir=str(tmp_path / "none"))
    blimp = (local_data / "blimp/blimp.jsonl.gz").read_bytes()
    for content in (b"{}", blimp[:-9], blimp[:20] + b"x" * 20 + blimp[40:]):
        files._paradigms.cache_clear()
        (local_data / "blimp/blimp.jsonl.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"blimp.jsonl.gz' cannot be read: "):
            files.blimp("adjunct_island")
    (local_data / "arc/arc_easy_test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"arc_easy_test.jsonl' cannot be read"):
        files.rows("arc/arc_easy_test.jsonl", "test")


def test_choice_of_tasks(local_data):
    assert zero_shot.choose_tasks(None, None) == (list(zero_shot.TASKS), {})
    assert zero_shot.choose_tasks("piqa, cbt", local_data) == (["piqa", "cbt"], {})
    (local_data / "cbt/cbtest_V_test_2500ex.txt").unlink()
    tasks, left_out = zero_shot.choose_tasks(None, local_data)
    assert tasks == ["lambada", "blimp", "hellaswag", "piqa", "arc_easy"]
    assert left_out == {"cbt": ["cbt/cbtest_V_test_2500ex.txt"]}
    with pytest.raises(ValueError, match=r"data-dir=.*cbt: cbt/cbtest_V_test_2500ex.txt"):
        zero_shot.choose_tasks("piqa,cbt", local_data)
    with pytest.raises(ValueError, match=r"data-dir=.*: lambada"):
        zero_shot.choose_tasks(None, local_data / "cbt")


def save_model(folder, encoding="pope", family="llama", **fields):
    model = tiny_model(family, encoding, vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257, **fields)
    model.save_pretrained(folder)
    build_tokenizer("bytes").save_pretrained(folder)
    return model


def test_cbt_scores_are_likelihoods(tmp_path):
    # Questions are longer than that; PoPE has no limit.
    model = save_model(tmp_path / "model", max_position_embeddings=64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = cbt_rows(4)
    right = dict.fromkeys(rows, 0)
    right_by_length = dict.fromkeys(rows, 0)
    for number, (word_class, questions) in enumerate(rows.items()):
        for place, row in enumerate(questions):
            wholes = [
                files.detokenise(" ".join([*row["sentences"], row["question"].replace("XXXXX", option)]))
                for option in row["options"]
            ]
            context = files.detokenise(" ".join([*row["sentences"], row["question"]])).partition("XXXXX")[0].rstrip()
            choices = [whole[len(context) :] for whole in wholes]
            sums = [log_likelihood(model, tokenizer, context, choice) for choice in choices]
            per_character = [total / len(choice) for total, choice in zip(sums, choices)]
            best = row["options"][sums.index(max(sums))]
            # Some answers are what the model says, of each class another number; the rest are not.
            row["answer"] = best if place <= number else row["options"][sums.index(min(sums))]
            gold = row["options"].index(row["answer"])
            right[word_class] += gold == sums.index(max(sums))
            right_by_length[word_class] += gold == per_character.index(max(per_character))
        write_cbt(tmp_path / "data", word_class, questions)
    assert list(right.values()) == [1, 2, 3, 4]
    model = zero_shot.load_scorer(str(tmp_path / "model"), Loading(), batch_size=16)
    report = zero_shot.run(model, ["cbt"], manager(tmp_path / "data"), local=True)
    assert report["truncated_requests"] == 0
    assert report["max_length"] == zero_shot.MAX_LENGTH
    (task,) = lm_eval_tasks(report).values()
    for word_class in rows:
        metrics = task["subtasks"][f"whatwhere_cbt_{word_class.lower()}"]["metrics"]
        assert metrics["acc"]["value"] == right[word_class] / 4
        assert metrics["acc_norm"]["value"] == right_by_length[word_class] / 4
    assert task["metrics"]["acc"]["value"] == pytest.approx(10 / 16)
    assert task["samples"] == 16
    assert (task["version"], task["shots"], task["split"]) == ("1.0+local", 0, "test")


def run_command(options, capsys):
    zero_shot.main([str(option) for option in options])
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys, local_data):
    (local_data / "piqa/valid.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    # Long contexts meet a table of 200 positions: they are cut, which is said.
    save_model(tmp_path / "absolute", "absolute", "gpt2", max_position_embeddings=200)
    stock = transformers.GPT2Config(vocab_size=258, n_embd=16, n_layer=1, n_head=2, n_positions=1024)
    transformers.GPT2LMHeadModel(stock).save_pretrained(tmp_path / "someone/stock")
    build_tokenizer("bytes").save_pretrained(tmp_path / "someone/stock")
    printed = run_command(["absolute", "someone/stock", "--data-dir", local_data, "--limit", 2], capsys)
    assert f"PIQA is left out: {str(local_data)!r} has no piqa/valid.jsonl." in printed
    table = (tmp_path / "zero_shot/zero_shot.md").read_text()
    assert table in printed
    for folder in ("absolute", "someone/stock"):
        content = json.loads((tmp_path / folder / "lm_eval.json").read_text())
        assert content["weights_sha256"] == weights_fingerprint(tmp_path / folder)
        assert content["limit"] == 2
        tasks = content["tasks"]
        assert list(tasks) == [
            "lambada_openai",
            "hellaswag",
            "arc_easy",
            "whatwhere_local_blimp",
            "whatwhere_local_cbt",
        ]
        samples = {"whatwhere_local_blimp": 134, "whatwhere_local_cbt": 8}
        for name, task in tasks.items():
            assert task["samples"] == samples.get(name, 2)
            assert task["limit"] == 2
            assert task["version"].endswith("+local")
            assert 0 <= task["metrics"]["acc"]["value"] <= 1
            assert task["metrics"]["acc"]["standard_error"] >= 0
        assert set(tasks["lambada_openai"]["metrics"]) == {"perplexity", "acc"}
        # lm-eval's report says the same.
        assert lm_eval_tasks(report_in(tmp_path / folder)).keys() == tasks.keys()
        accuracy = [tasks[name]["metrics"]["acc"] for name in ("lambada_openai", "whatwhere_local_blimp")]
        cells = [f"{100 * score['value']:.2f} ± {100 * score['standard_error']:.2f}" for score in accuracy]
        assert re.search(rf"^\| {folder} \| [\d,]+ \| {cells[0]} \| {cells[1]} \| ", table, flags=re.MULTILINE)
    for text in (
        "| mean of these 5 |",
        "| the paper's PoPE | 124M | 27.67 | 77.75 | 44.43 | 29.18 | 38.52 | 43.51 |",
        "| chance |  | 0.00 | 50.00 | 10.00 | 25.00 | 25.00 | 22.00 |",
        "**Only the first 2 questions of each task",
        "**PIQA was not run**: missing piqa/valid.jsonl.",
        "requests were longer than 200 tokens and truncated at the beginning.",
    ):
        assert text in table
    assert "someone/stock: " not in table, "nothing was too long for it"
    # The card is made from lm_eval.json.
    text = write_card(tmp_path / "absolute").read_text()
    assert re.search(r"\| whatwhere_local_blimp \| 2.0\+local \| train \| 0 \| first 134 \| acc \| 0\.\d{4} ±", text)
    # Some questions only: not for the Hub's index.
    assert "model-index" not in text
    # Other tasks, and fewer questions: existing scores are kept.
    before = read_results(tmp_path / "absolute")["lm_eval"]["tasks"]
    options = ["absolute", "--data-dir", local_data, "--tasks", "hellaswag,lambada", "--limit", 1]
    monkeypatch.setattr(zero_shot, "task_manager", manager)
    run_command([*options, "--output", tmp_path / "fewer"], capsys)
    after = read_results(tmp_path / "absolute")["lm_eval"]
    assert dict(sorted(after["tasks"].items())) == dict(sorted(before.items()))
    assert "--limit 2" in after["command"]


def test_the_command_on_one_task(tmp_path, monkeypatch, capsys, local_data):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zero_shot, "task_manager", manager)
    save_model(tmp_path / "model", max_position_embeddings=512)
    options = ["model", "--data-dir", local_data, "--tasks", "hellaswag", "--limit", 2, "--output", "out"]
    printed = run_command(options, capsys)
    table = (tmp_path / "out/zero_shot.md").read_text()
    assert table in printed
    content = json.loads((tmp_path / "model/lm_eval.json").read_text())
    assert content["weights_sha256"] == weights_fingerprint(tmp_path / "model")
    (task,) = content["tasks"].values()
    assert (task["samples"], task["limit"]) == (2, 2)
    assert "| chance |" in table
    assert "**Only the first 2 questions of each task" in table
    assert "earlier table" not in printed
    assert printed.endswith("Written: out/zero_shot.md\nNext, model cards: whatwhere card model\n")
    assert "zero_shot.md, in place of an earlier table\n" in run_command(options, capsys)


def test_nothing_but_the_table_is_printed(tmp_path, monkeypatch, capfd, local_data):
    """In a folder without git, of which lm-eval asks for the version; in a log, with a line of progress."""
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zero_shot, "task_manager", manager)
    save_model(tmp_path / "model", max_position_embeddings=512)
    capfd.readouterr()
    options = ["model", "--data-dir", str(local_data), "--tasks", "lambada", "--limit", "2"]
    cli.main(["zero-shot", *options])
    printed, said = capfd.readouterr()
    assert printed.startswith("# Zero-shot evaluation\n")
    assert said == ""
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    cli.main(["zero-shot", *options])
    again, said = capfd.readouterr()
    assert again.startswith("# Zero-shot evaluation\n")
    assert re.fullmatch(r"model: 1 of 2 requests, [\d.]+ requests/s, \d\d:\d\d left\n", said)


def test_scores_of_more_questions_and_of_other_tasks_are_kept(tmp_path):
    save_model(tmp_path)

    def save(**samples):
        tasks = {name: {"metrics": {}, "samples": count, "command": f"do {name}"} for name, count in samples.items()}
        origin = {"command": "do", "date": "2031-02-03", "versions": {}}
        zero_shot.save(tmp_path, {"tasks": tasks, **origin}, {})
        content = json.loads((tmp_path / "lm_eval.json").read_text())
        return {name: task["samples"] for name, task in content["tasks"].items()}, content["command"]

    assert save(piqa=10, cbt=5) == ({"piqa": 10, "cbt": 5}, "do")
    assert save(cbt=5, blimp=3) == ({"cbt": 5, "blimp": 3, "piqa": 10}, "do cbt\ndo blimp\ndo piqa")
    assert save(piqa=9, cbt=6)[0] == {"piqa": 10, "cbt": 6, "blimp": 3}
    # Other weights.
    save_model(tmp_path, "cope")
    assert save(piqa=1) == ({"piqa": 1}, "do")


def test_results_of_a_hub_id_go_to_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert zero_shot.result_folder("you/model", pathlib.Path("out")) == pathlib.Path("out/you__model")
    (tmp_path / "you/model").mkdir(parents=True)
    assert zero_shot.result_folder("you/model", pathlib.Path("out")) == pathlib.Path("you/model")


def test_means_of_the_papers_table():
    for figures, mean in zero_shot.TABLE_5.values():
        assert len(figures) == len(zero_shot.TASKS)
        assert sum(figures) / len(figures) == pytest.approx(mean, abs=0.0051)


def test_mistakes(tmp_path, monkeypatch, refuses):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    save_model(tmp_path / "model")
    (tmp_path / "model/lm_eval.json").write_text("{")
    table = (
        ("CHECKPOINT",),
        ("model", "model", "checkpoint='model'"),
        ("model", "--limit", "0", "--limit"),
        ("model", "--batch-size", "0", "--batch-size"),
        ("model", "--tasks", "hella", "tasks='hella': 'hella' is not a task. Did you mean 'hellaswag'?"),
        ("model", "--data-dir", "none", "data_dir='none'"),
        ("folder", "checkpoint='folder'"),
        ("you/model", "checkpoint='you/model'"),
        ("model", "is not valid JSON"),
    )
    refuses("zero-shot", table)


def test_without_the_hub_local_files_are_named(tmp_path, monkeypatch, refused):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    save_model(tmp_path)
    found = refused("zero-shot", tmp_path, "--tasks", "piqa", "--device", "cpu", "--output", tmp_path / "out")
    assert "For local files, give --data-dir, or set WHATWHERE_DATA_DIR." in found


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, monkeypatch, capsys, local_data, two_processes):
    """43 requests of tasks with one question each; many are truncated."""
    save_model(tmp_path / "model", "absolute", "gpt2", max_position_embeddings=200)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model").symlink_to(tmp_path / "model")
    options = ["--data-dir", local_data, "--tasks", "lambada,cbt,piqa", "--limit", 1, "--batch-size", 4]
    contents, printed = {}, {}
    for folder in ("one", "two"):
        monkeypatch.chdir(tmp_path / folder)
        given = ["model", *options, "--output", "out"]
        if folder == "two":
            printed[folder] = two_processes("zero-shot", *given)
        else:
            monkeypatch.setattr(zero_shot, "task_manager", manager)
            printed[folder] = run_command([*given, "--device", "cpu"], capsys)
        contents[folder] = json.loads((tmp_path / "model/lm_eval.json").read_text())
        (tmp_path / "model/lm_eval.json").unlink()
    one, two = contents.values()
    assert one["truncated_requests"] == two["truncated_requests"] > 0
    assert one["tasks"].keys() == two["tasks"].keys()
    pairs = [(one["tasks"][name], two["tasks"][name]) for name in one["tasks"]]
    pairs += [
        (part, second["subtasks"][name]) for first, second in pairs for name, part in first.get("subtasks", {}).items()
    ]
    for first, second in pairs:
        assert first["samples"] == second["samples"]
        for metric, score in first["metrics"].items():
            value = pytest.approx(score["value"], rel=1e-5) if metric == "perplexity" else score["value"]
            assert second["metrics"][metric] == {**score, "value": value}
    assert printed["two"] == printed["one"]


def adapted(folder, model):
    """Saves a LoRA adapter with random weights; returns the model with it."""
    peft_model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    peft_model.save_pretrained(folder)
    return peft_model.eval()


@for_engine("lm_eval")
def test_lm_eval_scores_are_likelihoods(encoding, expected, tmp_path):
    """lm-eval's own class, on the checkpoint's remote code, with and without an adapter."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    assert expected == "works"
    model = save_model(tmp_path / "model", encoding)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    pairs = [("The cat", " sat"), ("A dog", " and a cat ran."), ("It", "'s")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    given = {"pretrained": str(tmp_path / "model"), "device": "cpu", "batch_size": 2, "trust_remote_code": True}
    plain = [log_likelihood(model, tokenizer, *pair) for pair in pairs]
    with_adapter = adapted(tmp_path / "adapter", model)
    for options, wanted in (
        ({}, plain),
        ({"peft": str(tmp_path / "adapter")}, [log_likelihood(with_adapter, tokenizer, *pair) for pair in pairs]),
    ):
        scores = HFLM(**given, **options).loglikelihood(requests, disable_tqdm=True)
        assert [score for score, _ in scores] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert wanted != pytest.approx(plain, rel=1e-2)


# lm-eval's command line, in a process that fails if anything but the checkpoint's own code defines the model.
COMMAND = """
import sys
from lm_eval.__main__ import cli_evaluate

sys.argv[0] = "lm_eval"
cli_evaluate()
assert not any(name.partition(".")[0] == "whatwhere" for name in sys.modules), "the package was imported"
assert any(name.endswith("modeling_whatwhere_llama") for name in sys.modules), "the checkpoint's code was not"
"""


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True], ids=["alone", "accelerate launch, adapter"])
def test_lm_evals_command_line(launched, tmp_path, local_data, capsys):
    model = save_model(tmp_path / "model", max_position_embeddings=512)
    adapted(tmp_path / "adapter", model)
    zero_shot.main(["--print-task-folder"])
    folder = capsys.readouterr().out.strip()
    given = "pretrained=model,trust_remote_code=True" + (",peft=adapter" if launched else "")
    options = ["--model", "hf", "--model_args", given, "--device", "cpu"]
    options += ["--tasks", "whatwhere_local_cbt,whatwhere_local_piqa", "--include_path", folder]
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"] if launched else []
    places = {"WHATWHERE_DATA_DIR": str(local_data), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    python(*launcher, "command.py", "run", *options, "--output_path", "scores", cwd=tmp_path, env=places)
    tasks = lm_eval_tasks(report_in(tmp_path / "scores"))
    assert list(tasks) == ["piqa", "whatwhere_local_cbt"]
    assert tasks["whatwhere_local_cbt"]["samples"] == 16
    assert len(tasks["whatwhere_local_cbt"]["subtasks"]) == 4
    assert tasks["piqa"]["version"] == "1.0+local"
    assert tasks["piqa"]["split"] == "validation"

"""Trainers and adapters of others: each cell of `engine_matrix` works or is refused."""

import functools
import itertools
import json
import math
import pathlib
import re

import peft
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import whatwhere
from engine_matrix import for_engine
from processes import TORCHRUN, python
from tiny import FAMILIES, OLDER, OURS, VOCABULARY, slow_but, tiny_model, tokens
from whatwhere.scripts.data.rows import about_conversations
from whatwhere.scripts.data.tokenize import build_tokenizer

# TRL and PEFT use names that this version of Transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# A bias with a table, rotated keys, and a state of each token in the cache.
QUICK = ("cope", "pope", "fox")


@pytest.fixture
def trl():
    return pytest.importorskip("trl", reason="trl is not installed")


@pytest.fixture
def tokenizer():
    """Words w4 to w60, with their numbers as ids."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words = special | {f"w{index}": index for index in range(len(special), VOCABULARY)}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **names)


def text(length, seed):
    return " ".join(f"w{max(4, index)}" for index in tokens(1, length, seed=seed)[0].tolist())


def settings(folder, **fields):
    """What all runs share: plain gradient descent, so that equal gradients give equal weights."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        **fields,
    }


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def same_weights(model, other, tolerance=1e-5):
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, msg=name)


COMPILED = {"gradient_checkpointing": False, "torch_compile": True, "torch_compile_backend": "aot_eager"}
SFT = {
    "plain": {"gradient_checkpointing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 32},
    "compiled": {"padding_free": True, "max_length": None, **COMPILED},
}


def fine_tuned(trl, tokenizer, encoding, folder, **fields):
    """A model after two steps on six sequences, and the loss of each."""
    data = Dataset.from_dict({"input_ids": [tokens(1, T, seed=T)[0].tolist() for T in (5, 9, 17, 12, 20, 7)]})
    torch.manual_seed(0)
    model = tiny_model("llama", encoding)
    config = trl.SFTConfig(**settings(folder, per_device_train_batch_size=6, **fields))
    trainer = trl.SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return model, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@for_engine("trl_sft", QUICK, mode=list(SFT)[1:])
def test_trl_sft(trl, tokenizer, encoding, expected, mode, tmp_path):
    assert expected == "works"
    torch._dynamo.reset()
    model, losses = fine_tuned(trl, tokenizer, encoding, tmp_path, **SFT[mode])
    plain, expected_losses = fine_tuned(trl, tokenizer, encoding, tmp_path, **SFT["plain"])
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert losses[1] < losses[0]
    same_weights(model, plain)


CHAT = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [("user", "what?"), ("assistant", "where"), ("user", "and?"), ("assistant", "so")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
LATER = [{"role": "user", "content": "where is it?"}, {"role": "assistant", "content": "what"}]
# Rows, options, and the text of a row that has labels.
CHATS = {
    "messages": ([{"messages": MESSAGES}], {"assistant_only_loss": True}, "where<|endoftext|>so<|endoftext|>"),
    "completion": ([{"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}], {}, "so<|endoftext|>"),
    "text": ([{"prompt": "what? ", "completion": "where"}], {}, "where<|endoftext|>"),
    "packed": (
        [{"messages": MESSAGES}, {"messages": LATER}],
        {"assistant_only_loss": True, "packing": True, "max_length": 128},
        "where<|endoftext|>so<|endoftext|>what<|endoftext|>",
    ),
    "lora": ([{"messages": MESSAGES}], {"assistant_only_loss": True}, "where<|endoftext|>so<|endoftext|>"),
}


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("encoding", ["cope", "pope"])
def test_trl_conversations(trl, encoding, kind, tmp_path):
    """Answers alone have labels, also in packed rows, and are learned."""
    rows, options, labelled = CHATS[kind]
    tokenizer = build_tokenizer("bytes")
    tokenizer.chat_template = CHAT
    model = tiny_model("llama", encoding, vocab_size=len(tokenizer), max_position_embeddings=128)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    options = {
        **options,
        "max_steps": 20,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "gradient_checkpointing": False,
    }
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**settings(tmp_path, per_device_train_batch_size=len(rows), **options)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM") if kind == "lora" else None,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert tokenizer.decode(batch["input_ids"][kept]) == labelled
    if kind == "packed":
        # As in padded batches: the mean of the labelled tokens of both rows.
        losses = []
        for row in rows:
            given = tokenizer.apply_chat_template(
                row["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
            )
            logits = model(given["input_ids"]).logits[0, :-1]
            marked = given["assistant_masks"][0, 1:].bool()
            losses.append(
                torch.nn.functional.cross_entropy(logits, given["input_ids"][0, 1:], reduction="none")[marked]
            )
        with torch.no_grad():
            close(trainer.model(**batch).loss, torch.cat(losses).mean())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] / (1.02 if kind == "lora" else 3)
    trainer.save_model(str(tmp_path / "saved"))
    saved = whatwhere.WhatWhereLlamaForCausalLM.from_pretrained(tmp_path / "saved") if kind != "lora" else None
    if saved is None:
        # The model's own weights stay as they were.
        parameters = trainer.model.named_parameters()
        found = {name.replace("base_model.model.", "").replace("base_layer.", ""): one for name, one in parameters}
        assert all(torch.equal(found[name], before[name]) for name in before)
        saved = trainer.model.merge_and_unload()
    elif kind in ("messages", "text"):
        prompt = MESSAGES[:1]
        prompt = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        prompt = prompt if kind == "messages" else tokenizer("what? ", return_tensors="pt")
        output = saved.generate(**prompt, max_new_tokens=20, do_sample=False)
        assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == "where<|endoftext|>"


@pytest.mark.parametrize(
    ("row", "trainer"),
    [
        ({"messages": MESSAGES}, "SFT"),
        ({"conversations": [{"from": one["role"], "value": one["content"]} for one in MESSAGES]}, "SFT"),
        ({"chosen": MESSAGES, "rejected": [*MESSAGES[:-1], {"role": "assistant", "content": "no"}]}, "DPO"),
    ],
    ids=["messages", "conversations", "preferences"],
)
def test_the_lines_of_the_message_about_conversations(trl, row, trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer("bytes")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("CHECKPOINT")
    tiny_model("llama", "cope", vocab_size=len(tokenizer)).save_pretrained("CHECKPOINT")
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    _, *lines = about_conversations(row, "'json', data_files='chat.jsonl'").splitlines()
    assert len(lines) == 3
    # The defaults need a GPU.
    name, config = f"{trainer}Trainer", getattr(trl, f"{trainer}Config")
    monkeypatch.setattr(trl, name, functools.partial(getattr(trl, name), args=config(**settings(tmp_path))))
    names = {}
    exec("\n".join(line.strip() for line in lines), names)
    assert type(names["model"]).__name__ == "WhatWhereLlamaForCausalLM"


def log_probabilities(model, batch):
    """The sum of the completions' log-probabilities, one for each row."""
    inputs, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        found = model(inputs, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    found = found.gather(-1, inputs[:, 1:, None])[..., 0]
    return (found * batch["completion_mask"][:, 1:]).sum(-1)


@for_engine("trl_dpo", QUICK, mode=["full", "adapter", "compiled"])
def test_trl_dpo(trl, tokenizer, encoding, expected, mode, tmp_path):
    assert expected == "works"
    torch._dynamo.reset()
    base = tiny_model("llama", encoding)
    base.save_pretrained(tmp_path / "base")
    rows = range(4)
    data = Dataset.from_dict(
        {
            "prompt": [text(3 + row, row) for row in rows],
            "chosen": [" " + text(4 + row, 10 + row) for row in rows],
            "rejected": [" " + text(7 - row, 20 + row) for row in rows],
        }
    )
    model = type(base).from_pretrained(tmp_path / "base")
    options = COMPILED if mode == "compiled" else {"gradient_checkpointing": True}
    config = trl.DPOConfig(**settings(tmp_path, per_device_train_batch_size=4, learning_rate=0.5, **options))
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4) if mode == "adapter" else None
    trainer = trl.DPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[1] < losses[0] - 1e-4
    batch = next(iter(trainer.get_train_dataloader()))
    frozen = trainer.model if trainer.ref_model is None else trainer.ref_model
    reference = torch.cat(trainer.compute_ref_log_probs(frozen, batch))
    close(reference, log_probabilities(base, batch), 1e-4)
    trained = log_probabilities(trainer.model.eval(), batch)
    assert (trained - reference).abs().min() > 1e-4


@for_engine("trl_grpo", QUICK, mode=["generate", "generate_batch", "compiled"])
def test_trl_grpo(trl, tokenizer, encoding, expected, mode, tmp_path):
    assert expected == "works"
    if mode == "generate_batch" and OLDER:
        pytest.skip("this Transformers is older than 5.23")
    torch._dynamo.reset()
    base = tiny_model("llama", encoding)
    base.save_pretrained(tmp_path / "base")
    model = type(base).from_pretrained(tmp_path / "base")
    prompts, seen = [text(3 + row, row) for row in range(2)], []

    def reward(prompts, completion_ids, **kwargs):
        seen.append((prompts, completion_ids))
        return [float(sum(index % 2 for index in ids)) for ids in completion_ids]

    paged = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"page_size": 32, "num_blocks": 8, "max_batch_tokens": 64},
    }
    options = {"generate": {"gradient_checkpointing": True}, "generate_batch": paged, "compiled": COMPILED}[mode]
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    config = trl.GRPOConfig(**settings(tmp_path, beta=0.1, **sizes, **options))
    data = Dataset.from_dict({"prompt": prompts})
    trainer = trl.GRPOTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    first, second = [line for line in trainer.state.log_history if "loss" in line]
    # The model and the reference agree on the completions of the model, until it has learned.
    assert first["kl"] == pytest.approx(0, abs=1e-7)
    assert second["kl"] > 1e-5
    assert all(1 <= len(ids) <= 6 for _, batch in seen for ids in batch)
    assert len(seen) == 2
    with pytest.raises(AssertionError):
        same_weights(model, base)


def own_parameters(model):
    """The parameters of encodings, by name."""
    return {name: one for name, one in model.named_parameters() if any(part in name for part in OURS)}


def adapters(model):
    """The configurations of adapters that people write."""
    names = own_parameters(model)
    modules = sorted({name.rpartition(".")[0] for name in names})
    # LoRA of a table is a product of two matrices, as that of a projection.
    tables = [name for name, one in names.items() if one.ndim == 2]
    linear = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"}
    found = {"lora": linear, "dora": {**linear, "use_dora": True}}
    if modules:
        found["modules_to_save"] = {**linear, "modules_to_save": modules}
    if tables:
        # Not together with the layers of GPT-2, says PEFT.
        projections = ["q_proj", "k_proj", "v_proj", "o_proj"] if hasattr(model, "model") else []
        found["target_parameters"] = {**linear, "target_modules": projections, "target_parameters": tables}
    return {name: peft.LoraConfig(**values) for name, values in found.items()}


def learn(model, ids, **options):
    """Two steps of gradient descent."""
    model.train()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)
    for _ in range(2):
        model(ids, labels=ids, use_cache=False, **options).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


# PEFT sets it by itself for GPT-2's transposed layers.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@for_engine("peft", QUICK, family=list(FAMILIES))
def test_peft(encoding, expected, family, tmp_path):
    assert expected == "works"
    base, ids = tiny_model(family, encoding), tokens(2, 16)
    base.save_pretrained(tmp_path / "base")
    for name, config in adapters(base).items():
        torch.manual_seed(0)
        model = peft.get_peft_model(type(base).from_pretrained(tmp_path / "base"), config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        learn(model, ids)
        model.gradient_checkpointing_disable()
        with torch.no_grad():
            logits = model(ids).logits
            assert (logits - base(ids).logits).abs().max() > 2e-5, name
            with model.disable_adapter():
                close(model(ids).logits, base(ids).logits)
            model.save_pretrained(tmp_path / name)
            loaded = peft.PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / name)
            assert torch.equal(loaded.eval()(ids).logits, logits), name
            merged = model.merge_and_unload()
            close(merged(ids).logits, logits, 1e-4)
        changed = {n for n, one in own_parameters(merged).items() if not torch.equal(one, base.get_parameter(n))}
        if name == "modules_to_save":
            assert changed == set(own_parameters(base))
        if name == "target_parameters":
            assert changed == set(config.target_parameters)


PROMPTS = {
    "prefix tuning": peft.PrefixTuningConfig,
    "prompt tuning": peft.PromptTuningConfig,
    "p-tuning": peft.PromptEncoderConfig,
}
STATES = ("fox", "token_gated_cope", "shift")


# Each encoding, two plans by layers and an option of the block, in one family.
VIRTUAL = [
    *zip(
        itertools.cycle(FAMILIES),
        [*whatwhere.list_position_encodings(), ["rope", "fox"], ["fox", "none"], "shift"],
    )
]
QUICK_VIRTUAL = ("fox", "token_gated_cope+rope", ["rope", "fox"], "shift", "cope", "pope")


@pytest.mark.parametrize(
    ("family", "encoding"), slow_but([case for case in VIRTUAL if case[1] in QUICK_VIRTUAL], VIRTUAL), ids=str
)
def test_virtual_tokens(family, encoding):
    """Prefix tuning makes keys without the states that some encodings cache in further channels of theirs."""
    ids, fields = tokens(2, 8), {"key_value_shift": True} if encoding == "shift" else {}
    cached = [part for part in STATES if part in str(encoding)]
    for name, config_class in PROMPTS.items():
        base = tiny_model(family, "none" if fields else encoding, **fields)
        model = peft.get_peft_model(base, config_class(task_type="CAUSAL_LM", num_virtual_tokens=3))
        if name == "prefix tuning" and cached:
            message = rf"8 channels; position_encoding=.* needs \d+, with those for {re.escape(str(cached))}"
            with pytest.raises(ValueError, match=message):
                model(ids, labels=ids)
            continue
        before = base(ids).logits
        model(ids, labels=ids).loss.backward()
        assert all(one.grad.abs().max() > 0 for one in model.parameters() if one.requires_grad and one.ndim > 1)
        generated = model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert generated.shape == (2, 11)
        # The virtual tokens are there once, and not again at each step.
        for step in range(3):
            assert torch.equal(model(generated[:, : 8 + step]).logits[:, -1].argmax(-1), generated[:, 8 + step])
        assert torch.equal(base(ids).logits, before)


# With projections of their own, which get adapters, and without.
@pytest.mark.parametrize("encoding", slow_but(["cope"], ["cope", "pope", "fox", "token_gated_cope+rope"]))
def test_compiled_adapters(encoding):
    torch._dynamo.reset()
    base, ids = tiny_model("llama", encoding, num_hidden_layers=1), tokens(2, 16)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters() if one.requires_grad)])
        model.zero_grad()
    for one, other in zip(*found, strict=True):
        close(other, one, 1e-4)


def test_zero_3():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-engines")
    worker, encodings = pathlib.Path(__file__).parent / "zero_worker.py", whatwhere.list_position_encodings()
    assert re.findall(r"agrees: (.+)", python(*TORCHRUN, 2, worker, *encodings)) == encodings


def test_megatron_is_refused(monkeypatch):
    # accelerate takes "whatwhere_llama" for a Llama, which it builds itself.
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ValueError, match="Megatron-LM of accelerate is not supported"):
        tiny_model("llama", "cope")

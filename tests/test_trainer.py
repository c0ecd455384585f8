"""Our models in Transformers' own `Trainer`: they train as the stock model does, and resume exactly."""

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import whatwhere
from tiny import FAMILIES, causal_lm_class, tiny_config, tiny_model, tokens
from whatwhere.scripts.data.tokenize import build_tokenizer


def trainer(model, folder, **arguments):
    """A Trainer for four steps of two rows, of different lengths, so that batches are padded."""
    rows = [{"input_ids": row[:length]} for row, length in zip(tokens(8, 12), (12, 5, 9, 12, 3, 7, 11, 12))]
    tokenizer = build_tokenizer("bytes")
    tokenizer.pad_token_id = 0
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "seed": 0, **arguments}
    return Trainer(
        model,
        TrainingArguments(str(folder), use_cpu=True, report_to="none", logging_steps=1, save_steps=2, **options),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=name)


@pytest.mark.parametrize("parts", [1, 2])
def test_rope_trains_as_the_stock_model(parts, tmp_path):
    config = tiny_config("llama", "rope")
    stock = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.to_dict().items() if "position_enc" not in k}))
    ours = causal_lm_class("llama")._from_config(config)
    ours.load_state_dict(stock.state_dict())
    losses = []
    for name, model in (("stock", stock), ("ours", ours)):
        training = trainer(model, tmp_path / name, gradient_accumulation_steps=parts)
        training.train()
        losses.append([line["loss"] for line in training.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == 4
    assert_same(dict(stock.state_dict()), dict(ours.state_dict()))


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("family", FAMILIES)
def test_accumulated_gradients_are_those_of_one_batch(family, head, tmp_path):
    ids = tokens(8, 12)
    answers = ids[:, 0] % 12
    labels = {
        "CausalLM": {"labels": ids},
        "SequenceClassification": {"labels": answers % 3},
        "TokenClassification": {"labels": ids % 3},
        "QuestionAnswering": {"start_positions": answers, "end_positions": answers},
    }[head]
    rows = [{"input_ids": row, **{name: one[index] for name, one in labels.items()}} for index, row in enumerate(ids)]
    config = tiny_config(family, "rope", num_labels=3)
    cls = getattr(whatwhere, type(config).__name__.removesuffix("Config") + "For" + head)
    weights, found = cls(config).state_dict(), []
    for parts in (1, 4):
        model = cls(config)
        model.load_state_dict(weights)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        # Without clipping, plain gradient descent shows the size of the gradient.
        options = {"max_steps": 2, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1}
        options |= {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", **options)
        training = Trainer(model, arguments, train_dataset=rows)
        training.train()
        found.append((training.state.log_history, dict(model.state_dict())))
    losses = [[line["loss"] for line in history if "loss" in line] for history, _ in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert_same(found[0][1], found[1][1])
    assert any(not torch.equal(one, weights[name]) for name, one in found[0][1].items())


def smoothed_loss(logits, labels, smoothing):
    """Cross entropy of the next tokens with label smoothing."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing
    )


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("kind", ["plain", "lora", "fsdp"])
@pytest.mark.parametrize("encoding", ["rope", "cope"])
@pytest.mark.parametrize("family", FAMILIES)
def test_label_smoothing_is_of_the_next_token(family, encoding, kind, tmp_path):
    model = tiny_model(family, encoding)
    ids = tokens(2, 12)
    with torch.no_grad():
        expected = smoothed_loss(model(ids).logits, ids, 0.1)
    if kind == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    elif kind == "fsdp":
        # What FSDP2 does to the class of a model.
        model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
    training = trainer(model.eval(), tmp_path, label_smoothing_factor=0.1)
    with torch.no_grad():
        found = training.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    torch.testing.assert_close(found, expected)


def test_label_smoothing_trains_as_the_stock_model(tmp_path):
    config = tiny_config("llama", "rope")
    stock = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.to_dict().items() if "position_enc" not in k}))
    ours = causal_lm_class("llama")._from_config(config)
    ours.load_state_dict(stock.state_dict())
    for name, model in (("stock", stock), ("ours", ours)):
        trainer(model, tmp_path / name, label_smoothing_factor=0.1).train()
    assert_same(dict(stock.state_dict()), dict(ours.state_dict()))


@pytest.mark.parametrize("encoding", ["pope", "cope", "cope+rope", "fox", ["rope", "none"]])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_learns_and_resumes_exactly(family, encoding, tmp_path):
    whole = trainer(tiny_model(family, encoding), tmp_path / "run")
    before = whole.evaluate()["eval_loss"]
    start = {name: parameter.detach().clone() for name, parameter in whole.model.named_parameters()}
    whole.train()
    assert whole.evaluate()["eval_loss"] < before
    assert all(not torch.equal(parameter, start[name]) for name, parameter in whole.model.named_parameters())
    resumed = trainer(tiny_model(family, encoding), tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    torch.testing.assert_close(loaded(tokens(1, 9)).logits, whole.model(tokens(1, 9)).logits)

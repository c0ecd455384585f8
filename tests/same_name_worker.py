"""Loads folders of the same last name as remote code, in one process without the package; see test_remote_code.py."""

import pathlib
import sys

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

IDS = torch.arange(3, 13)[None]


def trainer(model, folder):
    """A Trainer for four steps, which saves every second one."""
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 61, (8, 8))]
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return Trainer(model, TrainingArguments(str(folder), **options, **quiet), train_dataset=rows)


def loaded(auto, place, **options):
    return auto.from_pretrained(place, trust_remote_code=True, **options)


def check(place, expected, adapters=None):
    """Loads one folder, in many ways if a folder for adapters is given; every way gives these logits."""
    models = [loaded(AutoModelForCausalLM, place)]
    code = type(models[0]).__module__
    if adapters is not None:
        from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

        config = loaded(AutoConfig, place)
        models.append(loaded(AutoModelForCausalLM, place, config=config))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 1}, unk_token="a")))
        writer = pipeline("text-generation", model=place, trust_remote_code=True, device="cpu", tokenizer=tokenizer)
        models.append(writer.model)
        get_peft_model(models[0], LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(adapters)
        models[0] = loaded(AutoPeftModelForCausalLM, adapters).get_base_model()
        others = [AutoModel.from_config(config, trust_remote_code=True), loaded(AutoModel, place)]
        others.append(loaded(AutoModelForSequenceClassification, place).base_model)
        assert {type(model).__module__ for model in [*models, *others]} == {code}
    for model in models:
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, expected), place
    return code


def resume(first, second):
    """Resumes the two runs, both loaded before either is trained; returns their weights."""
    runs = [(run, loaded(AutoModelForCausalLM, f"{run}/checkpoint-2")) for run in (first, second)]
    found = []
    for run, model in runs:
        trainer(model, run).train(resume_from_checkpoint=f"{run}/checkpoint-2")
        found.append(loaded(AutoModelForCausalLM, f"{run}/checkpoint-4").state_dict())
    return found


def main():
    folder = pathlib.Path(sys.argv[1])
    expected = torch.load(folder / "expected.pt")
    names = {check(place, logits, folder / "adapter") for place, logits in expected.items()}
    assert len(names) == len(expected), names
    # Again, in another order, and one folder saved anew with the code of another.
    rope, pope, *_ = expected
    loaded(AutoModelForCausalLM, pope).save_pretrained(rope)
    expected[rope] = expected[pope]
    for place in reversed(expected):
        check(place, expected[place])
    torch.save(resume(folder / "x", folder / "y"), folder / "resumed.pt")
    assert "whatwhere" not in sys.modules


if __name__ == "__main__":
    main()

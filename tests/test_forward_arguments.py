"""The arguments of the forward passes: both names of the cache in every version, and keywords that are not ignored."""

import inspect
import re
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, StaticCache
from transformers.masking_utils import create_causal_mask

import whatwhere
from tiny import FAMILIES, tiny_config, tiny_model, tokens
from whatwhere import pretrained_model
from whatwhere.forward_arguments import CACHE

NAMES = ("cache", "past_key_values")
OLD_NAME = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
HEADS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def test_name_of_the_installed_version():
    assert (CACHE == "cache") == (Version(transformers.__version__) >= Version("5.24.0"))
    assert CACHE in inspect.signature(create_causal_mask).parameters
    for family in FAMILIES:
        parameters = [*inspect.signature(tiny_model(family, "rope").forward).parameters]
        assert parameters[:4] == ["input_ids", "attention_mask", "position_ids", CACHE]


@pytest.mark.parametrize("family", FAMILIES)
def test_compilation_ahead_of_time(family):
    """What vLLM does: arguments are bound to the signature of the code that is compiled."""
    model, ids = tiny_model(family, "rope", "sdpa"), tokens(1, 6)
    options = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    forward = torch.compile(type(model.base_model).forward, fullgraph=True, backend="eager", options=options)
    if not hasattr(forward, "aot_compile"):
        pytest.skip(f"PyTorch {torch.__version__} has no aot_compile")
    with torch.no_grad():
        compiled = forward.aot_compile(((model.base_model,), {"input_ids": ids, "use_cache": False}))
        found = compiled(model.base_model, input_ids=ids, use_cache=False)
        torch.testing.assert_close(found[0], model.base_model(ids)[0])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_names_in_every_head(family, head):
    prefix = type(tiny_config(family, "cope")).__name__.removesuffix("Config")
    model = getattr(__import__("whatwhere"), prefix + head)(tiny_config(family, "cope")).eval()
    ids = tokens(1, 8)
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        # Transformers' own heads warn of the old name.
        warnings.simplefilter("ignore")
        for name in NAMES:
            cache = DynamicCache(config=model.config)
            model(ids[:, :5], **{name: cache})
            assert cache.get_seq_length() == 5
            found.append(model(ids[:, 5:], **{name: cache})[0])
            assert cache.get_seq_length() == 8
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_names_in_layers(family, name):
    model = tiny_model(family, "rope")
    seen = []
    layer = model.base_model.layers[0]
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(tokens(1, 6), use_cache=True)
        hook.remove()
        (states,), kwargs = seen[0]
        kwargs.pop(CACHE)
        for block in (layer, layer.self_attn if family == "llama" else layer.attn):
            cache = DynamicCache(config=model.config)
            block(states, **{name: cache}, **kwargs)
            assert cache.get_seq_length() == 6


@OLD_NAME
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_cache_is_written_twice_under_gradient_checkpointing(family, name):
    model = tiny_model(family, "rope").train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    cache = DynamicCache(config=model.config)
    ids = tokens(1, 6)
    model(ids, labels=ids, **{name: cache}).loss.backward()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_old_name_warns_as_in_the_stock_models(family, head):
    """Under versions where it is deprecated; in others, neither warns."""
    ours = getattr(whatwhere, type(tiny_config(family, "rope")).__name__.removesuffix("Config") + head)
    name = ("Llama" if family == "llama" else "GPT2") + head
    stock = getattr(transformers, name.replace("GPT2ForCausalLM", "GPT2LMHeadModel"))
    found, ids = [], tokens(1, 4)
    for cls in (stock, ours):
        config = tiny_config(family, "rope")
        if cls is stock:
            names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id")
            config = cls.config_class(**{name: getattr(config, name) for name in names})
        model = cls(config).eval()
        for options in ({}, {"past_key_values": None}, {"past_key_values": DynamicCache(config=config)}):
            with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(ids, **options)
            messages = [str(one.message) for one in caught if one.category is FutureWarning]
            # Some heads of stock GPT-2 pass the name on to the decoder, which warns.
            found.append([re.sub(r"for `\w+\.", "for `", message) for message in messages])
    assert found[:3] == found[3:]


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_one_row(family):
    """(Q,), in the family whose stock model takes it."""
    model, ids = tiny_model(family, "pope"), tokens(2, 6)
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        if family == "llama":
            with pytest.raises(ValueError, match=r"position_ids has the shape \(6,\)"):
                model(ids, position_ids=positions)
        else:
            expected = model(ids, position_ids=positions.expand(2, -1)).logits
            torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)


@OLD_NAME
def test_two_caches_are_refused():
    model = tiny_model("llama", "rope")
    first, second = (model(tokens(1, 3), use_cache=True)[CACHE] for _ in range(2))
    with pytest.raises(ValueError, match="two names of one argument"):
        model(tokens(1, 3), cache=first, past_key_values=second)


@pytest.mark.parametrize("encoding", ["rope", "pope", "fox+rope"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_uses_its_cache(family, encoding):
    model = tiny_model(family, encoding)
    lengths = []
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model.generate(
            tokens(1, 9), max_new_tokens=4, min_new_tokens=4, do_sample=False, return_dict_in_generate=True
        )
    assert lengths == [9, 1, 1, 1]
    assert out[CACHE].get_seq_length() == 12


def test_no_warning_of_transformers(caplog):
    model = tiny_model("llama", "cope").train()
    ids = tokens(1, 6)
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    transformers.utils.logging.get_logger("transformers.utils.generic").warning_once.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(ids, labels=ids).loss.backward()
            out = model.eval()(ids, use_cache=True)
            model(ids[:, :1], **{CACHE: out[CACHE]})
    finally:
        logger.removeHandler(caplog.handler)
    assert "deprecated" not in caplog.text


ENDS = torch.tensor([0, 3, 6], dtype=torch.int32)
REFUSED = {
    "past_key_value": (lambda config: DynamicCache(config=config), "has no effect"),
    "store": (lambda config: DynamicCache(config=config), f"has no effect: the model .* {CACHE},"),
    "kv_caches": (lambda _: [torch.ones(1)], "has no effect"),
    "cache_position": (lambda _: torch.arange(6), "It takes .*position_ids"),
    "head_mask": (lambda _: torch.ones(2, 4), "has no effect"),
    "encoder_hidden_states": (lambda _: torch.ones(1, 6, 32), "has no effect"),
    "attn_mask": (lambda _: torch.ones(1, 6), "It takes .*attention_mask"),
    "segment_ids": (lambda _: torch.ones(1, 6), "has no effect"),
    "cu_seqlens": (lambda _: ENDS, "has no effect"),
    "attention_bias": (lambda _: torch.ones(1, 1, 6, 6), "has no effect"),
    "positions": (lambda _: torch.arange(6), "It takes .*position_ids"),
    "sliding_window": (lambda _: 3, "has no effect"),
    "attention_masks": (lambda _: torch.ones(1, 6), "Did you mean 'attention_mask'"),
    "atention_mask": (lambda _: torch.ones(1, 6), "has no effect"),
    "labelz": (lambda _: torch.ones(1, 6), "Did you mean 'labels'"),
    "output_hidden_state": (lambda _: True, "Did you mean 'output_hidden_states'"),
    "cache": (lambda _: ((torch.ones(1), torch.ones(1)),), f"{CACHE}=.* it must be a Cache"),
    "cu_seq_lens_q": (lambda _: ENDS, "give position_ids"),
    "seq_idx": (lambda _: torch.tensor([[0, 0, 0, 1, 1, 1]]), "give position_ids"),
    "is_causal": (lambda _: False, "is_causal=False"),
}


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
def test_keywords_that_would_be_ignored(family, keyword):
    model = tiny_model(family, "cope")
    value, message = REFUSED[keyword]
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 6), **{keyword: value(model.config)})
    model(tokens(1, 6), **{keyword: None})


# What they have in their names means nothing by itself; the stock models pass them on, too.
PASSED_ON = (
    *("seq_weights", "sequence_weight", "bias_labels", "debias", "special_tokens_mask", "masking_rate", "max_length"),
    *("encoder_name", "windowed_loss", "kv_statistics", "past_loss", "positional", "dataset_cache_dir", "example_ids"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_keywords_are_passed_on(family):
    config = tiny_config(family, "rope" if family == "llama" else "absolute", num_key_value_heads=4)
    ours = tiny_model(family, config.position_encoding, num_key_value_heads=4)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "pad_token_id", "bos_token_id")
    stock_config = (LlamaConfig if family == "llama" else GPT2Config)(**{name: getattr(config, name) for name in names})
    stock, ids = AutoModelForCausalLM.from_config(stock_config).eval(), tokens(1, 6)
    with torch.no_grad():
        for model in (ours, stock):
            expected = model(ids).logits
            for name in PASSED_ON:
                for value in (3, "text", torch.ones(1, 6)):
                    torch.testing.assert_close(model(ids, **{name: value}).logits, expected)


def test_keywords_of_packed_documents():
    model = tiny_model("llama", "pope")
    ids, positions = tokens(1, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 3, "max_length_k": 3}
    index = {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)}
    filled = model(ids, use_cache=True)[CACHE]
    with torch.no_grad():
        for keywords in (packed, index):
            for cache in (None, DynamicCache(config=model.config)):
                found = model(ids, position_ids=positions, cache=cache, **keywords).logits
                torch.testing.assert_close(found[:, 3:], model(ids[:, 3:]).logits)
            for wrong in (
                {"position_ids": torch.arange(6)[None]},
                {"position_ids": positions, "attention_mask": torch.ones_like(ids)},
                {"position_ids": positions, "cache": filled},
                {"position_ids": positions, "cache": StaticCache(config=model.config, max_cache_len=8)},
            ):
                with pytest.raises(ValueError, match="does not separate packed documents"):
                    model(ids, **wrong, **keywords)


def test_misspelt_keywords_in_a_compiled_model():
    model = torch.compile(tiny_model("llama", "rope"), backend="eager")
    with torch.no_grad():
        model(tokens(1, 6))
        for keyword in ("atention_mask", "labelz"):
            with pytest.raises(Exception, match="has no effect"):
                model(tokens(1, 6), **{keyword: torch.ones(1, 6)})


@pytest.mark.parametrize("encoding", ["rope", "none", "pope"])
def test_bidirectional_attention(encoding):
    model = tiny_model("llama", encoding, "sdpa")
    ids = tokens(1, 6)
    with torch.no_grad():
        mask = torch.zeros(1, 1, 6, 6)
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(model(ids, is_causal=False).logits, expected)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids, attention_mask=mask, is_causal=False).logits, expected)
        with pytest.raises(ValueError, match="Use attn_implementation='sdpa' or a 4D"):
            model(ids, is_causal=False)


def test_a_newer_version_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(pretrained_model, "NEWEST_TESTED", "5.0")
    type(pretrained_model.logger).warning_once.cache_clear()
    for _ in range(2):
        tiny_model("llama", "rope")
    said = [record.getMessage() for record in caplog.records if "newer than" in record.getMessage()]
    assert len(said) == 1
    assert transformers.__version__ in said[0]
    assert "(5.0)" in said[0]

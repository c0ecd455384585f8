"""What every encoding promises, in both families: the shared contract."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, StaticCache

import whatwhere
from tiny import FAMILIES, OURS, declared, in_steps, slow_but, tiny_config, tiny_model, tokens
from whatwhere.attention_choice import flash_names, supported_implementations
from whatwhere.forward_arguments import CACHE
from whatwhere.position_plan import COMBINATIONS

VARIANTS = {f"{name}:{variant}": found for name, own in declared("VARIANTS").items() for variant, found in own.items()}
VARIANTS["cope+rope:separate"] = {"cope": {"num_positions": 6, "gates": "separate_key"}}
VARIANTS["cope+rope:unrotated"] = {"cope": {"num_positions": 6, "gates": "unrotated_key"}}
SHORT = {"cope": {"num_positions": 6}}
# Variants by other fields of the configuration. Those that are called a plan give each layer an encoding of its own.
PRO = {"output_gate": True, "output_norm": True, "qk_norm": True, "key_value_shift": True}
FIELD_VARIANTS = {
    "fox:pro": PRO,
    "cope:pro": {**PRO, "position_encoding_parameters": {"num_positions": 6}},
    "pope:norms": {"output_gate": True, "output_norm": True, "qk_norm": True},
    "absolute:hard": {"attention_weights": "straight_through"},
    "cope:hard": {"attention_weights": "straight_through", "position_encoding_parameters": {"num_positions": 6}},
    "rope:half": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "rope:yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 12,
        }
    },
    "plan:rope,none": {"position_encoding": ["rope", "rope", "rope", "none"], "num_hidden_layers": 4},
    "plan:cope,rope": {"position_encoding": ["cope", "rope"], "position_encoding_parameters": SHORT},
    "plan:pope,alibi": {"position_encoding": ["pope", "alibi"]},
    "plan:cope+rope,fox": {
        "position_encoding": ["cope+rope", "fox"],
        "position_encoding_parameters": {"cope": {"num_positions": 6, "gates": "separate_key"}},
        "output_gate": True,
        "qk_norm": True,
    },
}
ENCODINGS = [*whatwhere.list_position_encodings(), *VARIANTS, *FIELD_VARIANTS]
PLAIN = [name for name in ENCODINGS if not {"+", ":"} & set(name)]
# Scaled down to saturate within the tiny sequences.
SMALL = declared("SMALL")
FIELDS = {name: {"position_encoding_parameters": small} for name, small in SMALL.items() if small}
for name in COMBINATIONS:
    nested = {part: SMALL[part] for part in name.split("+") if SMALL[part]}
    FIELDS |= {name: {"position_encoding_parameters": nested}} if nested else {}


# What a family has of its own (embedding, projections, norms, heads, names of weights) meets an encoding in few places:
# most tests take each encoding in one family.
def models(*, first=0, names=ENCODINGS, quick=None, both=()):
    """Each encoding in one family, by turns from FAMILIES[first] on; those of `both` in both. Not `quick` is slow."""
    return pytest.mark.parametrize(
        ("family", "encoding"),
        [
            pytest.param(
                *(family, name),
                id=f"{family}-{name}",
                marks=() if quick is None or name in quick else pytest.mark.slow,
            )
            for index, name in enumerate(ENCODINGS)
            for family in FAMILIES
            if name in names and (name in both or family == FAMILIES[(index + first) % 2])
        ],
    )


# Both families, but for variants.
every_model = models(both=[name for name in ENCODINGS if ":" not in name])
# For the code of a family: both, with learned, computed and no embeddings of positions.
EVERY_FAMILY = ("absolute", "sinusoidal", "rope")
every_family = models(both=EVERY_FAMILY)
# Half of the other tests take an encoding in one family, and half in the other one.
one_family, other_family = models(), models(first=1)
RELATIVE = [name for name in ENCODINGS if name.split(":")[0] not in ("absolute", "sinusoidal")]
# For what takes long: sums and variants are slow.
one_plain, other_plain = models(quick=PLAIN), models(first=1, quick=PLAIN)


def settings(encoding):
    """The name of an encoding or variant as the configuration takes it, and its fields."""
    if encoding in FIELD_VARIANTS:
        fields = dict(FIELD_VARIANTS[encoding])
        return fields.pop("position_encoding", encoding.split(":")[0]), fields
    parameters = VARIANTS.get(encoding)
    return encoding.split(":")[0], {"position_encoding_parameters": parameters} if parameters else FIELDS.get(
        encoding, {}
    )


def build(family, encoding, implementation=None, **fields):
    name, own = settings(encoding)
    return tiny_model(family, name, implementation, **{**own, **fields})


def build_config(family, encoding, **fields):
    name, own = settings(encoding)
    return tiny_config(family, name, **own, **fields)


def quick_implementations(model):
    """The implementations of a model but those that compile or are interpreted, which have tests of their own."""
    left_out = (*flash_names(), "flex_attention", "triton")
    return [name for name in supported_implementations(model.config) if name not in left_out]


# Logits of size 4 after two layers in float32: in float64 they agree to 1e-14, and a mistake is off by 1e-2 or more.
def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@every_model
def test_causality(family, encoding):
    model = build(family, encoding)
    ids = tokens(1, 20)
    changed = ids.clone()
    changed[:, 12:] = tokens(1, 8, seed=9)
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    close(after[:, :12], before[:, :12])
    assert not torch.allclose(after[:, 12:], before[:, 12:])


@one_family
def test_implementations_agree(family, encoding):
    ids = tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    model = build(family, encoding)
    names = quick_implementations(model)
    assert model.config._attn_implementation == names[0]
    reference = None
    for name in reversed(names):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        logits[mask.bool()].square().mean().backward()
        found = [logits[mask.bool()].detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if reference is None:
            reference = found
            continue
        assert len(found) == len(reference)
        for one, other in zip(found, reference):
            close(one, other, 2e-4)


@other_family
@pytest.mark.parametrize("steps", [[1] * 24, [5, 1, 7, 1, 1, 9], [24]], ids=["one-by-one", "chunks", "prefill"])
def test_cached_decoding_equals_full_forward(family, encoding, steps):
    model = build(family, encoding)
    ids = tokens(2, 24)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        close(in_steps(model, ids, steps, DynamicCache(config=model.config)), full)


@one_family
def test_static_cache_equals_full_forward(family, encoding):
    model = build(family, encoding)
    ids = tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=32)
        found = in_steps(model, ids, (9, 1, 6, 1, 1, 2), cache, mask, positions)
    close(found[mask.bool()], full[mask.bool()])


@other_plain
def test_static_cache_without_a_mask(family, encoding):
    # Where nothing is masked, Transformers may make no mask, although slots of the cache are empty.
    ids = tokens(2, 16)
    model = build(family, encoding)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    generated = model.generate(ids, **options)
    for name in quick_implementations(model):
        model.set_attn_implementation(name)
        for steps in ([16], [9, 5, 1, 1], [1, 15]):
            with torch.no_grad():
                close(in_steps(model, ids, steps, StaticCache(config=model.config, max_cache_len=24)), full)
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), generated)


@other_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family, encoding, side):
    model = build(family, encoding)
    ids = tokens(1, 14)
    padded = torch.zeros(2, 20, dtype=torch.long)
    mask = torch.zeros(2, 20, dtype=torch.long)
    rows = slice(6, 20) if side == "left" else slice(0, 14)
    padded[0, rows], mask[0, rows] = ids[0], 1
    padded[1], mask[1] = tokens(1, 20, seed=4)[0], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids).logits
        logits = model(padded, attention_mask=mask, position_ids=positions).logits
    close(logits[0, rows], alone[0])
    assert logits.isfinite().all()


@models(names=RELATIVE)
def test_a_shift_of_all_positions_changes_nothing(family, encoding):
    model = build(family, encoding)
    ids, positions = tokens(2, 10), torch.arange(10)[None]
    with torch.no_grad():
        for name in quick_implementations(model):
            model.set_attn_implementation(name)
            expected = model(ids, position_ids=positions).logits
            # The cosines of other angles are rounded in another way.
            for shift in (37, -5):
                close(model(ids, position_ids=positions + shift).logits, expected, 1e-4)
        cache = DynamicCache(config=model.config)
        close(in_steps(model, ids, (8, 1, 1), cache, positions=positions + 37), expected, 1e-4)


@models(first=1, names=RELATIVE)
def test_left_padding_without_positions_changes_nothing(family, encoding):
    model = build(family, encoding)
    ids = tokens(1, 9)
    padded, mask = torch.nn.functional.pad(ids, (5, 0)), torch.tensor([[0] * 5 + [1] * 9])
    with torch.no_grad():
        close(model(padded, attention_mask=mask).logits[:, 5:], model(ids).logits, 1e-4)


def sdpa_hides_nan():
    """On processors with AVX-512, PyTorch's attention without a mask gives 0 for a query that is NaN."""
    key, value = torch.ones(2, 1, 1, 2, 8)
    return not F.scaled_dot_product_attention(key * float("nan"), key, value).isnan().any()


@pytest.mark.parametrize(
    ("encoding", "broken"),
    slow_but(
        [*((name, "nan") for name in ENCODINGS), *((name, "inf") for name in PLAIN)],
        itertools.product(ENCODINGS, ("nan", "inf")),
    ),
)
def test_what_is_not_finite_reaches_the_loss(encoding, broken):
    # Training then says that it has diverged. (An infinite query sees keys that are infinitely near or far.)
    model = build("llama", encoding)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(float("nan") if broken == "nan" else 1e38)
    ids = tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    hidden = sdpa_hides_nan() and model.model.layers[0].self_attn.encodings.default == "sdpa"
    for name in quick_implementations(model):
        if hidden and name in ("sdpa", "auto"):
            continue
        model.set_attn_implementation(name)
        for given in (None, mask):
            loss = model(ids, attention_mask=given, labels=ids).loss
            assert broken == "inf" or loss.isnan()
            loss.backward()
        with torch.no_grad():
            cache = model(ids[:, :9], use_cache=True)[CACHE]
            step = model(ids[:, 9:10], cache=cache)
            assert broken == "inf" or step.logits.isnan().all()


@one_family
def test_decoding_after_right_padding(family, encoding):
    model = build(family, encoding)
    ids = tokens(1, 9)
    with torch.no_grad():
        alone = model(ids).logits
        padded = torch.cat((ids[:, :6], torch.zeros(1, 4, dtype=torch.long), ids[:, 6:]), dim=1)
        mask = torch.tensor([[1] * 6 + [0] * 4 + [1] * 3])
        positions = torch.tensor([[*range(10), 6, 7, 8]])
        cache = DynamicCache(config=model.config)
        pieces = in_steps(model, padded, (10, 1, 1, 1), cache, mask, positions)
    close(pieces[:, 10:], alone[:, 6:])


@one_family
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_documents_equal_separate_ones(family, encoding, use_cache):
    model = build(family, encoding)
    first, second = tokens(1, 11), tokens(1, 8, seed=5)
    positions = torch.cat((torch.arange(11), torch.arange(8)))[None]
    with torch.no_grad():
        packed = model(torch.cat((first, second), dim=1), position_ids=positions, use_cache=use_cache).logits
        close(packed[:, :11], model(first).logits)
        close(packed[:, 11:], model(second).logits)


@other_family
@pytest.mark.parametrize("given", [False, True], ids=["slots", "positions"])
def test_cached_decoding_past_a_hole_in_the_mask(family, encoding, given):
    model = build(family, encoding)
    ids = tokens(1, 20)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, 6:11] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if given else None

    def run(start, end, **options):
        own = None if positions is None else positions[:, start:end]
        return model(ids[:, start:end], attention_mask=mask[:, :end], position_ids=own, **options)

    with torch.no_grad():
        full = run(0, 20, use_cache=False).logits
        prefill = run(0, 13, use_cache=True)
        close(run(13, 20, cache=prefill[CACHE]).logits, full[:, 13:])


@every_model
def test_every_form_of_a_4d_mask_hides_the_same(family, encoding):
    model = build(family, encoding)
    ids, positions = tokens(1, 8), torch.tensor([[0, 1, 2, 0, 3, 4, 5, 6]])
    shown = torch.ones(8, 8, dtype=torch.bool).tril()
    # The prompt has a hole, which only its own token sees.
    shown[4:, 3] = False

    def run(form):
        masks = [form(shown[rows, :end])[None, None] for rows, end in ((slice(0, 5), 5), (slice(5, 8), 8))]
        prefill = model(ids[:, :5], attention_mask=masks[0], position_ids=positions[:, :5], use_cache=True)
        step = model(ids[:, 5:], attention_mask=masks[1], position_ids=positions[:, 5:], cache=prefill[CACHE])
        return torch.cat((prefill.logits, step.logits), dim=1)

    with torch.no_grad():
        for name in quick_implementations(model):
            model.set_attn_implementation(name)
            expected = run(lambda mask: mask)
            for lowest in (-1e4, torch.finfo(torch.float32).min, -float("inf")):
                close(run(lambda mask, lowest=lowest: torch.where(mask, 0.0, lowest)), expected)


@other_family
def test_every_form_of_a_4d_mask_past_a_hole(family, encoding):
    model = build(family, encoding)
    ids = tokens(1, 20)
    seen = torch.ones(1, 20, dtype=torch.bool)
    seen[0, 6:11] = False
    positions = (seen.long().cumsum(-1) - 1).clamp(min=0)
    # Rows of padding see themselves: with -inf a row that sees nothing is no number.
    shown = (torch.ones(20, 20, dtype=torch.bool).tril() & seen | torch.eye(20, dtype=torch.bool))[None, None]

    def decoded(mask):
        first, last = slice(0, 13), slice(13, 20)
        cache = model(ids[:, first], attention_mask=mask[:, :, first, :13], position_ids=positions[:, first])[CACHE]
        return model(ids[:, last], attention_mask=mask[:, :, last], position_ids=positions[:, last], cache=cache).logits

    with torch.no_grad():
        expected = decoded(shown)
        for hidden in (-1e4, torch.finfo(torch.float32).min, float("-inf")):
            close(decoded(torch.where(shown, 0.0, hidden)), expected)


@other_family
def test_second_derivatives_in_eager(family, encoding):
    model = build(family, encoding, "eager")
    ids = tokens(1, 8)
    parts = (*OURS, "embed_positions", "wpe", "norm", "ln")
    parameters = [p for name, p in model.named_parameters() if any(part in name for part in parts)]
    gradients = torch.autograd.grad(model(ids, labels=ids).loss, parameters, create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    assert all(p.grad.isfinite().all() for p in parameters if p.grad is not None)


@other_family
def test_custom_4d_mask(family, encoding):
    # A tree: tokens 4 and 5 both follow token 3, and do not see each other.
    model = build(family, encoding)
    ids = tokens(1, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[5, 4] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 4]])
    with torch.no_grad():
        branch = model(ids[:, [0, 1, 2, 3, 5]]).logits
        for form in (mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
            tree = model(ids, attention_mask=form[None, None], position_ids=positions, use_cache=False).logits
            close(tree[:, 5], branch[:, 4])


@every_model
def test_every_parameter_gets_a_gradient(family, encoding):
    model = build(family, encoding).train()
    ids = tokens(2, 16)
    model(ids, labels=ids).loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


@one_family
def test_trains_after_inference_mode(family, encoding):
    # Tensors that a model caches must not be inference tensors, which autograd cannot save.
    model = build(family, encoding)
    ids = tokens(1, 8)
    with torch.inference_mode():
        expected = model(ids, labels=ids).loss
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    close(loss.detach(), expected)


@other_family
def test_gradient_checkpointing_changes_nothing(family, encoding):
    ids = tokens(2, 16)
    model = build(family, encoding).train()
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    for reentrant in (False, True):
        model.zero_grad()
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        model(ids, labels=ids, use_cache=False).loss.backward()
        for one, other in zip(plain, [p.grad for p in model.parameters()]):
            close(one, other)


# Most variants are in test_saved_models.
@models(names=[name for name in ENCODINGS if ":" not in name or name.startswith("plan:")], both=EVERY_FAMILY)
def test_save_and_load_keep_every_logit(family, encoding, tmp_path):
    model = build(family, encoding)
    ids = tokens(2, 16)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.position_encoding == model.config.position_encoding
    assert loaded.config.position_encoding_parameters == model.config.position_encoding_parameters
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)


@every_family
def test_fresh_parameters_are_initialised_after_loading(family, encoding, tmp_path):
    # Weights that a checkpoint lacks are built on the meta device: they must be filled.
    model = build(family, encoding)
    model.save_pretrained(tmp_path)
    state = {
        name: p
        for name, p in model.state_dict().items()
        if not any(part in name for part in OURS) and "wpe" not in name
    }
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=state)
    reference = type(model)._from_config(build_config(family, encoding))
    for name, parameter in loaded.named_parameters():
        assert parameter.isfinite().all(), name
        if any(part in name for part in OURS):
            assert parameter.std().isclose(dict(reference.named_parameters())[name].std(), rtol=0.5), name


@one_family
def test_bfloat16_stays_close_to_float32(family, encoding):
    model = build(family, encoding)
    ids = tokens(2, 30)
    with torch.no_grad():
        exact = model(ids).logits
        half = build(family, encoding).to(torch.bfloat16)(ids).logits.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(ids).logits.float()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = build(family, encoding, "eager").to(torch.bfloat16)(ids).logits.float()
    # The yardstick is the error that the readable path itself makes in bfloat16.
    allowed = 3 * (eager - exact).abs().max() + 1e-3
    assert (half - exact).abs().max() < allowed
    assert (mixed - exact).abs().max() < allowed


@models(first=1, quick=["absolute", "rope", "cope", "pope"])
def test_generation_modes_agree(family, encoding):
    model = build(family, encoding)
    ids = tokens(2, 7)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        expected = ids
        for _ in range(8):
            logits = model(expected, use_cache=False).logits[:, -1]
            logits[:, model.config.eos_token_id] = float("-inf")
            expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, use_cache=False, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    assert torch.equal(model.generate(ids[:1], assistant_model=build(family, encoding), **options), expected[:1])
    beams = model.generate(ids, num_beams=3, **options)
    uncached = model.generate(ids, num_beams=3, use_cache=False, **options)
    assert torch.equal(beams, uncached)
    torch.manual_seed(0)
    sampled = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(
        sampled, model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=True, use_cache=False)
    )


@one_plain
def test_left_padded_batch_generates_as_alone(family, encoding):
    model = build(family, encoding)
    short, long = tokens(1, 5), tokens(1, 9, seed=3)
    batch = torch.cat((torch.cat((torch.zeros(1, 4, dtype=torch.long), short), dim=1), long))
    mask = (batch != 0).long()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for cache in ("dynamic", "static"):
        together = model.generate(batch, attention_mask=mask, cache_implementation=cache, **options)
        assert torch.equal(together[0, 4:], model.generate(short, **options)[0])
        assert torch.equal(together[1], model.generate(long, **options)[0])


@every_family
def test_past_the_configured_length(family, encoding):
    model = build(family, encoding)
    ids = tokens(1, 60)
    if encoding in ("absolute", "absolute:hard", "relative", "cope+relative"):
        with pytest.raises(ValueError, match=r"60 tokens.*supports \(48 tokens\)"):
            model(ids)
        return
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        # In float64 they differ by 2e-15.
        close(in_steps(model, ids, [50] + [1] * 10, DynamicCache(config=model.config)), full, 1e-4)


@other_family
def test_eager_returns_weights(family, encoding):
    model = build(family, encoding, "eager")
    outputs = model(tokens(2, 9), output_attentions=True, output_hidden_states=True)
    layers = model.config.num_hidden_layers
    assert [a.shape for a in outputs.attentions] == [(2, 4, 9, 9)] * layers
    assert len(outputs.hidden_states) == layers + 1
    for weights in outputs.attentions:
        if encoding.startswith("stick_breaking"):
            # What is left of the stick belongs to no key.
            assert weights.min() >= 0
            assert 0 < weights.sum(-1).max() < 1
        else:
            close(weights.sum(-1), torch.ones(2, 4, 9))
        assert weights.triu(1).abs().max() == 0


@models(quick=["cope"])
def test_compiled_training_step(family, encoding):
    ids = tokens(2, 16)
    model = build(family, encoding).train()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled_loss = compiled(ids, labels=ids, use_cache=False).loss
    compiled_loss.backward()
    close(compiled_loss, loss)
    for one, other in zip(plain, [p.grad for p in model.parameters()]):
        close(one, other)


@every_family
def test_loss_head_and_embedding_options(family, encoding):
    model = build(family, encoding)
    ids = tokens(2, 12)
    with torch.no_grad():
        logits = model(ids).logits
        close(model(ids, logits_to_keep=1).logits, logits[:, -1:])
        close(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, logits[:, [2, 5]])
        mean = model(ids, labels=ids).loss
        close(model(ids, labels=ids, num_items_in_batch=torch.tensor(44)).loss, mean * 22 / 44)
        close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, logits)
        model.resize_token_embeddings(80)
        assert model(ids).logits.shape == (2, 12, 80)
        close(model(ids).logits[..., :61], logits)


# PyTorch's compiler and Transformers' mask function call what PyTorch itself deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Without a bias, and with one; each compiles for many seconds.
@pytest.mark.parametrize("encoding", slow_but([], ["relative", "pope", "alibi"]))
def test_flex_attention_agrees(encoding):
    # The first call compiles; one family and no gradient, which CPUs do not have here.
    ids = tokens(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    model = build("llama", encoding, hidden_size=128)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("flex_attention")
        close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()], 2e-4)
        cache = StaticCache(config=model.config, max_cache_len=48)
        close(model(ids[1:], cache=cache).logits, expected[1:], 2e-4)


@pytest.mark.parametrize("encoding", ["fox:pro", "cope:separate", "token_gated_cope", "token_gated_cope+rope"])
def test_adapters_on_projections(encoding):
    # Low-rank adapters add to what a linear layer returns; merged, they add to its weight.
    model = build("llama", encoding)
    layers = [
        module
        for name, module in model.named_modules()
        if any(part in name for part in OURS) and isinstance(module, torch.nn.Linear)
    ]
    assert layers
    ids = tokens(2, 12)
    with torch.no_grad():
        plain = model(ids).logits
        deltas = [0.3 * torch.randn_like(layer.weight) for layer in layers]
        handles = [
            layer.register_forward_hook(
                lambda module, inputs, output, delta=delta: output + torch.nn.functional.linear(inputs[0], delta)
            )
            for layer, delta in zip(layers, deltas)
        ]
        adapted = model(ids).logits
        for layer, delta, handle in zip(layers, deltas, handles):
            handle.remove()
            layer.weight += delta
        close(model(ids).logits, adapted)
    assert not torch.allclose(adapted, plain, atol=0.01)


@every_family
def test_classification(family, encoding):
    name = "WhatWhereLlamaForSequenceClassification" if family == "llama" else "WhatWhereGPT2ForSequenceClassification"
    config = build_config(family, encoding, num_labels=3)
    model = getattr(whatwhere, name)(config).eval()
    ids = tokens(2, 9)
    padded = torch.cat((ids, torch.zeros(2, 3, dtype=torch.long)), dim=1)
    outputs = model(ids, labels=torch.tensor([0, 2]))
    assert outputs.logits.shape == (2, 3)
    assert outputs.loss.isfinite()
    close(model(padded, attention_mask=(padded != 0).long()).logits, outputs.logits)


@one_family
def test_memory_is_freed_without_the_garbage_collector(family, encoding):
    # A reference cycle with tensors keeps gigabytes in training until the next garbage collection.
    model, ids = build(family, encoding), tokens(2, 24)
    # What is made once and kept.
    model(ids, labels=ids, use_cache=False).loss.backward()
    # Only what comes now is looked at.
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        model(ids, labels=ids, use_cache=False).loss.backward()
        with torch.no_grad():
            model(ids)
        gc.collect()
        held = [type(item) for item in gc.garbage if issubclass(type(item), torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not held

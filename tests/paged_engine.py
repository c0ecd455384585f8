"""A stand-in for SGLang, which keeps keys and values itself and needs a GPU.

The contract of its wrapper of models of Transformers, from SGLang 0.5.23's `models/transformers.py`:

- it sets `config._attn_implementation` to "sglang", and builds the class that `auto_map` names for AutoModel, with
  parameters on the meta device, which it then loads by name;
- all sequences of a batch are one row: `input_ids` and `position_ids` are (1, tokens), without a mask or a cache;
- its layers, by their index, and other keywords are given to the attention function;
- that gets queries, keys and values of the new tokens, (1, heads, tokens, width), reshapes them to its own heads, and
  returns (tokens, heads * width).
"""

import math

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

PAGE = 4


class PagedAttention(torch.nn.Module):
    """Keys and values of one layer in pages; `batch` is set by the engine before each step."""

    def __init__(self, heads, key_heads, head_dim, pages):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.head_dim, self.scaling = heads, key_heads, head_dim, None
        self.keys = torch.full((pages * PAGE, key_heads, head_dim), math.nan)
        self.values = torch.full((pages * PAGE, key_heads, head_dim), math.nan)
        # For each sequence, its new tokens as a slice of the row, and the slots of all its tokens.
        self.batch = []

    def forward(self, query, key, value):
        query = query.view(-1, self.tp_q_head_num, self.head_dim)
        key, value = (states.view(-1, self.tp_k_head_num, self.head_dim) for states in (key, value))
        output = torch.full_like(query, math.nan)
        for rows, slots in self.batch:
            new = rows.stop - rows.start
            self.keys[slots[-new:]], self.values[slots[-new:]] = key[rows], value[rows]
            groups = self.tp_q_head_num // self.tp_k_head_num
            keys, values = (
                states[slots].repeat_interleave(groups, dim=1).transpose(0, 1) for states in (self.keys, self.values)
            )
            logits = query[rows].transpose(0, 1) @ keys.transpose(1, 2) * self.scaling
            hidden = torch.ones(new, len(slots), dtype=torch.bool).triu(len(slots) - new + 1)
            weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
            output[rows] = (weights @ values).transpose(0, 1)
        return output.reshape(-1, self.tp_q_head_num * self.head_dim)


def attention_function(module, query, key, value, attention_mask, scaling, attention_instances, **kwargs):
    assert attention_mask is None
    layer = attention_instances[module.layer_idx]
    layer.scaling = scaling
    tokens = query.shape[2]
    query, key, value = (states.transpose(1, 2).reshape(tokens, -1) for states in (query, key, value))
    return layer.forward(query, key, value), None


class Engine:
    """Runs prompts of several lengths at once, at most `batch_tokens` tokens a step, and picks the likeliest token."""

    def __init__(self, folder, processes=1, pages=64, batch_tokens=12):
        # The code in the folder, whether or not the package is imported too.
        saved = AutoConfig.from_pretrained(folder).auto_map
        config_class, model_class = (
            get_class_from_dynamic_module(saved[name], str(folder)) for name in ("AutoConfig", "AutoModel")
        )
        config = config_class.from_pretrained(folder)
        config._attn_implementation = "sglang"
        # Buffers are not on the meta device.
        with init_empty_weights(include_buffers=False):
            self.model = model_class._from_config(config).eval()
        assert self.model._supports_attention_backend
        assert "transformers_modules" in model_class.__module__
        weights = load_file(f"{folder}/model.safetensors")
        prefix = f"{self.model.base_model_prefix}."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        self.model.load_state_dict(own, strict=True, assign=True)
        self.head = weights.get("lm_head.weight", self.model.get_input_embeddings().weight.detach())
        # Each of several processes has some of the heads.
        heads, key_heads = config.num_attention_heads // processes, config.num_key_value_heads // processes
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layers = {
            index: PagedAttention(heads, key_heads, head_dim, pages) for index in range(config.num_hidden_layers)
        }
        # In an order that no sequence can rely on.
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.batch_tokens = batch_tokens

    @torch.no_grad()
    def step(self, requests):
        """Runs [(tokens, number already run, pages)] for some new tokens each; returns the logits of the new tokens."""
        row, positions, batch = [], [], []
        for tokens, done, pages in requests:
            while len(pages) * PAGE < len(tokens):
                pages.append(self.free.pop())
            slots = [page * PAGE + offset for page in pages for offset in range(PAGE)][: len(tokens)]
            batch.append((slice(len(row), len(row) + len(tokens) - done), slots))
            row += tokens[done:]
            positions += range(done, len(tokens))
        for layer in self.layers.values():
            layer.batch = batch
        hidden = self.model(
            input_ids=torch.tensor([row]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            return_dict=False,
            attention_instances=self.layers,
        )[0][0]
        logits = hidden @ self.head.T
        return [logits[rows] for rows, _ in batch]

    def generate(self, prompts, new_tokens):
        """Returns the tokens of each prompt continued by `new_tokens`, and the logits of all tokens but the last."""
        texts, logits = [list(prompt) for prompt in prompts], [[] for _ in prompts]
        done, pages = [0] * len(texts), [[] for _ in texts]
        while True:
            left, requests = self.batch_tokens, []
            for index, prompt in enumerate(prompts):
                count = min(left, len(texts[index]) - done[index])
                if count and len(texts[index]) < len(prompt) + new_tokens:
                    requests.append((index, done[index] + count))
                    left -= count
            if not requests:
                break
            found = self.step([(texts[index][:end], done[index], pages[index]) for index, end in requests])
            for (index, end), rows in zip(requests, found):
                logits[index].append(rows)
                done[index] = end
                if end == len(texts[index]):
                    texts[index].append(int(rows[-1].argmax()))
        return texts, [torch.cat(rows) for rows in logits]

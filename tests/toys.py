"""Toy tasks so small that a tiny model solves them in a second, and recipes for them."""

from whatwhere.scripts.training.recipe import parse_recipe

# Parameters, the length of a block, and steps after which no answer is wrong.
SOLVABLE = {
    "flip_flop": ({"instructions": 4, "ignore": 0.3}, 8, 100),
    "selective_copy": ({"non_blanks": 2, "blanks": 1, "vocabulary": 4}, 8, 50),
    "counting": ({"max_steps": 5, "pass_weight": 2, "set_weight": 2, "increment_weight": 2}, 24, 150),
    "indirect_indexing": ({"min_length": 2, "max_length": 2, "max_shift": 1, "letters": 4}, 16, 80),
}


def with_changes(values, changes):
    """Sets keys of a recipe, written `data__source`; a value of `...` removes the key. Returns the recipe."""
    for key, value in changes.items():
        *sections, last = key.split("__")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return values


def toy_recipe(task, **changes):
    """A recipe that solves a small version of the task; keys are written `training__steps`."""
    parameters, length, steps = SOLVABLE[task]
    values = {
        "name": "toy",
        "data": {
            "source": "task",
            "task": task,
            "task_parameters": parameters,
            "test_sets": {"in_distribution": {}},
            "test_samples": 40,
            "sequence_length": length,
        },
        "model": {
            "family": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": 0.1,
        },
        "training": {"steps": steps, "batch_size": 32, "learning_rate": 0.01, "log_every": 50},
        "evaluation": {"blocks": 64},
    }
    return parse_recipe(with_changes(values, changes))

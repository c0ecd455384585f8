"""Toy tasks for comparing position encodings: data sets and tokenizers.

    from whatwhere.scripts.toy_tasks.common import build_dataset
    from whatwhere.scripts.toy_tasks.flip_flop import FlipFlopConfig

    config = FlipFlopConfig(ignore=0.98, instructions=64, seed=3)
    build_dataset(config, "test", streaming=True)  # generated on the fly
    build_dataset(config, "validation")  # in the cache of `datasets`; nothing is downloaded

`registry` lists the tasks; `test_sets` of a configuration are those of the paper. `whatwhere train` trains on the tasks
(`data.source: task`), `whatwhere task` compares checkpoints.
"""

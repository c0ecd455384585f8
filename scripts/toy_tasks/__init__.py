"""Toy tasks that tell position encodings apart: data set builders, solvers and tokenizers.

    from whatwhere.scripts.toy_tasks.flip_flop import FlipFlop

    FlipFlop("sparse", instructions=64, seed=3).as_streaming_dataset(split="test")  # drawn as it is read
    builder = FlipFlop()
    builder.download_and_prepare()  # into the cache of `datasets`; nothing is downloaded
    builder.as_dataset(split="validation")

`registry` lists the tasks. `whatwhere train` trains on them (`data.source: task`),
`whatwhere task` compares checkpoints.
"""

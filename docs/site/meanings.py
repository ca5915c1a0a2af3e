"""What the keys of a policy mean, in a line each, for the table of the reference.

A key's own description in the model goes before what is here. ``Part.key`` is for one part, a key
alone for every part that has it.
"""

MEANINGS = {
    "schema": "The version of this format.",
    "about": "What the policy is for, in a sentence; `tagc policies` shows it.",
    "gradients": "For FSDP's reduce-scatter: the first rule that matches a parameter decides, and "
    "what none matches is dense.",
    "parameters": "Likewise for FSDP's all-gather, in forward and backward.",
    "replicas": "Likewise for gradients between copies of the sharded model, with "
    "`tagc.wrap(..., replicas=...)`.",
    "when": "Which parameters the rule is for; `{}` is for all.",
    "codec": "How they travel.",
    "feedback": "What becomes of what a message did not say. Default: the first that the codec can "
    "have, which is `average` if it sends every element, `residual` if it selects.",
    "role": "The part of a transformer, read from the parameter's name; one or a list.",
    "name": "Globs over the whole name, such as `*.wq.weight`; one or a list. A rule with `name` "
    "also takes parameters that are small or have one dimension.",
    "layers": "Indices of transformer blocks, inclusive: `'4-11'`, `[4, 11]` or one number.",
    "min_numel": "Elements before sharding, at least. Without it, a rule that compresses passes "
    "over those below 16,384, unless it has `name`.",
    "max_numel": "Elements before sharding, at most.",
    "kind": "Chooses this part.",
    "density": "The share of the elements that a rank sends.",
    "symbol": "How many neighbours share a 32-bit symbol, and in how many bits each; `auto` goes "
    "by the number of ranks, which sums have to hold.",
    "support": "`own`: every rank sends its own largest groups. `shared`: all send those that the "
    "shard's owner chose one step ahead.",
    "warmup_steps": "Reductions that go dense at first. A unit waits for the longest of its rules.",
    "bits": "Bits of a code.",
    "DeltaConfig.bits": "Bits of a code. 8 and 4 have a scale for each block; 2 and 1 need "
    "matrices, and have scales of rows and columns.",
    "PackedConfig.group": "Neighbours that are sent or left together.",
    "MatrixConfig.group": "Neighbours in a row that share one code, which names the largest and "
    "its sign: 0.5, 0.33 and 0.2 bits an element for 8, 16 and 32. Needs `bits: 1`.",
    "block": "Elements that share a scale.",
    "level": "Multiplies the values that codes stand for: above 1, a message carries more of what "
    "is owed, and more noise.",
    "wire": "`bfloat16`: rounded to 16 bits on the way, and summed in float32.",
    "min_bits": "The fewest that may be chosen.",
    "memory": "Bytes that a rank may store for every parameter of the model, for copies or kept "
    "messages.",
    "keep_for_backward": "Keep the messages of the forward, and gather nothing in backward.",
    "FeedbackConfig.kind": "`residual`: what was not sent is added to the next gradient. "
    "`average`: a moving average of it is (LoCo). `momentum`: a moving average of the gradient "
    "is sent, and the optimizer needs none. `none`: it is lost.",
    "dtype": "In which residuals are stored; `int8` has a scale for every 256 elements.",
    "beta": "Only `average`: the share of the old in the moving average.",
    "reset_steps": "Only `average`: the moving average starts from zero every so many steps.",
    "rate": "Only `momentum`: the share of the new gradient in the moving average.",
    "lead": "Only `residual`: the share of what is owed that a message is taken to carry. Below 1, "
    "the shard's owner undoes the lag of error feedback.",
}

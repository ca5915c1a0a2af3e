"""The parity matrix: native FSDP and DDP beside tagc, by API, dtype, ranks, option and policy.

    make parity                                # run all of it (docs/parity.md), print tables
    PYTHONPATH=tests python -m parity --quick  # what `make test` runs

A case passes if, over several backwards with data of each rank and step,

- `dense`: the gradients of every step have the bits of native FSDP's (on hosts of two ranks, and
  with DDP: as for the others);
- every other policy: the sum of the gradients that tagc handed out and of all residuals is the sum
  of the native gradients, within the rounding of the sums (`sums.bound`).

Options are in `fsdp2_options.py` and `module_options.py` (FSDP1 and DDP), the other axes in
`option.py`; `running.py` combines them and decides, `sums.py` says what may differ. Another API is
another `Api` in `apis.APIS`: how to shard a model for it, and where its gradients are.
"""

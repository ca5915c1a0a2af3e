"""Golden files: what tagc sent, saved and resumed to when the files were made, to be compared with
what it does now.

    PYTHONPATH=tests python -m golden.make              # make all of them again
    PYTHONPATH=tests python -m golden.make messages     # or one: see ``make.FILES``

- ``messages.txt``: SHA-256 of the words, sums and residuals of every codec, dtype and number of
  ranks, for fixed inputs;
- ``identities.txt``: hashes of policies and fingerprints of plans, by which a checkpoint knows
  whether a run is its own;
- ``checkpoints.tar.xz``: a checkpoint of every shipped policy in both formats, in the middle of a
  training;
- ``resumed.txt``: SHA-256 of what the step after each checkpoint gives; for sites the steps until
  all has been exchanged once more.

Inputs are integer arithmetic (``inputs.py``) and every product with one is exact, so that neither
torch's generators nor the processor's matrix products have a say.
"""

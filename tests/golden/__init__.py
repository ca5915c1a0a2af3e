"""Golden files: what tagc sent and resumed to when the files were made, to be compared with what it
does now.

- ``messages.txt``: SHA-256 of the words, sums and residuals of every codec, dtype and number of
  ranks, for fixed inputs;
- ``resumed.txt``: SHA-256 of what the step after a checkpoint gives, for every shipped policy; for
  sites the steps until all has been exchanged once more.

Inputs are integer arithmetic (``inputs.py``) and every product with one is exact, so that neither
torch's generators nor the processor's matrix products have a say.
"""

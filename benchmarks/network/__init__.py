"""``network``: training over slow links; needs Linux, root, ``ip`` and ``tc``.

| file | idea |
|---|---|
| ``suite.py`` | the command |
| ``launch.py``, ``latency.py`` | the network, and ranks that run in it; latency |
| ``methods.py``, ``baselines.py`` | what is compared; how the dense ones communicate |
| ``training.py``, ``ledger.py`` | one rank's training; its collectives, counted |
| ``worker.py`` | one rank of a run: measures all cells |
| ``report.py`` | tables and a plot from the records alone |
"""

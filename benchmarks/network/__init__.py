"""``network``: training over slow links; needs Linux, root, ``ip`` and ``tc``.

| file | idea |
|---|---|
| ``suite.py`` | the command |
| ``launch.py``, ``latency.py`` | the network, and ranks that run in it; latency |
| ``methods.py`` | what is compared |
| ``training.py`` | one rank's training, and how dense methods communicate |
| ``ledger.py`` | a rank's collectives, counted |
| ``worker.py`` | one rank of a run: measures all cells |
| ``report.py`` | tables and a plot from the records alone |
"""

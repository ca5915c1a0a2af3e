"""The command ``tagc``: what it reads (``cli.py``), and what it does (``commands.py``)."""

"""The ``tagc`` command: its arguments (``cli.py``) and its subcommands (``commands.py``)."""

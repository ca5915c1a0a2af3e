"""``network``: training over slow links; needs Linux, root, ``ip`` and ``tc``."""

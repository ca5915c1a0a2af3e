"""Models that are split over several dimensions of a mesh, in ``training.py`` and ``model.py``."""

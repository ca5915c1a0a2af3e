"""Wraps models in other projects' trainers, and puts residuals into their checkpoints.

Each trainer has a module. None is imported until you import it, so tagc depends on no trainer.
"""

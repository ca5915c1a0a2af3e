"""Other projects' trainers: where each wraps its model, and residuals in its checkpoints.

A module for each; none is imported before it is asked for, so that tagc needs none of them.
"""

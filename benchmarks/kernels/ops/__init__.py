"""The operators that the suite measures, a file each, and the baselines beside them."""

"""``tagc.wrap``, and the handle that it leaves on a model."""

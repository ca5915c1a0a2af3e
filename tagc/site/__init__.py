"""``tagc.sites``: a model in several sites, which exchange changes of parameters."""

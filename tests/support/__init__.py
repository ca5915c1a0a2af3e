"""What tests share: ranks, models, oracles, cases, and how to look at what happened."""

"""The target over several ranks: who they are, how they reduce, how they start and how they die."""

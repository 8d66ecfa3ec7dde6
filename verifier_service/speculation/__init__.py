"""How much to speculate: what steps and drafts cost, what drafts are worth, and what is chosen. No torch, no gRPC."""

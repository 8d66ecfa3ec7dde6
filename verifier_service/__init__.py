"""The verifier: runs the target, verifies drafts, emits tokens."""

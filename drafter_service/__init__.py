"""The drafter: runs the draft model, streams drafts to the verifier."""

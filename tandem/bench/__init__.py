"""Measures a running stack: closed-loop load over the prompt set, speculation modes side by side."""

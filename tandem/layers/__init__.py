"""Torch pieces shared by target models and draft models."""

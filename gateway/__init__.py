"""The gateway: clients' text in, text out. Imports no torch."""

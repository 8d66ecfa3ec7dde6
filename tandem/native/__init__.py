"""The CPU's own path through a dense decoder: C++ that is compiled on the machine it runs on, and its binding."""

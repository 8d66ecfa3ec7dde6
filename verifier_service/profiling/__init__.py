"""`python -m verifier_service.profiling`: where the time of a step goes; `tandem bench --profile` runs it.

Nothing in the service knows of it: the objects are wrapped from outside while it measures.
"""

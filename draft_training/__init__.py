"""Training draft models for a target: data written by the target, DFlash training, export, offline measurement."""

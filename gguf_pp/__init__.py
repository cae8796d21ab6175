"""Run one GGUF model across several devices, as a pipeline."""

__version__ = "0.1.0"

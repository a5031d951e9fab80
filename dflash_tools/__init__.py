"""Train DFlash drafters for speculative decoding from cached hidden states."""

__version__ = "0.1.0"

"""nanoserve: an LLM server in three small processes. See README.md for the tree and a reading order."""

__version__ = "0.1.0"

"""Tests; they need neither a GPU nor a network."""

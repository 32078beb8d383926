"""Tests of `loka.semantic_ids`."""

"""Tests of `loka.metrics`."""

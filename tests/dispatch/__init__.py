"""Tests of loka.dispatch."""

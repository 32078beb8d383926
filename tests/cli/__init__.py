"""Tests of loka.cli."""

"""Tests of loka.probe."""

"""Tests of loka.report."""

"""Tests of loka.training."""

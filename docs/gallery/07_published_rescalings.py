"""Dummy."""

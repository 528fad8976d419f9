"""Measurements of installed wheels."""

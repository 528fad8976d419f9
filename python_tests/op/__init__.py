"""Tests of GroupQueryAttention in the installed wheel."""

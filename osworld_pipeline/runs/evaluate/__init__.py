"""Evaluations, champion and reports."""
